"""An encoder without a model, for tests: a vector is one number, made from what its picture is and its place in it.

Its vectors are written into pages when the line of a group has come to its end, in the order of the plans, and every
vector that a row reads is compared with what its picture says it should be.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.encoder import EncoderWork
from paceline.core.plan import EncodeJoin, Encodes
from paceline.core.stretch import MediaInput
from paceline.scheduler.invariants import InvariantViolation
from tests.reference_output import picture_vector

POISON = 0xDEADBEEF  # a slot that was not written must never be read
NO_ENCODER = EncoderWork(layers=0, num_pages=0, max_units=0)
Stretches = Sequence[tuple[int, int, int]]  # start, end and number of each item of a row


class FakeEncoder:
    """What a runner holds of items, and the pages of their vectors."""

    def __init__(self, work: EncoderWork) -> None:
        self._work = work
        self._held: dict[int, MediaInput] = {}
        self.clear()

    def clear(self) -> None:
        """What is held stays."""
        self._pages = [[POISON] * self._work.page_vectors for _ in range(self._work.num_pages)]
        self._vectors: dict[int, EncodeJoin] = {}  # by number: where the vectors of an item are
        self._group: tuple[EncodeJoin, ...] = ()
        self._at = 0  # positions of its line that are computed

    def hold(self, media: int, given: MediaInput) -> None:
        assert media not in self._held, "an item is held already"
        self._held[media] = given

    def drop(self, media: int) -> None:
        del self._held[media]

    @property
    def num_held(self) -> int:
        return len(self._held)

    def compute(self, part: Encodes) -> tuple[int, ...]:
        """E3: a line is computed in order, each position once. Returns the items that are complete with it."""
        if part.joins:
            self._group, self._at = part.joins, 0
            for join in part.joins:
                self._vectors[join.media] = join
                for page in join.pages:
                    self._pages[page] = [POISON] * self._work.page_vectors
        total = 2 * self._work.layers * sum(join.units for join in self._group)
        if part.first != self._at or self._at + part.count > total:
            raise InvariantViolation(
                "E3", f"position {part.first} of a line comes after {self._at}, of {total}"
            )
        self._at += part.count
        if self._at < total:
            return ()
        for join in self._group:
            given = self._held[join.media]
            assert (given.units, given.outputs) == (join.units, join.outputs), "another item than was held"
            for index in range(join.outputs):
                page, slot = divmod(index, self._work.page_vectors)
                self._pages[join.pages[page]][slot] = picture_vector(given.content, index)
        return tuple(join.media for join in self._group)

    def expected(self, media: Stretches) -> dict[int, int]:
        """By position of a row, the vector that must stand there."""
        return {
            position: picture_vector(self._held[number].content, position - start)
            for start, end, number in media
            for position in range(start, end)
        }

    def check(self, row: int, media: Stretches, low: int, high: int) -> None:
        """E2: the vectors of tokens `low` to `high` of a row are there, and they are of its items."""
        for start, end, number in media:
            for position in range(max(start, low), min(end, high)):
                page, slot = divmod(position - start, self._work.page_vectors)
                join = self._vectors.get(number)
                found = POISON if join is None else self._pages[join.pages[page]][slot]
                if found != picture_vector(self._held[number].content, position - start):
                    raise InvariantViolation("E2", f"row {row} reads a vector that is not there: {position}")
