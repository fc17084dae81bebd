"""What the dial gives: a target between tokens held through a step in load, and what each place of the dial costs.

**How held is measured.** For each second, the p99 of the gaps between tokens that ended in it; of these the median
over every 20 seconds. Windows count from the second on, the one right after the step in load among them. A target is
held when each of these medians lies within 15 % of it (simulator) or 30 % (a server on a CPU). The simulator also has
the p99 of all gaps of a window. The load has to be heavy enough to reach the target at all: with less, gaps are shorter
and there is nothing to hold. Turns are changes of direction of the controller: a run that oscillates has many.

    python -m benchmarks.dial_study sim [--trace azure2023_conv.csv] [--target 30] [--rates 8,24] [--seconds 120]
    python -m benchmarks.dial_study server [--target 120] [--rates 0.5,1.5] [--seconds 80]

The simulator runs an 8B model on a modelled H200: with step costs known exactly, known 30 % too low or too high, and
unknown. The server is `paceline serve` with its default model on this machine, started here on a free port; its load
is open-loop, prompts of the licence's text, 80 to 240 tokens each, greedy streams.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import (
    ENGINE,
    GREEDY,
    TEXT,
    TRACE_FLAG,
    Benchmark,
    Found,
    Given,
    Server,
    at_once,
    flag,
    h200,
    open_loop,
    row,
    served,
    simulated,
    streamed,
    table,
)
from paceline.config.engine import StepCosts
from paceline.core.events import Decision, DecisionKind
from paceline.core.recorder import Inputs, StepRecord
from paceline.lab.sim import SimConfig, engine_config, simulate
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
WINDOW_S = 20
FEWEST_GAPS = 8  # of a second that has a p99
SIM_WITHIN, SERVER_WITHIN = 0.15, 0.30
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Steps of up to 128 tokens, about a third of a second on two small cores: room to move on both sides of the target.
FLAGS = ("--max-num-batched-tokens", "128", "--no-enable-prefix-caching", "--disable-log-requests")
DIAL = "/v1/admin/dial"
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Gaps:
    """Gaps between tokens, with when they ended."""

    at_s: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)

    def windows(self, seconds: int) -> Iterator[tuple[int, float, float]]:
        """Of each window its start, the median of its seconds' p99, and the p99 of all its gaps."""
        at, gaps = np.array(self.at_s), np.array(self.gap_ms)
        for start in range(0, seconds, WINDOW_S):
            per_second = [
                float(np.percentile(own, 99))
                for second in range(start, start + WINDOW_S)
                if len(own := gaps[(at >= second) & (at < second + 1)]) >= FEWEST_GAPS
            ]
            own = gaps[(at >= start) & (at < start + WINDOW_S)]
            if per_second:
                yield start, float(np.median(per_second)), float(np.percentile(own, 99))


def judged(label: str, target_ms: float, gaps: Gaps, seconds: int, within: float, walk: list[float]) -> Found:
    """How well a run held its target; `walk` is where the dial stood."""
    windows = list(gaps.windows(seconds))
    medians = [round(median, 1) for _, median, _ in windows]
    # The farthest from the target, as a share of it, the first window aside.
    worst = max((abs(median / target_ms - 1.0) for _, median, _ in windows[1:]), default=1.0)
    steps = [later - earlier for earlier, later in pairwise(walk) if later != earlier]
    turns = sum(one * other < 0 for one, other in pairwise(steps))
    p99s = [round(p99, 1) for _, _, p99 in windows]
    print(f"\n{label}: target {target_ms:g} ms, {'held' if worst <= within else 'NOT HELD'}")
    print(f"  20 s medians of p99 by the second: {medians}; worst {worst:.0%} off")
    print(f"  p99 of each 20 s: {p99s}; {len(steps)} moves, {turns} turns", flush=True)
    return {
        "label": label,
        "target_ms": target_ms,
        "medians_ms": medians,
        "p99s_ms": p99s,
        "worst": round(worst, 3),
        "moves": len(steps),
        "turns": turns,
        "is_held": worst <= within,
    }


def loads_of(given: Given) -> tuple[list[float], str]:
    return [float(rate) for rate in given.rates.split(",")], given.rates.replace(",", "/s then ") + "/s"


# -- the simulator -------------------------------------------------------------------------------------------


class Watch:
    """Takes gaps and moves from the records of a run."""

    def __init__(self, num_rows: int) -> None:
        self.gaps = Gaps()
        self.walk: list[float] = []
        self._last_s: Floats = np.full(num_rows, np.nan)
        self._owner = np.full(num_rows, -1)

    def step(self, record: StepRecord) -> None:
        for decision in record.decisions:
            if decision.kind is DecisionKind.DIAL:
                self._moved(decision)
        result = record.result
        if result is None:
            return
        got = result.count > 0
        rows, owners = result.rows[got], result.generation[got]
        gaps = np.where(self._owner[rows] == owners, record.t_done - self._last_s[rows], np.nan) * 1e3
        self._last_s[rows], self._owner[rows] = record.t_done, owners
        gaps = gaps[np.isfinite(gaps)]
        self.gaps.gap_ms += gaps.tolist()
        self.gaps.at_s += [record.t_done] * len(gaps)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        return None

    def _moved(self, decision: Decision) -> None:
        found = re.search(r"from=(\S+) to=(\S+)", decision.detail)
        assert found is not None
        self.walk += ([] if self.walk else [float(found[1])]) + [float(found[2])]


