"""The three runs of the demonstration, one after the other: the same model, sizes, requests and machine.

Owns the order, the sizes, how fast requests come (somewhat faster than continuous batching can serve them here, which
is found by a short run before), and the loop that adds requests when they are due and steps the engine in between, on
the real clock and in this thread. Shows nothing; a viewer is called for what begins, and after every step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from paceline.config.engine import ModelConfig
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.events import Decision, StepEvents
from paceline.core.plan import StepPlan
from paceline.core.recorder import RunWatcher, StepWatcher
from paceline.core.request import Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.stepper import Stepper
from paceline.engine.trace import Watch
from paceline.factory import LoadedModel, load_model
from paceline.lab.bench.machine import BUDGETS, engine_sizes
from paceline.lab.bench.shapes import write_shape
from paceline.lab.bench.throughput import release_memory
from paceline.lab.measure import Meter, StepFigures, StepMeter
from paceline.lab.report.lanes import DECODE, EMPTY, HELD, PADDING, PROMPT, Codes, Lanes
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.report.table import ABSENT, format_number
from paceline.lab.report.table import to_json as summary_json
from paceline.lab.workload import Workload, load_workload
from paceline.llm.offline import interrupts_noted
from paceline.scheduler.state import SchedulerState

# -- the traffic: bursts of requests whose lengths are those of recorded chats, or smaller -------------------
#
# The same seed gives the same requests, down to the token ids, so that every mode does the same work.

SOURCE = "azure-conv"
ON_S, OFF_S = 2.0, 3.0  # seconds of requests, seconds of none
WHOLE_BURSTS_S = 7.0  # of traffic: in less time there would be only one burst of that length
LEAST_SHARE = 0.001  # of the length of a burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Parts of the recorded lengths, and the longest."""

    prompt_part: int
    output_part: int
    longest_prompt: int
    longest_output: int

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_output

    def of(self, workload: Workload) -> Workload:
        prompts, outputs = workload.prompt_len // self.prompt_part, workload.output_len // self.output_part
        return replace(
            workload,
            name="bursts of chats",
            prompt_len=np.clip(prompts, 4, self.longest_prompt).astype(np.int32),
            output_len=np.clip(outputs, 4, self.longest_output).astype(np.int32),
        )


# What a small model on a CPU answers in the time there is; and whole chats, but for the very longest.
LENGTHS = {
    "cpu": Lengths(prompt_part=32, output_part=8, longest_prompt=96, longest_output=80),
    "cuda": Lengths(prompt_part=1, output_part=1, longest_prompt=2048, longest_output=1024),
}


def burst_traffic(num_requests: int, rate: float, seed: int, lengths: Lengths) -> Workload:
    """Requests in bursts, with a mean of `rate` a second. Little traffic has short bursts: if all of it came in
    the first one, it would come faster and be over sooner than was asked for."""
    share = min(1.0, max(LEAST_SHARE, num_requests / rate / WHOLE_BURSTS_S))
    arrivals = f"onoff:{ON_S * share:g},{OFF_S * share:g}"
    return lengths.of(
        load_workload(SOURCE, num_requests=num_requests, seed=seed, rate=rate, arrivals=arrivals)
    )


def at_once(num_requests: int, seed: int, lengths: Lengths) -> Workload:
    """The like, all there from the start: to see how much a machine can do."""
    return lengths.of(load_workload(SOURCE, num_requests=num_requests, seed=seed, arrivals="all-at-once"))


