"""Keys and values on the device: per layer one pool each, [blocks, kv heads, block size, head_dim].

Copies between blocks and to places in host memory are plain torch operations in the stream of the steps; they move
bytes and need not know what type is stored. What lies in a block beyond its row's tokens is never read, so nothing is
wiped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.checkpoint.spec import ModelSpec
from paceline.config import KVConfig
from paceline.core.plan import BlockCopies, Swaps
from paceline.kernels import BLOCK_SIZE
from paceline.kernels.paged_kv import PagedKV, as_movable

Pair = tuple[Tensor, Tensor]


def device_block_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers of all groups, with keys and values stored as `dtype`."""
    return spec.num_layers * 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class KVPools:
    """All pools of one model, with the block tables of its rows."""

    def __init__(
        self, spec: ModelSpec, config: KVConfig, tables: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        assert config.block_size == BLOCK_SIZE, f"kernels are made for blocks of {BLOCK_SIZE} tokens"
        self._groups = spec.layer_groups
        device = tables[0].device
        counts = [group.num_blocks or config.num_blocks for group in config.groups]

        def pool(num_blocks: int, where: torch.device | str, pinned: bool = False) -> Tensor:
            shape = (num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
            return torch.zeros(shape, dtype=dtype, device=where, pin_memory=pinned)

        self._pools: list[Pair] = [(pool(counts[g], device), pool(counts[g], device)) for g in self._groups]
        places, pinned = config.num_host_blocks, device.type == "cuda"
        self._host: list[Pair] = []
        if places:
            self._host = [(pool(places, "cpu", pinned), pool(places, "cpu", pinned)) for _ in self._groups]
        self.layers = [
            PagedKV(keys=keys, values=values, block_table=tables[group])
            for (keys, values), group in zip(self._pools, self._groups, strict=True)
        ]

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        for group in np.unique(copies.group).tolist():
            mine = copies.group == group
            origins: dict[int, int] = {}
            for read, write in zip(copies.source[mine].tolist(), copies.target[mine].tolist(), strict=True):
                origins[write] = origins.get(read, read)
            self._move(group, self._pools, list(origins.values()), self._pools, list(origins))

    def swap_out(self, swaps: Swaps) -> None:
        for group in np.unique(swaps.group).tolist():
            mine = swaps.group == group
            self._move(group, self._pools, swaps.block[mine].tolist(), self._host, swaps.place[mine].tolist())

    def swap_in(self, swaps: Swaps) -> None:
        for group in np.unique(swaps.group).tolist():
            mine = swaps.group == group
            self._move(group, self._host, swaps.place[mine].tolist(), self._pools, swaps.block[mine].tolist())

    def copy_out_and_back(self, count: int) -> None:
        """Copy so many blocks of the first group to host places and back; only while nobody uses them."""
        blocks, places = list(range(1, count + 1)), list(range(count))
        self._move(0, self._pools, blocks, self._host, places)
        self._move(0, self._host, places, self._pools, blocks)

    def _move(
        self, group: int, origin: list[Pair], source: list[int], goal: list[Pair], target: list[int]
    ) -> None:
        mine = [layer for layer, number in enumerate(self._groups) if number == group]
        for layer in mine:
            for old, new in zip(map(as_movable, origin[layer]), map(as_movable, goal[layer]), strict=True):
                if old.device == new.device:
                    new[torch.tensor(target, device=new.device)] = old[
                        torch.tensor(source, device=old.device)
                    ]
                elif new.device.type == "cpu":
                    taken = old[torch.tensor(source, device=old.device)]
                    for start, place, count in _runs(target):
                        new[place : place + count].copy_(taken[start : start + count], non_blocking=True)
                else:
                    given = torch.empty((len(source), *old.shape[1:]), dtype=old.dtype, device=new.device)
                    for start, place, count in _runs(source):
                        given[start : start + count].copy_(old[place : place + count], non_blocking=True)
                    new[torch.tensor(target, device=new.device)] = given


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


def tickets_of(*swaps: Swaps) -> NDArray[np.int32]:
    """The tickets of all swaps of a plan, each once."""
    return np.unique(np.concatenate([part.ticket for part in swaps]))
