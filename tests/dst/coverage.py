"""What a run has come across."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.config.engine import EngineConfig
from paceline.core.events import Decision, DecisionKind
from paceline.core.recorder import Inputs, StepRecord, StepRecorder
from tests.dst.settings import Trouble
from tests.dst.truth import Truth, can_tell


class Coverage:
    """Counts what happened; also the recorder of the run, which passes everything on to others."""

    def __init__(
        self,
        config: EngineConfig,
        trouble: Trouble,
        make_recorder: Callable[[EngineConfig], StepRecorder] | None = None,
        *,
        told: bool = True,
    ) -> None:
        """`told`: what requests do is understood by `Truth`, if the config and the trouble are."""
        self.counts: Counter[str] = Counter()
        self.truth = Truth(config) if told and can_tell(config, trouble) else None
        recorder = make_recorder(config) if make_recorder is not None else None
        self._further = [each for each in (recorder, self.truth) if each is not None]

    def step(self, record: StepRecord) -> None:
        counts, plan = self.counts, record.plan
        counts["steps"] += 1
        rows = plan.work.decode_rows + len(plan.spans.row)
        if rows >= 8:
            counts["steps with 8 or more rows"] += 1
        if len(plan.block_copies.row):
            counts["copy-on-write"] += len(plan.block_copies.row)
        if plan.encodes.count:
            counts["steps that encode"] += 1
            counts["items encoded"] += len(plan.encodes.joins)
        counts["runs placed"] += len(plan.placements.row)
        counts["tokens placed"] += plan.work.placed_tokens
        counts["store"] += len(plan.store.disk)
        counts["drop"] += len(plan.drops.row)
        counts["fetch"] += len(plan.fetch.disk)
        counts["failed copy"] += 0 if record.result is None else len(record.result.copies_failed)
        for decision in record.decisions:
            if decision.kind is DecisionKind.LOAD:
                counts[f"load: {decision.reason.value}"] += 1
            elif decision.kind is DecisionKind.RESUME:
                counts["resume"] += 1
            elif decision.kind is DecisionKind.DIAL:
                counts[f"dial: {decision.reason.value}"] += 1
            elif decision.kind is DecisionKind.DEFER and decision.reason.startswith("module"):
                counts[f"defer: {decision.reason.value}"] += 1
            elif decision.kind is DecisionKind.ENCODE:
                counts[f"picture {decision.reason.value}"] += 1
            elif decision.reason.startswith("pages:"):
                counts["preempted for pages"] += 1
            elif decision.reason.startswith("place:"):
                counts["place taken"] += 1
        for recorder in self._further:
            recorder.step(record)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        for recorder in self._further:
            recorder.close(inputs, decisions)
        if self.truth is not None:
            self.counts["figures of decisions"] = self.truth.num_checked
