"""One allocation on the device, cut into slabs that the KV and the weights of several models share.

    slab       0            1                2                3
         | null blocks | home of a ...  | ... home of a  | KV of a or b: part 0, part 1, ... |

A *part* is the keys or the values of one layer. In a slab of its KV, a model has `n` blocks, part after part: the
address of a block's part is `slab * slab_bytes + part * n * part_bytes + (block % n) * part_bytes`, with the slab
`block // n`. Slabs are a whole number of parts of every model, so that the same address is
`part * n * part_bytes + unit * part_bytes` with `unit = block // n * (slab_bytes // part_bytes) + block % n`. Tables on
the device hold units: kernels compute addresses as they do for a model alone, which has one slab, where the unit of a
block is its number.

A *home* is where a model's weights lie while it is awake. Graphs hold addresses, so it wakes where it slept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.plan import Runner
from paceline.core.standing import WEIGHTS_DROPPED
from paceline.models.layers import Linear
from paceline.runner.gpu.host_memory import HostPlaces
from paceline.runner.gpu.kernels import BLOCK_SIZE

MIB = 1 << 20
LEAST_SLAB, MOST_SLAB = 128 * MIB, 512 * MIB
_ALIGNED = 256  # bytes; as the driver's own allocations are, at least


@dataclass(frozen=True, slots=True)
class PartShape:
    """Keys or values of one layer in one block, and how many of them a block has over all layers."""

    num_parts: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.kv_heads * BLOCK_SIZE * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.num_parts * self.num_bytes


def choose_slab_bytes(shapes: Sequence[PartShape], least: int = LEAST_SLAB, most: int = MOST_SLAB) -> int:
    """The size that wastes least for the model it suits least: what is left of a slab behind its last whole block."""
    step = math.lcm(*(shape.num_bytes for shape in shapes))
    least = max(least, *(shape.block_bytes for shape in shapes))
    first = -(-least // step)
    sizes = range(first * step, max(most, first * step) + 1, step)
    return min(sizes, key=lambda size: (max(size % shape.block_bytes / size for shape in shapes), size))


class SlabMemory:
    """The allocation."""

    def __init__(self, num_slabs: int, slab_bytes: int, device: torch.device) -> None:
        self.num_slabs, self.slab_bytes = num_slabs, slab_bytes
        self.bytes = torch.zeros(num_slabs * slab_bytes, dtype=torch.uint8, device=device)
        self._last_home: Home | None = None

    def blocks_in(self, shape: PartShape) -> int:
        """Blocks of a model in one slab."""
        return self.slab_bytes // shape.block_bytes

    def home(self) -> Home:
        """Where the weights of the next model go, behind those of the model before, which are all there."""
        first = self._last_home.slabs.stop if self._last_home is not None else 1
        self._last_home = Home(self, first)
        return self._last_home


class Home:
    """A run of slabs with the weights of one model."""

    def __init__(self, memory: SlabMemory, first: int) -> None:
        self._memory, self._first = memory, first
        self._at = self._start = first * memory.slab_bytes
        self._kept: HostPlaces | None = None  # the same bytes in host memory

    @property
    def num_bytes(self) -> int:
        return self._at - self._start

    @property
    def slabs(self) -> range:
        return range(self._first, self._first + -(-self.num_bytes // self._memory.slab_bytes))

    def place(self, linear: Linear) -> Linear:
        """The same matrix with its memory here."""
        made: Any = linear
        weight = made.weight
        if isinstance(weight, Tensor):
            made.weight = self._copy(weight)
        else:
            parts = {each.name: getattr(weight, each.name) for each in fields(weight)}
            tensors = {name: self._copy(part) for name, part in parts.items() if isinstance(part, Tensor)}
            made.weight = replace(weight, **tensors)
        return linear

    def _copy(self, tensor: Tensor) -> Tensor:
        end = self._at + tensor.nbytes
        if end > len(self._memory.bytes):
            raise torch.OutOfMemoryError("the weights do not fit into the memory that models share")
        here = self._memory.bytes[self._at : end].view(tensor.dtype)
        self._at = -(-end // _ALIGNED) * _ALIGNED
        # Its strides too: some scales lie across.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
        assert tensor.permute(order).is_contiguous(), "weights have no gaps"
        back = [order.index(axis) for axis in range(tensor.dim())]
        made = here.view([tensor.shape[axis] for axis in order]).permute(back)
        return made.copy_(tensor)

    def again(self) -> Home:
        """The same place, to be filled as it was."""
        return Home(self._memory, self._first)

    def keep(self) -> None:
        """Copy what is here to host memory, where it stays: weights do not change."""
        if self._kept is not None:
            return
        slabs = self._as_slabs()
        kept = HostPlaces([slabs], len(slabs), pin=slabs.is_cuda)
        kept.pin(len(slabs))
        for piece in self._pieces(kept):
            kept.tensors[0][piece].copy_(slabs[piece], non_blocking=True)
        self.wait()
        self._kept = kept

    def forget(self) -> None:
        self._kept = None

    def bring_back(self) -> bool:
        """From host memory; False: it is not there."""
        if self._kept is None:
            return False
        slabs = self._as_slabs()
        for piece in self._pieces(self._kept):
            slabs[piece].copy_(self._kept.tensors[0][piece], non_blocking=True)
        self.wait()
        return True

    def _as_slabs(self) -> Tensor:
        size, slabs = self._memory.slab_bytes, self.slabs
        here = self._memory.bytes[slabs.start * size : slabs.stop * size]
        return here.view(torch.int64).view(len(slabs), -1)

    def _pieces(self, kept: HostPlaces) -> list[slice]:
        """Slabs whose memory on the host was pinned together: one copy each."""
        return [slice(start, start + kept.piece) for start in range(0, len(self.slabs), kept.piece)]

    def wait(self) -> None:
        """For what this thread has copied here or from here."""
        if self._memory.bytes.is_cuda:
            torch.cuda.current_stream().synchronize()


class GPUSleeper:
    """The weights of a model over its sleeps. Its runner stays, with its graphs: they hold addresses."""

    def __init__(self, home: Home, load: Callable[[Home], object], runner: Runner) -> None:
        """`load` reads the weights into a home again."""
        self.home = home
        self._load = load
        self._runner = runner

    def let_go(self, level: int) -> None:
        if level >= WEIGHTS_DROPPED:
            self.home.forget()
        else:
            self.home.keep()

    def open(self) -> Runner:
        if not self.home.bring_back():
            self._load(self.home.again())
            self.home.wait()
        return self._runner
