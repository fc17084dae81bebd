"""What comes back from the device: a step's tokens and codes, as the columns of a `StepResult`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import AT_LENGTH, RUNNING_ON, STOPPED, RowLogprobs, StepResult, StepTimes
from paceline.kernels.row_update import NOT_FINITE
from paceline.runner.gpu.queue import Mark
from paceline.runner.gpu.rows import DeviceBatch

_CODES = np.array([RUNNING_ON, STOPPED, AT_LENGTH, RUNNING_ON], np.uint8)  # by what `update_rows` reports


class Computing:
    """A submitted step. `swapped` tells, when the step is done, the tickets of swaps that are done too."""

    def __init__(
        self,
        seq: int,
        batch: DeviceBatch,
        ring: NDArray[np.int32],
        done: Mark,
        swapped: Callable[[], NDArray[np.int32]],
        logprobs: tuple[RowLogprobs, ...],
        started_s: float,
    ) -> None:
        self._seq, self._batch, self._ring, self._done = seq, batch, ring, done
        self._swapped, self._logprobs, self._started_s = swapped, logprobs, started_s

    def wait(self) -> StepResult:
        self._done.wait()
        batch = self._batch
        slots, drawn = len(batch.decode), len(batch.decode) + len(batch.finishing)
        token, code = self._ring[0, :drawn].copy(), self._ring[1, :drawn]
        took_part = code >= 0
        known = np.where(took_part, code, 0)
        finite, finished = known != NOT_FINITE, _CODES[known]
        count = took_part.astype(np.int32)
        token[~took_part] = 0
        rows = batch.decode.astype(np.int32)
        if len(batch.spans):
            rows = np.concatenate([rows, batch.spans.astype(np.int32)])
            at = np.concatenate([np.arange(slots), slots + batch.finishing])
            token, count = _spread(token, at, len(rows)), _spread(count, at, len(rows))
            finished = _spread(finished, at, len(rows))
            finite = _spread(finite, at, len(rows), True)
        return StepResult(
            seq=self._seq,
            rows=rows,
            generation=batch.generation,
            tokens=token[:, None],
            count=count,
            finished=finished,
            finite=finite,
            copies_done=self._swapped(),
            logprobs=self._logprobs,
            times=StepTimes(start_s=self._started_s, end_s=time.perf_counter()),
        )


def _spread(values: NDArray, at: NDArray[np.int64], size: int, rest: object = 0) -> NDArray:  # type: ignore[type-arg]
    """Values at their places among rows of which some have none."""
    whole = np.full(size, rest, values.dtype)
    whole[at] = values
    return whole
