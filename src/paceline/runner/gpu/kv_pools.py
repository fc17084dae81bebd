"""Keys and values on the device: one piece of memory, whose parts are the pools of the layers (`slab_memory`).

A pool is [blocks, kv heads, block size, head_dim]; copies between blocks are plain torch operations in the stream of
the steps. They move bytes and need not know what type is stored. What lies in a block beyond its row's tokens is never
read, so nothing is wiped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import KVConfig
from paceline.core.plan import EMPTY, BlockCopies, StepPlan, Swaps
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.slab_memory import HostPlaces, PartShape, SlabMemory


def device_block_bytes(spec: ModelSpec, dtype: torch.dtype, further: Sequence[FurtherLayer] = ()) -> int:
    """Bytes of one block in all layers of all groups, with keys and values stored as `dtype`. `further`: layers of a
    model that guesses."""
    more = sum(PartShape(2, layer.num_kv_heads, layer.head_dim, dtype).block_bytes for layer in further)
    return part_shape(spec, dtype).block_bytes + more


def part_shape(spec: ModelSpec, dtype: torch.dtype) -> PartShape:
    return PartShape(2 * spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)


_BLOCKS_OF_A_PLAN = (
    ("new_blocks", ("block",)),
    ("block_copies", ("source", "target")),
    ("swap_out", ("block",)),
    ("swap_in", ("block",)),
)


class KVPools:
    """All pools of one model, with the block tables of its rows."""

    def __init__(
        self,
        spec: ModelSpec,
        config: KVConfig,
        tables: Sequence[Tensor],
        dtype: torch.dtype,
        further: Sequence[FurtherLayer] = (),
        memory: SlabMemory | None = None,
    ) -> None:
        """`further`: layers of a model that guesses; their keys lie in blocks of the first group, which keeps most.
        `memory`: what models share; None: one slab holds all blocks of this one."""
        assert config.block_size == BLOCK_SIZE, f"kernels are made for blocks of {BLOCK_SIZE} tokens"
        assert memory is None or not further, "models that share memory have parts of one size"
        own = part_shape(spec, dtype)
        # Of every layer its group, and the shape of its keys and of its values.
        shapes = [(group, own) for group in spec.layer_groups]
        shapes += [(0, PartShape(2, layer.num_kv_heads, layer.head_dim, dtype)) for layer in further]
        counts = [config.slab_blocks or group.num_blocks or config.num_blocks for group in config.groups]
        if memory is None:
            size = sum(2 * counts[group] * shape.num_bytes for group, shape in shapes)
            memory = SlabMemory(1, size, tables[0].device)
        self.memory = memory
        self._slab_blocks = config.slab_blocks
        self._slab_units = memory.slab_bytes // own.num_bytes
        words = memory.bytes.view(torch.int64)
        pools: list[list[Tensor]] = [[] for _ in shapes]
        self.blocks: list[BlockParts] = []  # per group
        first = 0  # byte at which the next part begins
        for number, count in enumerate(counts):
            units = (memory.num_slabs - 1) * self._slab_units + count
            parts: list[tuple[int, int]] = []
            for pool, (group, shape) in zip(pools, shapes, strict=True):
                for _ in range(2 if group == number else 0):
                    numbers = memory.bytes[first : first + units * shape.num_bytes].view(dtype)
                    pool.append(numbers.view(units, shape.kv_heads, BLOCK_SIZE, shape.head_dim))
                    parts.append((first // words.itemsize, shape.num_bytes // words.itemsize))
                    first += count * shape.num_bytes
            self.blocks.append(BlockParts(words, parts))
        layers = [
            PagedKV(keys=keys, values=values, block_table=tables[group])
            for (keys, values), (group, _) in zip(pools, shapes, strict=True)
        ]
        self.layers, self.further = layers[: spec.num_layers], layers[spec.num_layers :]
        # Bytes of a token in layers that see all of a row.
        seen = (shape for group, shape in shapes if spec.group_windows[group] is None)
        self.context_bytes = sum(2 * shape.num_bytes // BLOCK_SIZE for shape in seen)

    def in_units(self, plan: StepPlan) -> StepPlan:
        """A plan with the units of its blocks instead of their numbers (`slab_memory`)."""
        if not self._slab_blocks:
            return plan
        changes: dict[str, Any] = {}
        for name, columns in _BLOCKS_OF_A_PLAN:
            found = getattr(plan, name)
            if len(found.group):
                units = {column: self._units(getattr(found, column)) for column in columns}
                changes[name] = replace(found, **units)
        return plan._replace(**changes)

    def _units(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        slab, within = np.divmod(blocks, self._slab_blocks)
        return slab * self._slab_units + within

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        for group in np.unique(copies.group).tolist():
            mine = copies.group == group
            origins: dict[int, int] = {}
            for read, write in zip(copies.source[mine].tolist(), copies.target[mine].tolist(), strict=True):
                origins[write] = origins.get(read, read)
            parts = self.blocks[group]
            found = parts.flat[parts.rows(list(origins.values())).view(-1)]
            parts.flat.index_copy_(0, parts.rows(list(origins)).view(-1), found)


def on_device(numbers: Sequence[int], where: Tensor) -> Tensor:
    """Numbers that go where a tensor lies, without waiting for what that device is doing."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=where.is_cuda)
    return pinned.to(where.device, non_blocking=True)


