"""Parameters of a request that have fields of their own. A client may give each of them as an object.

`KVKeep` says which of its tokens a request still sees: the first ones, the recent ones, and until then everything. What
a token sees follows from its position alone, never from the steps it was computed in: the prompt is read whole; a token
of the output at position p sees the blocks of the first `first` tokens, and those that hold any of the last `recent`
tokens up to p. So chunks, preemption and other requests change nothing. Decision: docs/decisions/0050-less-kv.md.

    blocks of 4, first 3, recent 6, prompt of 17:   position   0   4   8   12  16  20
                                                    block      0   1   2   3   4   5
        token 16, the prompt's last                            x   x   x   x   x        sees everything
        token 17, the output's first                           x   .   .   x   x        hole of blocks 1 to 3
        token 21                                               x   .   .   .   x   x

`Pin` says what is to stay cached of a prompt's beginning after its request: until when, and how much of it. A pin holds
KV blocks as a row does, so that nothing evicts them. One with a name belongs to a context; one without is of the prompt
of a conversation (`cache_control`, `prompt_cache_retention`). Decision: docs/decisions/0055-contexts.md.

`PoolingParams`: a request ends with a vector instead of tokens. It is a prompt like any other; it ends when its last
token is computed, and its one vector comes with its `Finished`. Decision: docs/decisions/0053-vectors.md.

| kind     | the vector                                                          | prefix hits | models            |
|----------|---------------------------------------------------------------------|-------------|-------------------|
| last     | hidden state of the last token                                      | yes         | decoders          |
| mean     | mean of the hidden states of all tokens, summed as they are computed | no          | decoders, encoders |
| cls      | hidden state of the first token                                     | no          | encoders          |
| classify | scores of the model's labels                                        | no          | classifiers       |
| choice   | softmax over the logits of `token_ids` behind the last token        | yes         | decoders          |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from paceline.errors import InvalidRequest

MOST_TOKENS = 2**31 - 1
MAX_PIN_S = 86_400  # a day
MAX_PIN_NAME = 64
LAST, MEAN, CLS, CLASSIFY, CHOICE = POOLINGS = ("last", "mean", "cls", "classify", "choice")
MAX_CHOICES = 64


class NestedParameter:
    """A dataclass that is a parameter of a request."""

    __slots__ = ()
    NAME: ClassVar[str]  # of the parameter

    @classmethod
    def of(cls, given: Any) -> Self:
        """From an object with its fields: all that have no default, and no others."""
        if isinstance(given, cls):
            return given
        known = {spec.name: spec.default for spec in fields(cls)}  # type: ignore[arg-type]
        needed = {name for name, default in known.items() if default is MISSING}
        if not isinstance(given, Mapping) or not needed <= set(given) <= set(known):
            raise InvalidRequest(
                f"{cls.NAME} takes an object with {', '.join(sorted(known))}", param=cls.NAME
            )
        return cls(**given)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvalidRequest(f"{self.NAME}: {what}", param=self.NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVKeep(NestedParameter):
    """Tokens at the beginning and before the newest one whose keys and values are kept."""

    NAME = "kv_keep"

    first: int
    recent: int

    def __post_init__(self) -> None:
        for name, low in (("first", 0), ("recent", 1)):
            value = getattr(self, name)
            self._check(
                _is_whole(value, low) and value <= MOST_TOKENS,
                f"first is a whole number from 0 to {MOST_TOKENS}, recent one from 1; {name} is {value!r}",
            )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(NestedParameter):
    """What a request wants to be pinned."""

    NAME = "pin"

    ttl_s: int  # from its end on; of a context that is there, from when the request came
    name: str = ""  # of a context
    num_tokens: int | None = None  # of the prompt, from its beginning; None: all of them
    # The request is there for nothing else: it ends once its prompt is computed, without output, and is refused where
    # there is no room for the whole pin.
    computes: bool = False

    def __post_init__(self) -> None:
        self._check(
            _is_whole(self.ttl_s, 1) and self.ttl_s <= MAX_PIN_S,
            f"ttl_s must be a whole number from 1 to {MAX_PIN_S}, not {self.ttl_s!r}",
        )
        named = isinstance(self.name, str) and len(self.name) <= MAX_PIN_NAME
        self._check(named, f"name is a text of at most {MAX_PIN_NAME} characters")
        counted = self.num_tokens is None or _is_whole(self.num_tokens, 1)
        self._check(counted, "num_tokens must be a whole number from 1 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams(NestedParameter):
    """How the hidden states of a prompt become one vector."""

    NAME = "pooling"

    kind: str
    dimensions: int | None = None  # only the first of its numbers
    normalize: bool = False  # to a length of 1, behind the cut
    token_ids: tuple[int, ...] = ()  # of choice
    raw: bool = False  # of classify and choice: scores as they are, without sigmoid or softmax
    second_at: int = 0  # where the second of two texts begins; 0: it is one text

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        kinds = ", ".join(POOLINGS)
        self._check(self.kind in POOLINGS, f"kind must be one of {kinds}, not {self.kind!r}")
        if self.dimensions is not None and not _is_whole(self.dimensions, 1):
            raise InvalidRequest(
                f"dimensions must be a whole number above 0, not {self.dimensions!r}", param="dimensions"
            )
        has_ids = bool(self.token_ids)
        self._check(
            (self.kind == CHOICE) == has_ids and len(self.token_ids) <= MAX_CHOICES,
            f"choice, and no other kind, names 1 to {MAX_CHOICES} token ids",
        )
        numbers = (*self.token_ids, self.second_at)
        self._check(
            all(_is_whole(each, 0) for each in numbers), "token ids and places are whole numbers from 0"
        )

    @property
    def reads_last(self) -> bool:
        """Whether only the last token is looked at, so that the others may come from the cache."""
        return self.kind in (LAST, CHOICE)


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
