"""How far the predicted time to the first token is from the real one, under a load that varies.

*server* starts `paceline serve` and sends chats over loopback as an open loop: times of arrival are drawn beforehand,
in stretches of different rates, whether or not answers come. The forecast is the answer's header
x-paceline-predicted-ttft-ms; the real time is measured here, with everything on the way. *sim* asks the same scheduler
in the simulator, an 8B model on an H200. An error is |forecast - real| over the real time or 200 ms, whichever is more.

    python -m benchmarks.forecast_error server [--seconds 90] [--rate R] [--seed 1] [--options "..."]
    python -m benchmarks.forecast_error sim [--trace azure2023_conv.csv] [--tenants vtc_arena_multiclient_trace.csv]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.harness import (
    TENANTS_FLAG,
    TEXT,
    TRACE_FLAG,
    Benchmark,
    Found,
    Given,
    flag,
    open_loop,
    row,
    served,
    simulated,
    streamed,
    table,
)
from paceline.core.events import Forecast
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload
from paceline.scheduler.scheduler import Scheduler

bench = Benchmark(__doc__)
FLOOR_S = 0.2  # shorter times are judged as if they were this long
BAR = 0.25
LOADS = (0.4, 1.6, 0.8, 2.4, 0.4)  # of the rate, in stretches of equal length
MOST_OPEN = 64  # requests under way: an overload must end some time
WARMING = 16  # requests before anything is measured
ANSWER_S = 300.0
SECONDS_FLAG = flag("--seconds", 90.0, "how long requests come")
HEAD = (
    *("requests", "real p50 ms", "real p90", "forecast p50", "ahead", "error p50 %", "error p90 %"),
    *("too late by ms", "finish error p50 %"),
)


class Sample(NamedTuple):
    """One request: forecast and real seconds to its first and last token; how many requests were ahead of it."""

    forecast_s: float
    real_s: float
    forecast_finish_s: float
    real_finish_s: float
    ahead: int


def report(label: str, samples: Sequence[Sample]) -> Found:
    """One row of the table."""
    if not samples:
        row(label, 0)
        return {"label": label, "requests": 0, "holds": False}
    forecast, real, forecast_finish, real_finish, ahead = np.array(samples).T
    error = 100 * np.abs(forecast - real) / np.maximum(real, FLOOR_S)
    finish = 100 * np.abs(forecast_finish - real_finish) / np.maximum(real_finish, FLOOR_S)
    half, most = np.percentile(error, [50, 90]).tolist()
    times = [*np.percentile(1e3 * real, [50, 90]).tolist(), 1e3 * float(np.median(forecast))]
    late = 1e3 * float(np.median(forecast - real))
    values = [len(samples), *times, float(ahead.mean()), half, most, late, float(np.median(finish))]
    row(label, *values)
    return {"label": label, **dict(zip(HEAD, values, strict=True)), "holds": half <= 100 * BAR}


# -- a server ------------------------------------------------------------------------------------------------


def chat(draw: random.Random, words: list[str]) -> dict[str, Any]:
    """A conversation of any length; one in two answers may end early."""
    count = min(400, int(draw.lognormvariate(3.9, 0.9)) + 3)
    start = draw.randrange(len(words) - count)
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": " ".join(words[start : start + count])}],
        "max_tokens": draw.randint(8, 96),
        "ignore_eos": bool(draw.getrandbits(1)),
        "stream": True,
    }


async def ask(port: int, body: Found) -> Sample | None:
    """Send a chat and read its answer to the end. None: refused, or without a forecast."""
    started_s, first_s = time.perf_counter(), 0.0
    async with streamed(port, "/v1/chat/completions", body) as answer:
        async for event in answer.events:
            if not first_s and b'"content":"' in event:
                first_s = time.perf_counter() - started_s
        whole_s, headers = time.perf_counter() - started_s, answer.headers
    if answer.status != 200 or "x-paceline-predicted-ttft-ms" not in headers or not first_s:
        return None
    first, finish = (int(headers[f"x-paceline-predicted-{name}-ms"]) / 1e3 for name in ("ttft", "finish"))
    return Sample(first, first_s, finish, whole_s, int(headers["x-paceline-queue-position"]))


async def offer(port: int, seconds: float, rate: float, seed: int) -> list[list[Sample]]:
    """Chats of all sizes at the rates of `LOADS`, one list of samples for each stretch."""
    draw = random.Random(seed)
    words = TEXT.read_text().split()
    stretch_s = seconds / len(LOADS)
    found: list[list[Sample]] = [[] for _ in LOADS]

    async def send(stretch: int, body: Found) -> None:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            sample = await asyncio.wait_for(ask(port, body), ANSWER_S)
            found[stretch] += [] if sample is None else [sample]

    due = []
    for stretch, share in enumerate(LOADS):
        at_s = stretch * stretch_s + draw.expovariate(rate * share)
        while at_s < (stretch + 1) * stretch_s:
            due.append((at_s, partial(send, stretch, chat(draw, words))))
            at_s += draw.expovariate(rate * share)
    await asyncio.gather(*await open_loop(due, MOST_OPEN))
    return found


async def saturation(port: int, seed: int) -> float:
    """Requests per second that eight clients get through, each sending its next when the last is done."""
    draw, words = random.Random(seed), TEXT.read_text().split()
    bodies = [chat(draw, words) for _ in range(WARMING)]

    async def client() -> None:
        while bodies:
            await asyncio.wait_for(ask(port, bodies.pop()), ANSWER_S)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(8)))
    return WARMING / (time.perf_counter() - started_s)


@bench.part(
    SECONDS_FLAG,
    flag("--rate", None, "requests per second; default: 0.7 of saturation", kind=float),
    flag("--seed", 1),
    flag("--options", "", 'of paceline serve, such as "--max-num-batched-tokens 64"'),
)
def server(given: Given) -> Found:
    """Forecasts in the answers of `paceline serve` on this machine."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with served(shlex.split(given.options)) as running:
        rate = given.rate or 0.7 * asyncio.run(saturation(running.port, given.seed))
        found = asyncio.run(offer(running.port, given.seconds, rate, given.seed))
    table("server", *HEAD)
    rows = [
        report(f"{rate * share:.2f} requests/s", samples) for share, samples in zip(LOADS, found, strict=True)
    ]
    whole = report("all", [sample for samples in found for sample in samples])
    return {"rows": [*rows, whole], "holds": whole["holds"]}