# Blocks on the host: pinned memory, and two streams, in which they go and come back.
#
# Steps go on beside the copies, and those of one direction beside those of the other. A copy begins when everything
# queued before it is done, so what it reads has been written; its ticket is reported when its last byte has arrived,
# and until then the scheduler gives neither its blocks nor its places away. In host memory a block's layers lie behind
# one another: they are gathered on the device, and places that lie behind one another are one copy.


# Copied in one piece: long enough for the bus to be busy, short enough for a step's tokens, which leave by the same
# way, not to be held up for long.
STAGED_BYTES = 16 << 20
FIRST_PLACES = 256  # pinned before an engine serves, and copied to see how long that takes
# Blocks whose copies are given to the driver at a time. It takes a thousand launches; with the next one the step that
# is being submitted would wait until one of them is done.
MOST_QUEUED = 256


class Lane:
    """Copies in one direction: their stream, the memory on the device they go through, and those under way."""

    def __init__(self, blocks: Sequence[Tensor], num_places: int, steps: DeviceQueue) -> None:
        self.queue = DeviceQueue(steps.device)
        self.staged = [
            torch.empty(
                (_at_once(group, num_places), *group.shape[1:]), dtype=group.dtype, device=steps.device
            )
            for group in blocks
        ]
        self.waiting: deque[Swaps] = deque()  # a ticket each, for those under way to be done
        self.under_way: deque[tuple[Swaps, Mark]] = deque()
        self._num_queued = 0  # blocks of those under way

    @property
    def num_open(self) -> int:
        """Tickets that are waiting or under way."""
        return len(self.waiting) + len(self.under_way)

    def next(self) -> Swaps | None:
        """The ticket whose copies are queued next, if they may be by now."""
        if not self.waiting or (
            self.under_way and self._num_queued + len(self.waiting[0].block) > MOST_QUEUED
        ):
            return None
        return self.waiting.popleft()

    def queued(self, swaps: Swaps) -> None:
        self.under_way.append((swaps, self.queue.mark()))
        self._num_queued += len(swaps.block)

    def completed(self, *, wait: bool) -> list[int]:
        """Tickets of the copies that are done, in their order; with `wait` at least one."""
        done: list[int] = []
        while self.under_way:
            swaps, mark = self.under_way[0]
            if wait and not done:
                mark.wait()
            elif not mark.is_reached():
                break
            done.append(int(swaps.ticket[0]))
            self._num_queued -= len(swaps.block)
            self.under_way.popleft()
        return done

    def forget(self) -> None:
        self.waiting.clear()
        self.under_way.clear()
        self._num_queued = 0


