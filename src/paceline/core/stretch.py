"""Stretches: parts of a prompt that are not plain text to a step.

A prompt is tokens with stretches. A MEDIA stretch stands for one item, such as a picture: an encoder makes a vector for
each of its tokens, and no token of it is computed before that. What an item is made from (pixels) never enters plans or
logs: the runner holds it under a number. Decision: docs/decisions/0054-media-in-steps.md.

A PLACED stretch is a text whose KV was computed alone, as a *module*: a sequence that begins with it. Its first tokens
are computed again where they stand; the KV of the rest, its *body*, is copied there out of the module's blocks, with
keys turned by the distance (`shift`) between the two places:

    module    0 ......... 16 ........................ 64 ..... 70      blocks of the module: full ones only
    prompt    a b c       |  stretch: computed again | body copied |  tail and question: computed
                          start                      start + 16    end

Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from paceline.core.fast import value
from paceline.core.parameters import Pin


class StretchKind(IntEnum):
    MEDIA = 0  # an encoder must run first
    PLACED = 1  # the KV of its body is copied from elsewhere


class Stretch(NamedTuple):
    """Tokens `start` to `end` of a prompt."""

    start: int
    end: int
    kind: StretchKind
    item: int  # its place in `Request.media`, or in `Request.modules`


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """What an encoder makes vectors of, as far as the scheduler knows it."""

    key: bytes  # of its content, its settings and its tenant: equal items are computed once
    units: int  # that its encoder computes: patches
    outputs: int  # vectors, one for each token of its stretch


@value
class MediaInput:
    """What a runner holds of an item: pixels as they are after resizing, uint8. The encoder normalises them.

    | family           | pixels                                | grid              | units | outputs        |
    |------------------|---------------------------------------|-------------------|-------|----------------|
    | SmolVLM, Idefics3| [1, side, side, 3], one tile by rows  | (1, rows, columns)| all   | image_seq_len  |
    | Qwen-VL          | [units, 3 x size x size], patches     | (1, rows, columns)| all   | units / merge^2|

    Rows and columns count patches; units are their product. A picture of SmolVLM is as many items as it has tiles,
    because tokens that are no vectors stand between them: row by row, the picture as a whole last. Tiles are always
    whole, so that there is no mask. Patches of Qwen-VL stand in the order of its processor: merged squares row by
    row, the patches of each square row by row; inside a patch channel, row, column. The frames of a patch
    (`temporal_patch_size`) are equal, so that it is sent once.
    """

    content: bytes  # says what it is: what keys are made from
    units: int
    outputs: int
    pixels: Any = None  # as above
    grid: tuple[int, int, int] = (1, 1, 1)  # frames, rows and columns of patches


class MediaPart(NamedTuple):
    """An item of a prompt, and where its tokens begin."""

    start: int
    given: MediaInput


RECOMPUTED = 16  # tokens of a placed text that are computed again where they stand


class ModulePart(NamedTuple):
    """A text of a prompt that is to be placed: `num_tokens` of its tokens from `start` on.

    Equal tokens of a tenant are one module. One that has no full block behind its first tokens is computed like any
    other text.
    """

    start: int
    num_tokens: int
    recompute: int = RECOMPUTED
    pin: Pin | None = None  # of the context that the text is of: what is lost of it is pinned again


class PromptParts(NamedTuple):
    """What of a prompt is not plain text; see `Engine.add`."""

    media: tuple[MediaPart, ...] = ()
    modules: tuple[ModulePart, ...] = ()
    is_module: bool = False  # it is such a text alone


PLAIN = PromptParts()
