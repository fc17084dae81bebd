"""What the dial gives: a target between tokens held through a step in load, and what each place of the dial costs.

**How held is measured.** For each second, the p99 of the gaps between tokens that ended in it; of these the median
over every 20 seconds. Windows count from the second on, the one right after the step in load among them. A target is
held when each of these medians lies within 15 % of it (simulator) or 30 % (a server on a CPU). The simulator also has
the p99 of all gaps of a window. The load has to be heavy enough to reach the target at all: with less, gaps are shorter
and there is nothing to hold. Turns are changes of direction of the controller: a run that oscillates has many.

    python -m benchmarks.dial_study [--trace azure2023_conv.csv] [--target 30] [--rates 8,24] [--seconds 120]
    python -m benchmarks.dial_study --server [--target 120] [--rates 0.5,1.5] [--seconds 80] [--json FILE]

The simulator runs an 8B model on a modelled H200: with step costs known exactly, known 30 % too low or too high, and
unknown. The server is `paceline serve` with its default model on this machine, started here on a free port; its load
is open-loop, prompts of the licence's text, 80 to 240 tokens each, greedy streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import StepCosts
from paceline.core.events import Decision, DecisionKind
from paceline.core.recorder import Inputs, StepRecord
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload import load_workload
from paceline.lab.workload.model import Workload

WINDOW_S = 20
FEWEST_GAPS = 8  # of a second that has a p99
SIM_WITHIN, SERVER_WITHIN = 0.15, 0.30
ENGINE: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Steps of up to 128 tokens, about a third of a second on two small cores: room to move on both sides of the target.
FLAGS = ("--max-num-batched-tokens", "128", "--no-enable-prefix-caching")
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run with a target."""

    label: str
    target_ms: float
    medians_ms: list[float]  # of each window of 20 s
    p99s_ms: list[float]
    worst: float  # farthest from the target, as a share of it, the first window aside
    moves: int
    turns: int
    is_held: bool


def judged(
    label: str, target_ms: float, gaps: Gaps, seconds: int, within: float, walk: list[float]
) -> Outcome:
    windows = list(gaps.windows(seconds))
    medians = [median for _, median, _ in windows]
    worst = max((abs(median / target_ms - 1.0) for median in medians[1:]), default=1.0)
    steps = [later - earlier for earlier, later in pairwise(walk) if later != earlier]
    return Outcome(
        label=label,
        target_ms=target_ms,
        medians_ms=[round(median, 1) for median in medians],
        p99s_ms=[round(p99, 1) for _, _, p99 in windows],
        worst=round(worst, 3),
        moves=len(steps),
        turns=sum(one * other < 0 for one, other in pairwise(steps)),
        is_held=worst <= within,
    )


def show(outcome: Outcome) -> None:
    print(f"\n{outcome.label}: target {outcome.target_ms:g} ms, {'held' if outcome.is_held else 'NOT HELD'}")
    print(f"  20 s medians of p99 by the second: {outcome.medians_ms}; worst {outcome.worst:.0%} off")
    print(f"  p99 of each 20 s: {outcome.p99s_ms}; {outcome.moves} moves, {outcome.turns} turns", flush=True)


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
    return replace(
        costs,
        seconds=tuple(second * factor for second in costs.seconds),
        context_s=costs.context_s * factor,
        product_s=costs.product_s * factor,
        row_s=costs.row_s * factor,
    )


def hold_in_simulator(arguments: argparse.Namespace, rates: list[float]) -> list[Outcome]:
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    workload = stepped(arguments.trace, rates, arguments.seconds, arguments.seed)
    target = arguments.target or 30.0
    engine = engine_config(machine, workload, {**ENGINE, "target_itl_p99_ms": target})
    costs = engine.scheduler.step_costs
    assert costs is not None
    tables = {
        "exact": costs,
        "30 % too low": scaled(costs, 0.7),
        "30 % too high": scaled(costs, 1.3),
        "none": None,
    }
    outcomes = []
    for name, table in tables.items():
        watch = Watch(2 * ENGINE["max_num_seqs"])
        own = replace(engine, scheduler=replace(engine.scheduler, step_costs=table))
        simulate(SimConfig(machine=machine, engine=own), workload, recorder=watch)
        label = f"simulator, {'/s then '.join(f'{rate:g}' for rate in rates)}/s, step costs: {name}"
        seconds = len(rates) * arguments.seconds
        outcomes.append(judged(label, target, watch.gaps, seconds, SIM_WITHIN, watch.walk))
        show(outcomes[-1])
    return outcomes


