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

Blocks that leave the device go to memory of the host, which is pinned piece by piece (`HostPlaces`).
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.plan import Runner
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED
from paceline.models.layers import Linear
from paceline.runner.gpu.kernels import BLOCK_SIZE

PAGE = mmap.PAGESIZE
PIECE_BYTES = 64 << 20  # pinned at a time: other calls to the driver wait meanwhile
_POPULATE_WRITE = 23  # of madvise: give pages their memory and leave what they hold
_PORTABLE = 1  # of cudaHostRegister: pinned for every context

_logger = logging.getLogger("paceline")


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


class HostPlaces:
    """Memory of the host for blocks that leave the device: per group a tensor [places, parts of a block ...], of which
    the first `num_pinned` places are pinned.

    Pinning a hundred gigabytes takes tens of seconds. So a first part is pinned before an engine serves, and a thread
    pins the rest beside its steps. Places that are not pinned yet hold bytes like any others, but a copy to or from
    them would hold up the steps: `SwapPool` copies nothing out to them.
    """

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
