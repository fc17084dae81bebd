"""A service over an engine that says what a test wrote down, and calls to its routes without HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.core.events import Finished, Forecast
from paceline.core.plan import RowLogprobs
from paceline.core.request import TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.stretch import PLAIN, PromptParts
from paceline.errors import NeverFits
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.models.files.sampling_defaults import GenerationDefaults
from paceline.models.media.pictures import PictureReader
from paceline.process.client import BranchUpdate, EngineInfo, EngineState, EngineStats, EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.api.route import Route
from paceline.server.api.routes import routes
from paceline.server.call import Answer, Call, Download, Events
from paceline.server.generate.request_record import RequestRecord
from paceline.server.generate.served_model import ServedModel, ServiceSettings
from paceline.server.generate.service import Service
from paceline.text.tokenizer import Tokenizer
from tests.fake_engine import IdleClient, IdleStream, engine_info, finished
from tests.model_folder import CONTEXT, VOCAB_SIZE, write_model

INFO = engine_info(vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, num_blocks=64, max_num_seqs=8)
DEFAULT_CALLER = Caller()
EOS = 3
WIDTH = 64  # of vectors
Script = Callable[[Sequence[int], SamplingParams], list[list[BranchUpdate] | Exception]]


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(write_model(Path(folder)), model_vocab_size=VOCAB_SIZE)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def ending(reason: str = "stop", num_output: int = 1, detail: str = "", num_cached: int = 0) -> Finished:
    return finished(1, reason, num_output, detail=detail, num_cached=num_cached)


def says(*pieces: str, reason: str = "length", num_cached: int = 0, with_eos: bool = False) -> Script:
    """Every branch says these pieces, a piece in each update; a branch's number takes the place of `#`."""

    def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        if sampling.pooling is not None:  # as many ones as tokens
            vector = np.ones(WIDTH, "<f4") * len(prompt)
            has_vector = ending("stop", 0)._replace(vector=vector.tobytes())
            return [[BranchUpdate(branch=0, tokens=[], ending=has_vector, time_s=1.0)]]
        steps: list[list[BranchUpdate] | Exception] = []
        sent = [0] * sampling.n
        for number, piece in enumerate(pieces):
            step = []
            for branch in range(sampling.n):
                update = BranchUpdate(branch=branch, tokens=ids(piece.replace("#", str(branch))), time_s=1.0)
                is_last = number == len(pieces) - 1
                if is_last and with_eos:
                    update.tokens.append(EOS)
                if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                    update.logprobs = logprobs_of(
                        prompt, update.tokens, sent[branch], sampling, with_prompt=not number
                    )
                sent[branch] += len(update.tokens)
                if is_last:
                    update.ending = ending(reason, sent[branch], num_cached=num_cached)
                step.append(update)
            steps.append(step)
        return steps

    return script


def logprobs_of(
    prompt: Sequence[int], tokens: Sequence[int], before: int, sampling: SamplingParams, *, with_prompt: bool
) -> list[RowLogprobs]:
    """The chosen token is always the likeliest, with -0.5; the next id follows with -1.5."""
    places = [(len(prompt) + before + index, token) for index, token in enumerate(tokens)]
    count = sampling.logprobs or 0
    if with_prompt and sampling.prompt_logprobs is not None:
        places = [(index, token) for index, token in enumerate(prompt) if index] + places
        count = max(count, sampling.prompt_logprobs)
    return [
        RowLogprobs(
            row=0,
            position=position,
            token=token,
            logprob=-0.5,
            rank=1,
            top_tokens=(token, token + 1)[:count],
            top_logprobs=(-0.5, -1.5)[:count],
        )
        for position, token in places
    ]


class FakeStream(IdleStream):
    def __init__(self, steps: list[list[BranchUpdate] | Exception]) -> None:
        self.steps = steps
        self.finished_at: list[tuple[int, int]] = []
        self.is_closed = False
        self.gate: asyncio.Event | None = None
        self.forecast: Forecast | None = None

    async def take(self) -> list[BranchUpdate]:
        if not self.steps:
            await asyncio.Event().wait()  # an engine that has nothing to say
        await asyncio.sleep(0)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def finish_at(self, branch: int, num_output: int) -> None:
        self.finished_at.append((branch, num_output))

    def close(self) -> None:
        self.is_closed = True


