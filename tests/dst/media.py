"""The pictures of a seed: an encoder, what requests have of it, and faults. Draws from a separate stream."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from paceline.config.encoder import EncoderWork
from paceline.config.engine import EngineConfig
from paceline.core.request import Request
from paceline.core.stretch import MediaInput, MediaPart
from paceline.scheduler.invariants import InvariantViolation
from tests.dst.watch import WatchedRunner
from tests.reference_output import vectors_of

PLACEHOLDER = 5  # the token that stands for each vector


def _has_media(seed: int) -> bool:
    return random.Random(seed + 33).random() < 0.2


def draw_encoder(seed: int, config: EngineConfig, allowed: bool) -> EngineConfig:
    """Some engines see pictures; the pages of many hold one of them only."""
    if not allowed or not _has_media(seed) or config.scheduler.mode != "continuous":
        return config
    rng = random.Random(seed + 34)
    work = EncoderWork(
        layers=rng.choice((1, 2, 4)),
        num_pages=rng.choice((3, 3, 4, 8, 24)),
        page_vectors=4,
        max_units=rng.choice((1, 12, 40)),
        token_positions=rng.choice((0.3, 1.0, 8.0, 50.0)),
        product_share=rng.choice((0.0, 0.1)),
        keys_share=random.Random(seed + 36).choice((1.0, 0.4)),
        least=random.Random(seed + 37).choice(("position", "position", "layer", "line")),
    )
    return replace(config, scheduler=replace(config.scheduler, encoder=work))


class Media:
    """What pictures the requests of a world have."""

    def __init__(self, seed: int, config: EngineConfig, runner: WatchedRunner, counts: Counter[str]) -> None:
        self._rng = rng = random.Random(seed + 35)
        self._counts, self._work = counts, config.scheduler.encoder
        self._share = rng.choice((0.3, 0.7, 1.0)) if self._work is not None else 0.0
        self._sizes = [1, 2, 3, 5, 8, rng.choice((9, 12, 13))]
        self._owners: dict[bytes, str] = {}  # tenant of each key
        if self._work is not None:
            runner.faults.bad_encoding = rng.choice((0.0, 0.0, 0.02))

    def draw(self, prompt: list[int]) -> list[MediaPart]:
        """Pictures of a prompt, one behind the other; their tokens are placeholders there."""
        rng, parts = self._rng, []
        if self._work is None or rng.random() >= self._share:
            return []
        at = rng.choice((0, rng.randrange(len(prompt))))
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            content = rng.randrange(len(self._sizes))
            outputs = self._sizes[content]
            if at + outputs > len(prompt):
                continue
            given = MediaInput(content=b"%d" % content, units=outputs * rng.choice((1, 4)), outputs=outputs)
            given = MediaInput(
                content=given.content + b"/%d" % given.units, units=given.units, outputs=outputs
            )
            parts.append(MediaPart(at, given))
            prompt[at : at + outputs] = [PLACEHOLDER] * outputs
            at += outputs + rng.choice((0, 0, 1, 7))
        return parts

    def expect(self, request: Request, parts: list[MediaPart], tenant: str) -> dict[int, int]:
        """The vectors of a request by position; notes which tenant has which item."""
        for item in request.media:
            if self._owners.setdefault(item.key, tenant) != tenant:
                raise InvariantViolation("E4", f"{tenant} and {self._owners[item.key]} share a picture")
        self._counts["pictures"] += len(parts)
        return vectors_of(parts)
