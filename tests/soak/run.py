"""A whole soak: starts a server, sends traffic, watches, waits for rest, and hands over what it found."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.soak.client import Outcome, User, drip, stall
from tests.soak.judge import AT_REST, MOVES, ClientCounts, Evidence
from tests.soak.plans import GENERATION_PATHS, Planner, stalled_plan
from tests.soak.server import COMMAND, Metrics, Served, children_of

NUM_USERS, NUM_STALLED = 32, 2
MEAN_THINK_S = 0.25
WARM_UP_S = 8.0
REST_S = 60.0  # how long it may take until nothing is left
ROUNDS_OVER_S = 150.0  # after the end of the traffic: longer than any answer may take
PROBES = ("/health", "/health/live", "/health/ready", "/metrics")
MOST_PROBLEMS = 20


@dataclass(slots=True, kw_only=True)
class Figures:
    """What is reported and not judged."""

    seed: int
    seconds: float = 0.0
    requests: int = 0
    generation_tokens: int = 0
    live_ms: list[float] = field(default_factory=list)
    ready_ms: list[float] = field(default_factory=list)
    loop_lag_ms: list[float] = field(default_factory=list)  # the worst of ten seconds, each


class Soak:
    """One run."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._seed = seed
        self.counts = ClientCounts()
        self.problems: list[str] = []
        self.figures = Figures(seed=seed)
        self.memory: dict[str, list[tuple[float, int]]] = {name: [] for name in served.pids}
        self._is_over = threading.Event()

    async def traffic(self, seconds: float) -> None:
        """All users for so long; each ends what it has begun."""
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        tasks = [self._user(number, over) for number in range(NUM_USERS)]
        tasks += [self._stalled_reader(over) for _ in range(NUM_STALLED)]
        await asyncio.wait_for(asyncio.gather(*tasks, self._dripper(over)), seconds + ROUNDS_OVER_S)

    async def _user(self, number: int, over: asyncio.Event) -> None:
        planner = Planner(self._seed, number)
        user = User(self._served.port)
        while not over.is_set():
            self._note(await user.ask(planner.next()))
            await asyncio.sleep(planner.think_s(MEAN_THINK_S))
        user.close()

    async def _stalled_reader(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await stall(self._served.port, stalled_plan(), over)
            self.counts.perhaps_unseen += 1

    async def _dripper(self, over: asyncio.Event) -> None:
        while not over.is_set():
            match await drip(self._served.port, over):
                case True:
                    self.counts.dripped += 1
                case False:
                    self._complain("a slow request was not answered with 408")
                case None:
                    self.counts.undecided += 1

    def _note(self, outcome: Outcome) -> None:
        counts, plan = self.counts, outcome.plan
        self.figures.requests += 1
        if outcome.problem:
            self._complain(outcome.problem)
        if outcome.status is None:
            if outcome.was_sent and not plan.resets:
                counts.left += 1
            else:
                counts.perhaps_unseen += 1
        elif plan.is_raw:
            counts.refused += 1
        else:
            counts.answered[str(outcome.status)] += 1
            counts.good += outcome.status == 200 and plan.path in GENERATION_PATHS

    def _complain(self, problem: str) -> None:
        self.problems = [*self.problems, problem][:MOST_PROBLEMS]

    # ------------------------------------------------------------ beside the traffic

    def watch(self, pause_s: float) -> None:
        """Probe and measure until it is over; runs in a separate thread."""
        started_s = time.monotonic()
        turn = 0
        while not self._is_over.wait(pause_s):
            turn += 1
            self.figures.live_ms.append(self._probe("/health/live"))
            self.figures.ready_ms.append(self._probe("/health/ready"))
            if turn % 4 == 0:
                for name, state in self._served.states().items():
                    self.memory[name].append((time.monotonic() - started_s, state.memory_kib))
            if turn % 40 == 0:
                lag_s = self._served.metrics().value("event_loop_lag_seconds")
                self.figures.loop_lag_ms.append(lag_s * 1e3)

    def end_watch(self) -> None:
        self._is_over.set()

    def _probe(self, path: str) -> float:
        began_s = time.perf_counter()
        try:
            status, _ = self._served.get(path)
            if status != 200:
                self._complain(f"{path} was answered with {status}")
        except OSError as error:
            self._complain(f"{path}: {error}")
        return (time.perf_counter() - began_s) * 1e3


def at_rest(page: Metrics) -> dict[str, float]:
    """The gauges of `AT_REST`, with what is held on lower levels and by how many adapters."""
    used = page.texts("lora_requests_info", "running_lora_adapters", "waiting_lora_adapters")
    found = {name: page.value(name) for name in AT_REST}
    return {
        **found,
        "kv_level_blocks_held": page.value("kv_level_blocks", state="held"),
        "adapters_in_use": float(len(used)),
        "models_asleep": page.value("engine_sleep_state", sleep_state="weights_offloaded"),
    }


def wait_for_rest(served: Served, rest_s: float) -> Metrics:
    """The metrics once nothing is under way, or as they are when that takes too long."""
    until_s = time.monotonic() + rest_s
    while True:
        page = served.metrics()
        is_still = all(at_rest(page)[name] == wanted for name, wanted in AT_REST.items())
        if (is_still and page.value("http_connections") <= 1) or time.monotonic() > until_s:
            return page
        time.sleep(0.1)


def run_soak(
    minutes: float, seed: int, command: Sequence[str] = COMMAND, rest_s: float = REST_S
) -> tuple[Evidence, Figures]:
    """Start a server, send traffic for so long, stop it."""
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder:
        served = Served(Path(folder), command)
        try:
            return _measure(served, minutes, seed, rest_s)
        finally:
            served.close()


def _measure(served: Served, minutes: float, seed: int, rest_s: float) -> tuple[Evidence, Figures]:
    soak = Soak(served, seed)
    asyncio.run(soak.traffic(WARM_UP_S))
    answer = served.ask()  # always the same: what an engine keeps of its last step is, too
    wait_for_rest(served, rest_s)
    held = served.held()
    before, tasks_before = served.states(), served.num_tasks()
    num_before = soak.figures.requests
    watcher = threading.Thread(target=soak.watch, args=(0.25,), daemon=True)
    watcher.start()
    began_s = time.monotonic()
    try:
        asyncio.run(soak.traffic(minutes * 60))
    finally:
        soak.end_watch()
        watcher.join()
    soak.figures.seconds = time.monotonic() - began_s
    if served.ask() != answer:
        soak.problems.append("the same question is answered differently at the end")
    page = wait_for_rest(served, rest_s)
    after, tasks_after = served.states(), served.num_tasks()
    held_after = served.held()
    is_same_engine = children_of(served.process.pid) == [served.engine]
    code = served.stop()
    served.log.join(60.0)  # what was logged last
    soak.figures.generation_tokens = round(page.value("generation_tokens_total"))
    evidence = _evidence(soak, served, page)
    evidence.before, evidence.after = before, after
    evidence.tasks_before, evidence.tasks_after = tasks_before, tasks_after
    evidence.held_before, evidence.held_after = held, held_after
    evidence.num_between = soak.figures.requests - num_before
    evidence.is_same_engine, evidence.exit_code = is_same_engine, code
    return evidence, soak.figures


def _evidence(soak: Soak, served: Served, page: Metrics) -> Evidence:
    soak.counts.answered["200"] += served.num_asked
    soak.counts.good += served.num_asked
    by_status = page.by("http_requests_total", "status")
    for probe in PROBES:
        by_status.subtract(page.by("http_requests_total", "status", handler=probe))
    return Evidence(
        clients=soak.counts,
        problems=soak.problems,
        complaints=served.log.complaints,
        by_status=by_status,
        ended=page.by("request_success_total", "finished_reason"),
        num_logged=served.log.num_requests,
        refused=round(page.value("connections_refused_total")),
        timed_out=round(page.value("connections_timed_out_total")),
        stalled=round(page.value("connections_stalled_total")),
        preemptions=round(page.value("num_preemptions_total")),
        moved={name: page.value(name) for name in MOVES},
        disk_bytes=served.disk_bytes(),
        at_rest=at_rest(page),
        memory=soak.memory,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Half, 99 of a hundred, and the worst."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(max(values), 1)}
