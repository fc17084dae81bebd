"""A request that ends with a vector instead of tokens: which vector.

A pooled request is a prompt like any other; it ends when its last token is computed, and its one vector comes with its
`Finished`. Decision: docs/decisions/0053-vectors.md.

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
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import InvalidRequest

FIELD = "pooling"
LAST, MEAN, CLS, CLASSIFY, CHOICE = KINDS = ("last", "mean", "cls", "classify", "choice")
MAX_CHOICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector."""

    kind: str
    dimensions: int | None = None  # only the first of its numbers
    normalize: bool = False  # to a length of 1, behind the cut
    token_ids: tuple[int, ...] = ()  # of choice
    raw: bool = False  # of classify and choice: scores as they are, without sigmoid or softmax
    second_at: int = 0  # where the second of two texts begins; 0: it is one text

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.kind not in KINDS:
            raise InvalidRequest(
                f"{FIELD}: kind must be one of {', '.join(KINDS)}, not {self.kind!r}", param=FIELD
            )
        if self.dimensions is not None and not _is_whole(self.dimensions, 1):
            raise InvalidRequest(
                f"dimensions must be a whole number above 0, not {self.dimensions!r}", param="dimensions"
            )
        if (self.kind == CHOICE) != bool(self.token_ids) or len(self.token_ids) > MAX_CHOICES:
            raise InvalidRequest(
                f"{FIELD}: choice, and no other kind, names 1 to {MAX_CHOICES} token ids", param=FIELD
            )
        if not all(_is_whole(token, 0) for token in (*self.token_ids, self.second_at)):
            raise InvalidRequest(f"{FIELD}: token ids and places are whole numbers from 0", param=FIELD)

    @classmethod
    def of(cls, given: Any) -> PoolingParams:
        """From an object with these fields."""
        if isinstance(given, cls):
            return given
        known = {spec.name for spec in fields(cls)}
        if not isinstance(given, Mapping) or "kind" not in given or not set(given) <= known:
            raise InvalidRequest(f"{FIELD} takes an object with {', '.join(sorted(known))}", param=FIELD)
        return cls(**given)

    @property
    def reads_last(self) -> bool:
        """Whether only the last token is looked at, so that the others may come from the cache."""
        return self.kind in (LAST, CHOICE)


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
