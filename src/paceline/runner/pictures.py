"""Pictures on the device: what is held of them, the line of the group under way, and pages of their vectors.

A plan says which positions of the line to compute and into which pages the vectors go; a row reads them in place of the
embeddings of its tokens. What computes is a `PictureEncoder`. Knows numbers of items, never a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config.encoder import EncoderWork
from paceline.core.counters import CPUWork
from paceline.core.plan import EMPTY, I32, EncodeJoin, Encodes, i32
from paceline.core.stretch import MediaInput
from paceline.models.patches import PicturePlace, turns
from paceline.models.spec import PatchSpec
from paceline.runner.device_rows import DeviceRows, FlatBatch

Index = NDArray[np.int64]
Floats = NDArray[np.float32]
Items = tuple[tuple[int, int, int], ...]  # where each begins and ends in a row, and its number
_logger = logging.getLogger("paceline")
NO_VECTOR = -1  # in the place of a slot: the token is text
TIMES = 2


class PictureEncoder(Protocol):
    """Computes lines, in any parts; see `models.encoder`."""

    def begin(self, items: Sequence[MediaInput]) -> Any: ...

    def advance(self, line: Any, first: int, count: int) -> None: ...

    def vectors(self, line: Any, items: Sequence[MediaInput]) -> Sequence[Any]:
        """Of each item, [outputs, values]; arrays, or tensors on a device."""
        ...


class Pictures:
    """Those of one runner. `around`: entered for a number of positions. `spent`, `close`: of what computes."""

    def __init__(
        self,
        encoder: PictureEncoder,
        work: EncoderWork,
        patches: PatchSpec | None,
        around: Callable[[int], AbstractContextManager[None]] = lambda count: nullcontext(),
        spent: Callable[[], CPUWork] = CPUWork,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._encoder, self._around, self._merge = encoder, around, patches.merge if patches else 1
        self.work, self.close = spent, close
        self._page, self._layers = work.page_vectors, work.layers
        slots = work.num_pages * work.page_vectors
        self.vectors: Floats = np.zeros((slots, patches.values if patches else 0), np.float32)
        self._held: dict[int, MediaInput] = {}
        self.clear()

    def clear(self) -> None:
        """Vectors and the group are forgotten; what is held stays."""
        self._pages: dict[int, Index] = {}  # by number of the item that has them
        self._owner: dict[int, int] = {}  # by page
        self._group: tuple[EncodeJoin, ...] = ()
        self._line: Any = None

    def hold(self, media: int, given: MediaInput) -> None:
        self._held[media] = given

    def drop(self, media: int) -> None:
        del self._held[media]

    def compute(self, part: Encodes) -> I32:
        """Some of the line; returns the items completed with it whose numbers are not usable."""
        with self._around(part.count):
            if part.joins:
                self._begin(part.joins)
            items = [self._held[join.media] for join in self._group]
            total = 2 * self._layers * sum(item.units for item in items)
            found = self._computed(part, items, total)
            if part.first + part.count < total:
                return EMPTY
            found = found or [self._alone(item) for item in items]
        self._line = None
        slots = [self._slots(join.media, np.arange(join.outputs)) for join in self._group]
        return self._store(slots, found)

    def _store(self, slots: Sequence[Index], found: Sequence[Any]) -> I32:
        """Keep the vectors of the group; returns the items whose numbers are not usable."""
        bad = []
        for join, at, vectors in zip(self._group, slots, found, strict=True):
            self.vectors[at] = vectors
            if not np.isfinite(vectors).all():
                bad.append(join.media)
        return i32(bad) if bad else EMPTY

    def _computed(self, part: Encodes, items: list[MediaInput], total: int) -> Sequence[Any]:
        """Vectors once the line is complete; none where it failed.

        A line that fails, for want of memory or otherwise, is begun again once. If that fails too its items are
        computed one by one in the step that completes it.
        """
        if part.first and self._line is None:  # it has failed
            return []
        end = part.first + part.count
        for first in (part.first, 0):
            try:
                if not first:
                    self._line = self._encoder.begin(items)
                self._encoder.advance(self._line, first, end - first)
                return self._encoder.vectors(self._line, items) if end == total else []
            except Exception:
                self._line = None
                _logger.exception("pictures could not be encoded")
        return []

    def _alone(self, item: MediaInput) -> Any:
        """The vectors of an item whose group has failed. If it fails alone as well, that fails the requests that need
        it, and neither the step nor the others of its group."""
        try:
            line = self._encoder.begin([item])
            self._encoder.advance(line, 0, 2 * self._layers * item.units)
            return self._encoder.vectors(line, [item])[0]
        except Exception:
            _logger.exception("a picture could not be encoded")
            return np.full((), np.nan, np.float32)

    def _begin(self, joins: tuple[EncodeJoin, ...]) -> None:
        items = [self._held[join.media] for join in joins]
        assert [(item.units, item.outputs) for item in items] == [
            (join.units, join.outputs) for join in joins
        ]
        for join in joins:
            for page in join.pages:
                self._pages.pop(self._owner.get(page, NO_VECTOR), None)
            self._owner.update(dict.fromkeys(join.pages, join.media))
            self._pages[join.media] = np.array(join.pages, np.int64)
        self._group, self._line = joins, None

    def _slots(self, media: int, index: Index) -> Index:
        """Where vectors of an item lie."""
        return self._pages[media][index // self._page] * self._page + index % self._page

    def slots(self, rows: DeviceRows, batch: FlatBatch) -> Index | None:
        """Where the vector of each token of a batch lies, or NO_VECTOR; None: all are text."""
        if not rows.media:
            return None
        found: Index | None = None
        for media, start, end, first in _rows_with_items(rows, batch):
            if media[-1][1] <= start:  # all of its pictures are behind it
                continue
            for low, high, slots in self.within(media, start, end):
                if found is None:
                    found = np.full(len(batch.tokens), NO_VECTOR, np.int64)
                found[first + low - start : first + high - start] = slots
        return found

    def within(
        self, media: Sequence[tuple[int, int, int]], start: int, end: int
    ) -> Iterator[tuple[int, int, Index]]:
        """The parts of a row's items between two positions, and where their vectors lie."""
        for begin, behind, number in media:
            low, high = max(begin, start), min(behind, end)
            if low < high:
                yield low, high, self._slots(number, np.arange(low - begin, high - begin))

    def turns(self, rows: DeviceRows, batch: FlatBatch) -> Index | None:
        """By what each token of a batch turns in a decoder that looks at more than positions, [3, tokens]; None: by
        its position, as tokens do that have no picture before them."""
        if not rows.media:
            return None
        found: Index | None = None
        for media, start, end, first in _rows_with_items(rows, batch):
            if media[0][0] >= end:
                continue
            if found is None:
                found = np.tile(batch.positions, (3, 1))
            pictures = (self._placed(*each) for each in media)
            found[:, first : first + end - start] = turns(pictures, start, end)
        return found

    def _placed(self, begin: int, end: int, media: int) -> PicturePlace:
        _, rows, columns = self._held[media].grid
        return PicturePlace(begin, end, rows // self._merge, columns // self._merge)


def _rows_with_items(rows: DeviceRows, batch: FlatBatch) -> Iterator[tuple[Items, int, int, int]]:
    """Of each row of a batch that has items: these, between which positions it computes, and the place of its first
    token in the batch."""
    for index, row in enumerate(batch.rows.tolist()):
        media = rows.media.get(row)
        if media is not None and not batch.masked[index]:
            start, count = int(batch.start[index]), int(batch.count[index])
            yield media, start, start + count, int(batch.last[index]) + 1 - count


def usual_picture(patches: PatchSpec) -> MediaInput:
    """One of the shape that the encoder was made for, black."""
    side = patches.side // patches.merge * patches.merge
    units, grid = side**2, (1, side, side)
    pixels = np.zeros((1, side * patches.size, side * patches.size, 3), np.uint8)
    return MediaInput(content=b"", units=units, outputs=patches.outputs(units), pixels=pixels, grid=grid)


def position_seconds(encoder: PictureEncoder, patches: PatchSpec) -> tuple[float, float]:
    """Seconds of a position of such a picture's line: of keys and values, and of attention and what follows."""
    item = usual_picture(patches)
    line, units = encoder.begin([item]), item.units
    taken = []
    for _ in range(TIMES):  # the first pays for threads and memory
        began_s = time.perf_counter()
        encoder.advance(line, 0, units)
        between_s = time.perf_counter()
        encoder.advance(line, units, units)
        taken.append(((between_s - began_s) / units, (time.perf_counter() - between_s) / units))
    return min(keys_s for keys_s, _ in taken), min(rest_s for _, rest_s in taken)
