"""What a run has come across."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.events import Decision, DecisionKind
from paceline.core.recorder import Inputs, StepRecord, StepRecorder


class Coverage:
    """Counts what happened; also the recorder of the run, which may pass everything on to another."""

    def __init__(self, further: StepRecorder | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._further = further

    def step(self, record: StepRecord) -> None:
        counts, plan = self.counts, record.plan
        counts["steps"] += 1
        rows = plan.work.decode_rows + len(plan.spans.row)
        if rows >= 8:
            counts["steps with 8 or more rows"] += 1
        if len(plan.block_copies.row):
            counts["copy-on-write"] += len(plan.block_copies.row)
        for decision in record.decisions:
            if decision.kind is DecisionKind.RESUME:
                counts["resume"] += 1
        if self._further is not None:
            self._further.step(record)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        if self._further is not None:
            self._further.close(inputs, decisions)
