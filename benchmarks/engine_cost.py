"""What the host does beside the device: a step of the engine, the decision trail, the live page.

*step*: host time of a step when the device costs nothing, with rows at uniform phases within their blocks; mean and
p99 over 512 consecutive steps, of steady decode at several batch sizes, then of 1,024 rows with 32 joining and 32
leaving in every step. Block allocation, prefix keys, results and events are included. CPU time is what the thread
used; wall time also has what other programs took from it. With --drafts N every decoding row has N drafts verified,
of which some are right, another number for each row and step.

*trail*: the same work without the decision trail, with the ring and with the logs, in turns, as ratios to "bare",
which records no decision. *Churn* is the load above, about 14,000 requests a second; *model* a real model with short
answers. "cpu" is the time of all threads, the writers' included, "engine" that of the thread that steps.

*watch*: an engine of 1,024 rows on a device that takes a fixed time for a step, looked at as often as the server does
with and without a viewer. Shares are of the CPU time of the engine's thread. *watch-server*: the same counters of a
busy server, while this program watches it as a page does (PACELINE_ADMIN_KEY, if it needs a key). *frames*: a simulated
run with 1,024 rows on the page in Chromium, at its recorded speed; the time of the page's code for each frame, and the
time between frames.

    python -m benchmarks.engine_cost step [--overlapped] [--drafts 4]
    python -m benchmarks.engine_cost trail [--rounds 7] [--model FOLDER|FILE] [--requests 96] [--only churn,model]
    python -m benchmarks.engine_cost watch [--step-ms 5] [--seconds 10]
    python -m benchmarks.engine_cost watch-server --url http://127.0.0.1:8000 [--seconds 10]
    python -m benchmarks.engine_cost frames [--seconds 10]
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import (
    PYTHON,
    Benchmark,
    Found,
    Given,
    flag,
    in_turns,
    no_garbage_collection,
    program,
    row,
    spread,
    table,
)
from paceline.audit.trail import INTERVAL_S
from paceline.config.engine import EngineConfig, KVConfig, ModelConfig, PreemptionCosts, SchedulerConfig
from paceline.config.sized import Capacity
from paceline.config.speculative import DraftConfig
from paceline.core.clock import ManualClock
from paceline.core.guide import Guide
from paceline.core.plan import DRAFT_KINDS, EMPTY, STOPPED, DraftTally, Pending, StepPlan, StepResult
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine, load_model
from paceline.process.client import EngineStats
from paceline.process.live_view import LiveView
from paceline.server.live.feed import UNWATCHED_INTERVAL_S, LookInterval

bench = Benchmark(__doc__)
STEPS, PROMPT, BLOCK = 512, 64, 16
SIZES = (1, 16, 64, 256, 1024, 4096)
ROWS, CHURN, CHURN_STEPS, MODEL_ROWS = 1024, 32, 700, 16
Figures = dict[str, float]
Make = Callable[[Found], tuple[Engine, Callable[[], Figures]]]  # from options of the engine


# -- an engine on a device that costs nothing ----------------------------------------------------------------


class NoOpRunner:
    """Answers each plan with a token for every row that gets one. `leaving` rows stop in each step. With drafts, rows
    get as many tokens as a table says, which is drawn beforehand."""

    def __init__(self, num_rows: int, drafts: int = 0) -> None:
        self.leaving = 0
        self.step_s = 0.0  # how long the device takes
        self._decoding = np.zeros(num_rows, np.bool_)
        self._generation = np.zeros(num_rows, np.int32)
        self._left = np.zeros(num_rows, np.int32)  # known tokens still to compute
        self._rows = EMPTY
        self._tokens = np.full((num_rows, 1 + drafts), 7, np.int32)
        right = [0, 0, 0, 1, 1, 2, drafts] if drafts else [0]
        self._counts = 1 + np.random.default_rng(1).choice(right, (64, num_rows)).astype(np.int32)
        self._verified = np.full(num_rows, drafts, np.int32)
        self._tally = DraftTally(np.full(DRAFT_KINDS, 4, np.int32), np.full(DRAFT_KINDS, 3, np.int32))
        self._ones = np.ones(num_rows, np.int32)
        self._zeros = np.zeros(num_rows, np.uint8)
        self._finite = np.ones(num_rows, np.bool_)

    def reset(self, full: StepPlan) -> None:
        raise AssertionError("nothing fails here")

    def submit(self, plan: StepPlan) -> Pending:
        if self.step_s:
            due_s = time.monotonic() + self.step_s
            done = self._answer(plan)
            time.sleep(max(0.0, due_s - time.monotonic()))
            return done
        return self._answer(plan)

    def _answer(self, plan: StepPlan) -> _Done:
        change = plan.decode_rows
        joins = plan.joins
        self._decoding[plan.leaves] = False
        self._generation[joins.row] = joins.generation
        self._left[joins.row] = joins.num_tokens - joins.num_computed
        if len(change.added) or len(change.removed) or len(plan.leaves):
            self._decoding[change.removed] = False
            self._decoding[change.added] = True
            self._rows = np.flatnonzero(self._decoding).astype(np.int32)
        rows, count = self._rows, self._ones[: len(self._rows)]
        finished = self._zeros[: len(rows)]
        if self.leaving and len(rows) > self.leaving:
            finished = finished.copy()
            finished[: self.leaving] = STOPPED
        if plan.draft_width:
            count = self._counts[plan.seq % len(self._counts), : len(rows)]
        spans, verified = plan.spans, self._verified[: len(rows)]
        if len(spans.row):
            verified = np.concatenate([verified, self._zeros[: len(spans.row)].astype(np.int32)])
            self._left[spans.row] -= spans.num_scheduled
            rows = np.concatenate([rows, spans.row])
            count = np.concatenate([count, (self._left[spans.row] == 0).astype(np.int32)])
            finished = np.concatenate([finished, self._zeros[: len(spans.row)]])
        return _Done(
            StepResult(
                seq=plan.seq,
                rows=rows,
                generation=self._generation[rows],
                tokens=self._tokens[: len(rows)],
                count=count,
                finished=finished,
                finite=self._finite[: len(rows)],
                copies_done=_tickets(plan),
                verified=verified if plan.draft_width else EMPTY,
                drafts=self._tally if plan.draft_width else None,
            )
        )


def _tickets(plan: StepPlan) -> NDArray[np.int32]:
    """All copies of a plan, done at once."""
    found = [
        part.ticket for part in (plan.swap_out, plan.swap_in, plan.store, plan.fetch) if len(part.ticket)
    ]
    if not found:
        return EMPTY
    tickets = np.concatenate(found)
    return tickets[np.flatnonzero(np.diff(tickets, prepend=-1))]  # each is one run


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    result: StepResult

    def supply(self, guides: Mapping[int, Guide]) -> None:
        raise AssertionError("no row has a guide here")

    def wait(self) -> StepResult:
        return self.result


class Load:
    """An engine, its runner and requests for it: prompts of random tokens at uniform phases within their blocks."""

    def __init__(
        self,
        num_rows: int,
        *,
        longest: int,
        max_tokens: int,
        budget: int,
        kv: KVConfig,
        costs: PreemptionCosts | None = None,
        drafts: int = 0,
        **options: Any,
    ) -> None:
        """`options`: of the engine; among them its `clock`, if that is not the machine's."""
        clock = options.pop("clock", None)
        config = EngineConfig(
            kv=kv,
            scheduler=SchedulerConfig(
                max_num_seqs=num_rows,
                max_num_batched_tokens=budget,
                max_model_len=longest,
                max_queue=1_000_000,
                preemption_costs=costs,
                drafts=DraftConfig(width=drafts) if drafts else None,
            ),
            **options,
        )
        self.runner = NoOpRunner(Capacity.of(config).num_rows, drafts)
        self.clock = clock or ManualClock()  # of the engine, if it is given
        self.engine = build_engine(config, self.runner, clock=clock)
        self._sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._random = np.random.default_rng(0)
        self.add(num_rows)

    def add(self, count: int) -> None:
        for index in range(count):
            prompt = self._random.integers(0, 32000, PROMPT + index % BLOCK).astype(np.int32)
            self.engine.add(prompt, self._sampling)