class BlockParts:
    """All blocks of a group as rows of one table. A *part* of a block is the keys or values of one layer; layers may be
    of different sizes, so that a part is as many rows as its size needs.

    torch makes of a copy to blocks, whose parts lie apart, one for each two gigabytes that it spans; of rows it is one.
    """

    def __init__(self, memory: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """`memory`: words. `parts`: of each, where that of block 0 begins and its size, in words; those of the next
        blocks follow it."""
        self.words = math.gcd(*(number for part in parts for number in part), memory.numel())
        self.flat = memory.view(-1, self.words)
        rows = [
            (first // self.words + row, size // self.words)
            for first, size in parts
            for row in range(size // self.words)
        ]
        self._first, self._step = torch.tensor(rows, device=memory.device).unbind(1)

    def rows(self, blocks: Sequence[int]) -> Tensor:
        """The rows of each of `blocks`: [blocks, rows of a block]."""
        return on_device(blocks, self.flat)[:, None] * self._step + self._first


class SwapPool:
    """Places in host memory for blocks of all groups, and the copies under way."""

    def __init__(self, blocks: Sequence[BlockParts], num_places: int, steps: DeviceQueue) -> None:
        """`blocks`: per group. Nothing is taken where there are no places."""
        self._steps = steps
        self._parts = list(blocks) if num_places else []
        first = [parts.flat[parts.rows([0])] for parts in self._parts]  # as large as any
        self.places = HostPlaces(first, num_places, pin=steps.is_gpu)
        self.places.pin(FIRST_PLACES)
        self._out, self._back = (Lane(first, num_places, steps) for _ in range(2))
        self._failed: list[NDArray[np.int32]] = []

    def swap(self, out: Swaps, back: Swaps) -> None:
        """Take in the swaps of a plan, and queue those whose turn it is. Where places are not pinned yet, they fail."""
        if len(out.ticket):
            self._out.waiting += _tickets(self._pinned(out))
        if len(back.ticket):
            self._back.waiting += _tickets(back)
        for lane, move in ((self._out, self._move_out), (self._back, self._move_back)):
            if not lane.waiting:
                continue
            lane.queue.follow(self._steps)
            with lane.queue.entered():
                while (swaps := lane.next()) is not None:
                    for group in np.unique(swaps.group).tolist():
                        mine = swaps.group == group
                        move(group, swaps.block[mine].tolist(), swaps.place[mine].tolist())
                    lane.queued(swaps)

    def _pinned(self, out: Swaps) -> Swaps:
        """Those of the swaps of whose tickets all places are pinned."""
        late = np.unique(out.ticket[out.place >= self.places.num_pinned])
        if not len(late):
            return out
        self._failed.append(late)
        return _of(out, ~np.isin(out.ticket, late))

    def completed(self, *, wait: bool) -> NDArray[np.int32]:
        """Tickets of the swaps that are done; with `wait` at least one of them, if any is under way: one that comes
        back, for which a row waits, before one that goes."""
        done = self._back.completed(wait=wait)
        done += self._out.completed(wait=wait and not done)
        return np.array(done, np.int32) if done else EMPTY

    def take_failed(self) -> NDArray[np.int32]:
        """Tickets of the swaps that will not be done, once."""
        failed, self._failed = self._failed, []
        return np.concatenate(failed) if failed else EMPTY

    def forget(self) -> None:
        """The device has been drained; swaps that were under way are dropped."""
        for lane in (self._out, self._back):
            lane.forget()
        self._failed.clear()

    def copy_out_and_back(self, count: int) -> None:
        """Copy `count` blocks of the first group out and back and wait for it; only while they are not in use."""
        blocks, places = list(range(1, count + 1)), list(range(count))
        for lane, after, move in (
            (self._out, self._steps, self._move_out),
            (self._back, self._out.queue, self._move_back),
        ):
            lane.queue.follow(after)
            with lane.queue.entered():
                move(0, blocks, places)
        self._back.queue.mark().wait()

    def _move_out(self, group: int, blocks: list[int], places: list[int]) -> None:
        staged, host, parts = self._out.staged[group], self.places.tensors[group], self._parts[group]
        for start, taken in _pieces(parts.rows(blocks), len(staged)):
            part = staged[: len(taken)]
            torch.index_select(parts.flat, 0, taken.view(-1), out=part.view(-1, parts.words))
            for first, place, count in self._runs(places[start : start + len(staged)]):
                host[place : place + count].copy_(part[first : first + count], non_blocking=True)

    def _move_back(self, group: int, blocks: list[int], places: list[int]) -> None:
        staged, host, parts = self._back.staged[group], self.places.tensors[group], self._parts[group]
        for start, given in _pieces(parts.rows(blocks), len(staged)):
            part = staged[: len(given)]
            for first, place, count in self._runs(places[start : start + len(staged)]):
                part[first : first + count].copy_(host[place : place + count], non_blocking=True)
            parts.flat.index_copy_(0, given.view(-1), part.view(-1, parts.words))

    def _runs(self, places: list[int]) -> list[tuple[int, int, int]]:
        """Places that lie behind one another and were pinned together, as (index of the first, its place, how many):
        each is one copy."""
        found: list[tuple[int, int, int]] = []
        for index, place in enumerate(places):
            if found and place == found[-1][1] + found[-1][2] and place % self.places.piece:
                start, first, count = found[-1]
                found[-1] = (start, first, count + 1)
            else:
                found.append((index, place, 1))
        return found


def _tickets(swaps: Swaps) -> list[Swaps]:
    """Those of each ticket."""
    tickets = np.unique(swaps.ticket)
    return [swaps] if len(tickets) == 1 else [_of(swaps, swaps.ticket == ticket) for ticket in tickets]


def _of(swaps: Swaps, mine: NDArray[np.bool_]) -> Swaps:
    return Swaps(
        ticket=swaps.ticket[mine], group=swaps.group[mine], block=swaps.block[mine], place=swaps.place[mine]
    )


def _pieces(numbers: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    """At most `length` entries each, with the index of the first."""
    for start in range(0, len(numbers), length):
        yield start, numbers[start : start + length]


def _at_once(group: Tensor, num_places: int) -> int:
    """Blocks of a group that are copied in one piece."""
    return max(1, min(num_places, STAGED_BYTES // (group[0].numel() * group.itemsize)))
