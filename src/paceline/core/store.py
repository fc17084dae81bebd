"""Where blocks are kept that have left host memory: a seam of three methods.

What a store answers is distrusted: it says itself whether bytes are what a head names, and anything else is a miss.
Stores are called from several threads. Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class BlockHead(NamedTuple):
    """What names the content of a block: no token can be learned from it."""

    key: bytes  # 32 bytes, of the prefix
    check: bytes  # 16 bytes more of the same digest, compared before a hit counts
    uses: int = 0  # what is left of its uses, as eviction counts them


ANYWHERE = -1  # the place of an entry that can be read as if it were in any


class BlockStore(Protocol):
    """Numbered places, each for one block."""

    @property
    def num_places(self) -> int: ...

    def write(self, place: int, head: BlockHead, parts: Sequence[memoryview]) -> None:
        """Put a block into a place, whatever was there. Raises OSError where that cannot be done."""
        ...

    def read(self, place: int, head: BlockHead, into: Sequence[memoryview]) -> bool:
        """Get the block of this head from a place. False: the place does not hold it, and what stands in `into` is of
        no use. Raises OSError where the place cannot be read."""
        ...

    def entries(self) -> Iterator[tuple[int, BlockHead]]:
        """What earlier runs have left: each place, and what should be in it. From a store that servers share: what
        others have left since the last call. Raises OSError where that cannot be read."""
        ...


class StoreWork(NamedTuple):
    """What a store has done since the start; times are those of all its threads together."""

    blocks_written: int = 0
    blocks_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    failed: int = 0  # blocks that could not be read or written, or not in time
    bad: int = 0  # blocks that were not what they should be
    is_off: bool = False  # it failed too often and is not used any more


NO_STORE_WORK = StoreWork()
