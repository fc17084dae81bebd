"""Keys and values on the device: one tensor per group of layers, whose parts are the pools of these layers.

A pool is [blocks, kv heads, block size, head_dim]; copies between blocks are plain torch operations in the stream of
the steps. They move bytes and need not know what type is stored. What lies in a block beyond its row's tokens is never
read, so nothing is wiped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import KVConfig
from paceline.core.plan import EMPTY, BlockCopies, Swaps
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV


def device_block_bytes(spec: ModelSpec, dtype: torch.dtype, num_further: int = 0) -> int:
    """Bytes of one block in all layers of all groups, with keys and values stored as `dtype`. `num_further`: layers of
    a head, which are as large."""
    layers = spec.num_layers + num_further
    return layers * 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class KVPools:
    """All pools of one model, with the block tables of its rows."""

    def __init__(
        self,
        spec: ModelSpec,
        config: KVConfig,
        tables: Sequence[Tensor],
        dtype: torch.dtype,
        further: Sequence[FurtherLayer] = (),
    ) -> None:
        """`further`: layers of a head, with keys as large as the model's."""
        further_groups = [layer.group(spec.group_windows) for layer in further]
        groups = (*spec.layer_groups, *further_groups)
        assert config.block_size == BLOCK_SIZE, f"kernels are made for blocks of {BLOCK_SIZE} tokens"
        device, block = tables[0].device, (spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        pools: list[Tensor] = []
        for index, group in enumerate(config.groups):
            shape = (2 * groups.count(index), group.num_blocks or config.num_blocks, *block)
            pools.append(torch.zeros(shape, dtype=dtype, device=device))
        parts = [iter(pool.unbind()) for pool in pools]
        self.layers = [
            PagedKV(keys=next(parts[group]), values=next(parts[group]), block_table=tables[group])
            for group in groups
        ]
        # Per group every block with its keys and values in all layers, in words: [blocks, 2 * layers, words ...].
        self.blocks = [pool.view(torch.int64).transpose(0, 1) for pool in pools]

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        for group in np.unique(copies.group).tolist():
            mine = copies.group == group
            origins: dict[int, int] = {}
            for read, write in zip(copies.source[mine].tolist(), copies.target[mine].tolist(), strict=True):
                origins[write] = origins.get(read, read)
            blocks = self.blocks[group]
            blocks[on_device(list(origins), blocks)] = blocks[on_device(list(origins.values()), blocks)]


def on_device(numbers: Sequence[int], where: Tensor) -> Tensor:
    """Numbers that go where a tensor lies, without waiting for what that device is doing."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=where.is_cuda)
    return pinned.to(where.device, non_blocking=True)


# Blocks that are swapped out: pinned host memory, and a separate stream in which they come and go.
#
# Steps go on beside the copies. A swap begins when everything queued before it is done, so what it reads has been
# written; its ticket is reported when its last byte has arrived, and until then the scheduler gives neither its
# blocks nor its places away. In host memory a block's layers lie behind one another: they are gathered on the
# device, and places that lie behind one another are one copy.


# Copied in one piece: long enough for the bus to be busy, short enough for a step's tokens, which leave by the same
# way, not to be held up for long.
STAGED_BYTES = 16 << 20


class SwapPool:
    """Places in host memory for blocks of all groups, and the copies under way."""

    def __init__(self, blocks: Sequence[Tensor], num_places: int, steps: DeviceQueue) -> None:
        """`blocks`: per group [blocks, parts of a block ...]. Nothing is taken where there are no places."""
        self._steps, self._copies = steps, DeviceQueue(steps.device)
        self._blocks = list(blocks) if num_places else []
        self._places = [
            torch.empty((num_places, *group.shape[1:]), dtype=group.dtype, pin_memory=steps.is_gpu)
            for group in self._blocks
        ]
        self._staged = [
            torch.empty(
                (_at_once(group, num_places), *group.shape[1:]), dtype=group.dtype, device=steps.device
            )
            for group in self._blocks
        ]
        self._under_way: deque[tuple[NDArray[np.int32], Mark]] = deque()

    def swap(self, out: Swaps, back: Swaps) -> None:
        """Queue the swaps of a plan."""
        for swaps, move in ((out, self._move_out), (back, self._move_back)):
            if not len(swaps.ticket):
                continue
            self._copies.follow(self._steps)
            with self._copies.entered():
                for group in np.unique(swaps.group).tolist():
                    mine = swaps.group == group
                    move(group, swaps.block[mine].tolist(), swaps.place[mine].tolist())
            self._under_way.append((np.unique(swaps.ticket), self._copies.mark()))

    def completed(self, *, wait: bool) -> NDArray[np.int32]:
        """Tickets of the swaps that are done; with `wait` at least one of them, if any is under way."""
        done: list[NDArray[np.int32]] = []
        while self._under_way:
            tickets, mark = self._under_way[0]
            if wait and not done:
                mark.wait()
            elif not mark.is_reached():
                break
            done.append(tickets)
            self._under_way.popleft()
        return np.concatenate(done) if done else EMPTY

    def forget(self) -> None:
        """The device has been drained; swaps that were under way are dropped."""
        self._under_way.clear()

    def copy_out_and_back(self, count: int) -> None:
        """Copy `count` blocks of the first group out and back and wait for it; only while they are not in use."""
        blocks, places = list(range(1, count + 1)), list(range(count))
        self._copies.follow(self._steps)
        with self._copies.entered():
            self._move_out(0, blocks, places)
            self._move_back(0, blocks, places)
        self._copies.mark().wait()

    def _move_out(self, group: int, blocks: list[int], places: list[int]) -> None:
        staged, host = self._staged[group], self._places[group]
        for start in range(0, len(blocks), len(staged)):
            taken = blocks[start : start + len(staged)]
            part = staged[: len(taken)]
            torch.index_select(self._blocks[group], 0, on_device(taken, staged), out=part)
            for first, place, count in _runs(places[start : start + len(staged)]):
                host[place : place + count].copy_(part[first : first + count], non_blocking=True)

    def _move_back(self, group: int, blocks: list[int], places: list[int]) -> None:
        staged, host = self._staged[group], self._places[group]
        for start in range(0, len(blocks), len(staged)):
            given = blocks[start : start + len(staged)]
            part = staged[: len(given)]
            for first, place, count in _runs(places[start : start + len(staged)]):
                part[first : first + count].copy_(host[place : place + count], non_blocking=True)
            self._blocks[group].index_copy_(0, on_device(given, staged), part)


def _at_once(group: Tensor, num_places: int) -> int:
    """Blocks of a group that are copied in one piece."""
    return max(1, min(num_places, STAGED_BYTES // (group[0].numel() * group.itemsize)))


def _runs(places: list[int]) -> list[tuple[int, int, int]]:
    """Places that lie behind one another, as (index of the first, its place, how many): each is one copy."""
    found: list[tuple[int, int, int]] = []
    for index, place in enumerate(places):
        if found and place == found[-1][1] + found[-1][2]:
            start, first, count = found[-1]
            found[-1] = (start, first, count + 1)
        else:
            found.append((index, place, 1))
    return found
