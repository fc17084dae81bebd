"""What a token costs between the engine's step and its reader: joining, encoding, the socket, decoding, handing out.

    python benchmarks/ipc_cost.py [--steps 2000]

The engine's side and the HTTP process's side are timed apart, in one process, with a real socket between them and a
reader task behind each stream. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import socket
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import uvloop

from paceline.config.process import ProcessConfig
from paceline.core.events import StepEvents, TokenEvents
from paceline.core.sampling import SamplingParams
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.channel import Channel
from paceline.process.client import EngineInfo
from paceline.process.outbox import Outbox
from paceline.process.streams import Stream
from paceline.process.supervisor import Link

_decode_lists = msgspec.msgpack.Decoder(tuple[float, list[int], list[int]]).decode
INFO = EngineInfo(
    vocab_size=1,
    max_model_len=1,
    block_size=1,
    num_blocks=1,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    max_num_prompt_tokens=0,
    device="",
    dtype="",
    kv_dtype="",
    weight_bytes=0,
    kv_bytes=0,
    load_s=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds: per step on the engine's side and for a look at an empty socket, per token on both sides."""

    rows: int
    engine_step: float
    empty_look: float
    engine_token: float
    http_token: float


async def measure(rows: int, steps: int) -> Cost:
    config = ProcessConfig()
    ours, theirs = socket.socketpair()
    channel, outbox = Channel(theirs, config.max_frame_bytes), Outbox(config.max_frame_bytes)
    client = AsyncEngine(config)

    def on_frame(frame: frames.FromEngine) -> None:
        assert isinstance(frame, frames.News)
        client.take(frame)

    link = Link(1, config.max_frame_bytes, client.rejects, on_frame)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    client.attach(link)
    client.ready(INFO)
    sampling = SamplingParams(max_tokens=steps)
    streams = [client.submit([1], sampling, tenant="a") for _ in range(rows)]
    readers = [asyncio.create_task(_read(stream, steps)) for stream in streams]
    for _ in range(3):
        await asyncio.sleep(0)
    channel.receive()
    events = StepEvents(
        tokens=(
            TokenEvents(
                seq=1,
                time_s=1.0,
                requests=np.arange(1, rows + 1, dtype=np.int64),
                tokens=np.arange(rows, dtype=np.int32),
                index=np.zeros(rows, np.int64),
            ),
        )
    )
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
    num_tokens = rows * steps
    return Cost(
        rows=rows,
        engine_step=1e6 * engine_s / steps,
        empty_look=1e6 * looked_s / steps,
        engine_token=1e6 * engine_s / num_tokens,
        http_token=1e6 * http_s / num_tokens,
    )


async def _read(stream: Stream, count: int) -> None:
    while count > 0:
        for news in await stream.take():
            count -= len(news.tokens)


def columns(rows: int) -> tuple[float, float]:
    """Encode and decode of a step's two columns, in microseconds: as bytes, and as lists of numbers."""
    ids, tokens = np.arange(10**6, 10**6 + rows), np.arange(rows, dtype=np.int32) + 40_000

    def as_bytes() -> None:
        frame = frames.decode_from_engine(frames.encode(frames.News(1.0, ids.tobytes(), tokens.tobytes())))
        assert isinstance(frame, frames.News)
        np.frombuffer(frame.branches, frames.ID).tolist()
        np.frombuffer(frame.tokens, frames.TOKEN).tolist()

    def as_lists() -> None:
        _decode_lists(frames.encode([1.0, ids.tolist(), tokens.tolist()]))

    return _microseconds(as_bytes), _microseconds(as_lists)


def _microseconds(function: Callable[[], None]) -> float:
    return 1e6 * min(timeit.repeat(function, number=500, repeat=5)) / 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    results = []
    for rows in (1, 32, 256):
        cost = uvloop.run(measure(rows, steps))
        as_bytes, as_lists = columns(rows)
        print(
            f"{rows:4} rows: engine {cost.engine_step:6.1f} us a step (an empty look {cost.empty_look:.1f}), "
            f"{cost.engine_token:6.2f} us a token; HTTP side {cost.http_token:6.2f} us a token; "
            f"columns as bytes {as_bytes:6.1f} us, as lists {as_lists:6.1f} us"
        )
        results.append(
            {
                "rows": rows,
                "engine_step_us": round(cost.engine_step, 2),
                "engine_token_us": round(cost.engine_token, 3),
                "http_token_us": round(cost.http_token, 3),
                "columns_as_bytes_us": round(as_bytes, 2),
                "columns_as_lists_us": round(as_lists, 2),
            }
        )
    print(
        json.dumps({"machine": platform.machine(), "python": platform.python_version(), "results": results})
    )


if __name__ == "__main__":
    main()
