"""Pictures that a runner encodes: a group that fails takes none with it that can be encoded alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.config.encoder import EncoderWork
from paceline.core.plan import EncodeJoin, Encodes
from paceline.core.stretch import MediaInput
from paceline.runner.pictures import Pictures

WIDTH, UNITS, OUTPUTS = 3, 10, 4
WORK = EncoderWork(layers=2, num_pages=8, page_vectors=OUTPUTS, max_units=64)
TOTAL = 2 * WORK.layers * UNITS


class Line(NamedTuple):
    items: Sequence[MediaInput]
    done: list[int]


class SmallEncoder:
    """Has memory for lines of so many items, and cannot compute some pictures at all."""

    def __init__(self, most: int, broken: bytes = b"") -> None:
        self.most, self.broken = most, broken

    def begin(self, items: Sequence[MediaInput]) -> Line:
        if len(items) > self.most:
            raise MemoryError
        return Line(items, [0])

    def advance(self, line: Line, first: int, count: int) -> None:
        assert line.done[0] == first, "in order"
        line.done[0] += count
        if any(item.content in self.broken for item in line.items):
            raise ValueError("this one cannot be encoded")

    def vectors(self, line: Line, items: Sequence[MediaInput]) -> list[NDArray[np.float32]]:
        assert line.done == [TOTAL * len(items)]
        return [np.full((OUTPUTS, WIDTH), item.content[0], np.float32) for item in items]


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("broken", [b"", b"\x02", b"\x01\x02\x03"])
def test_only_pictures_that_fail_alone_fail(parts: int, most: int, broken: bytes) -> None:
    pictures = Pictures(SmallEncoder(most, broken), WORK, None)
    pictures.vectors = np.zeros((WORK.num_pages * OUTPUTS, WIDTH), np.float32)
    for number in (1, 2, 3):
        pixels = np.zeros(0, np.uint8)
        given = MediaInput(content=bytes([number]), units=UNITS, outputs=OUTPUTS, pixels=pixels)
        pictures.hold(number, given)
    joins = tuple(EncodeJoin(number, UNITS, OUTPUTS, (number,)) for number in (1, 2, 3))
    bounds = np.linspace(0, 3 * TOTAL, parts + 1).astype(int).tolist()
    for first, end in pairwise(bounds):
        bad = pictures.compute(Encodes(joins=() if first else joins, first=first, count=end - first))
        assert end == 3 * TOTAL or not len(bad)
    assert bytes(bad.tolist()) == broken
    for number in {1, 2, 3} - set(broken):
        assert (pictures.vectors[number * OUTPUTS : (number + 1) * OUTPUTS] == number).all()
