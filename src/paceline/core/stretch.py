"""Stretches: parts of a prompt that are not plain text to a step.

A prompt is tokens with stretches. A MEDIA stretch stands for one item, such as a picture: an encoder makes a vector for
each of its tokens, and no token of it is computed before that. What an item is made from (pixels) never enters plans or
logs: the runner holds it under a number. Decision: docs/decisions/0054-media-in-steps.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from paceline.core.fast import value


class StretchKind(IntEnum):
    MEDIA = 0  # an encoder must run first


class Stretch(NamedTuple):
    """Tokens `start` to `end` of a prompt."""

    start: int
    end: int
    kind: StretchKind
    item: int  # its place in `Request.media`


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """What an encoder makes vectors of, as far as the scheduler knows it."""

    key: bytes  # of its content, its settings and its tenant: equal items are computed once
    units: int  # that its encoder computes: patches
    outputs: int  # vectors, one for each token of its stretch


@value
class MediaInput:
    """What a runner holds of an item."""

    content: bytes  # says what it is: what keys are made from
    units: int
    outputs: int
    pixels: Any = None  # as the model's encoder takes them


class MediaPart(NamedTuple):
    """An item of a prompt, and where its tokens begin."""

    start: int
    given: MediaInput
