"""What the HTTP process costs, over real sockets: chunks, refusals, the start, the ledger, tokens, the load client.

*chunks*: CPU time of the HTTP process, read from /proc around runs of many streams at once, a tiny model behind it;
what a request costs before its first chunk comes from streams of one token. Beside it, in turns, plain uvicorn sends
the same bytes from a bare ASGI application at the same pace: the floor. *refusals*: a server with a small queue is
filled; refusals (429), /health/live and /health/ready are timed. *start*: from the command to the first answer of a
server whose model is cached (PACELINE_CACHE_ROOT), seen from outside: the listener by a connection, the engine's
process and its libraries in /proc, readiness by /health. *ledger*: requests that end and share writes, and sums over a
long ledger. *ipc*: from the engine's step to the reader in the HTTP process: joining, encoding, the socket, decoding,
handing out; both sides are timed apart, in one process, with a reader task behind each stream. *client*: how many
streamed tokens the load generator of `paceline bench serve` takes in on one core, and how late: a token is late by the
time between the mock server's handing it to its socket and the client's noting it.

    python -m benchmarks.server_cost chunks [--streams 40] [--chunks 200] [--rounds 5]
    python -m benchmarks.server_cost refusals [--seconds 15]
    python -m benchmarks.server_cost start [--model MODEL] [--runs 3]
    python -m benchmarks.server_cost ledger [--entries 1000000] [--at-once 64] [--folder DIR]
    python -m benchmarks.server_cost ipc [--steps 2000]
    python -m benchmarks.server_cost client
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.harness import (
    GREEDY,
    HOST,
    PYTHON,
    START_S,
    Benchmark,
    Found,
    Given,
    Server,
    call,
    flag,
    free_port,
    in_turns,
    program,
    request_bytes,
    row,
    rows_of,
    served,
    spread,
    table,
)
from paceline.config.server import ProcessConfig
from paceline.core.events import StepEvents, TokenEvents
from paceline.core.sampling import SamplingParams
from paceline.lab.bench.load.figures import figures
from paceline.lab.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.lab.bench.load.pool import Pool, Target
from paceline.lab.bench.load.prompt_source import BodyForm, RandomSource
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.channel import Channel
from paceline.process.outbox import Outbox
from paceline.process.streams import Stream
from paceline.process.supervisor import Link
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import COMPLETE, Closing, LedgerDb, Opening, now_ms, reading
from paceline.server.billing.usage_report import read_usage
from tests.fake_engine import engine_info
from tests.mock_openai import RunningMock, running_mock
from tests.model_folder import write_model

bench = Benchmark(__doc__)
LIMIT_US = 40.0
TICK_S = os.sysconf("SC_CLK_TCK")
FLOOR = "--floor"


# -- cost of a chunk -----------------------------------------------------------------------------------------


class Streaming(NamedTuple):
    """What many streams cost the process that sends them."""

    user_us: float  # of CPU, per chunk
    system_us: float
    chunks: int
    took_s: float
    piece: bytes  # one of the events

    @property
    def total_us(self) -> float:
        return self.user_us + self.system_us


@contextmanager
def tiny_server(*flags: str) -> Iterator[Server]:
    """`paceline serve` with a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", max_position_embeddings=4096)
        options = ("--load-format", "dummy", "--served-model-name", "m", "--disable-log-stats")
        quiet = ("--log-level", "error")
        environ: Found = {"PACELINE_CACHE_ROOT": name, "OMP_NUM_THREADS": "1"}
        with served((str(model), *options, *quiet, *flags), **environ) as server:
            yield server