def prompt_tokens(workload: Workload, vocab_size: int, seed: int) -> list[NDArray[np.int32]]:
    """Random ids, so that no request finds anything of another in the prefix cache."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, int(count), dtype=np.int32) for count in workload.prompt_len]


MODES = ("static", "dynamic", "continuous")
LOAD = 1.1  # of what continuous batching can do: every mode shows how much it gets done
FEWEST = 12  # requests
JUST_WARM = 4  # requests before the first mode where the rate is given and nothing has to be found out
BLOCK = {"cpu": 16, "cuda": 64}
STATIC_FLUSH_S, DYNAMIC_TIMEOUT_S = 1.0, 0.25  # how long a batch that is not full waits


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What was asked for."""

    model: str | None = None  # None: the default one
    shape: str | None = None  # made-up weights of this shape, instead of a model
    device: str = "cpu"
    rows: int = 8  # in every mode: as many requests as can be in a batch
    seconds: float = 40.0  # over which requests arrive
    warm_up: int = 3  # times a full batch that is there at once, to see what the machine can do
    rate: float | None = None  # requests per second; None: found by the run before
    seed: int = 0
    log_folder: Path | None = None  # where the run logs go


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Requests with their tokens."""

    workload: Workload
    prompts: list[NDArray[np.int32]]
    span_s: float  # time of all requests at the mean rate; the last of them may come sooner or later


class DemoViewer(Protocol):
    """Observes the demo."""

    def warming_up(self, num_requests: int) -> None: ...

    def begins(self, mode: str, traffic: Traffic) -> None: ...

    def watching(self, mode: str) -> Watch | None:
        """Makes a further watcher of the run of a mode, if there is to be one."""

    def stepped(self, driver: Driver) -> None: ...

    def ended(self, run: ModeRun) -> None: ...


def run_demo(plan: DemoPlan, viewer: DemoViewer) -> Iterator[ModeRun]:
    """Each mode in turn. What was run stays with the caller, also when Ctrl-C ends the next one."""
    with _model_config(plan) as model:
        loaded = load_model(model, {**_sizes(plan), "mode": "continuous"})
        # The budget follows from a measurement; it must not differ between modes.
        chosen = engine_sizes(loaded)
        sizes = {**_sizes(plan), **{name: chosen[name] for name in BUDGETS}}
        traffic = _traffic(plan, loaded, viewer)
        for mode in MODES:
            del loaded  # two engines need twice the memory
            release_memory()
            with _log_of_a_whole_run(plan, mode) as log:
                loaded = load_model(model, {**sizes, **log, "mode": mode})
                viewer.begins(mode, traffic)
                driver = Driver(loaded, traffic.workload, traffic.prompts, viewer.watching(mode))
                try:
                    run = driver.run(viewer.stepped)
                finally:
                    loaded.engine.close()  # completes its log
            viewer.ended(run)
            yield run


def _traffic(plan: DemoPlan, loaded: LoadedModel, viewer: DemoViewer) -> Traffic:
    vocab_size = loaded.checkpoint.spec.vocab_size
    count = plan.warm_up * plan.rows if plan.rate is None else JUST_WARM
    viewer.warming_up(count)
    lengths = LENGTHS[plan.device]
    warm = at_once(count, plan.seed + 1, lengths)
    run = Driver(loaded, warm, prompt_tokens(warm, vocab_size, plan.seed + 2)).run(viewer.stepped)
    rate = plan.rate if plan.rate is not None else LOAD * _requests_per_s(run)
    workload = burst_traffic(max(FEWEST, round(rate * plan.seconds)), rate, plan.seed, lengths)
    prompts = prompt_tokens(workload, vocab_size, plan.seed + 3)
    return Traffic(workload=workload, prompts=prompts, span_s=len(workload) / rate)


def _requests_per_s(run: ModeRun) -> float:
    """While the batch was full: between a quarter and three quarters of the endings."""
    ends = np.sort(run.record.finished_s)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return max(1, last - first) / max(float(ends[last] - ends[first]), 1e-6)


def _sizes(plan: DemoPlan) -> dict[str, Any]:
    longest, block = LENGTHS[plan.device].longest, BLOCK[plan.device]
    blocks = -(-longest // block) + 1
    return {
        "max_num_seqs": plan.rows,
        "batch_size": plan.rows,
        "block_size": block,
        "num_blocks": plan.rows * blocks + 1,  # every row has room for the longest request, in every mode
        "max_model_len": longest + 1,
        "static_flush_s": STATIC_FLUSH_S,
        "batch_timeout_s": DYNAMIC_TIMEOUT_S,
        "enable_prefix_caching": False,
    }


@contextmanager
def _log_of_a_whole_run(plan: DemoPlan, mode: str) -> Iterator[dict[str, Any]]:
    """Where the run is logged. After Ctrl-C its file goes: a part of a run stands beside no other mode."""
    if plan.log_folder is None:
        yield {}
        return
    path = plan.log_folder / f"{mode}.jsonl.gz"
    try:
        yield {"run_log": str(path), "run_log_files": 0}
    except KeyboardInterrupt:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def _model_config(plan: DemoPlan) -> Iterator[ModelConfig]:
    """Requests are token ids, so that no tokenizer is needed."""
    if plan.shape is None:
        yield ModelConfig(model=plan.model, device=plan.device, skip_tokenizer_init=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        options = write_shape(plan.shape, Path(folder))
        names = ("model", "load_format", "skip_tokenizer_init")
        yield ModelConfig(device=plan.device, **{name: options[name] for name in names})


# -- one mode: an engine, requests at their times, and what became of them -----------------------------------


class LaneWatcher:
    """A `StepWatcher` that keeps what every row did in every step, one byte each, and the figures of steps."""

    def __init__(self, state: SchedulerState, meter: Meter, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._steps = StepMeter(meter, 0, state)
        self._underway: dict[int, tuple[float, StepFigures, Codes]] = {}
        self._times: list[tuple[float, float]] = []
        self._codes: list[Codes] = []
        self.further: StepWatcher | None = None  # called after this one

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        self._underway[plan.seq] = (self._clock.now(), self._steps.figures(plan), self._codes_of(plan))
        if self.further is not None:
            self.further.submitted(plan, decisions, time_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        start_s, figures, codes = self._underway.pop(seq)
        if self._times:  # one that was planned ahead waited for the one before it
            start_s = max(start_s, self._times[-1][1])
        end_s = self._clock.now()
        self._steps.write(figures, start_s, end_s)
        self._times.append((start_s, end_s))
        self._codes.append(codes)
        if self.further is not None:
            self.further.completed(seq, time_s, failed=failed)

    def lanes(self, origin_s: float = 0.0) -> Lanes:
        """Everything so far; times count from `origin_s`."""
        times = np.array(self._times, np.float64).reshape(-1, 2) - origin_s
        codes, num_slots = self.latest(len(self._codes)), self._state.config.max_num_seqs
        used = max([num_slots, *(np.flatnonzero((codes != EMPTY).any(axis=0)) + 1).tolist()])
        return Lanes(start_s=times[:, 0], end_s=times[:, 1], codes=codes[:, :used], num_slots=num_slots)

    def latest(self, count: int) -> Codes:
        """The rows in the last steps, a step per line."""
        return np.array(self._codes[-count:], np.uint8).reshape(-1, len(self._state.rows.live))

    def _codes_of(self, plan: StepPlan) -> Codes:
        rows = self._state.rows
        codes = np.where(rows.live, np.uint8(HELD), np.uint8(EMPTY))
        codes[rows.live & rows.decoding] = DECODE
        codes[plan.spans.row] = PROMPT
        codes[(rows.done | rows.padding) & rows.live] = PADDING
        return codes


SHORT_NAP_S = 0.02  # so that a picture moves while nothing arrives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeRun:
    """What one mode did with the traffic."""

    mode: str
    record: RunRecord
    lanes: Lanes
    origin_s: float  # when it began, on the clock of its run log


class Driver:
    """Sends a workload to one engine and measures it. Not to be used twice."""

    def __init__(
        self,
        loaded: LoadedModel,
        workload: Workload,
        prompts: Sequence[NDArray[np.int32]],
        watch: Watch | None = None,
    ) -> None:
        """`watch` makes a further watcher of the run, such as one that a page reads."""
        self.workload = workload
        self.meter = Meter(workload)
        self.num_tokens = 0  # delivered
        self._engine = loaded.engine
        self._config = loaded.config
        self._prompts = prompts
        self._clock = MonotonicClock()
        self.watcher = LaneWatcher(self._engine.scheduler.state, self.meter, self._clock)
        self._stepper = Stepper(self._engine, self._collect)
        self._live: dict[RequestId, tuple[int, Request]] = {}
        self._num_sent = 0
        self._watch = watch
        self._further: RunWatcher | None = None
        self._origin_s = self._clock.now()

    @property
    def now_s(self) -> float:
        """Since the start."""
        return self._clock.now() - self._origin_s

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.state.requests) - self._engine.scheduler.state.rows.num_live

    def run(self, on_step: Callable[[Driver], None]) -> ModeRun:
        """Send everything at its time and wait for the last token. Ctrl-C acts between two steps."""
        state = self._engine.scheduler.state
        self._engine.watcher = self.watcher
        self._origin_s = self._clock.now()
        if self._watch is not None:
            self._further = self.watcher.further = self._watch(state)
        try:
            with interrupts_noted() as check_interrupts:
                while self.meter.num_ended < len(self.workload):
                    check_interrupts()
                    self._send_due()
                    self._step_or_nap()
                    on_step(self)
        finally:
            self._engine.watcher = None
        if self._further is not None:
            self._further.close(state.decisions, self._clock.now())
        return ModeRun(
            mode=self._config.scheduler.mode,
            record=self.record(),
            lanes=self.watcher.lanes(self._origin_s),
            origin_s=self._origin_s,
        )

    def record(self) -> RunRecord:
        """The measures so far."""
        kv = self._engine.scheduler.state.kv
        mode = self._config.scheduler.mode
        return self.meter.record(
            mode,
            {"mode": mode},
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_replicas=1,
            kv_total_slots=kv.num_slots,
            origin_s=self._origin_s,
        )

    def _send_due(self) -> None:
        arrivals = self.workload.arrival_s
        while self._num_sent < len(self.workload) and arrivals[self._num_sent] <= self.now_s:
            index = self._num_sent
            sampling = SamplingParams(
                temperature=0.0, max_tokens=int(self.workload.output_len[index]), ignore_eos=True
            )
            arrival_s = self._origin_s + float(arrivals[index])
            (request_id,) = self._engine.add(self._prompts[index], sampling, arrival_s=arrival_s)
            self._live[request_id] = (index, self._engine.scheduler.state.requests[request_id])
            self._num_sent += 1
            self._stepper.wake()

    def _step_or_nap(self) -> None:
        """A step if there is anything to do; else sleep until something may be."""
        nap_s = self._stepper.wait_s()
        if nap_s == 0:
            self._stepper.step()
            return
        time.sleep(min(nap_s if nap_s is not None else SHORT_NAP_S, SHORT_NAP_S))
        self._stepper.wake()

    def _collect(self, events: StepEvents) -> None:
        if self._further is not None:
            self._further.on_events(events)
        for tokens in events.tokens:
            numbers = [self._live[RequestId(each)][0] for each in tokens.requests.tolist()]
            self.meter.tokens(replace(tokens, requests=np.array(numbers, np.int64)))
            self.num_tokens += len(numbers)
        for finished in events.finished:
            number, request = self._live.pop(finished.request)
            self.meter.ended(finished._replace(request=RequestId(number)), request)


# The demonstration's figures, and the table that sets them beside what the field claims for continuous batching.
#
# Owns which figures those are and the claims. The measures themselves are `report`'s.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """One mode."""

    mode: str
    origin_s: float  # when it began, on the clock of its run log
    summary: Summary
    useful_slots: float | None  # share of rows that computed for a request that still wanted it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    value: Callable[[ModeFigures], float | None]
    text: Callable[[float], str]
    claim: str = ""
    # Continuous over static as "2.1 x", else as a change in percent; "" where text is a share.
    as_factor: bool = False
    compares: bool = True


def figures_of(run: ModeRun) -> ModeFigures:
    return ModeFigures(
        mode=run.mode,
        origin_s=run.origin_s,
        summary=summarize(run.record),
        useful_slots=run.lanes.useful_share,
    )


def demo_table(figures: Sequence[ModeFigures]) -> Table:
    """A column for each mode that ran; how the last compares with the first, and what is claimed."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("", no_wrap=True)
    for each in figures:
        table.add_column(each.mode, justify="right", no_wrap=True)
    compares = len(figures) > 1
    if compares:
        table.add_column(f"against {figures[0].mode}", justify="right", no_wrap=True)
    table.add_column("claimed", no_wrap=True)
    for line in _LINES:
        values = [line.value(each) for each in figures]
        cells = [ABSENT if value is None else line.text(value) for value in values]
        if compares:
            cells.append(_against(line, values[0], values[-1]))
        table.add_row(line.name, *cells, line.claim)
    return table


