"""What a token costs on its way from the engine's step to the client, without the client's socket.

*ipc*: from the engine's step to the reader in the HTTP process: joining, encoding, the socket, decoding, handing out.
Both sides are timed apart, in one process, with a real socket between them and a reader task behind each stream.
*text*: from there to a frame: text of the token, frame, bookkeeping. An engine that has its updates ready stands behind
the real routes.

    python -m benchmarks.stream_cost ipc [--steps 2000]
    python -m benchmarks.stream_cost text [--chunks 20000] [--streams 40] [--tokenizer FOLDER]
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.harness import Benchmark, Found, Given, flag, row, table
from paceline.config.process import ProcessConfig
from paceline.core.events import StepEvents, TokenEvents
from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.channel import Channel
from paceline.process.client import BranchUpdate
from paceline.process.outbox import Outbox
from paceline.process.streams import Stream
from paceline.process.supervisor import Link
from paceline.server.access.caller import Caller
from paceline.server.api.routes import routes
from paceline.server.call import Call, Events
from paceline.server.generate.service import ServedModel, Service
from paceline.text.tokenizer import Tokenizer
from tests.fake_engine import IdleClient, IdleStream, engine_info, finished
from tests.pure.text.text_helpers import tokenizer as small_tokenizer

bench = Benchmark(__doc__)


# -- between the processes -----------------------------------------------------------------------------------


async def token_costs(rows: int, steps: int) -> Found:
    """Microseconds: per step on the engine's side and for a look at an empty socket, per token on both sides."""
    config = ProcessConfig()
    ours, theirs = socket.socketpair()
    channel, outbox = Channel(theirs, config.max_frame_bytes), Outbox(config.max_frame_bytes)
    client = AsyncEngine(config)

    def on_frame(frame: frames.FromEngine) -> None:
        assert isinstance(frame, frames.Update)
        client.on_update(frame)

    link = Link(1, config.max_frame_bytes, client.rejects, on_frame)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    client.attach(link)
    client.ready(engine_info())
    sampling = SamplingParams(max_tokens=steps)
    streams = [client.submit([1], sampling, tenant="a") for _ in range(rows)]
    readers = [asyncio.create_task(_read(stream, steps)) for stream in streams]
    for _ in range(3):
        await asyncio.sleep(0)
    channel.receive()
    ids, tokens = np.arange(1, rows + 1, dtype=np.int64), np.arange(rows, dtype=np.int32)
    index = np.zeros(rows, np.int64)
    events = StepEvents(tokens=(TokenEvents(seq=1, time_s=1.0, requests=ids, tokens=tokens, index=index),))
    looked_s = engine_s = 0.0
    started_s = time.process_time()
    for _ in range(steps):
        before_s = time.perf_counter()
        channel.receive()
        between_s = time.perf_counter()
        outbox.put(events)
        channel.send(frames.encode(outbox.take()))
        after_s = time.perf_counter()
        looked_s += between_s - before_s
        engine_s += after_s - before_s
        await asyncio.sleep(0)  # the link reads
        await asyncio.sleep(0)  # the readers run
    await asyncio.gather(*readers)
    http_s = time.process_time() - started_s - engine_s
    link.close()
    channel.close()
    return {
        "engine_step_us": round(1e6 * engine_s / steps, 2),
        "empty_look_us": round(1e6 * looked_s / steps, 2),
        "engine_token_us": round(1e6 * engine_s / (rows * steps), 3),
        "http_token_us": round(1e6 * http_s / (rows * steps), 3),
    }


async def _read(stream: Stream, count: int) -> None:
    while count > 0:
        for update in await stream.take():
            count -= len(update.tokens)


def column_costs(rows: int) -> Found:
    """Encode and decode of a step's two columns, in microseconds: as bytes, and as lists of numbers."""
    ids, tokens = np.arange(10**6, 10**6 + rows), np.arange(rows, dtype=np.int32) + 40_000
    decode_lists = msgspec.msgpack.Decoder(tuple[float, list[int], list[int]]).decode

    def as_bytes() -> None:
        frame = frames.decode_from_engine(frames.encode(frames.Update(1.0, ids.tobytes(), tokens.tobytes())))
        assert isinstance(frame, frames.Update)
        np.frombuffer(frame.branches, frames.ID).tolist()
        np.frombuffer(frame.tokens, frames.TOKEN).tolist()

    def as_lists() -> None:
        decode_lists(frames.encode([1.0, ids.tolist(), tokens.tolist()]))

    def microseconds(function: Callable[[], None]) -> float:
        return round(1e6 * min(timeit.repeat(function, number=500, repeat=5)) / 500, 2)

    return {"columns_as_bytes_us": microseconds(as_bytes), "columns_as_lists_us": microseconds(as_lists)}


