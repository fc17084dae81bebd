"""Encodings: the vectors of pictures, where they lie, and the one group of them that is being computed.

An encoder sees all units of a picture at once, so a picture cannot be cut as a prompt is. Its work can be put in a
line: for each layer first the keys and values of all units, then attention and what follows, unit by unit. A group of
items is under way at a time, its line is 2 x layers x units long, and each step computes some of it:

    line of a group    0 ........... planned ............ total
                                   ^ a plan takes the next positions; the plan that takes the last may read the vectors

Vectors lie in pages of 64, in a pool with references and eviction like that of KV blocks. All pages of an item are
taken at once, in the order of the prompt, and only for rows: what a row holds it can read, so that no two pictures wait
for each other. A row lets go of an item once it has computed the tokens behind it. A page that no row holds keeps its
vectors until it is needed, and equal items of a tenant are computed once.

Decision: docs/decisions/0054-media-in-steps.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from paceline.config.encoder import EncoderWork
from paceline.core.counters import MediaUse
from paceline.core.plan import EncodeJoin, Encodes
from paceline.core.request import Request
from paceline.core.stretch import MediaItem, Stretch, StretchKind
from paceline.kv.block_pool import BlockPool, Blocks


@dataclass(slots=True, eq=False)
class Encoding:
    """An item and its vectors, computed or being computed."""

    media: int  # its number
    item: MediaItem
    pages: Blocks
    first_step: int
    last_step: int = 0
    is_planned: bool = False  # all of it stands in plans: what is planned from now on may read it
    is_done: bool = False  # it is computed: it stays where it is when no row holds it


@dataclass(slots=True, eq=False)
class Group:
    """Items that are encoded together."""

    encodings: list[Encoding]
    total: int  # length of its line
    units: int
    products: int  # units that a unit attends to, on average
    planned: int = 0
    credit: float = 0.0  # tokens that rows have paid for what is less than a part
    done: int = 0


@dataclass(slots=True, eq=False)
class RowMedia:
    """The stretches of a row, and the items it holds."""

    request: Request
    stretches: tuple[Stretch, ...]
    passed: int = 0  # stretches that it has computed
    held: dict[int, Encoding] = field(default_factory=dict)  # by stretch
    waits_since_s: float | None = None  # it stands at a picture without vectors


@dataclass(slots=True)
class _Known:
    """An item that live requests have, or that has vectors."""

    media: int
    num_requests: int = 0


class Encodings:
    """All of one scheduler."""

    def __init__(self, work: EncoderWork | None, make_pool: Callable[..., BlockPool] = BlockPool) -> None:
        self.work = work
        num_pages = 0 if work is None else work.num_pages
        self.pool = make_pool(num_pages, on_evict=self._evicted, has_null=False)
        self.rows: dict[int, RowMedia] = {}  # those with stretches
        self.items: dict[bytes, Encoding] = {}  # by key
        self.group: Group | None = None  # under way, with positions that no plan has
        self.unfinished: list[Group] = []  # this one, and those before it of which results are to come
        self.fences: deque[tuple[int, Blocks]] = deque()
        self.dropped: dict[int, int] = {}  # number of an item -> step that must be done
        self.lacks_pages = False  # in the step being planned, the first item in order found too few pages
        self._known: dict[bytes, _Known] = {}
        self._owner: dict[int, Encoding] = {}  # of each page
        self._next_number = 1
        self.found: list[tuple[RowMedia, int]] = []  # stretches whose item was there when a row came to it
        # All of it stands in plans now, and that is not recorded yet.
        self.last_completed: Group | None = None
        self.now: Group | None = None  # of which the step being planned computes a part
        self._first = 0
        self.as_tokens = 0.0  # what has been planned of lines, in tokens of prompts

    # -- requests ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        for key in _keys(request):
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(self._next_number)
                self._next_number += 1
            known.num_requests += 1

    def drop_request(self, request: Request, submitted: int, completed: int) -> None:
        """A request has ended. What no other has need not be held, once the steps under way are done."""
        for key in _keys(request):
            known = self._known[key]
            known.num_requests -= 1
            if not known.num_requests:
                self.dropped[known.media] = submitted  # again, where another request had it since
                self._forget_number(key)
        group = self.group
        if group is not None and not any(self._is_wanted(each.item.key) for each in group.encodings):
            self._abandon(group, submitted, completed)

    def _is_wanted(self, key: bytes) -> bool:
        known = self._known.get(key)
        return known is not None and known.num_requests > 0

    def _abandon(self, group: Group, submitted: int, completed: int) -> None:
        """No request needs any item of the group: its line ends here."""
        self.group, self.now = None, None
        self.unfinished.remove(group)
        for encoding in group.encodings:
            self._forget(encoding)
            self._let_go(encoding, submitted, completed)

    def number(self, key: bytes) -> int:
        """Under which the runner holds an item."""
        return self._known[key].media

    def numbers(self, request: Request) -> tuple[int, ...]:
        return tuple(self._known[item.key].media for item in request.media)

    def take_dropped(self, completed: int) -> list[int]:
        """Numbers that no request needs any more, and no step under way."""
        wanted = {known.media for known in self._known.values() if known.num_requests}
        busy = {encoding.media for group in self.unfinished for encoding in group.encodings}
        self.dropped = {media: seq for media, seq in self.dropped.items() if media not in wanted}
        due = [media for media, seq in self.dropped.items() if seq <= completed and media not in busy]
        for media in due:
            del self.dropped[media]
        return due

    # -- rows ----------------------------------------------------------------------------------------------

    def take_row(self, request: Request, row: int, num_computed: int) -> None:
        stretches = tuple([each for each in request.stretches if each.kind is StretchKind.MEDIA])
        self.rows[row] = RowMedia(request, stretches)
        self.computed(row, num_computed)

    def leave_row(self, row: int, submitted: int, completed: int) -> None:
        """A row lets go of what it holds; what steps under way read stays until they are done."""
        for encoding in self.rows.pop(row).held.values():
            self._let_go(encoding, submitted, completed)

    def _let_go(self, encoding: Encoding, submitted: int, completed: int) -> None:
        if submitted > completed:
            self.fences.append((submitted, encoding.pages))
        else:
            self.pool.release(encoding.pages)

    def computed(self, row: int, num_computed: int) -> None:
        """A row has computed `num_computed` tokens: the items before them are behind it."""
        media = self.rows[row]
        while media.passed < len(media.stretches) and media.stretches[media.passed].end <= num_computed:
            encoding = media.held.pop(media.passed, None)
            media.passed += 1
            if encoding is not None:
                self.pool.release(encoding.pages)

    def complete(self, seq: int) -> None:
        while self.fences and self.fences[0][0] <= seq:
            self.pool.release(self.fences.popleft()[1])

    def open_stretch(self, row: int, position: int) -> Stretch | None:
        """The first stretch of a row behind `position` whose vectors cannot be read yet."""
        media = self.rows[row]
        for index in range(media.passed, len(media.stretches)):
            stretch = media.stretches[index]
            if stretch.end > position and not (self._hold(media, index) and media.held[index].is_planned):
                return stretch
        return None

    def _hold(self, media: RowMedia, index: int) -> bool:
        """Whether a row holds the item of a stretch, taken now if it is there."""
        if index in media.held:
            return True
        encoding = self.items.get(media.request.media[media.stretches[index].item].key)
        if encoding is None or any(at not in media.held for at in range(media.passed, index)):
            return False
        self.pool.share(encoding.pages)
        media.held[index] = encoding
        if encoding.is_planned:
            self.found.append((media, index))
        return True

    # -- the line ------------------------------------------------------------------------------------------

    def buy(self, tokens: int, in_order: Callable[[], Iterable[int]], step: int) -> int:
        """Plan as much of the line as `tokens` tokens of a prompt pay for; returns what it takes. `in_order`: the rows
        that compute prompts."""
        assert self.work is not None
        self.lacks_pages = False
        if self.group is None:
            if self.now is not None:  # one group a step
                return 0
            self._begin(in_order(), step)
        group = self.group
        if group is None:
            return 0
        if self.now is None:
            self.now, self._first = group, group.planned
        first, credit = group.planned, group.credit + tokens
        part = self.work.least_positions(group.units)
        count = self.work.positions(credit, first, group.units, group.products) // part * part
        if not count and first == self._first:  # every step goes on; what is beyond its share is not owed
            count = part
        count = min(count, group.total - first)
        taken = self.work.tokens(first, count, group.units, group.products)
        self.as_tokens += taken
        group.planned, paid = first + count, taken - group.credit
        group.credit = max(0.0, credit - taken)
        if group.planned == group.total:
            self.group, self.last_completed = None, group
            for encoding in group.encodings:
                encoding.is_planned, encoding.last_step = True, step
            if self.work.least == "line":  # beside the tokens of the step
                return 0
            return max(0, min(tokens, math.ceil(paid)))
        return tokens

    def _begin(self, rows: Iterable[int], step: int) -> None:
        """Take items of rows in order, each with all its pages, as many as fit together."""
        assert self.work is not None
        taken: list[Encoding] = []
        units = products = 0
        for row in rows:
            media = self.rows.get(row)
            if media is None:
                continue
            for index in range(media.passed, len(media.stretches)):
                if self._hold(media, index):
                    continue
                item = media.request.media[media.stretches[index].item]
                num_pages = self.work.pages_of(item.outputs)
                is_room = num_pages <= self.pool.available
                if not is_room or (taken and units + item.units > self.work.max_units):
                    self.lacks_pages = not is_room and not taken
                    return self._start(taken, units, products)
                encoding = Encoding(self.number(item.key), item, self.pool.allocate(num_pages), step)
                self.items[item.key] = encoding
                self._owner.update(dict.fromkeys(encoding.pages.tolist(), encoding))
                taken.append(encoding)
                units, products = units + item.units, products + item.units**2
                self._hold(media, index)
        self._start(taken, units, products)

    def _start(self, taken: list[Encoding], units: int, products: int) -> None:
        if taken:
            assert self.work is not None
            total = 2 * self.work.layers * units
            self.group = Group(taken, total, units, products // units)
            self.unfinished.append(self.group)

    def most_steps(self, tokens: int) -> int:
        """In how many steps of `tokens` tokens all that rows have is encoded, if none of it is there. For checks."""
        if self.work is None:
            return 0
        units = [item.units for media in self.rows.values() for item in media.request.media]
        units += [each.item.units for group in self.unfinished for each in group.encodings]
        a_step = max(1, int(tokens / max(self.work.prices(max(units, default=0)))))
        if self.work.least != "position":  # what is less than a part waits for the next step
            a_step = max(1, a_step // 2)
        return sum(-(-2 * self.work.layers * count // a_step) for count in units)

    def tokens_left(self, request: Request) -> int:
        """What is to be encoded for a request, in tokens of a prompt: what has vectors, or will have, is left out."""
        tokens, wanted = 0.0, {item.key: item.units for item in request.media if self.work is not None}
        for key, units in wanted.items():
            assert self.work is not None
            encoding, group = self.items.get(key), self.group
            if encoding is None:
                tokens += self.work.tokens(0, 2 * self.work.layers * units, units, units)
            elif group is not None and not encoding.is_planned:
                left = self.work.tokens(
                    group.planned, group.total - group.planned, group.units, group.products
                )
                tokens += left * units / group.units
        return math.ceil(tokens)

    def use(self) -> MediaUse:
        """How the pages are used."""
        pool = self.pool
        cached = int(np.count_nonzero(pool.cached & (pool.refs == 0))) if pool.usable else 0
        return MediaUse(held=pool.usable - pool.num_free, cached=cached, pages=pool.usable)

    def take_plan(self) -> tuple[Encodes, Group]:
        """What the step being planned computes of the line."""
        group, self.now = self.now, None
        assert group is not None
        joins: tuple[EncodeJoin, ...] = ()
        if not self._first:
            joins = tuple(
                EncodeJoin(each.media, each.item.units, each.item.outputs, tuple(each.pages.tolist()))
                for each in group.encodings
            )
        return Encodes(joins=joins, first=self._first, count=group.planned - self._first), group

    def was_computed(self, group: Group, count: int, bad: Iterable[int]) -> list[Encoding]:
        """A step has computed `count` positions; returns encodings whose numbers are not usable."""
        group.done += count
        if group.done < group.total or group not in self.unfinished:
            return []
        self.unfinished.remove(group)
        unusable, found = set(bad), []
        for encoding in group.encodings:
            if encoding.media in unusable:
                self._forget(encoding)
                found.append(encoding)
            else:
                encoding.is_done = True
                self.pool.cached[encoding.pages] = True
            self.pool.release(encoding.pages)
        return found

    # -- letting go ----------------------------------------------------------------------------------------

    def holders(self, encoding: Encoding) -> list[Request]:
        """Requests on rows that hold an encoding."""
        rows = list(self.rows.values())
        return [media.request for media in rows if any(each is encoding for each in media.held.values())]

    def reset(self) -> None:
        """The device's memory is not to be trusted: all vectors are forgotten. No row is left that holds any."""
        assert not self.rows, "rows leave first"
        while self.fences:
            self.pool.release(self.fences.popleft()[1])
        for group in self.unfinished:
            for encoding in group.encodings:
                self.pool.release(encoding.pages)
        for encoding in list(self.items.values()):
            if encoding.is_done:
                self.pool.forget(encoding.pages)
            self._forget(encoding)
        self.group, self.unfinished = None, []

    def _evicted(self, pages: list[int]) -> None:
        """Some pages are about to be used again: the items they belong to are gone, with all their pages."""
        gone = set(pages)
        for encoding in {id(each): each for each in map(self._owner.__getitem__, pages)}.values():
            others = encoding.pages[[page not in gone for page in encoding.pages.tolist()]]
            self._forget(encoding)
            self.pool.forget(others)

    def _forget(self, encoding: Encoding) -> None:
        """No row finds it any more; its pages are another matter."""
        key = encoding.item.key
        if self.items.get(key) is encoding:
            del self.items[key]
        for page in encoding.pages.tolist():
            if self._owner.get(page) is encoding:
                del self._owner[page]
        self._forget_number(key)

    def _forget_number(self, key: bytes) -> None:
        """An item that no request has and that has no vectors needs no number."""
        known = self._known.get(key)
        if known is not None and not known.num_requests and key not in self.items:
            del self._known[key]


def _keys(request: Request) -> list[bytes]:
    """Of its items, each once and in order: a set would give them other numbers in a replay."""
    return list(dict.fromkeys(item.key for item in request.media))
