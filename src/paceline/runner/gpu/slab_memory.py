"""One allocation on the device, cut into slabs that the KV and the weights of several models share.

    slab       0            1                2                3
         | null blocks | home of a ...  | ... home of a  | KV of a or b: part 0, part 1, ... |

A *part* is the keys or the values of one layer. In a slab of its KV, a model has `n` blocks, part after part: the
address of a block's part is `slab * slab_bytes + part * n * part_bytes + (block % n) * part_bytes`, with the slab
`block // n`. Slabs are a whole number of parts of every model, so that the same address is
`part * n * part_bytes + unit * part_bytes` with `unit = block // n * (slab_bytes // part_bytes) + block % n`. Tables on
the device hold units: kernels compute addresses as they do for a model alone, which has one slab, where the unit of a
block is its number.

A *home* is where a model's weights lie while it is awake, and in the slabs behind them the pool of its adapters. Graphs
hold addresses, so it wakes where it slept. A model alone has a home too, in memory of its own, which goes back to the
driver while it sleeps.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.plan import Runner
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED
from paceline.models.layers import Linear
from paceline.runner.gpu.host_memory import PIECE_BYTES, HostPlaces
from paceline.runner.gpu.kernels import BLOCK_SIZE

MIB = 1 << 20
LEAST_SLAB, MOST_SLAB = 128 * MIB, 512 * MIB
_ALIGNED = 256  # bytes; as the driver's own allocations are, at least
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


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
        self._last_home: SlabHome | None = None

    def blocks_in(self, shape: PartShape) -> int:
        """Blocks of a model in one slab."""
        return self.slab_bytes // shape.block_bytes

    def home(self) -> SlabHome:
        """Where the weights of the next model go, behind those of the model before, which are all there."""
        first = self._last_home.slabs.stop if self._last_home is not None else 1
        self._last_home = SlabHome(self, first)
        return self._last_home


class Home:
    """Where the matrices of one model lie, by name: read again, each goes where it was. Those of a layer's experts lie
    behind one another, so that they are one tensor too (`device_layers`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._areas: dict[str, Tensor] = {}  # bytes
        self._placed: set[str] = set()
        self._lock = threading.Lock()  # matrices are read in several threads
        self._kept: HostPlaces | None = None  # the same bytes in host memory

    def place(self, linear: Linear, name: str, num_experts: int = 0) -> Linear:
        """The same matrix with its memory here. `num_experts`: of its layer, where `name` is that of an expert."""
        made: Any = linear
        weight = made.weight
        if isinstance(weight, Tensor):
            made.weight = self._copy(weight, name, num_experts)
        else:
            parts = {each.name: getattr(weight, each.name) for each in fields(weight)}
            made.weight = replace(
                weight,
                **{
                    part: self._copy(tensor, f"{name} {part}", num_experts)
                    for part, tensor in parts.items()
                    if isinstance(tensor, Tensor)
                },
            )
        return linear

    def _copy(self, tensor: Tensor, name: str, num_experts: int) -> Tensor:
        found = _EXPERT.fullmatch(name) if num_experts else None
        count, index, stack = 1, 0, name
        if found is not None:
            count, index, tensor = num_experts, int(found[2]), tensor.contiguous()
            stack = f"{found[1]}*{found[3]} {tensor.dtype}"  # of one kind only
        size = tensor.nbytes
        with self._lock:
            assert name not in self._placed, f"{name} is there twice"
            self._placed.add(name)
            if stack not in self._areas:
                self._areas[stack] = self._take(size * count)
            area = self._areas[stack]
        assert len(area) == size * count, f"{name} has another size than before"
        here = area[size * index : size * (index + 1)].view(tensor.dtype)
        # Its strides too: some scales lie across.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
        assert tensor.permute(order).is_contiguous(), "weights have no gaps"
        back = [order.index(axis) for axis in range(tensor.dim())]
        made = here.view([tensor.shape[axis] for axis in order]).permute(back)
        return made.copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        """Bytes for one matrix, or for those of a layer's experts."""
        raise NotImplementedError

    def beside(self, num_bytes: int) -> Tensor:
        """Bytes for what need not come back after a sleep: adapters, which are read again. Once, behind all weights."""
        raise NotImplementedError

    def leave(self) -> None:
        """Nothing is here any more: others may have the memory."""

    def come_back(self) -> None:
        """There is memory again, not always where it was."""

    def addresses(self) -> list[int]:
        """Of all that may be elsewhere after a sleep."""
        return []

    def again(self) -> Home:
        """To be filled as it was."""
        self._placed.clear()
        return self

    def keep(self) -> None:
        """Copy what is here to host memory, where it stays: weights do not change."""
        if self._kept is not None:
            return
        total = sum(len(area) for area in self._areas.values())
        piece = torch.empty(1, PIECE_BYTES, dtype=torch.uint8, device="meta")
        kept = HostPlaces([piece], -(-total // PIECE_BYTES), pin=self.device.type == "cuda")
        kept.pin(len(kept.tensors[0]))
        for on_host, here in self._pieces(kept):
            on_host.copy_(here, non_blocking=True)
        self.wait()
        self._kept = kept

    def forget(self) -> None:
        self._kept = None

    def bring_back(self) -> bool:
        """From host memory; False: it is not there."""
        if self._kept is None:
            return False
        for on_host, here in self._pieces(self._kept):
            here.copy_(on_host, non_blocking=True)
        self.wait()
        return True

    def _pieces(self, kept: HostPlaces) -> Iterator[tuple[Tensor, Tensor]]:
        """What is one copy each: memory of the host that was pinned together, and its bytes here."""
        on_host, at = kept.tensors[0].view(-1), 0
        for area in self._areas.values():
            done = 0
            while done < len(area):
                count = min(len(area) - done, PIECE_BYTES - at % PIECE_BYTES)
                yield on_host[at : at + count], area[done : done + count]
                at, done = at + count, done + count

    def wait(self) -> None:
        """For what this thread has copied here or from here."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class SlabHome(Home):
    """A run of slabs. While its model sleeps, others have them."""

    def __init__(self, memory: SlabMemory, first: int) -> None:
        super().__init__(memory.bytes.device)
        self._memory, self._first = memory, first
        self._at = first * memory.slab_bytes
        self.num_beside = 0  # slabs of adapters, the last ones

    @property
    def slabs(self) -> range:
        return range(self._first, -(-self._at // self._memory.slab_bytes))

    def _take(self, num_bytes: int) -> Tensor:
        start, end = self._at, self._at + num_bytes
        if end > len(self._memory.bytes):
            raise torch.OutOfMemoryError("the weights do not fit into the memory that models share")
        self._at = -(-end // _ALIGNED) * _ALIGNED
        return self._memory.bytes[start:end]

    def beside(self, num_bytes: int) -> Tensor:
        weights = self.slabs.stop
        self._at = weights * self._memory.slab_bytes
        found = self._take(num_bytes)
        self.num_beside = self.slabs.stop - weights
        return found


class OwnHome(Home):
    """The memory of a model alone, with its KV. While it sleeps the driver has it: other processes may use it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.blank: list[Tensor] = []  # bytes that go and come back empty
        self._sizes: list[int] | None = None  # while they are away

    def _take(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def beside(self, num_bytes: int) -> Tensor:
        self.blank.append(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
        return self.blank[-1]

    def leave(self) -> None:
        if self._sizes is None:
            self._sizes = [len(each) for each in self._everything()]
        for each in self._everything():
            each.untyped_storage().resize_(0)  # tensors that are views of it stay, and are of use again later
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        if self._sizes is not None:
            for each, size in zip(self._everything(), self._sizes, strict=True):
                each.untyped_storage().resize_(size)
            for each in self.blank:
                each.zero_()
            self.wait()
            self._sizes = None

    def addresses(self) -> list[int]:
        return [each.data_ptr() for each in self._everything()]

    def _everything(self) -> list[Tensor]:
        return [*self._areas.values(), *self.blank]


class GPUSleeper:
    """The memory of a model over its sleeps. Its runner stays, with what a step needs beside: graphs hold addresses."""

    on_gpu, levels_lost = True, DEVICE_LOST

    def __init__(
        self,
        home: Home,
        load: Callable[[Home], object],
        runner: Runner,
        capture_again: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` reads the weights into a home again; `capture_again`: the graphs, where memory is another one."""
        self.home = home
        self._load = load
        self._runner = runner
        self._capture_again = capture_again
        self._captured = home.addresses()  # what graphs know

    def let_go(self, level: int) -> None:
        if level >= WEIGHTS_DROPPED:
            self.home.forget()
        else:
            self.home.keep()
        self.home.leave()

    def open(self) -> Runner:
        try:
            self.home.come_back()
            if not self.home.bring_back():
                self._load(self.home.again())
                self.home.wait()
            if self._captured != self.home.addresses():
                self._captured = [0]  # of no memory, until all of them are captured
                self._capture_again()
                self._captured = self.home.addresses()
        except Exception:
            self.home.leave()
            raise
        return self._runner
