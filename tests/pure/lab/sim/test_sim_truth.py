"""What decisions say is what inputs and plans show; and a false decision is noticed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.events import DecisionKind, Rule
from paceline.core.recorder import StepRecord
from paceline.core.request import RequestId
from paceline.scheduler.invariants import InvariantViolation
from tests.dst.truth import Truth
from tests.dst.world import World

pytestmark = pytest.mark.slow

# Of the worlds that can be told: crowded ones, with forks, prefixes, shortages and steps planned ahead.
SEEDS = (24, 11, 58, 66, 75, 81, 104, 133, 156, 409, 439, 191)
Lie = tuple[DecisionKind, Rule, dict[str, Any]]
ADMITTED, DEFERRED = (DecisionKind.ADMIT, Rule.FITS), DecisionKind.DEFER
PREEMPTED = (DecisionKind.PREEMPT, Rule.BLOCKS_RECOMPUTE)
LIES: dict[str, Lie] = {
    "rows": (DEFERRED, Rule.ROWS, {"reason": Rule.BUDGET}),
    "budget": (DEFERRED, Rule.BUDGET, {"reason": Rule.ROWS}),
    "blocks": (DEFERRED, Rule.BLOCKS, {"reason": Rule.ROWS}),
    "prefix": (DEFERRED, Rule.PREFIX, {"reason": Rule.BLOCKS}),
    "short of nothing": (DEFERRED, Rule.BLOCKS, {"blocks_needed": 0}),
    "more free": (*ADMITTED, {"blocks_free": 999}),
    "more needed": (*ADMITTED, {"blocks_needed": 99}),
    "another request ahead": (*ADMITTED, {"against": RequestId(77)}),
    "another request's gain": (*PREEMPTED, {"against": RequestId(99)}),
    "free when it was preempted": (*PREEMPTED, {"blocks_free": 99}),
    "longer": (DecisionKind.FINISH, Rule.LENGTH, {"value": 1000}),
    "at its length": (DecisionKind.FINISH, Rule.STOP, {"reason": Rule.LENGTH}),
}


class Recorded:
    """Keeps the records of a run, to be looked at afterwards."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self, inputs: object, decisions: object) -> None:
        return None


@pytest.fixture(scope="module")
def runs() -> list[tuple[World, Recorded]]:
    """Worlds in which every decision told the truth."""
    found = []
    for seed in SEEDS:
        recorded = Recorded()
        without = {"drafts": False, "trees": False, "drops": False, "media": False, "contexts": False}
        world = World(seed, lambda config, recorded=recorded: recorded, **without)  # type: ignore[misc]
        assert world.run(200)["figures of decisions"] > 30
        found.append((world, recorded))
    return found


def test_the_worlds_hold_every_kind_of_deferral(runs: list[tuple[World, Recorded]]) -> None:
    records = [record for _, recorded in runs for record in recorded.records]
    decisions = [decision for record in records for decision in record.decisions]
    reasons = {decision.reason for decision in decisions if decision.kind is DecisionKind.DEFER}
    assert {Rule.ROWS, Rule.BUDGET, Rule.BLOCKS, Rule.PREFIX, Rule.RESERVE} <= reasons


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_noticed(lie: str, runs: list[tuple[World, Recorded]]) -> None:
    assert any(_notices(Truth(world.config), recorded.records, LIES[lie]) for world, recorded in runs)


def _notices(truth: Truth, records: list[StepRecord], lie: Lie) -> bool:
    """Whether some decision of the lie's kind is called one once it is told."""
    kind, rule, changes = lie
    for record in records:
        told = list(record.decisions)
        for at, decision in enumerate(told):
            if decision.kind is kind and decision.reason is rule:
                told[at] = decision._replace(**changes)
                try:
                    deepcopy(truth).step(replace(record, decisions=told))
                except InvariantViolation as violation:
                    return violation.name == "T1"
                told[at] = decision  # not every decision can be worked out again
        truth.step(record)
    return False
