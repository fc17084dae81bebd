"""A KV manager alone: small, with one or two layer groups, and keys that say what they stand for."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.config.engine import GroupSpec, KVConfig
from paceline.config.sized import Capacity
from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool
from paceline.kv.manager import KVManager

SIZE = 4
FULL = GroupSpec()


def make_kv(
    *,
    num_blocks: int = 17,
    groups: Sequence[GroupSpec] = (FULL,),
    host: int = 0,
    caching: bool = True,
    rows: int = 6,
    max_chunk: int = 8,
    make_pool: Callable[..., BlockPool] = BlockPool,
) -> KVManager:
    config = KVConfig(
        block_size=SIZE,
        num_blocks=num_blocks,
        num_host_blocks=host,
        enable_prefix_caching=caching,
        groups=tuple(groups),
    )
    capacity = Capacity(num_rows=rows, max_blocks_per_row=16)
    return KVManager(config, capacity, max_chunk=max_chunk, make_pool=make_pool)


def keys(text: str) -> list[BlockKey]:
    """One key per letter, chained: equal beginnings of two texts have equal keys."""
    return [
        BlockKey(text[: end + 1].encode(), b"payload of " + text[: end + 1].encode())
        for end in range(len(text))
    ]


def free(kv: KVManager) -> list[int]:
    return [group.pool.num_free for group in kv.groups]


def held(kv: KVManager, row: int, group: int = 0) -> list[int]:
    return [int(block) for block in kv.groups[group].blocks_of(row)]


def refs(kv: KVManager, blocks: Sequence[int], group: int = 0) -> list[int]:
    return [int(kv.groups[group].pool.refs[block]) for block in blocks]


def submit(kv: KVManager) -> Any:
    """A plan goes out: what has changed since the last one."""
    kv.submitted += 1
    return kv.delta.take()


def complete(kv: KVManager, seq: int | None = None) -> None:
    """The steps up to `seq` (all of them) have completed."""
    kv.complete(kv.submitted if seq is None else seq)
    kv.settle()


def compute(kv: KVManager, row: int, text: str, num_tokens: int | None = None) -> None:
    """A row gets the blocks of a text, computes them and offers them to the cache."""
    total = num_tokens if num_tokens is not None else len(text) * SIZE
    kv.extend(row, total)
    kv.publish(row, keys(text), total)


def check_conservation(kv: KVManager) -> None:
    """S1 to S4 and S15, from outside: each block is held as often as its count says, or free exactly once."""
    for group in kv.groups:
        pool = group.pool
        holders = np.zeros(pool.num_blocks, np.int64)
        holders[0] = 1
        for row in range(len(group.held)):
            holders[group.blocks_of(row)] += 1
        for fence in kv.fences:
            if fence.group == group.index:
                np.add.at(holders, fence.blocks, 1)
        for ticket in kv.tickets.open.values():
            np.add.at(holders, ticket.blocks[group.index], 1)
        assert holders.tolist() == pool.refs.tolist()
        free_blocks = pool.free_blocks().tolist()
        assert sorted(free_blocks) == np.flatnonzero(pool.refs == 0).tolist()
        entries = group.cache.entries()
        assert sorted(entries) == np.flatnonzero(pool.cached).tolist()
        assert set(pool.evictable) == {block for block in entries if not pool.refs[block]}
        assert all(group.cache.find(key) == block for block, key in entries.items())
        assert group.reserved == int(group.reserved_for.sum()) >= 0
