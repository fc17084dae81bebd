"""What stands in the place of a runner that is not there, and of a step that has no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.guide import Guide
from paceline.core.plan import Pending, StepPlan, StepResult


class NoRunner:
    """In the place of the runner of an engine that sleeps."""

    def submit(self, plan: StepPlan) -> Pending:
        raise AssertionError("an engine that sleeps makes no step")

    def reset(self, full: StepPlan) -> None:
        raise AssertionError("an engine that sleeps has nothing to reset")


@dataclass(slots=True)
class FailedStep:
    """The pending of a step that has no result."""

    error: Exception

    def supply(self, guides: Mapping[int, Guide]) -> None:
        raise self.error

    def wait(self) -> StepResult:
        raise self.error