def stepped(trace: str, rates: Sequence[float], seconds: int, seed: int) -> Workload:
    """The trace's requests in their order, with arrivals at one rate after the other."""
    rng, arrivals = np.random.default_rng(seed), list[float]()
    for index, rate in enumerate(rates):
        gaps = rng.exponential(1.0 / rate, int(3 * rate * seconds) + 50)
        arrivals += [index * seconds + at for at in np.cumsum(gaps).tolist() if at < seconds]
    workload = load_workload(trace, num_requests=len(arrivals), seed=seed)
    return replace(workload, arrival_s=np.array(arrivals), prefix_ids=None)


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    parts = {name: getattr(costs, name) * factor for name in ("context_s", "product_s", "row_s")}
    return replace(costs, seconds=tuple(second * factor for second in costs.seconds), **parts)


@bench.part(
    TRACE_FLAG,
    flag("--target", 30.0, "p99 between tokens in ms"),
    flag("--rates", "8,24", "requests per second, one after the other"),
    flag("--seconds", 120, "of each rate"),
    flag("--seed", 7),
)
def sim(given: Given) -> Found:
    """An 8B model on a modelled H200, and what each place of the dial gives."""
    rates, named = loads_of(given)
    workload = stepped(given.trace, rates, given.seconds, given.seed)
    engine = engine_config(h200(), workload, {**ENGINE, "target_itl_p99_ms": given.target})
    costs = engine.scheduler.step_costs
    assert costs is not None
    low, high = scaled(costs, 0.7), scaled(costs, 1.3)
    tables = {"exact": costs, "30 % too low": low, "30 % too high": high, "none": None}
    outcomes = []
    for name, known in tables.items():
        watch = Watch(2 * ENGINE["max_num_seqs"])
        own = replace(engine, scheduler=replace(engine.scheduler, step_costs=known))
        simulate(SimConfig(machine=h200(), engine=own), workload, recorder=watch)
        label, seconds = f"simulator, {named}, step costs: {name}", len(rates) * given.seconds
        outcomes.append(judged(label, given.target, watch.gaps, seconds, SIM_WITHIN, watch.walk))
    show_places(stepped(given.trace, [rates[0] * 2], given.seconds, given.seed), rates[0] * 2)
    return {"outcomes": outcomes}


def show_places(workload: Workload, rate: float) -> None:
    """What each place of the dial gives, at a load below saturation and when everything is there from the start."""
    crowd = at_once(workload)
    print(
        f"\nplaces of the dial at {rate:g}/s (ms), and requests per second when all are there from the start"
    )
    table("place", "ITL p50", "ITL p99", "TTFT p50", "TTFT p99", "all at once")
    for place in PLACES:
        record, rushed = (simulated(load, {**ENGINE, "dial": place}) for load in (workload, crowd))
        itl = np.nanpercentile(record.itl_s * 1e3, (50, 99)).tolist()
        first = np.nanpercentile((record.first_token_s - record.arrival_s) * 1e3, (50, 99)).tolist()
        row(place, *itl, *first, len(crowd) / rushed.duration_s)


# -- a server ------------------------------------------------------------------------------------------------


async def send(server: Server, body: Found, gaps: Gaps, origin_s: float) -> None:
    """One request; its gaps between pieces of text are noted as they end."""
    async with streamed(server.port, "/v1/completions", body) as answer:
        last_s: float | None = None
        async for _ in answer.events:
            now_s = time.perf_counter() - origin_s
            if last_s is not None:
                gaps.at_s.append(now_s)
                gaps.gap_ms.append((now_s - last_s) * 1e3)
            last_s = now_s


async def offer(server: Server, rates: list[float], given: Given) -> tuple[Gaps, list[float]]:
    """Open-loop load, one rate after the other; also where the dial stood each second."""
    rng, words = np.random.default_rng(given.seed), TEXT.read_text().split()
    gaps, walk, origin_s = Gaps(), list[float](), time.perf_counter()

    async def look() -> None:
        while True:
            walk.append(float((await asyncio.to_thread(server.read, DIAL))["position"]))
            await asyncio.sleep(1.0)

    def due() -> Iterator[tuple[float, Callable[[], Coroutine[Any, Any, None]]]]:
        for index, rate in enumerate(rates):
            due_s = index * given.seconds + float(rng.exponential(1.0 / rate))
            while due_s < (index + 1) * given.seconds:
                start, count = int(rng.integers(len(words) - 200)), int(rng.integers(60, 180))
                prompt = " ".join(words[start : start + count])
                body = {"model": "smollm2", "prompt": prompt, "max_tokens": 96, "stream": True, **GREEDY}
                yield due_s, partial(send, server, body, gaps, origin_s)
                due_s += float(rng.exponential(1.0 / rate))

    looking = asyncio.create_task(look())
    tasks = await open_loop(due(), given.most)
    await asyncio.sleep(max(0.0, len(rates) * given.seconds - (time.perf_counter() - origin_s)))
    for task in (*tasks, looking):
        task.cancel()
    await asyncio.gather(*tasks, looking, return_exceptions=True)
    return gaps, walk


@bench.part(
    flag("--target", 120.0, "p99 between tokens in ms"),
    flag("--rates", "0.5,1.5", "requests per second, one after the other"),
    flag("--seconds", 80, "of each rate"),
    flag("--most", 24, "requests under way at a time"),
    flag("--seed", 7),
)
def server(given: Given) -> Found:
    """`paceline serve` with its default model on this machine."""
    rates, named = loads_of(given)
    with served((*FLAGS, "--target-itl-p99-ms", str(given.target))) as running:
        gaps, walk = asyncio.run(offer(running, rates, given))
        for sentence in running.read(DIAL)["sentences"]:
            print(f"  {sentence}")
    seconds = len(rates) * given.seconds
    return {"outcomes": [judged(f"server, {named}", given.target, gaps, seconds, SERVER_WITHIN, walk)]}


if __name__ == "__main__":
    bench.main()
