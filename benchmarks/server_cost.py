"""What a streamed chunk costs the HTTP process, and how fast a full server says no and answers probes.

    PYTHONPATH=. python benchmarks/server_cost.py [--streams 40] [--chunks 200] [--rounds 5] [--json FILE]

A real server with a tiny model; the clients are this process. CPU time of the HTTP process is read from /proc around
runs of so many streams at once; what a request costs before its first chunk is told apart with streams of one token.
Beside it, in turns, plain uvicorn sends the same bytes from a bare ASGI application at the same pace: the floor.
Then a server with a small queue is filled, and refusals (429), /health/live and /health/ready are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_folder import write_model

HOST = "127.0.0.1"
LIMIT_US, LIMIT_MS = 40.0, 50.0
TICK_S = os.sysconf("SC_CLK_TCK")
FLOOR = "--floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU of one process for some chunks, in microseconds each."""

    user_us: float
    system_us: float
    chunks: int

    @property
    def total_us(self) -> float:
        return self.user_us + self.system_us


# -- servers ---------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """`paceline serve` with a tiny model; gives the number of the HTTP process and its port."""
    model = write_model(folder / "model", max_position_embeddings=4096)
    command = (sys.executable, "-m", "paceline", "serve", str(model), "--load-format", "dummy")
    options = ("--served-model-name", "m", "--port", "0", "--disable-log-stats", "--log-level", "error")
    environment = {**os.environ, "PACELINE_CACHE_ROOT": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options, *flags], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"API: "):
                yield process.pid, int(line.split(b":")[-1].partition(b"/")[0])
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def bare(piece: bytes, pause_s: float) -> Iterator[tuple[int, int]]:
    """Plain uvicorn that sends the same piece to every client at every tick."""
    command = (sys.executable, __file__, FLOOR, piece.hex(), str(pause_s))
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(60)