# -- a step --------------------------------------------------------------------------------------------------


def step_times(num_rows: int, *, depth: int, churn: int = 0, drafts: int = 0) -> Figures:
    """Mean and p99 microseconds per step, of CPU and of wall time."""
    most = (6 if drafts else 3) * STEPS
    longest = PROMPT + BLOCK + most
    load = Load(
        num_rows,
        longest=longest,
        max_tokens=most - 64,
        drafts=drafts,
        budget=num_rows + (64 * PROMPT if churn else 65536),
        kv=KVConfig(block_size=BLOCK, num_blocks=(num_rows + 64) * (longest // BLOCK + 2)),
        depth=depth,
    )
    engine = load.engine
    step = engine.step_overlapped if depth else engine.step
    for _ in range(80):
        step()
    assert engine.scheduler.state.rows.num_live == num_rows
    load.runner.leaving = churn
    wall, cpu = np.empty(STEPS), np.empty(STEPS)
    with no_garbage_collection():
        for index in range(STEPS):
            load.add(churn)  # making prompt keys is work outside the step, and is not timed
            start, start_cpu = time.perf_counter(), time.thread_time()
            step()
            cpu[index] = time.thread_time() - start_cpu
            wall[index] = time.perf_counter() - start
    assert engine.scheduler.state.rows.num_live >= num_rows - 2 * churn
    return {
        f"{name}_{kind}_us": round(value * 1e6, 1)
        for name, taken in (("cpu", cpu), ("wall", wall))
        for kind, value in (("mean", float(taken.mean())), ("p99", float(np.percentile(taken, 99))))
    }


@bench.part(
    flag("--overlapped", False, "one step ahead of the device"),
    flag("--drafts", 0, "verified for each row"),
)
def step(given: Given) -> Found:
    """Host time of a step when the device costs nothing."""
    depth = 1 if given.overlapped else 0
    figures = {}
    table("rows", "cpu mean us", "cpu p99", "wall mean us", "wall p99")
    for size in SIZES[:-1] if given.drafts else SIZES:
        figures[str(size)] = step_times(size, depth=depth, drafts=given.drafts)
        row(size, *figures[str(size)].values())
    if not given.drafts:
        figures["churn"] = step_times(1024, depth=depth, churn=CHURN)
        row("1024, 32 in 32 out", *figures["churn"].values())
    slope = (figures["1024"]["cpu_mean_us"] - figures["64"]["cpu_mean_us"]) / 960
    print(f"slope from 64 to 1,024 rows: {slope:.3f} us per row (cpu)")
    return {"depth": depth, "drafts": given.drafts, "slope_us_per_row": slope, **figures}


# -- the decision trail --------------------------------------------------------------------------------------


def variants(folder: Path) -> dict[str, Found]:
    """Options of the engine by the name of what they keep."""
    return {
        "bare": {"decision_ring": 0},
        "ring": {},
        "decision log": {"decision_log": str(folder / "decisions")},
        "run log": {"run_log": str(folder / "run.jsonl")},
        "both logs": {"decision_log": str(folder / "both"), "run_log": str(folder / "both.jsonl")},
    }


class Clocks:
    """Time that passes while something runs."""

    def __init__(self) -> None:
        self.wall = self.engine = 0.0
        self._process, self._thread = time.process_time(), time.thread_time()

    def run(self, work: Callable[[], object]) -> None:
        wall, engine = time.perf_counter(), time.thread_time()
        work()
        self.engine += time.thread_time() - engine
        self.wall += time.perf_counter() - wall

    def figures(self) -> Figures:
        """Work outside `run` is not counted; what other threads did, or still have to do, is."""
        time.sleep(2.5 * INTERVAL_S)
        others = (time.process_time() - self._process) - (time.thread_time() - self._thread)
        return {"cpu": self.engine + max(0.0, others), "engine": self.engine, "wall": self.wall}


def churn_work(options: Found) -> tuple[Engine, Callable[[], Figures]]:
    # At depth 0 a row that has ended is not computed again, so that as many leave as join.
    load = Load(
        ROWS,
        longest=1024,
        max_tokens=512,
        budget=ROWS + 64 * PROMPT,
        kv=KVConfig(block_size=BLOCK, num_blocks=ROWS * 96),
        depth=0,
        check_every=0,
        **options,
    )

    def work() -> Figures:
        clocks = Clocks()
        for _ in range(CHURN_STEPS):
            load.add(CHURN)
            clocks.run(load.engine.step)
        return clocks.figures()

    for _ in range(80):
        load.engine.step()
    load.runner.leaving = CHURN
    return load.engine, work


def model_work(model: str | None, requests: int, options: Found) -> tuple[Engine, Callable[[], Figures]]:
    sizes = {"max_num_seqs": MODEL_ROWS, "max_model_len": 512, "num_blocks": 640, "check_every": 0, **options}
    engine = load_model(ModelConfig(model=model, device="cpu"), sizes).engine
    rng = np.random.default_rng(0)

    def work() -> Figures:
        clocks = Clocks()
        for _ in range(requests):
            prompt = rng.integers(100, 30_000, 16).astype(np.int32)
            most = int(rng.integers(4, 17))
            engine.add(prompt, SamplingParams(max_tokens=most, ignore_eos=True, temperature=0))
        while engine.has_requests:
            clocks.run(engine.step_overlapped)
        return clocks.figures()

    return engine, work


def ratios(make: Make, rounds: int) -> dict[str, Figures]:
    """The median over rounds of each variant's time, divided by that of the bare one in the same round."""
    with tempfile.TemporaryDirectory(prefix="paceline-trail-") as folder:
        made = {name: make(options) for name, options in variants(Path(folder)).items()}
        state = made["bare"][0].scheduler.state
        state.decide = lambda *args, **more: None  # type: ignore[method-assign]
        works = {name: work for name, (_, work) in made.items()}
        in_turns(works, 1)
        with no_garbage_collection():
            seen = in_turns(works, rounds)
        for engine, _ in made.values():
            engine.close()
    return {
        name: {
            clock: statistics.median(
                mine[clock] / bare[clock] for mine, bare in zip(times, seen["bare"], strict=True)
            )
            for clock in times[0]
        }
        | {"seconds": statistics.median(each["cpu"] for each in times)}
        for name, times in seen.items()
    }


@bench.part(
    flag("--rounds", 7, "runs of each variant"),
    flag("--model", None, "folder or file of a model; SmolLM2-135M-Instruct if none is named"),
    flag("--requests", 96, "requests to the model in each round"),
    flag("--only", "churn,model", "kinds of work"),
)
def trail(given: Given) -> Found:
    """The decision trail: the same work without it, with the ring and with the logs, in turns."""
    works: dict[str, Make] = {"churn": churn_work, "model": partial(model_work, given.model, given.requests)}
    found = {}
    for kind in given.only.split(","):
        table(kind, "cpu", "engine", "wall", "cpu seconds")
        found[kind] = ratios(works[kind], given.rounds)
        for name, figures in found[kind].items():
            shown = (f"{figures[clock] - 1:+.1%}" for clock in ("cpu", "engine", "wall"))
            row(name, *shown, f"{figures['seconds']:.3f}")
    return found


# -- the live page -------------------------------------------------------------------------------------------


def watch_shares(step_s: float, seconds: float, *, churn: int, is_watched: bool) -> Figures:
    """CPU time of watching as a share of that of the thread, and of a look and of a step alone."""
    kv = KVConfig(block_size=BLOCK, num_blocks=65_536)
    load = Load(ROWS, longest=4096, max_tokens=2000, budget=65_536, kv=kv, depth=0)
    for _ in range(8):
        load.engine.step()
    load.runner.step_s, load.runner.leaving = step_s, churn
    live_view = LiveView(load.engine)
    look_s, steps, next_s, interval = [], 0, 0.0, LookInterval()
    began_s, began_cpu = time.monotonic(), time.thread_time()
    while time.monotonic() - began_s < seconds:
        if time.monotonic() >= next_s:
            before = live_view.cpu_s
            live_view.snapshot()
            look_s.append(live_view.cpu_s - before)
            stats = EngineStats(watch_cpu_s=live_view.cpu_s, cpu_s=time.thread_time() - began_cpu)
            wanted_s = interval.interval_s(stats, time.monotonic()) if is_watched else UNWATCHED_INTERVAL_S
            next_s = time.monotonic() + wanted_s
        load.add(len(load.engine.step().finished))
        steps += 1
    spent_s = time.thread_time() - began_cpu
    return {
        "rows": ROWS,
        "rows_changed_per_step": churn,
        "step_ms": step_s * 1e3,
        "steps": steps,
        "engine_cpu_share_of_wall": spent_s / (time.monotonic() - began_s),
        "watch_share_of_engine_cpu": live_view.cpu_s / spent_s,
        "looks_per_s": len(look_s) / seconds,
        "look_ms": statistics.median(look_s) * 1e3,
        "note_us": (live_view.cpu_s - sum(look_s)) / steps * 1e6,
    }


@bench.part(flag("--step-ms", 5.0, "time of the device for a step"), flag("--seconds", 10.0, "of each run"))
def watch(given: Given) -> Found:
    """The live page's cost in the engine: watched and not, with rows that change in every step and without."""
    found = {}
    for name, is_watched in (("watched", True), ("unwatched", False)):
        for kind, churn in (("changing", 1), ("steady", 0)):
            shares = watch_shares(given.step_ms / 1e3, given.seconds, churn=churn, is_watched=is_watched)
            found[f"{name}, {kind}"] = shares
    table("", *next(iter(found.values())))
    for name, shares in found.items():
        row(name, *shares.values())
    return found


COUNTERS = ("watch_cpu_seconds_total", "engine_cpu_seconds_total", "engine_steps_total")
SETTLED_S = 6.0  # after which the feed has found how often to look


@bench.part(flag("--url", "http://127.0.0.1:8000", "of a busy server"), flag("--seconds", 10.0))
def watch_server(given: Given) -> Found:
    """The share of a busy server's engine that watching takes, once looks come as often as they will."""
    url, messages = given.url.rstrip("/"), [0]
    feed = _opened(f"{url}/v1/admin/watch")

    def read() -> None:
        for line in feed:
            messages[0] += line.startswith(b"data: ")

    threading.Thread(target=read, daemon=True).start()
    time.sleep(SETTLED_S)
    before, first = _counters(url), messages[0]
    time.sleep(given.seconds)
    watch_s, cpu_s, steps = (after - was for after, was in zip(_counters(url), before, strict=True))
    return {
        "watch_share_of_engine_cpu": watch_s / cpu_s,
        "engine_cpu_share_of_wall": cpu_s / given.seconds,
        "steps_per_s": steps / given.seconds,
        "watch_us_per_step": watch_s / max(steps, 1.0) * 1e6,
        "looks_per_s": (messages[0] - first) / given.seconds,
    }


def _counters(url: str) -> list[float]:
    text = _opened(f"{url}/metrics").read().decode()
    return [float(re.findall(rf"^paceline:{name}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for name in COUNTERS]


def _opened(address: str) -> Any:
    key = os.environ.get("PACELINE_ADMIN_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60)


SIMULATED = (
    *(
        "paceline",
        "sim",
        "--model",
        "qwen3-0.6b",
        "--trace",
        "uniform:50-600x200-600",
        "--num-requests",
        "6000",
    ),
    *("--rate", "150", "--max-num-seqs", str(ROWS), "--ui", "--ui-port", "0"),
)
GAPS = (
    "{ window.gaps = []; let last = 0; const next = (at) => { if (last) gaps.push(at - last); last = at;"
    " requestAnimationFrame(next); }; requestAnimationFrame(next); paceline.frames.length = 0; }"
)


@bench.part(flag("--seconds", 10.0, "of frames"))
def frames(given: Given) -> Found:
    """Times of the page's frames in Chromium, with every row in use."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with (
        program(*PYTHON, *SIMULATED, stderr=subprocess.PIPE, text=True) as command,
        sync_playwright() as playwright,
    ):
        assert command.stderr is not None
        address = next(found[1] for line in command.stderr if (found := re.search(r"(http://\S+/ui)", line)))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(address)
        page.wait_for_timeout(1000)
        page.evaluate("paceline.player().seek(paceline.player().first + 15)")
        page.wait_for_timeout(3000)
        page.evaluate(GAPS)
        page.wait_for_timeout(1000 * given.seconds)
        rows, taken, gaps = page.evaluate("[paceline.stage.rows.size, paceline.frames, gaps]")
        browser.close()
    return {"rows": rows, "frame_ms": spread(taken), "between_frames_ms": spread(gaps)}


if __name__ == "__main__":
    bench.main()