def to_json(figures: ModeFigures) -> dict[str, object]:
    return {
        "mode": figures.mode,
        "origin_s": figures.origin_s,
        "useful_slots": figures.useful_slots,
        "summary": summary_json(figures.summary),
    }


def _against(line: _Line, first: float | None, last: float | None) -> str:
    if not line.compares or not first or last is None:
        return ""
    return f"{last / first:.1f} x" if line.as_factor else f"{100 * (last / first - 1):+.0f} %"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


_LINES = (
    _Line(
        name="output tokens/s",
        value=lambda each: each.summary.output_tokens_per_s,
        text=format_number,
        claim="2 to 4 x",
        as_factor=True,
    ),
    _Line(
        name="answer, p50 (s)", value=lambda each: each.summary.e2e_s.p50, text=format_number, claim="-60 %"
    ),
    _Line(name="answer, p99 (s)", value=lambda each: each.summary.e2e_s.p99, text=format_number),
    _Line(name="first token, p50 (s)", value=lambda each: each.summary.ttft_s.p50, text=format_number),
    _Line(
        name="padded share",
        value=lambda each: each.summary.padded_share,
        text=_share,
        claim="30 to 50 % to none",
        compares=False,
    ),
    _Line(
        name="slots that do useful work", value=lambda each: each.useful_slots, text=_share, as_factor=True
    ),
    _Line(
        name="all answered after (s)",
        value=lambda each: each.summary.duration_s,
        text=format_number,
    ),
)
