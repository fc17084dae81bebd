"""Memory of the host for blocks that leave the device, pinned piece by piece.

Pinning a hundred gigabytes takes tens of seconds. So a first part is pinned before an engine serves, and a thread pins
the rest beside its steps. Places that are not pinned yet hold bytes like any others, but a copy to or from them would
hold up the steps: `SwapPool` copies nothing out to them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = mmap.PAGESIZE
PIECE_BYTES = 64 << 20  # pinned at a time: other calls to the driver wait meanwhile
_POPULATE_WRITE = 23  # of madvise: give pages their memory and leave what they hold
_PORTABLE = 1  # of cudaHostRegister: pinned for every context

_logger = logging.getLogger("paceline")


class HostPlaces:
    """Per group a tensor [places, parts of a block ...], of which the first `num_pinned` places are pinned."""

    def __init__(self, blocks: Sequence[Tensor], num_places: int, *, pin: bool) -> None:
        """`blocks`: per group [blocks, parts of a block ...] on the device. `pin`: False where there is no GPU."""
        sizes = [math.prod(group.shape[1:]) * group.itemsize for group in blocks]
        # Pieces are whole places and whole pages in every group: no place and no page is in two of them.
        whole = math.lcm(*(PAGE // math.gcd(PAGE, size) for size in sizes)) if sizes else 1
        self.piece = -(-max(1, PIECE_BYTES // max(sizes, default=1)) // whole) * whole
        self.tensors = [
            _memory(num_places * size, group.dtype).view(num_places, *group.shape[1:])
            for group, size in zip(blocks, sizes, strict=True)
        ]
        self._state = _Pinned(num_places if not pin else 0, num_places)
        if pin and self.tensors:
            weakref.finalize(self, _unpin, self._state, self.tensors).atexit = False

    def pack(self, place: int, into: NDArray[np.uint8]) -> None:
        """A block of the first group, as bytes."""
        into[:] = self._bytes(place)

    def unpack(self, place: int, source: NDArray[np.uint8]) -> None:
        self._bytes(place)[:] = source

    def _bytes(self, place: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self.tensors[0][place].reshape(-1).view(torch.uint8).numpy()
        return found

    @property
    def num_pinned(self) -> int:
        return self._state.count

    def pin(self, count: int) -> None:
        """Pin at least the first `count` places, and wait for it."""
        _pin(self._state, self.tensors, self.piece, count)

    def pin_rest(self) -> None:
        """Pin all places beside what the engine does."""
        state = self._state
        if state.count < state.total:
            work = (state, self.tensors, self.piece, state.total)
            state.thread = threading.Thread(target=_pin, args=work, name="pin host memory", daemon=True)
            state.thread.start()


class _Pinned:
    """What the thread and the owner share: the thread must not keep the owner alive."""

    def __init__(self, count: int, total: int) -> None:
        self.count, self.total = count, total
        self.pieces: list[int] = []  # addresses that are registered
        self.stopped = False
        self.thread: threading.Thread | None = None


def _memory(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Memory that begins with a page and takes no room before it is touched."""
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    return torch.frombuffer(area, dtype=dtype)


def _pin(state: _Pinned, tensors: Sequence[Tensor], piece: int, until: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run
    while state.count < min(until, state.total) and not state.stopped:
        count = min(piece, state.total - state.count)
        for group in tensors:
            part = group[state.count : state.count + count]
            start, size = part.data_ptr(), -(-part.nbytes // PAGE) * PAGE
            # Older kernels refuse: then pages get their memory while they are pinned.
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE)
            error = int(torch.cuda.cudart().cudaHostRegister(start, size, _PORTABLE))  # type: ignore[no-untyped-call]
            if error:
                _logger.warning(
                    "%d of %d KV blocks of host memory are used: the driver pins no more (error %d); "
                    "a smaller --kv-offloading-size would fit",
                    state.count,
                    state.total,
                    error,
                )
                return
            state.pieces.append(start)
        state.count += count


def _unpin(state: _Pinned, tensors: Sequence[Tensor]) -> None:
    state.stopped = True
    if state.thread is not None:
        state.thread.join()
    for start in state.pieces:
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]
