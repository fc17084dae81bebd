"""What the engines of a fleet are likely to have cached of prompts, as far as the front can know it.

A prompt that an engine has read is there until as many blocks as that engine has were read after it: what engines evict
they do not tell. Keys are the front's own, with a secret that never leaves memory, and compare nothing but prompts of
one tenant and adapter. Only the beginning of a long prompt is looked at.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from paceline.routing.prefix_map import KEY_BYTES, PrefixMap

MOST_BLOCKS = 256  # of a prompt


class FleetPrefixes:
    """Keeps the map that a router looks at."""

    def __init__(self, known: PrefixMap, num_engines: int) -> None:
        self._known = known
        self._secret = os.urandom(32)
        # By engine: blocks in the order in which they were used last.
        self._used: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def keys(self, tokens: Sequence[int], block_tokens: int, root: str) -> tuple[bytes, ...]:
        """Of a prompt's full blocks, each with all that is before it."""
        if block_tokens < 1:
            return ()
        count = min(len(tokens) // block_tokens, MOST_BLOCKS)
        column = np.array(tokens[: count * block_tokens], np.int32).tobytes()
        size, key = 4 * block_tokens, root.encode()
        found = []
        for at in range(count):
            text = key + column[at * size : (at + 1) * size]
            key = hashlib.blake2b(text, digest_size=KEY_BYTES, key=self._secret).digest()
            found.append(key)
        return tuple(found)

    def was_read(self, engine: int, keys: Sequence[bytes], num_blocks: int) -> None:
        """An engine with so many blocks has computed a prompt, or found it."""
        used = self._used[engine]
        self._known.stored(engine, [key for key in keys if key not in used])
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            used[key] = None
            used.move_to_end(key)
        gone = [used.popitem(last=False)[0] for _ in range(len(used) - num_blocks)]
        if gone:
            self._known.evicted(engine, gone)

    def forget(self, engine: int) -> None:
        """It starts with an empty cache."""
        self._used[engine].clear()
        self._known.forget(engine)
