"""The requests of a run, made one at a time by their number.

Owns how lengths become prompts. A prompt is made of common short words, each of which is one token in the vocabularies
of today's models, so that no tokenizer is needed and no two requests share more than they should; what the server
counted is what the results say. Request n is the same whenever it is made: numbers below zero are for warming up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.workload.model import WISHES, Workload

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name "
    "president team minute idea body information back parent face others level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force "
    "education foot boy age policy music market sense nation plan college interest death experience "
    "effect use class control care field development role effort rate heart drug show leader light voice "
    "wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official "
    "matter center couple site project star table need court oil situation cost industry figure street "
    "image phone data picture practice piece land product doctor wall patient worker news test movie "
    "north love support technology step baby computer type attention film tree source organization hair "
    "look window culture chance brother energy period course summer plant opportunity term letter "
    "condition choice rule daughter south husband floor campaign material population call economy "
    "hospital church risk fire future bank help staff sound blue red green black white small large long "
    "short old new high low good great "
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request, before it is put into the form of an API."""

    prompt: str | Sequence[Mapping[str, Any]]  # text, or the messages of a conversation
    num_output: int | None = None  # None: the server's own limit
    tenant: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # more of the body


class Source(Protocol):
    """Where requests come from."""

    @property
    def name(self) -> str: ...

    def make(self, index: int) -> LoadRequest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSource:
    """Made-up prompts. Lengths are drawn evenly around a mean; a share of each prompt may be common to many."""

    seed: int = 0
    input_len: int = 256
    output_len: int = 128
    spread: float = 0.0  # 0.5: from half to one and a half times the mean
    prefix_share: float = 0.0
    num_prefixes: int = 1

    @property
    def name(self) -> str:
        return f"random {self.input_len}x{self.output_len}"

    def make(self, index: int) -> LoadRequest:
        draw = random.Random(f"{self.seed} {index}")
        num_input, num_output = self._length(draw, self.input_len), self._length(draw, self.output_len)
        num_shared = round(num_input * self.prefix_share) if index >= 0 else 0
        shared = words(f"{self.seed} prefix {index % self.num_prefixes}", num_shared)
        own = draw.choices(WORDS, k=num_input - num_shared)
        return LoadRequest(prompt=" ".join([*shared, *own]), num_output=num_output)

    def _length(self, draw: random.Random, mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - self.spread)), round(mean * (1 + self.spread))))


class TraceSource:
    """Lengths, tenants, shared blocks and wishes as a workload has them; after its end it begins again."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self.name = workload.name
        self.workload = workload
        self._seed = seed

    def make(self, index: int) -> LoadRequest:
        work = self.workload
        row = index % len(work)
        num_input = int(work.prompt_len[row])
        own = f"{self._seed} {index}"
        if work.prefix_ids is None or index < 0:
            prompt = words(own, num_input)
        else:
            prompt = self._blocks(work.prefix_ids[row], num_input)
        wishes = [0] * len(WISHES) if work.wishes is None else work.wishes[row].tolist()
        return LoadRequest(
            prompt=" ".join(prompt),
            num_output=int(work.output_len[row]),
            tenant=work.tenants[int(work.tenant[row])] if len(work.tenants) > 1 else "",
            fields={name: wish for name, wish in zip(WISHES, wishes, strict=True) if wish},
        )

    def _blocks(self, ids: Sequence[int], num_input: int) -> list[str]:
        """Blocks with the same id have the same words, whichever request they are in."""
        found: list[str] = []
        for block in ids:
            found += words(f"{self._seed} block {block}", self.workload.prefix_block)
        return found[:num_input]


class TextSource:
    """Prompts that somebody wrote; after the last the first comes again."""

    def __init__(self, name: str, requests: Sequence[LoadRequest]) -> None:
        assert requests
        self.name = name
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def make(self, index: int) -> LoadRequest:
        return self._requests[index % len(self._requests)]


def words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count) if count else []