def run_bare(piece: bytes, pause_s: float) -> None:
    """The process of `bare`; as many pieces as the path says."""
    import uvicorn

    waiting: list[asyncio.Future[None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(int(scope["path"].strip("/"))):
            future = loop.create_future()
            waiting.append(future)
            await future
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def tick() -> None:
        while True:
            await asyncio.sleep(pause_s)
            woken, waiting[:] = list(waiting), []
            for future in woken:
                if not future.done():
                    future.set_result(None)

    async def serve() -> None:
        config = uvicorn.Config(app, host=HOST, port=0, http="httptools", lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        ticking = asyncio.create_task(tick())
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving
        ticking.cancel()

    import uvloop

    uvloop.run(serve())


# -- clients ---------------------------------------------------------------------------------------------------


def stream_request(num_tokens: int) -> bytes:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return post("/v1/chat/completions", json.dumps(body).encode())


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def stream_all(port: int, request: bytes, num_streams: int) -> tuple[int, bytes]:
    """Read so many streams at once; how many events came, and one of them."""
    answers = await asyncio.gather(*(exchange(port, request) for _ in range(num_streams)))
    pieces = [piece for answer in answers for piece in answer.split(b"\r\n") if piece.startswith(b"data: ")]
    assert all(b" 200 " in answer[:20] for answer in answers), answers[0][:200]
    # A short answer may come in one piece as a whole.
    single = [piece for piece in pieces if piece.count(b"data: {") == 1] or pieces
    return sum(piece.count(b"data: {") for piece in pieces), single[len(single) // 2]


# -- cost of a chunk -------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICK_S, int(fields[12]) / TICK_S


def measure(
    pid: int, work: Callable[[], Coroutine[Any, Any, tuple[int, bytes]]]
) -> tuple[Cost, float, bytes]:
    """Cost of what happens meanwhile, how long it took, and one piece of it."""
    user_s, system_s = cpu_s(pid)
    began_s = time.monotonic()
    chunks, piece = asyncio.run(work())
    took_s = time.monotonic() - began_s
    user_end_s, system_end_s = cpu_s(pid)
    user, system = (user_end_s - user_s) * 1e6 / chunks, (system_end_s - system_s) * 1e6 / chunks
    return Cost(user_us=user, system_us=system, chunks=chunks), took_s, piece


def chunk_costs(folder: Path, streams: int, chunks: int, rounds: int) -> dict[str, Any]:
    ours, floors, starts = [], [], []
    with served(folder) as (pid, port):
        long, short = stream_request(chunks), stream_request(1)
        asyncio.run(stream_all(port, stream_request(20), streams))
        _, took_s, piece = measure(pid, lambda: stream_all(port, long, streams))
        with bare(piece + b"\n\n", took_s / chunks) as (bare_pid, bare_port):
            for _ in range(rounds):
                ours.append(measure(pid, lambda: stream_all(port, long, streams))[0])
                starts.append(measure(pid, lambda: stream_all(port, short, streams))[0])
                work = lambda: stream_all(bare_port, get(f"/{chunks}"), streams)  # noqa: E731
                floors.append(measure(bare_pid, work)[0])
    opening_us = statistics.median(cost.total_us * cost.chunks for cost in starts) / (streams * chunks)
    found: dict[str, Any] = {
        "streams": streams,
        "chunks_per_stream": chunks,
        "rounds": rounds,
        "bytes": len(piece),
    }
    for name, costs in (("paceline", ours), ("bare_uvicorn", floors)):
        middle = sorted(costs, key=lambda cost: cost.total_us)[len(costs) // 2]
        found[name] = {
            "us_per_chunk": round(middle.total_us, 1),
            "user_us": round(middle.user_us, 1),
            "system_us": round(middle.system_us, 1),
            "least_us": round(min(cost.total_us for cost in costs), 1),
            "chunks": middle.chunks,
        }
    found["opening_us_per_chunk"] = round(opening_us, 1)
    return found


# -- saturation ------------------------------------------------------------------------------------------------


async def saturated(port: int, num_streams: int, seconds: float) -> dict[str, list[float]]:
    """Times in milliseconds of refusals and probes while every place is taken."""
    stop = asyncio.Event()

    async def fill() -> None:
        while not stop.is_set():
            answer = await exchange(port, stream_request(2000))
            await asyncio.sleep(0.05 if b" 429 " in answer[:20] else 0.0)

    fillers = [asyncio.create_task(fill()) for _ in range(num_streams)]
    await asyncio.sleep(1.0)
    kinds = {"429": (stream_request(1), b" 429 "), "/health/live": (get("/health/live"), b" 200 ")}
    kinds["/health/ready"] = (get("/health/ready"), b" 503 ")
    times: dict[str, list[float]] = {name: [] for name in kinds}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for name, (request, wanted) in kinds.items():
            began_s = time.perf_counter()
            answer = await exchange(port, request)
            if wanted in answer[:20]:  # a place may be free for a moment
                times[name].append((time.perf_counter() - began_s) * 1e3)
            await asyncio.sleep(0.005)
    stop.set()
    for filler in fillers:
        filler.cancel()
    await asyncio.gather(*fillers, return_exceptions=True)
    return times


def saturation(folder: Path, seconds: float) -> dict[str, Any]:
    flags = ("--max-num-seqs", "16", "--max-waiting-requests", "16", "--max-num-batched-tokens", "512")
    with served(folder, *flags) as (_, port):
        times = asyncio.run(saturated(port, 40, seconds))
    return {name: {"count": len(values), **_percentiles(values)} for name, values in times.items()}


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50_ms": round(float(p50), 1), "p99_ms": round(float(p99), 1), "max_ms": round(max(values), 1)}


def main() -> None:
    if sys.argv[1:2] == [FLOOR]:
        run_bare(bytes.fromhex(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of probing a full server; 0 leaves it out"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = chunk_costs(Path(folder), arguments.streams, arguments.chunks, arguments.rounds)
        if arguments.seconds:
            found["saturated"] = saturation(Path(folder), arguments.seconds)
    found |= {"machine": platform.machine(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    ratio = found["paceline"]["us_per_chunk"] / found["bare_uvicorn"]["us_per_chunk"]
    print(
        f"{found['paceline']['us_per_chunk']} us of CPU per chunk (limit {LIMIT_US:g}), {ratio:.2f} x uvicorn"
    )


if __name__ == "__main__":
    main()
