"""What the engines of a fleet have cached of prompts, by their own word, and the keys that a prompt is looked up by.

Engines and front make names with one secret, the fleet's, which never leaves memory: names of one prompt are the same
everywhere, and others cannot guess them. Only the beginning of a long prompt is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from paceline.core.stretch import PLAIN, PromptParts
from paceline.engine.prefix_keys import MODULES
from paceline.kv.prefix import KeyMaker
from paceline.process import frames
from paceline.routing.prefix_map import KEY_BYTES, PrefixMap

MOST_BLOCKS = 256  # of a prompt


class FleetPrefixes:
    """Keeps the map that a router looks at."""

    def __init__(self, known: PrefixMap) -> None:
        self.key = os.urandom(32)  # that engines are given
        self._known = known
        self._used = self.key  # that they use
        self._maker = KeyMaker(1, self.key)

    def told(self, engine: int, news: frames.PrefixNews | None) -> None:
        """An engine has stored and evicted blocks; None: it starts with an empty cache."""
        if news is None:
            self._known.forget(engine)
            return
        if news.key:
            self._used = news.key
            self._maker = KeyMaker(self._maker.block_size, news.key)
        self._known.stored(engine, _names(news.stored))
        self._known.evicted(engine, _names(news.evicted))

    def keys(
        self,
        tokens: Sequence[int],
        block_tokens: int,
        tenant: str,
        adapter: str = "",
        parts: PromptParts = PLAIN,
    ) -> tuple[bytes, ...]:
        """Of the full blocks of a prompt before the first of what is not plain text. `adapter`: its identity."""
        if self._maker.block_size != block_tokens:
            self._maker = KeyMaker(block_tokens, self._used)
        starts = [part.start for part in parts.media] + [part.start for part in parts.modules]
        count = min(len(tokens), *starts, MOST_BLOCKS * block_tokens) // block_tokens
        column = np.array(tokens[: count * block_tokens], np.int32)
        kind = MODULES if parts.is_module else ""
        root = self._maker.root(tenant, adapter=int(adapter or "0", 16), kind=kind)
        return tuple([made.key[:KEY_BYTES] for made in self._maker.extend((), column, root)])


def _names(column: bytes) -> list[bytes]:
    return [column[at : at + KEY_BYTES] for at in range(0, len(column) - KEY_BYTES + 1, KEY_BYTES)]
