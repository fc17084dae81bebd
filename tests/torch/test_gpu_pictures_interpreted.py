"""Pages of pictures' vectors for a GPU, on tensors of the CPU: what steps read is what a CPU's pages hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.encoder import EncoderWork
from paceline.core.plan import EncodeJoin, Encodes
from paceline.core.stretch import MediaInput
from paceline.runner.gpu.device_pictures import DevicePictures
from paceline.runner.gpu.host_rows import DeviceBatch
from paceline.runner.gpu.kernels.token_inputs import NO_VECTOR, allocate_picture_pages, token_inputs

WIDTH, TOKENS, PAGE = 6, 64, 4
WORK = EncoderWork(layers=2, num_pages=8, page_vectors=PAGE, max_units=64, token_positions=1.0)


class Numbered:
    """Vectors tell their item and their place in it."""

    def begin(self, items: Sequence[MediaInput]) -> Any:
        return len(items)

    def advance(self, line: Any, first: int, count: int) -> None: ...

    def vectors(self, line: Any, items: Sequence[MediaInput]) -> list[NDArray[np.float32]]:
        return [vectors_of(item) for item in items]


def vectors_of(item: MediaInput) -> NDArray[np.float32]:
    place = np.arange(item.outputs, dtype=np.float32)[:, None]
    return (item.units + place / 100 + np.zeros((1, WIDTH))).astype(np.float32)


def item(units: int, outputs: int) -> MediaInput:
    pixels = np.zeros((1, 1, 1, 3), np.uint8)
    return MediaInput(content=b"", units=units, outputs=outputs, pixels=pixels, grid=(1, 1, units))


def pictures() -> DevicePictures:
    """Items 11 and 12, of 6 and of 3 vectors, in pages that are not in order."""
    pages = allocate_picture_pages(8 * PAGE, WIDTH, TOKENS, dtype=torch.float32, device="cpu")
    made = DevicePictures(Numbered(), WORK, pages, lambda count: nullcontext())
    made.hold(11, item(20, 6))
    made.hold(12, item(30, 3))
    joins = (
        EncodeJoin(media=11, units=20, outputs=6, pages=(5, 2)),
        EncodeJoin(media=12, units=30, outputs=3, pages=(7,)),
    )
    assert not len(made.compute(Encodes(joins=joins, first=0, count=100)))
    assert not len(made.compute(Encodes(first=100, count=100)))
    return made


def batch(decode: Sequence[int], *spans: tuple[int, int, int]) -> DeviceBatch:
    """Spans: row, place of the first token, number."""
    columns = np.array(spans, np.int64).reshape(-1, 3)
    return DeviceBatch(
        decode=np.array(decode, np.int64),
        spans=columns[:, 0],
        start=columns[:, 1],
        count=columns[:, 2],
        finishing=np.zeros(0, np.int64),
        generation=np.zeros(len(decode) + len(spans), np.int32),
        num_pad=0,
    )


MEDIA = {3: ((4, 10, 11), (12, 15, 12)), 5: ((0, 3, 12),)}
NOTHING_DROPPED = np.zeros(8, np.int64)


def seen(made: DevicePictures, count: int) -> list[float]:
    """What the first layer reads of a step of `count` tokens, in whose place text reads -1."""
    table = torch.full((1, WIDTH), -1.0)
    out = torch.empty(count, WIDTH)
    token_inputs(out, table, torch.zeros(count, dtype=torch.int32), pages=made.pages)
    return [round(value, 2) for value in out[:, 0].tolist()]


def test_tokens_of_spans_read_the_vectors_of_their_places() -> None:
    made = pictures()
    made.put_slots(MEDIA, batch([1, 2], (3, 2, 5), (5, 1, 4)), NOTHING_DROPPED)
    row_3 = [-1.0, -1.0, 20.0, 20.01, 20.02]  # two of text, then the beginning of its first picture
    row_5 = [30.01, 30.02, -1.0, -1.0]
    assert seen(made, 11) == [-1.0, -1.0, *row_3, *row_5]


def test_a_span_may_have_two_pictures_and_begin_inside_one() -> None:
    made = pictures()
    made.put_slots(MEDIA, batch([], (3, 8, 8)), NOTHING_DROPPED)
    assert seen(made, 8) == [20.04, 20.05, -1.0, -1.0, 30.0, 30.01, 30.02, -1.0]


def test_places_count_what_a_row_has_dropped() -> None:
    made, dropped = pictures(), NOTHING_DROPPED.copy()
    dropped[3] = 4
    made.put_slots(MEDIA, batch([], (3, 8, 3)), dropped)
    assert seen(made, 3) == [30.0, 30.01, 30.02]


def test_a_step_without_pictures_finds_no_slot_of_the_one_before() -> None:
    made = pictures()
    made.put_slots(MEDIA, batch([], (3, 4, 6)), NOTHING_DROPPED)
    made.put_slots({}, batch([1, 2], (4, 0, 30)), NOTHING_DROPPED)
    assert bool((made.pages.slots == NO_VECTOR).all())


def test_pages_of_another_item_are_not_read_as_the_first_any_more() -> None:
    made = pictures()
    made.hold(13, item(40, 4))
    join = EncodeJoin(media=13, units=40, outputs=4, pages=(5,))
    made.compute(Encodes(joins=(join,), first=0, count=160))
    made.put_slots({6: ((0, 4, 13),)}, batch([], (6, 0, 4)), NOTHING_DROPPED)
    assert seen(made, 4) == [40.0, 40.01, 40.02, 40.03]
    with pytest.raises(KeyError):  # the scheduler never lets a row get here
        made.put_slots(MEDIA, batch([], (3, 4, 6)), NOTHING_DROPPED)
