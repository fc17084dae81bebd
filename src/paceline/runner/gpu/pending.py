"""Steps that have been submitted, and what comes back of them: tokens and codes as the columns of a `StepResult`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Guide
from paceline.core.plan import (
    AT_LENGTH,
    EMPTY,
    RUNNING_ON,
    STOPPED,
    GuideWork,
    RowLogprobs,
    StepResult,
    StepTimes,
)
from paceline.runner.gpu.device_pooling import StepVectors
from paceline.runner.gpu.device_queue import Mark
from paceline.runner.gpu.host_rows import DeviceBatch
from paceline.runner.gpu.kernels.step_rows import NOT_FINITE
from paceline.runner.gpu.token_sampling import AskedLogprobs

I32 = NDArray[np.int32]
# By what kernels report; what rows with unusable numbers have does not matter.
CODES = np.array([RUNNING_ON, STOPPED, AT_LENGTH, RUNNING_ON], np.uint8)


@dataclass(slots=True, kw_only=True, eq=False)
class GPUPending:
    """A submitted step."""

    seq: int
    batch: DeviceBatch
    ring: NDArray[np.int32]
    # When the step is done: tickets of swaps that are done, or failed, too.
    swapped: Callable[[], tuple[I32, I32]]
    started_s: float
    draw: Callable[[Mapping[int, Guide]], tuple[Mark, tuple[RowLogprobs, ...], GuideWork | None, Mark]]
    asked: AskedLogprobs | None = None  # log-probabilities that come with the tokens
    vectors: StepVectors | None = None
    # Items of pictures whose numbers are not usable, once the step is done; None: it completes none.
    bad_encodings: Callable[[], I32] | None = None
    done: Mark | None = None  # None: its tokens are drawn when the guides of its rows have come
    logprobs: tuple[RowLogprobs, ...] = ()
    guided: GuideWork | None = None
    computed: Mark | None = None  # where the logits of a step with guides are there
    masked: Mark | None = None  # and where its masks are
    failed: set[int] | None = None  # gets the rows whose numbers are not usable
    took: Callable[[I32, I32], None] | None = None  # hears how many tokens rows have got

    def supply(self, guides: Mapping[int, Guide]) -> None:
        if self.done is None:  # else no row with a guide gets a token in this step
            self.done, self.logprobs, self.guided, self.masked = self.draw(guides)

    def wait(self) -> StepResult:
        assert self.done is not None, "rows with guides draw when these have come"
        self.done.wait()
        batch = self.batch
        slots, drawn = len(batch.decode), len(batch.decode) + len(batch.finishing)
        token, code = self.ring[0, :drawn].copy(), self.ring[1, :drawn]
        logprobs = self.logprobs + (() if self.asked is None else self.asked.read(token, code))
        took_part = code >= 0
        known = np.where(took_part, code, 0)
        finite, finished = known != NOT_FINITE, CODES[known]
        count = took_part.astype(np.int32)
        token[~took_part] = 0
        rows = batch.decode.astype(np.int32)
        if len(batch.spans):
            rows = np.concatenate([rows, batch.spans.astype(np.int32)])
            at = np.concatenate([np.arange(slots), slots + batch.finishing])
            token, count = _spread(token, at, len(rows)), _spread(count, at, len(rows))
            finished = _spread(finished, at, len(rows))
            finite = _spread(finite, at, len(rows), True)
        vectors, bad = ((), []) if self.vectors is None else self.vectors.read()
        if bad:
            finite = finite & ~np.isin(rows, bad)
        if self.failed is not None:
            self.failed.update(rows[~finite].tolist())
        if self.took is not None:
            self.took(rows, count)
        copied, lost = self.swapped()
        return StepResult(
            seq=self.seq,
            rows=rows,
            generation=batch.generation,
            tokens=token[:, None],
            count=count,
            finished=finished,
            finite=finite,
            copies_done=copied,
            copies_failed=lost,
            logprobs=logprobs,
            times=StepTimes(start_s=self.started_s, end_s=time.perf_counter()),
            guided=self._guided(),
            vectors=vectors,
            bad_encodings=EMPTY if self.bad_encodings is None else self.bad_encodings(),
        )

    def _guided(self) -> GuideWork | None:
        if self.guided is None or self.computed is None or self.masked is None:
            return self.guided
        return self.guided._replace(wait_s=self.masked.seconds_since(self.computed))


def _spread(values: NDArray, at: NDArray[np.int64], size: int, rest: object = 0) -> NDArray:  # type: ignore[type-arg]
    """Values at their places among rows of which some have none."""
    whole = np.full(size, rest, values.dtype)
    whole[at] = values
    return whole