@contextmanager
def bare(piece: bytes, pause_s: float) -> Iterator[Server]:
    """Plain uvicorn that sends the same piece to every client at every tick."""
    command = ("benchmarks.server_cost", FLOOR, piece.hex(), pause_s)
    with program(*PYTHON, *command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Server(int(process.stdout.readline()), process.pid)


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

    uvloop.run(serve())


def stream_request(num_tokens: int) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "max_tokens": num_tokens, "stream": True, **GREEDY}
    return request_bytes("/v1/chat/completions", body)


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def stream_all(port: int, request: bytes, num_streams: int) -> tuple[int, bytes]:
    """Read the streams at once; how many events came, and one of them."""
    answers = await asyncio.gather(*(exchange(port, request) for _ in range(num_streams)))
    pieces = [piece for answer in answers for piece in answer.split(b"\r\n") if piece.startswith(b"data: ")]
    assert all(b" 200 " in answer[:20] for answer in answers), answers[0][:200]
    # A short answer may come in one piece as a whole.
    single = [piece for piece in pieces if piece.count(b"data: {") == 1] or pieces
    return sum(piece.count(b"data: {") for piece in pieces), single[len(single) // 2]


def cpu_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICK_S, int(fields[12]) / TICK_S


def measure(server: Server, request: bytes, num_streams: int) -> Streaming:
    user_s, system_s = cpu_s(server.pid)
    began_s = time.monotonic()
    count, piece = asyncio.run(stream_all(server.port, request, num_streams))
    took_s = time.monotonic() - began_s
    user_end_s, system_end_s = cpu_s(server.pid)
    user, system = (user_end_s - user_s) * 1e6 / count, (system_end_s - system_s) * 1e6 / count
    return Streaming(user, system, count, took_s, piece)


@bench.part(flag("--streams", 40), flag("--chunks", 200, "of each stream"), flag("--rounds", 5))
def chunks(given: Given) -> Found:
    """CPU time of the HTTP process for a streamed chunk, beside plain uvicorn."""
    streams, count = given.streams, given.chunks
    with tiny_server() as server:
        long, short = stream_request(count), stream_request(1)
        asyncio.run(stream_all(server.port, stream_request(20), streams))
        first = measure(server, long, streams)
        with bare(first.piece + b"\n\n", first.took_s / count) as floor:
            works = {
                "paceline": partial(measure, server, long, streams),
                "opening": partial(measure, server, short, streams),
                "bare_uvicorn": partial(measure, floor, request_bytes(f"/{count}"), streams),
            }
            costs = in_turns(works, given.rounds)
    found: Found = {"streams": streams, "chunks_per_stream": count, "rounds": given.rounds}
    found["bytes"] = len(first.piece)
    table("", "us per chunk", "user", "system", "least")
    for name in ("paceline", "bare_uvicorn"):
        middle = sorted(costs[name], key=lambda cost: cost.total_us)[given.rounds // 2]
        least = min(cost.total_us for cost in costs[name])
        names = ("us_per_chunk", "user_us", "system_us", "least_us")
        values = (middle.total_us, middle.user_us, middle.system_us, least)
        found[name] = {key: round(value, 1) for key, value in zip(names, values, strict=True)}
        row(name, *found[name].values())
    opening = statistics.median(cost.total_us * cost.chunks for cost in costs["opening"])
    found["opening_us_per_chunk"] = round(opening / (streams * count), 1)
    ratio = found["paceline"]["us_per_chunk"] / found["bare_uvicorn"]["us_per_chunk"]
    print(f"limit {LIMIT_US:g} us; {ratio:.2f} times uvicorn")
    return found


# -- a full server -------------------------------------------------------------------------------------------


async def saturated(port: int, num_streams: int, seconds: float) -> dict[str, list[float]]:
    """Times in milliseconds of refusals and probes while every place is taken."""
    stop = asyncio.Event()

    async def fill() -> None:
        while not stop.is_set():
            answer = await exchange(port, stream_request(2000))
            await asyncio.sleep(0.05 if b" 429 " in answer[:20] else 0.0)

    fillers = [asyncio.create_task(fill()) for _ in range(num_streams)]
    await asyncio.sleep(1.0)
    kinds = {"429": (stream_request(1), b" 429 "), "/health/live": (request_bytes("/health/live"), b" 200 ")}
    kinds["/health/ready"] = (request_bytes("/health/ready"), b" 503 ")
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


@bench.part(flag("--seconds", 15.0, "of probing a full server"))
def refusals(given: Given) -> Found:
    """Milliseconds of refusals and health probes at a full server."""
    sizes = ("--max-num-seqs", "16", "--max-waiting-requests", "16", "--max-num-batched-tokens", "512")
    with tiny_server(*sizes) as server:
        times = asyncio.run(saturated(server.port, 40, given.seconds))
    return {name: spread(values, 1) for name, values in times.items()}


# -- the start -----------------------------------------------------------------------------------------------

STAGES = ("listening", "engine started", "kernels loaded", "live", "ready", "answered")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def watched_start(model: str | None) -> dict[str, float]:
    """Seconds from the command to each stage of one start."""
    port, times_s = free_port(), dict[str, float]()
    began_s = time.monotonic()

    def note(stage: str, is_reached: object = True) -> None:
        if is_reached:
            times_s.setdefault(stage, round(time.monotonic() - began_s, 3))

    command = ("paceline", "serve", "--port", port, "--served-model-name", "m", *([model] if model else []))
    with program(*PYTHON, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while "ready" not in times_s:
            if time.monotonic() - began_s > START_S or process.poll() is not None:
                raise SystemExit("the server did not start; is the model in the cache?")
            with socket.socket() as client:
                note("listening", "listening" in times_s or client.connect_ex((HOST, port)) == 0)
            engine = _read(f"/proc/{process.pid}/task/{process.pid}/children").split()
            note("engine started", engine)
            note("kernels loaded", engine and "llvmlite" in _read(f"/proc/{engine[0]}/maps"))
            if "listening" in times_s:
                # Before the event loop runs, a connection waits in the system's queue: do not wait with it.
                status, _ = call(port, "/health", timeout_s=0.2)
                note("live", status)
                note("ready", status == 200)
            time.sleep(0.01)
        status, _ = call(port, "/v1/chat/completions", {**CHAT, "max_tokens": 8})
        assert status == 200, status
        note("answered")
    return {stage: times_s[stage] for stage in STAGES}


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


@bench.part(flag("--model", None, "default: SmolLM2-135M-Instruct"), flag("--runs", 3))
def start(given: Given) -> Found:
    """Seconds from `paceline serve` to its first answer, and where they go."""
    runs = rows_of(watched_start(given.model) for _ in range(given.runs))
    return {
        "seconds": {stage: statistics.median(run[stage] for run in runs) for stage in STAGES},
        "runs": runs,
    }


# -- the ledger ----------------------------------------------------------------------------------------------

DAYS, KEYS, BATCH = 90, 50, 50_000
CLASSES = ("interactive", "standard", "spot", "batch")
DAY_MS = 86_400_000


def opening(seq: int, opened_ms: int) -> Opening:
    return Opening(
        seq=seq,
        id=f"{seq:032x}",
        opened_ms=opened_ms,
        key=f"team-{seq % KEYS}",
        service_class=CLASSES[seq % len(CLASSES)],
        model="a-model-of-some-size",
        route="/v1/chat/completions",
        prompt_tokens=700,
        factor=1_000_000,
        prompt_rate=150_000,
        cached_rate=50_000,
        output_rate=600_000,
        kv_rate=0,
    )


def ended(seq: int) -> Closing:
    sizes = {"cached_tokens": 300, "output_tokens": 200, "block_us": 90_000_000}
    prices = {"prompt_nano": 60_000, "output_nano": 120_000}
    return Closing(seq=seq, closed_ms=now_ms(), state=COMPLETE, reason="stop", **sizes, **prices)


def fill(path: Path, entries: int) -> float:
    """A ledger of this many entries over `DAYS` days; returns the seconds it took."""
    began_s, first_ms = time.perf_counter(), now_ms() - DAYS * DAY_MS
    db = LedgerDb(path)
    for begin in range(1, entries + 1, BATCH):
        numbers = range(begin, min(entries + 1, begin + BATCH))
        times = [first_ms + number * DAYS * DAY_MS // entries for number in numbers]
        db.write([opening(n, t) for n, t in zip(numbers, times, strict=True)], [ended(n) for n in numbers])
    db.close()
    return time.perf_counter() - began_s


def query_seconds(path: Path) -> dict[str, float]:
    queries: dict[str, tuple[tuple[str, ...], int | None]] = {
        "by_key_24h": (("key",), now_ms() - DAY_MS),
        "by_key_all": (("key",), None),
        "by_day_class_all": (("day", "class"), None),
    }
    found = {}
    for name, (by, since) in queries.items():
        began_s = time.perf_counter()
        assert read_usage(path, by, since, None)
        found[name] = round(time.perf_counter() - began_s, 3)
    return found


async def settle(ledger: Ledger, at_once: int, seconds: float) -> tuple[int, float]:
    """Requests opened, settled and released by `at_once` clients: how many, and their mean wait."""
    until_s, waits = time.perf_counter() + seconds, list[float]()

    async def client() -> None:
        while time.perf_counter() < until_s:
            seq = ledger.open(opening(0, now_ms()))
            began_s = time.perf_counter()
            await ledger.complete(ended(seq))
            ledger.release(seq)
            waits.append(time.perf_counter() - began_s)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return len(waits), sum(waits) / max(1, len(waits))


@bench.part(
    flag("--entries", 1_000_000, "of the ledger that is summed"),
    flag("--at-once", 64, "requests under way"),
    flag("--seconds", 5.0, "of requests that end"),
    flag("--folder", None, "on the disk to measure; default: the system's folder for temporary files"),
)
def ledger(given: Given) -> Found:
    """Requests per second that end with an entry on disk, and seconds of sums over a long ledger."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "ledger.db"
        fill_s, seconds = fill(path, given.entries), query_seconds(path)
        book = Ledger(LedgerDb(path))
        count, wait_s = asyncio.run(settle(book, given.at_once, given.seconds))
        writes = book.num_writes
        book.close()
        with closing(reading(path)) as connection:
            (total,) = connection.execute("SELECT count(*) FROM entries WHERE state = 'complete'").fetchone()
        assert total == given.entries + count, "every entry is there, once"
        return {
            "entries": given.entries,
            "fill_s": round(fill_s, 1),
            "ledger_mib": round(path.stat().st_size / 2**20, 1),
            "query_s": seconds,
            "at_once": given.at_once,
            "entries_per_s": round(count / given.seconds),
            "mean_wait_ms": round(wait_s * 1e3, 2),
            "entries_per_write": round(count / max(1, writes), 1),
        }


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
    readers = [asyncio.create_task(_take_all(stream, steps)) for stream in streams]
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
        "rows": rows,
        "engine_step_us": round(1e6 * engine_s / steps, 2),
        "empty_look_us": round(1e6 * looked_s / steps, 2),
        "engine_token_us": round(1e6 * engine_s / (rows * steps), 3),
        "http_token_us": round(1e6 * http_s / (rows * steps), 3),
    }


async def _take_all(stream: Stream, count: int) -> None:
    while count > 0:
        for update in await stream.take():
            count -= len(update.tokens)


@bench.part(flag("--steps", 2000))
def ipc(given: Given) -> Found:
    """A token between the engine's step and its reader in the HTTP process."""
    costs = (uvloop.run(token_costs(rows, given.steps)) for rows in (1, 32, 256))
    return {"results": rows_of(costs)}


# -- the load generator --------------------------------------------------------------------------------------

# Streams at once, and milliseconds between the tokens of each: what is offered is their ratio.
LOADS = ((64, 10.0), (128, 10.0), (256, 20.0), (256, 12.0), (512, 20.0))
TOKENS = 200


async def put_load(mock: RunningMock, streams: int) -> tuple[LoadRun, float]:
    pool = Pool(Target(host=HOST, port=mock.port))
    form = BodyForm(api="chat", model="mock", ignore_eos=True)
    plan = LoadPlan(max_concurrency=streams, num_requests=2 * streams)
    generator = LoadGenerator(pool, RandomSource(input_len=64, output_len=TOKENS), form, plan)
    await generator.warm_up(4)
    before_s = time.process_time()
    run = await generator.run()
    used_s = time.process_time() - before_s
    pool.close()
    return run, used_s


def taken_in(mock: RunningMock, streams: int, gap_ms: float) -> Found:
    run, used_s = uvloop.run(put_load(mock, streams))
    known = {entry["index"]: entry["piece_s"] for entry in mock.entries()}
    found = figures(run)
    late_ms = np.concatenate([np.subtract(seen.piece_s, known[seen.index]) for seen in run.seen]) * 1e3
    return {
        "streams": streams,
        "offered_tokens_per_s": streams / gap_ms * 1e3,
        "tokens_per_s": found.output_throughput,
        "client_cpu_share": used_s / run.seconds,
        "tokens_per_cpu_s": found.total_output_tokens / used_s,
        "late_p50_ms": float(np.percentile(late_ms, 50)),
        "late_p99_ms": float(np.percentile(late_ms, 99)),
    }


@bench.part()
def client(given: Given) -> Found:
    """Tokens per second that the load generator takes in on one core, with the mock server on another."""
    everywhere = os.sched_getaffinity(0)
    own, *others = sorted(everywhere)

    def measured(streams: int, gap_ms: float) -> Found:
        os.sched_setaffinity(0, others or {own})  # where the server will run
        with running_mock(ttft_ms=50, gap_ms=gap_ms) as mock:
            os.sched_setaffinity(0, {own})
            return taken_in(mock, streams, gap_ms)

    results = rows_of(starmap(measured, LOADS))
    os.sched_setaffinity(0, everywhere)
    return {"results": results}


if __name__ == "__main__":
    if sys.argv[1:2] == [FLOOR]:
        run_bare(bytes.fromhex(sys.argv[2]), float(sys.argv[3]))
    else:
        bench.main()
