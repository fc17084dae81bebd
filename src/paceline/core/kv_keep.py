"""Which of its tokens a request still sees: the first ones, the recent ones, and until then everything.

What a token sees follows from its position alone, never from the steps it was computed in: the prompt is read whole;
a token of the output at position p sees the blocks of the first `first` tokens, and those that hold any of the last
`recent` tokens up to p. So chunks, preemption and other requests change nothing. Decision:
docs/decisions/0050-less-kv.md.

    blocks of 4, first 3, recent 6, prompt of 17:   position   0   4   8   12  16  20
                                                    block      0   1   2   3   4   5
        token 16, the prompt's last                            x   x   x   x   x        sees everything
        token 17, the output's first                           x   .   .   x   x        hole of blocks 1 to 3
        token 21                                               x   .   .   .   x   x
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidRequest

FIELD = "kv_keep"
MOST_TOKENS = 2**31 - 1
_RANGE = f"first is a whole number from 0 to {MOST_TOKENS}, recent one from 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVKeep:
    """Tokens at the beginning and before the newest one whose keys and values are kept."""

    first: int
    recent: int

    def __post_init__(self) -> None:
        for name, low in (("first", 0), ("recent", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MOST_TOKENS:
                raise InvalidRequest(f"{FIELD}: {_RANGE}; {name} is {value!r}", param=FIELD)

    @classmethod
    def of(cls, given: Any) -> KVKeep:
        """From what a request says: an object with both numbers."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or set(given) != {"first", "recent"}:
            raise InvalidRequest(f"{FIELD} takes an object with first and recent, not {given!r}", param=FIELD)
        return cls(first=given["first"], recent=given["recent"])

    def start(self, block_size: int) -> int:
        """The first block that may be dropped."""
        return -(-self.first // block_size)

    def end(self, position: int, num_prompt: int, block_size: int) -> int:
        """The first block behind those that the token at a position does not see."""
        start = self.start(block_size)
        return start if position < num_prompt else max(start, (position + 1 - self.recent) // block_size)

    def sees_all(self, num_prompt: int, block_size: int) -> int:
        """How many tokens see everything before them: only their KV is what other requests with them have."""
        return max(num_prompt, (self.start(block_size) + 1) * block_size + self.recent - 1)

    def alike(self, position: int, num_prompt: int, block_size: int) -> int:
        """How many tokens from a position on see from the same block on: those that one step may compute."""
        if position < num_prompt:
            return num_prompt - position
        end = max(self.start(block_size), (position + 1 - self.recent) // block_size)
        return (end + 1) * block_size + self.recent - 1 - position