def show_places(arguments: argparse.Namespace, rate: float) -> None:
    """What each place of the dial gives, at a load below saturation and when everything is there from the start."""
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    workload = stepped(arguments.trace, [rate], arguments.seconds, arguments.seed)
    crowd = replace(workload, arrival_s=np.zeros(len(workload)))
    print(
        f"\nplaces of the dial at {rate:g}/s (ms), and requests per second when all are there from the start"
    )
    print(f"{'place':>6}{'ITL p50':>9}{'ITL p99':>9}{'TTFT p50':>10}{'TTFT p99':>10}{'all at once':>13}")
    for place in PLACES:
        engine = engine_config(machine, workload, {**ENGINE, "dial": place})
        record = simulate(SimConfig(machine=machine, engine=engine), workload)
        rushed = simulate(SimConfig(machine=machine, engine=engine), crowd)
        first = (record.first_token_s - record.arrival_s) * 1e3
        figures = [np.nanpercentile(record.itl_s * 1e3, share) for share in (50, 99)]
        figures += [np.nanpercentile(first, share) for share in (50, 99)]
        shown = "".join(f"{value:{width}.1f}" for value, width in zip(figures, (9, 9, 10, 10), strict=True))
        print(f"{place:6.2f}{shown}{len(crowd) / rushed.duration_s:13.1f}", flush=True)


# -- a server ------------------------------------------------------------------------------------------------


class Server:
    """`paceline serve` on a free port of loopback."""

    def __init__(self, target_ms: float) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--disable-log-requests"]
        self._process = subprocess.Popen(
            [*command, *FLAGS, "--target-itl-p99-ms", str(target_ms)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found[1])
                break
        else:
            raise SystemExit("the server did not start")

    def dial(self) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.port}/v1/admin/dial", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


async def stream(port: int, body: bytes, gaps: Gaps, origin_s: float) -> None:
    """One request; its gaps between pieces of text are noted as they end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    try:
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        last_s: float | None = None
        async for line in reader:
            if line.startswith(b"data: {"):
                now_s = time.perf_counter() - origin_s
                if last_s is not None:
                    gaps.at_s.append(now_s)
                    gaps.gap_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
    finally:
        writer.close()


async def offer(
    server: Server, rates: list[float], arguments: argparse.Namespace
) -> tuple[Gaps, list[float]]:
    """Open-loop load, one rate after the other; also where the dial stood each second."""
    rng, words = np.random.default_rng(arguments.seed), TEXT.read_text().split()
    gaps, walk, origin_s = Gaps(), list[float](), time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()

    async def look() -> None:
        while True:
            walk.append(float((await asyncio.to_thread(server.dial))["position"]))
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    due_s = 0.0
    for index, rate in enumerate(rates):
        while True:
            due_s += float(rng.exponential(1.0 / rate))
            if due_s >= (index + 1) * arguments.seconds:
                due_s = float((index + 1) * arguments.seconds)
                break
            await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - origin_s)))
            if len(tasks) < arguments.most:
                start, count = int(rng.integers(len(words) - 200)), int(rng.integers(60, 180))
                prompt = " ".join(words[start : start + count])
                fields = {"model": "smollm2", "prompt": prompt, "max_tokens": 96, "temperature": 0}
                body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
                task = asyncio.create_task(stream(server.port, body, gaps, origin_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
    await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - origin_s)))
    for task in (*tasks, looking):
        task.cancel()
    await asyncio.gather(*tasks, looking, return_exceptions=True)
    return gaps, walk


def hold_on_server(arguments: argparse.Namespace, rates: list[float]) -> list[Outcome]:
    target = arguments.target or 120.0
    server = Server(target)
    try:
        gaps, walk = asyncio.run(offer(server, rates, arguments))
        for sentence in server.dial()["sentences"]:
            print(f"  {sentence}")
    finally:
        server.close()
    label = f"server, {'/s then '.join(f'{rate:g}' for rate in rates)}/s"
    outcome = judged(label, target, gaps, len(rates) * arguments.seconds, SERVER_WITHIN, walk)
    show(outcome)
    return [outcome]


def main() -> None:
    parser = argparse.ArgumentParser(description="the dial, in the simulator or on a server")
    parser.add_argument("--server", action="store_true", help="start a server and measure it")
    parser.add_argument("--trace", default="azure-conv", help="trace file, or the generator fitted to it")
    parser.add_argument(
        "--target", type=float, help="p99 between tokens in ms; 30 simulated, 120 on a server"
    )
    parser.add_argument("--rates", help="requests per second, one after the other; 8,24 or 0.5,1.5")
    parser.add_argument("--seconds", type=int, help="of each rate; 120 or 80")
    parser.add_argument("--most", type=int, default=24, help="requests under way at a time, on a server")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rates = [
        float(rate) for rate in (arguments.rates or ("0.5,1.5" if arguments.server else "8,24")).split(",")
    ]
    arguments.seconds = arguments.seconds or (80 if arguments.server else 120)
    outcomes = (hold_on_server if arguments.server else hold_in_simulator)(arguments, rates)
    if not arguments.server:
        show_places(arguments, rates[0] * 2)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
