"""Prefixes: which block holds which tokens, and how the keys of blocks are made.

A key is a chained, keyed hash: it names a block's tokens and everything before them, starting from a root that
holds model, adapter and tenant, so that tenants never meet. A hit also compares the payload (the parent's key
and the tokens themselves): should two keys ever collide, the hit is refused. Keys are made outside the step.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import BlockKey

KEY_BYTES, CHECK_BYTES = 32, 16
NO_KEY = BlockKey(b"", b"")  # of a block that cannot be hit
NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


class CacheNews(NamedTuple):
    """Names of prefixes that can be hit since they were last asked for, and of those that cannot any more."""

    stored: list[bytes]
    evicted: list[bytes]


class PrefixCache:
    """The blocks that can be hit, by key."""

    def __init__(self, num_blocks: int) -> None:
        # Whether a name can be hit, of those that changed since the last call of `take_news`; None: never called.
        self._changed: dict[bytes, bool] | None = None
        self.by_name: dict[bytes, int] = {}  # for others to look into, many names at a time
        # By block. A list: a block's entry is rarely in the processor's cache, and a dictionary's lies in four places.
        self._key_of: list[BlockKey] = [NO_KEY] * num_blocks

    def __len__(self) -> int:
        return len(self.by_name)

    def find(self, key: BlockKey) -> int | None:
        """The block that holds exactly this prefix, or None."""
        block = self.by_name.get(key.key)
        if block is None or not self._key_of[block].is_same(key):
            return None
        return block

    def key_of(self, block: int) -> BlockKey:
        """The key that an entered block stands under."""
        return self._key_of[block]

    def lacking(self, keys: Sequence[BlockKey]) -> list[int]:
        """Those of `keys`, by their index, whose prefix is not here."""
        block_of = self.by_name
        absent = [at for at, key in enumerate(keys) if key.key not in block_of]
        if len(absent) == len(keys):
            return absent
        return [at for at, key in enumerate(keys) if self.find(key) is None]

    def add(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> list[int]:
        """Enter blocks; returns them without those entered already and those whose key another block stands under."""
        block_of, key_of = self.by_name, self._key_of
        entered = []
        for block, key in zip(blocks, keys, strict=True):
            name = key.key
            if name not in block_of and key_of[block] is NO_KEY:
                block_of[name] = block
                key_of[block] = key
                entered.append(block)
        if self._changed is not None:
            self._note([key_of[block].key for block in entered], is_stored=True)
        return entered

    def drop(self, blocks: Sequence[int]) -> list[BlockKey]:
        """The content of these blocks is about to go; returns the keys they stood under."""
        block_of, key_of = self.by_name, self._key_of
        keys = [key_of[block] for block in blocks]
        for block, key in zip(blocks, keys, strict=True):
            del block_of[key.key]
            key_of[block] = NO_KEY
        if self._changed is not None:
            self._note([key.key for key in keys], is_stored=False)
        return keys

    def _note(self, names: Sequence[bytes], *, is_stored: bool) -> None:
        """What came and went again since the last call is no news, so that there is never more than what was told and
        what is here."""
        changed = self._changed
        assert changed is not None
        for name in names:
            if changed.pop(name, is_stored) is is_stored:
                changed[name] = is_stored

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell to those who have asked."""
        return bool(self._changed)

    def take_news(self, most: int | None = None) -> CacheNews:
        """What has changed since the last call, at most so many names, and the rest with the next ones. The first one
        tells all there is."""
        if self._changed is None:
            self._changed = dict.fromkeys(self.by_name, True)
        changed, news = self._changed, CacheNews([], [])
        if most is None or most >= len(changed):
            told, self._changed = list(changed.items()), {}
        else:  # in order: a block's parent before it
            told = list(islice(changed.items(), most))
            for name, _ in told:
                del changed[name]
        for name, is_stored in told:
            news[not is_stored].append(name)
        return news

    def __contains__(self, name: bytes) -> bool:
        """Whether a block stands under a name."""
        return name in self.by_name

    def named(self, name: bytes) -> int | None:
        """The block under a name."""
        return self.by_name.get(name)

    def names(self, blocks: Sequence[int]) -> list[bytes]:
        """The names that entered blocks stand under."""
        return [self._key_of[block].key for block in blocks]

    def blocks(self) -> list[int]:
        """All entered blocks, in the order in which they came."""
        return list(self.by_name.values())

    def entries(self) -> dict[int, BlockKey]:
        """Block -> key, for checks."""
        return {block: self._key_of[block] for block in self.by_name.values()}


class KeyMaker:
    """Makes block keys from tokens. The process key is random: keys cannot be guessed from outside. It is that of the
    folder where prefixes outlive the process."""

    def __init__(self, block_size: int, process_key: bytes | None = None) -> None:
        self.block_size = block_size
        self._is_lasting = process_key is not None
        self._process_key = os.urandom(32) if process_key is None else process_key

    def use_key(self, key: bytes) -> bytes:
        """Make keys as the other engines of a fleet do, from now on, unless those here outlive the process; returns the
        process key that is in use."""
        if not self._is_lasting:
            self._process_key = key
        return self._process_key

    def root(self, tenant: str, model: int = 0, adapter: int = 0, kind: str = "") -> bytes:
        """Where chains of a tenant begin. Fields are length-prefixed, so that none runs into the next."""
        name = tenant.encode()
        text = b"%sroot:%d:%s:%d:%d" % (kind.encode(), len(name), name, model, adapter)
        return hashlib.blake2b(text, digest_size=32, key=self._process_key).digest()

    def media(self, root: bytes, content: bytes) -> bytes:
        """The key of an item: the same content behind another root is another item."""
        return hashlib.blake2b(b"media:" + root + content, digest_size=32, key=self._process_key).digest()

    def extend(
        self,
        keys: Sequence[BlockKey],
        tokens: NDArray[np.int32],
        root: bytes,
        marks: Mapping[int, bytes] = NO_MARKS,
    ) -> list[BlockKey]:
        """The keys of the full blocks of `tokens` that `keys` does not cover yet. `marks`: by position, what stands
        there beside the token; blocks from there on are another's than without it."""
        size, start = self.block_size, len(keys)
        end = len(tokens) // size
        if end <= start:
            return []
        raw = np.ascontiguousarray(tokens[start * size : end * size], np.int32).tobytes()
        parent = keys[-1].key if keys else root
        made: list[BlockKey] = []
        before = keys[-1].key if keys else b""
        marked = {at // size: b"" for at in marks}
        for at in sorted(marks):
            marked[at // size] += marks[at]
        for number, (low, high) in enumerate(pairwise(range(0, len(raw) + 1, size * 4)), start):
            payload = parent + raw[low:high] + marked.get(number, b"")
            digest = hashlib.blake2b(
                payload, digest_size=KEY_BYTES + CHECK_BYTES, key=self._process_key
            ).digest()
            parent = digest[:KEY_BYTES]
            made.append(BlockKey(parent, payload, digest[KEY_BYTES:], before))
            before = parent
        return made
