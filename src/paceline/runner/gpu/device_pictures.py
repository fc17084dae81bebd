"""Vectors of pictures on the device, in pages, and which of them each token of a step stands for.

Graphs have the two buffers in them, so that a step reads vectors where its slots say so, and embeddings elsewhere. A
step without pictures finds every slot empty: only steps that had some are followed by clearing. Knows numbers of items
and rows, never a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.encoder import EncoderWork
from paceline.runner.gpu.host_rows import DeviceBatch
from paceline.runner.gpu.kernels.token_inputs import NO_VECTOR, PicturePages
from paceline.runner.pictures import PictureEncoder, Pictures

Index = NDArray[np.int64]
# By row: where each item begins and ends, and its number.
Media = Mapping[int, tuple[tuple[int, int, int], ...]]


class DevicePictures(Pictures):
    """As on a CPU, with pages on the device. Calls are made in the stream that computes steps."""

    def __init__(
        self,
        encoder: PictureEncoder,
        work: EncoderWork,
        pages: PicturePages,
        around: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self.pages = pages
        self._num_set = 0  # tokens from the first on that may have a slot
        super().__init__(encoder, work, None, around)

    def _store(self, slots: Index, vectors: NDArray[np.float32] | Tensor) -> None:
        device, dtype = self.pages.vectors.device, self.pages.vectors.dtype
        into = torch.from_numpy(slots).to(device)
        self.pages.vectors[into] = torch.as_tensor(vectors).to(device, dtype)

    def put_slots(self, media: Media, batch: DeviceBatch, dropped: Index) -> None:
        """Of the tokens of a step: those of decoding rows come first, then spans, whose rows have `media`."""
        found: list[tuple[int, Index]] = []
        place = len(batch.decode)
        spans = (batch.spans.tolist(), batch.start.tolist(), batch.count.tolist())
        for row, start, count in zip(*spans, strict=True):
            start += int(dropped[row])
            for low, high, slots in self.within(media.get(row, ()), start, start + count):
                found.append((place + low - start, slots))
                assert len(slots) == high - low
            place += count
        if not found and not self._num_set:
            return
        end = max((at + len(slots) for at, slots in found), default=0)
        column = np.full(max(end, self._num_set), NO_VECTOR, np.int32)
        for at, slots in found:
            column[at : at + len(slots)] = slots
        staged = torch.from_numpy(column)
        if self.pages.slots.is_cuda:
            staged = staged.pin_memory()
        self.pages.slots[: len(column)].copy_(staged, non_blocking=True)
        self._num_set = end