# -- the simulator -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def forecasts() -> Iterator[dict[int, tuple[float, Forecast]]]:
    """The forecast of each request just before it is added, and when."""
    made: dict[int, tuple[float, Forecast]] = {}
    add = Scheduler.add

    def noted(self: Scheduler, requests: Sequence[Any]) -> None:
        for request in requests:
            forecast = self.forecast(request)
            if forecast is not None:
                made[request.id] = (self.state.now_s, forecast)
        add(self, requests)

    with patch.object(Scheduler, "add", noted):
        yield made


def samples_of(workload: Workload, options: dict[str, Any]) -> list[Sample]:
    with forecasts() as made:
        record = simulated(workload, {"max_num_seqs": 256, **options})
    samples = []
    for number, (asked_s, forecast) in made.items():
        arrival_s = float(record.arrival_s[number])
        late_s = asked_s - arrival_s
        real_s, finish_s = (float(c[number]) - arrival_s for c in (record.first_token_s, record.finished_s))
        if np.isfinite(real_s) and np.isfinite(finish_s):
            times = (late_s + forecast.first_token_s, real_s, late_s + forecast.finish_s, finish_s)
            samples.append(Sample(*times, forecast.ahead))
    return samples


def varying(workload: Workload, rate: float, seconds: float) -> Workload:
    """The requests of a trace with arrivals in stretches of different rates."""
    draw, arrivals = np.random.default_rng(7), []
    for stretch, share in enumerate(LOADS):
        count = int(rate * share * seconds / len(LOADS))
        start_s = stretch * seconds / len(LOADS)
        arrivals.append(start_s + np.sort(draw.uniform(0.0, seconds / len(LOADS), count)))
    at_s = np.concatenate(arrivals)
    return replace(workload.head(len(at_s)), arrival_s=at_s[: len(workload)])


@bench.part(SECONDS_FLAG, TRACE_FLAG, TENANTS_FLAG)
def sim(given: Given) -> Found:
    """Forecasts in the simulator."""
    chats, clients = load_workload(given.trace), load_workload(given.tenants)
    pace = {"max_num_batched_tokens": 3072, "step_target_ms": 34.0}
    cases: dict[str, tuple[Workload, float, dict[str, Any]]] = {
        "chats, 2,048 tokens, 12/s": (chats, 12.0, {"max_num_batched_tokens": 2048}),
        "chats, 2,048 tokens, 20/s": (chats, 20.0, {"max_num_batched_tokens": 2048}),
        "chats, paced, 12/s": (chats, 12.0, pace),
        "chats, paced, 20/s": (chats, 20.0, pace),
        "chats, paced, shortest first, 20/s": (chats, 20.0, {**pace, "scheduling_policy": "shortest"}),
        "chats, 64 rows, 16/s": (chats, 16.0, {**pace, "max_num_seqs": 64}),
        "27 clients, 10,000 KV tokens, fair, 12/s": (
            clients,
            12.0,
            {"scheduling_policy": "fair", "block_size": 16, "num_blocks": 626},
        ),
        "27 clients, 10,000 KV tokens, 6/s": (clients, 6.0, {"block_size": 16, "num_blocks": 626}),
    }
    table("simulator", *HEAD)
    rows = [
        report(label, samples_of(varying(workload, rate, given.seconds), options))
        for label, (workload, rate, options) in cases.items()
    ]
    return {"rows": rows, "holds": all(found["holds"] for found in rows)}


if __name__ == "__main__":
    is_good = bench.main()["holds"]
    print(f"the median error is {'within' if is_good else 'above'} {100 * BAR:.0f} %")
    raise SystemExit(0 if is_good else 1)