class FakeClient(IdleClient):
    def __init__(self, script: Script, info: EngineInfo = INFO) -> None:
        self.state = EngineState.READY
        self.script = script
        self._info = info
        self.submitted: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        # Of every request; an error is raised where a forecast is asked for.
        self.forecast_result: Forecast | Exception | None = NeverFits("it is too long", param="max_tokens")
        self.streams: list[FakeStream] = []
        self.has_info = True
        self.next_place_s: float | None = None

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        if not self.has_info:
            raise EngineUnavailable("the model is being loaded", code="starting")
        return self._info

    @property
    def stats(self) -> EngineStats:  # type: ignore[override]
        return EngineStats(next_place_s=self.next_place_s)

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        timeout_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = 0,
        parts: PromptParts = PLAIN,
    ) -> FakeStream:
        given = {"tokens": list(tokens), "sampling": sampling, "tenant": tenant, **service_level._asdict()}
        given |= {"adapter": adapter} if adapter else {}
        given |= {"media": parts.media} if parts.media else {}
        given |= {"modules": parts.modules} if parts.modules else {}
        given |= {"is_module": True} if parts.is_module else {}
        self.submitted.append({**given, "timeout_s": timeout_s})
        self.streams.append(FakeStream(self.script(tokens, sampling)))
        if isinstance(self.forecast_result, Forecast):
            self.streams[-1].forecast = self.forecast_result
        return self.streams[-1]

    async def forecast(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = 0,
        parts: PromptParts = PLAIN,
    ) -> Forecast | None:
        given = {"tokens": list(tokens), "sampling": sampling, "tenant": tenant, **service_level._asdict()}
        given |= {"modules": list(parts.modules)} if parts.modules else {}
        given |= {"media": list(parts.media)} if parts.media else {}
        self.asked.append(given)
        if isinstance(self.forecast_result, Exception):
            raise self.forecast_result
        return self.forecast_result


class Listener:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.records: list[RequestRecord] = []
        self.num_tokens = 0
        self.calls: list[tuple[Call, int, bool]] = []  # made in the process: status, whether it is run again
        self.errors: list[BaseException] = []

    def started(self, record: RequestRecord) -> None:
        self.events.append("started")

    def first_token(self, record: RequestRecord) -> None:
        self.events.append("first_token")

    def tokens(self, record: RequestRecord, count: int, time_s: float) -> None:
        self.num_tokens += count

    def finished(self, record: RequestRecord) -> None:
        self.events.append("finished")
        self.records.append(record)

    def call_ended(
        self, call: Call, status: int, code: str, *, line: int | None = None, is_again: bool = False
    ) -> None:
        self.calls.append((call, status, is_again))

    def call_failed(self, call: Call, error: BaseException) -> None:
        self.errors.append(error)


class Api:
    """One service and its routes."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        generation: GenerationDefaults | None = None,
        text: Tokenizer | None = None,
        embedding: EmbeddingDefaults | None = None,
        pictures: PictureReader | None = None,
        **settings: Any,
    ) -> None:
        text = text or tokenizer()
        self.client = FakeClient(script or says("hello"), replace(INFO, vocab_size=text.vocab_size))
        self.listener = Listener()
        own = generation or GenerationDefaults()
        vectors = embedding or EmbeddingDefaults(kind="mean", width=WIDTH)
        model = ServedModel(
            names=("tiny", "alias"),
            tokenizer=text,
            generation=own,
            embedding=vectors,
            pictures=pictures,
            created_s=7,
        )
        self.service = Service(self.client, model, ServiceSettings(**settings), observer=self.listener)
        self.routes: dict[tuple[str, str], Route] = {
            (method, route.path): route for route in routes(self.service) for method in route.methods
        }

    def call(
        self,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        caller: Caller = DEFAULT_CALLER,
        method: str = "POST",
        path: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Route, Call]:
        call = Call(
            id="id1",
            route=route,
            body=body or {},
            headers=headers or {},
            caller=caller,
            received_s=asyncio.get_running_loop().time(),
            path=path or {},
        )
        return self.routes[method, route], call

    async def open(self, route: str, body: dict[str, Any] | None = None, **more: Any) -> Answer | Events:
        found, call = self.call(route, body, **more)
        answer = await found.handler(call)
        assert not isinstance(answer, Download)
        return answer

    def ask(self, route: str, body: dict[str, Any] | None = None, **more: Any) -> Any:
        """The answer of a route, as JSON."""
        answer = asyncio.run(self.open(route, body, **more))
        assert isinstance(answer, Answer)
        return json.loads(answer.body)

    def stream(self, route: str, body: dict[str, Any], **more: Any) -> bytes:
        """All bytes of a stream. `created` is 0 in them, so that they are the same on every day."""

        async def run() -> bytes:
            events = await self.open(route, {**body, "stream": True}, **more)
            assert isinstance(events, Events)
            found = b""
            try:
                async for frame in events.frames:
                    found += frame
            except Exception as error:
                assert found, "before the first frame an error has its status"
                found += events.error_frame(error)
            finally:
                await events.frames.aclose()
            return re.sub(rb'"created(_at)?":\d+', rb'"created\1":0', found)

        return asyncio.run(run())

    @property
    def is_at_rest(self) -> bool:
        admission = self.service.admission
        closed = all(stream.is_closed for stream in self.client.streams)
        held = admission.places_taken, admission.tokens_waiting, self.service.media_sources.num_bytes
        return closed and held == (0, 0, 0)


def chunks(data: bytes) -> list[Any]:
    """The JSON of every frame but [DONE]."""
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    found = [frame.partition("data: ")[2] for frame in frames]
    return [json.loads(frame) for frame in found if frame != "[DONE]"]
