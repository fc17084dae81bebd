"""States of a scheduler right after a plan, and the list of ways to break them, by the check that must object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config.encoder import EncoderWork
from paceline.config.engine import StepCosts
from paceline.config.speculative import DraftConfig
from paceline.core.parameters import Pin
from paceline.core.plan import StepPlan
from paceline.core.request import RequestId
from paceline.core.stretch import MediaInput, MediaPart, ModulePart
from paceline.scheduler.invariants import INVARIANTS
from paceline.scheduler.invariants.half_steps import BlocksInUse
from paceline.scheduler.invariants.registry import CheckContext
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


@dataclass
class PlannedState:
    """A bench right after a schedule: the plan is made, its result is still to come."""

    bench: Bench
    plan: StepPlan | None

    def __post_init__(self) -> None:
        self.state = self.bench.state
        self.rows = self.state.rows
        self.kv = self.state.kv
        self.group = self.kv.groups[0]
        self.pool = self.group.pool
        self.decisions = list(self.state.decisions)
        self.in_flight: list[BlocksInUse] = []
        self.backlog: dict[int, float] = {}
        self.displaced: dict[RequestId, int] = {}
        self.stored = 0  # blocks written to the disk so far

    def row(self, number: int) -> int:
        return self.state.requests[RequestId(number)].row

    def objections(self, only: str = "") -> dict[str, str]:
        """What the checks (or one of them) find wrong, by the name of the check."""
        context = CheckContext(self.bench.scheduler, self.plan, self.in_flight)
        context.decisions = self.decisions
        context.backlog = self.backlog
        context.displaced = self.displaced
        context.stored = self.stored
        orders = self.state.orders
        context.arrived = {r.id: (r.arrival_s, orders[r.id]) for r in self.state.requests.values()}
        mine = [entry for entry in INVARIANTS if self.state.config.mode in entry.modes]
        found = {e.check.__name__: e.check(context) for e in mine if only in ("", e.check.__name__)}
        return {name: message for name, message in found.items() if message is not None}


def planned_state(count: int = 3, steps: int = 3, **options: Any) -> PlannedState:
    """Requests of 9 tokens, all decoding; numbers are 1, 2, ..."""
    bench = Bench(engine_config(num_host_blocks=8, **options))
    for start in range(count):
        bench.add(prompt(9, start), 20)
    bench.step(steps)
    return PlannedState(bench, bench.scheduler.schedule())


def shared_out() -> PlannedState:
    """Request 1 of one tenant was just admitted; request 2 of another waits for its row."""
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="fair"))
    for start, tenant in enumerate(("one", "other")):
        bench.add(prompt(9, start), 20, tenant=tenant)
    return PlannedState(bench, bench.scheduler.schedule())


def forked() -> PlannedState:
    """Request 2 shares the full blocks of request 1."""
    bench = Bench(engine_config())
    parent = bench.add(prompt(9), 20)
    bench.step(2)
    bench.fork(parent)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


def placing() -> PlannedState:
    """Row 0 places the first of two contexts, and computes the beginning of the second."""
    bench = Bench(engine_config())
    texts = [prompt(40, 5), prompt(24, 7)]
    tokens = prompt(3) + texts[0] + prompt(3, 9) + texts[1] + prompt(3, 9)
    bench.add(tokens, modules=[ModulePart(3, 40), ModulePart(46, 24)])
    while not len((plan := bench.scheduler.schedule() or StepPlan(seq=0)).placements.row):
        if plan.seq:  # the scheduler has planned it behind the engine's back
            bench.scheduler.update(bench.runner.submit(plan).wait())
        bench.engine.modules.obey()
    return PlannedState(bench, plan)


def crowded() -> PlannedState:
    """One request runs, two wait for its row."""
    return planned_state(max_num_seqs=1)


def vacated() -> PlannedState:
    """Row 0 was used and is free again."""
    bench = Bench(engine_config())
    bench.add(prompt(5), 1)
    bench.run()
    return PlannedState(bench, None)


def before_any_plan() -> PlannedState:
    """A request waits and nothing has been planned."""
    bench = Bench(engine_config())
    bench.add(prompt(9), 20)
    return PlannedState(bench, bench.scheduler.schedule())


def unplanned() -> PlannedState:
    bench = Bench(engine_config())
    return PlannedState(bench, bench.scheduler.schedule())


def long_prompt() -> PlannedState:
    """A prompt that takes the whole step, with no request waiting."""
    bench = Bench(engine_config(max_num_batched_tokens=32, long_prefill_share=0.5))
    bench.add(prompt(120), 5)
    bench.step()
    return PlannedState(bench, bench.scheduler.schedule())


def paced() -> PlannedState:
    """A prompt of which a step may carry eight tokens."""
    costs = StepCosts(sizes=(4, 8, 16), seconds=(0.004, 0.008, 0.016))
    bench = Bench(engine_config(step_costs=costs, step_target_ms=8.0))
    bench.add(prompt(40), 5)
    return PlannedState(bench, bench.scheduler.schedule())


def pictured() -> PlannedState:
    """The first picture of a prompt is encoded and read, its second waits for the next group; each has two pages."""
    work = EncoderWork(layers=2, num_pages=6, page_vectors=4, max_units=8, token_positions=2.0)
    bench = Bench(engine_config(max_num_batched_tokens=32, encoder=work))
    given = [MediaInput(content=bytes([n]), units=units, outputs=8) for n, units in enumerate((2, 40))]
    bench.add(prompt(40), 5, media=[MediaPart(2, given[0]), MediaPart(14, given[1])])
    return PlannedState(bench, bench.scheduler.schedule())


def pinned() -> PlannedState:
    """The prompt of request 1 is pinned; request 2 runs."""
    bench = Bench(engine_config(max_pinned_fraction=1.0, max_pinned_fraction_per_key=1.0, max_model_len=40))
    bench.add(prompt(9), 1, pin=Pin(ttl_s=60))
    bench.run()
    bench.add(prompt(9, 1), 20)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


def ahead() -> PlannedState:
    """Two plans under way; the second lets request 2 in."""
    bench = Bench(engine_config(depth=1))
    bench.add(prompt(9), 20)
    bench.scheduler.schedule()
    bench.add(prompt(9, 1), 20)
    return PlannedState(bench, bench.scheduler.schedule())


def drafted() -> PlannedState:
    """A row decodes with drafts."""
    bench = Bench(engine_config(drafts=DraftConfig(width=3)))
    bench.add(prompt(9), 20)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


# -- how to break it: by the name of the check, one or more ways ---------------------------------------------

Break = Callable[[PlannedState], None]
CASES: list[tuple[str, Callable[[], PlannedState], Break]] = []


def breaks(check: str, build: Callable[[], PlannedState] = planned_state) -> Callable[[Break], Break]:
    def register(function: Break) -> Break:
        CASES.append((check, build, function))
        return function

    return register
