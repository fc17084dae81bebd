"""What a streamed chunk costs the HTTP process before it is sent: text of the token, frame, bookkeeping.

    PYTHONPATH=. python benchmarks/stream_cost.py [--chunks 20000] [--streams 40] [--tokenizer FOLDER]

An engine that has its news ready stands behind the real routes; nothing is sent over a socket. Prints microseconds of
CPU per chunk for each kind of stream, and the same as one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.process.client import BranchNews, Ending, EngineInfo, EngineState, EngineStats, Prospect
from paceline.server.access.caller import Caller
from paceline.server.api.routes import routes
from paceline.server.call import Call, Events
from paceline.server.generate.service import ServedModel, Service
from paceline.text.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every single day. "
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stop string": ("/v1/chat/completions", {**CHAT, "stop": ["\n\nUser:"]}),
    "chat, running usage": ("/v1/chat/completions", {**CHAT, "stream_options": USAGE}),
    "chat, top_logprobs 5": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 5}),
    "completion": ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
    "message": (
        "/v1/messages",
        {"model": "m", "max_tokens": 9, "messages": CHAT["messages"], "stream": True},
    ),
    "response": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
}


class ReadyStream:
    """News that is there before it is asked for, a token at a time."""

    def __init__(self, tokens: Sequence[int], prompt: int, sampling: SamplingParams) -> None:
        self._news = [BranchNews(branch=0, tokens=[token], time_s=1.0) for token in tokens]
        if sampling.logprobs is not None:
            for index, news in enumerate(self._news):
                news.logprobs = [_logprobs(prompt + index, news.tokens[0], sampling.logprobs)]
        self._news[-1].ending = Ending(
            reason="length",
            detail="",
            num_prompt=prompt,
            num_output=len(tokens),
            num_cached=0,
            preemptions=0,
            queue_s=0.0,
            time_s=1.0,
        )
        self._next = 0

    prospect: Prospect | None = None

    async def take(self) -> list[BranchNews]:
        self._next += 1
        return [self._news[self._next - 1]]

    def finish_at(self, branch: int, num_output: int) -> None:
        raise AssertionError("no stop string is in the text")

    def close(self) -> None:
        pass


class ReadyClient:
    """An engine that answers every request with the same tokens."""

    state = EngineState.READY
    stats = EngineStats()
    heartbeat_age_s = 0.0

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens = tokens
        self.info = EngineInfo(
            vocab_size=vocab_size,
            max_model_len=1 << 20,
            block_size=16,
            num_blocks=1,
            max_num_seqs=256,
            max_num_batched_tokens=1,
            max_num_prompt_tokens=0,
            device="none",
            dtype="none",
            kv_dtype="none",
            weight_bytes=0,
            kv_bytes=0,
            load_s=0.0,
        )

    def submit(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> ReadyStream:
        return ReadyStream(self._tokens, len(tokens), sampling)

    async def ask(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Prospect:
        raise AssertionError("nobody asks")


def main() -> None:
    arguments = _arguments()
    tokenizer = _tokenizer(arguments.tokenizer)
    per_stream = max(2, arguments.chunks // arguments.streams)
    text = TEXT * (per_stream // 8 + 1)
    tokens = tokenizer.encode(text, add_special_tokens=False)[:per_stream]
    service = Service(
        ReadyClient(tokens, tokenizer.vocab_size), ServedModel(names=("m",), tokenizer=tokenizer)
    )
    costs = {}
    for kind, (path, body) in KINDS.items():
        runs = [asyncio.run(_run(service, path, body, arguments.streams)) for _ in range(3)]
        costs[kind] = min(runs) / (per_stream * arguments.streams) * 1e6
        print(f"{kind:24} {costs[kind]:6.2f} us per chunk")
    found = {name: round(value, 2) for name, value in costs.items()}
    print(json.dumps({"us_per_chunk": found, "chunks": per_stream * arguments.streams}))


async def _run(service: Service, path: str, body: dict[str, Any], num_streams: int) -> float:
    """CPU seconds to read all chunks of so many streams, one after the other."""
    (route,) = (route for route in routes(service) if route.path == path)
    opened = []
    for number in range(num_streams):
        call = Call(
            id=f"{number:032x}",
            route=path,
            body=body,
            headers={},
            caller=Caller(),
            received_s=time.monotonic(),
        )
        events = await route.handler(call)
        assert isinstance(events, Events)
        opened.append(events.frames)
    gc.collect()
    began = time.process_time()
    for frames in opened:
        async for _ in frames:
            pass
    took = time.process_time() - began
    assert service.admission.places_taken == 0
    return took


def _logprobs(position: int, token: int, count: int) -> RowLogprobs:
    likeliest = (token, *(index for index in range(count) if index != token))[:count]
    return RowLogprobs(
        row=0,
        position=position,
        token=token,
        logprob=-0.5,
        rank=1,
        top_tokens=likeliest,
        top_logprobs=tuple(-0.5 - index for index in range(count)),
    )


def _tokenizer(folder: str | None) -> Tokenizer:
    if folder is not None:
        return Tokenizer.from_folder(folder)
    from tests.pure.text.text_helpers import tokenizer

    return tokenizer("byte-level")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks in all")
    parser.add_argument("--streams", type=int, default=40, help="streams they are spread over")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json; default: a small one made here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
