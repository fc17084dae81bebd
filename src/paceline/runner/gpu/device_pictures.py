"""Vectors of pictures on the device, in pages, which of them each token of a step stands for, and by what it turns.

Graphs have these buffers in them, so that a step reads vectors where its slots say so, and embeddings elsewhere. A step
without pictures finds every slot empty: only steps that had some are followed by clearing. Knows numbers of items and
rows, never a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.encoder import EncoderWork
from paceline.core.plan import EMPTY, Encodes, RowJoins, i32
from paceline.models.patches import turns
from paceline.models.spec import PatchSpec
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.step_rows import StepTokens
from paceline.runner.gpu.kernels.token_inputs import (
    NO_VECTOR,
    PicturePages,
    allocate_picture_pages,
)
from paceline.runner.gpu.picture_encoder import DevicePictureEncoder
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.pictures import PictureEncoder, Pictures

I32 = NDArray[np.int32]
Index = NDArray[np.int64]
# By row: where each item begins and ends, and its number.
Items = tuple[tuple[int, int, int], ...]
Media = Mapping[int, Items]
_KINDS = 4  # of numbers that a token has: its slot, and what it turns by more than its position, of each axis


def open_pictures(
    encoder: DevicePictureEncoder | None, work: EncoderWork | None, max_tokens: int, queue: DeviceQueue
) -> DevicePictures | None:
    """With room for the vectors of `work`; None: the model sees no pictures."""
    if encoder is None or work is None:
        return None
    patches, slots = encoder.patches, work.num_pages * work.page_vectors
    pages = allocate_picture_pages(
        slots, patches.values, max_tokens, dtype=encoder.dtype, device=queue.device, axes=encoder.axes
    )
    return DevicePictures(encoder, work, pages, queue, patches)


class DevicePictures(Pictures):
    """As on a CPU, with pages on the device. Calls are made in the queue that computes steps."""

    def __init__(
        self,
        encoder: PictureEncoder,
        work: EncoderWork,
        pages: PicturePages,
        queue: DeviceQueue,
        patches: PatchSpec | None = None,
    ) -> None:
        self.pages, self._queue = pages, queue
        self._has_turns = pages.added is not None
        self._num_set = 0  # tokens from the first on that may have a slot
        self._check: tuple[I32, Tensor] | None = (
            None  # items that are complete, and whether their numbers are usable
        )
        super().__init__(encoder, work, patches)
        # They lie in pages.
        self.vectors = np.zeros((0, 0), np.float32)

    def _store(self, slots: Sequence[Index], found: Sequence[Any]) -> I32:
        device, dtype = self.pages.vectors.device, self.pages.vectors.dtype
        fine = []
        for at, vectors in zip(slots, found, strict=True):
            values = torch.as_tensor(vectors).to(device, dtype)
            self.pages.vectors[self._sent(at)] = values
            fine.append(torch.isfinite(values).all())
        pinned = torch.empty(len(fine), dtype=torch.bool, pin_memory=self._queue.is_gpu)
        pinned.copy_(torch.stack(fine), non_blocking=True)
        self._check = i32([join.media for join in self._group]), pinned
        return EMPTY

    def encode(self, part: Encodes) -> Callable[[], I32] | None:
        """Compute some of the line. What it returns is to be called behind the mark of the step: the items that were
        completed and are not usable."""
        if not part.count:
            return None
        failed = self.compute(part)
        check, self._check = self._check, None
        if check is None:
            return lambda: failed
        media, fine = check
        return lambda: media[~fine.numpy()]

    def join(self, joins: RowJoins, rows: HostRows) -> None:
        """Rows start."""
        if self._has_turns:
            saved = [self._saved(rows.media.get(row, ())) for row in joins.row.tolist()]
            rows.memory.put("turned", joins.row.astype(np.int64), saved)

    def turn(self, tokens: StepTokens, num_tokens: int, slot_rows: Tensor, memory: RowMemory) -> None:
        """Fill in by what the tokens of a step turn, whose positions are known; those of `slot_rows` come first."""
        if tokens.turns is None or self.pages.added is None:
            return
        turns, slots = tokens.turns[:, :num_tokens], len(slot_rows)
        torch.add(self.pages.added[:, :num_tokens], tokens.positions[:num_tokens], out=turns)
        if slots:
            turns[:, :slots] -= memory.column("turned").index_select(0, slot_rows)

    def _saved(self, items: Items) -> int:
        if not items:
            return 0
        end = items[-1][1]
        behind: int = turns([self._placed(*each) for each in items], end, end + 1)[0, 0]
        return end - behind

    def put_tokens(self, rows: HostRows, batch: DeviceBatch) -> None:
        """Of the tokens of a step: those of decoding rows come first, then spans."""
        place, parts = len(batch.decode), list[tuple[int, I32]]()
        spans = (batch.spans.tolist(), batch.start.tolist(), batch.count.tolist())
        for row, start, count in zip(*spans, strict=True) if rows.media else ():
            first = start + int(rows.dropped[row])
            columns = self._of_span(rows.media.get(row, ()), first, first + count)
            if columns is not None:
                parts.append((place, columns))
            place += count
        end = max((at + columns.shape[1] for at, columns in parts), default=0)
        size = max(end, self._num_set)
        if not size:
            return
        staged = torch.empty((_KINDS, size), dtype=torch.int32, pin_memory=self._queue.is_gpu)
        words = staged.numpy()
        words[0], words[1:] = NO_VECTOR, 0
        for at, columns in parts:
            words[:, at : at + columns.shape[1]] = columns
        self.pages.slots[:size].copy_(staged[0], non_blocking=True)
        if self.pages.added is not None:
            for axis in range(_KINDS - 1):  # a copy with gaps would wait
                self.pages.added[axis, :size].copy_(staged[1 + axis], non_blocking=True)
        self._num_set = end

    def _of_span(self, items: Items, start: int, end: int) -> I32 | None:
        """What tokens `start` to `end` of a row have; None: nothing."""
        if not items or items[0][0] >= end:
            return None
        columns = np.zeros((_KINDS, end - start), np.int32)
        columns[0] = NO_VECTOR
        for low, high, slots in self.within(items, start, end):
            columns[0, low - start : high - start] = slots
        if self._has_turns:
            columns[1:] = turns([self._placed(*each) for each in items], start, end) - np.arange(start, end)
            return columns
        return columns if (columns[0] != NO_VECTOR).any() else None

    def _sent(self, values: Index) -> Tensor:
        host = torch.from_numpy(values)
        if self._queue.is_gpu:
            host = host.pin_memory()
        return host.to(self._queue.device, non_blocking=True)