@bench.part(flag("--steps", 2000))
def ipc(given: Given) -> Found:
    """A token between the engine's step and its reader in the HTTP process."""
    results = []
    for rows in (1, 32, 256):
        costs = uvloop.run(token_costs(rows, given.steps))
        results.append({"rows": rows, **costs, **column_costs(rows)})
        if len(results) == 1:
            table(*results[0])
        row(*results[-1].values())
    return {"results": results}


# -- text and frames -----------------------------------------------------------------------------------------

TEXT = "The quick brown fox jumps over the lazy dog, and it does so again every single day of the week. "
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": CHAT["messages"], "stream": True}
KINDS: dict[str, tuple[str, Found]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stop string": ("/v1/chat/completions", {**CHAT, "stop": ["\n\nUser:"]}),
    "chat, running usage": ("/v1/chat/completions", {**CHAT, "stream_options": USAGE}),
    "chat, top_logprobs 5": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 5}),
    "completion": ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
    "message": ("/v1/messages", MESSAGE),
    "response": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
}


class ReadyStream(IdleStream):
    """Updates that are there before they are requested, a token at a time."""

    def __init__(self, tokens: Sequence[int], prompt: int, sampling: SamplingParams) -> None:
        self._updates = [BranchUpdate(branch=0, tokens=[token], time_s=1.0) for token in tokens]
        if sampling.logprobs is not None:
            for index, update in enumerate(self._updates):
                update.logprobs = [_logprobs(prompt + index, update.tokens[0], sampling.logprobs)]
        self._updates[-1].ending = finished(1, "length", len(tokens), num_prompt=prompt)
        self._next = 0

    async def take(self) -> list[BranchUpdate]:
        self._next += 1
        return [self._updates[self._next - 1]]


class ReadyClient(IdleClient):
    """An engine that answers every request with the same tokens."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens = tokens
        self.info = engine_info(vocab_size=vocab_size, max_model_len=1 << 20, max_num_seqs=256)

    def submit(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> ReadyStream:
        return ReadyStream(self._tokens, len(tokens), sampling)


@bench.part(
    flag("--chunks", 20_000, "chunks in all"),
    flag("--streams", 40, "streams they are spread over"),
    flag("--tokenizer", None, "folder with a tokenizer.json; default: a small one made here"),
)
def text(given: Given) -> Found:
    """A chunk in the HTTP process before it is sent, in CPU time: text of the token, frame, bookkeeping."""
    folder = given.tokenizer
    tokenizer = small_tokenizer("byte-level") if folder is None else Tokenizer.from_folder(folder)
    per_stream = max(2, given.chunks // given.streams)
    tokens = tokenizer.encode(TEXT * (per_stream // 8 + 1), add_special_tokens=False)[:per_stream]
    model = ServedModel(names=("m",), tokenizer=tokenizer)
    service = Service(ReadyClient(tokens, tokenizer.vocab_size), model)
    costs = {}
    table("stream", "us per chunk")
    for kind, (path, body) in KINDS.items():
        runs = [asyncio.run(_run(service, path, body, given.streams)) for _ in range(3)]
        costs[kind] = round(min(runs) / (per_stream * given.streams) * 1e6, 2)
        row(kind, costs[kind])
    return {"us_per_chunk": costs, "chunks": per_stream * given.streams}


async def _run(service: Service, path: str, body: Found, num_streams: int) -> float:
    """CPU seconds to read all chunks of the streams, one after the other."""
    (route,) = (route for route in routes(service) if route.path == path)
    opened = []
    for number in range(num_streams):
        given: Found = {
            "id": f"{number:032x}",
            "route": path,
            "body": body,
            "headers": {},
            "caller": Caller(),
        }
        events = await route.handler(Call(**given, received_s=time.monotonic()))
        assert isinstance(events, Events)
        opened.append(events.frames)
    gc.collect()
    began = time.process_time()
    for pieces in opened:
        async for _ in pieces:
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


if __name__ == "__main__":
    bench.main()
