"""Pictures of requests: what runners hold of them, under the numbers that the scheduler gives.

A plan knows an item by its number, a log by its key. The runner is told between steps what to hold, and what to drop
once no request needs it and no step under way does. Nothing here looks at pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from paceline.core.plan import MediaRunner, Runner
from paceline.core.request import Request
from paceline.core.stretch import MediaInput, MediaItem, MediaPart, Stretch, StretchKind
from paceline.errors import InvalidRequest
from paceline.scheduler.scheduler import Scheduler

KeyOf = Callable[[Request, bytes], bytes]  # of an item of a request, by its content


class Media:
    """Those of one engine."""

    def __init__(
        self, scheduler: Scheduler, runner: MediaRunner | None = None, key_of: KeyOf | None = None
    ) -> None:
        self._encodings = scheduler.state.encodings
        self._kv = scheduler.state.kv
        self._sees = runner is not None
        self._runner = runner  # None while the model sleeps: its memory is given back
        self._key_of = key_of
        self._held: dict[int, MediaInput] = {}

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def attach(self, request: Request, parts: Sequence[MediaPart]) -> None:
        """Give a new request its stretches and items."""
        key_of = self._key_of
        if key_of is None:
            raise InvalidRequest("this model takes text only, no pictures", param="prompt")
        attach(request, parts, lambda content: key_of(request, content))

    def hold(self, request: Request, parts: Sequence[MediaPart]) -> None:
        """A request was accepted: the runner keeps what its items are made from."""
        assert self._sees
        for number, (_, given) in zip(self._encodings.numbers(request), parts, strict=True):
            if number not in self._held:
                self._held[number] = given
                if self._runner is not None:
                    self._runner.hold(number, given)

    def let_go(self) -> None:
        """What no request and no step under way needs is dropped."""
        if not self._encodings.dropped:
            return
        for number in self._encodings.take_dropped(self._kv.completed):
            del self._held[number]
            if self._runner is not None:
                self._runner.drop(number)

    def sleep(self) -> None:
        """The runner goes; what requests have is kept here."""
        if self._runner is not None:
            for number in self._held:
                self._runner.drop(number)
        self._runner = None

    def wake(self, runner: Runner) -> None:
        """Another runner computes from now on."""
        if self._sees:
            self._runner = cast(MediaRunner, runner)
            for number, given in self._held.items():
                self._runner.hold(number, given)


def attach(request: Request, parts: Sequence[MediaPart], key_of: Callable[[bytes], bytes]) -> None:
    """Give a new request its stretches and items; `key_of` an item's content."""
    end = 0
    for start, given in parts:
        if start < end or start + given.outputs > request.num_prompt:
            raise InvalidRequest("the tokens of a picture do not stand in the prompt", param="prompt")
        end = start + given.outputs
    request.media = tuple(
        MediaItem(key=key_of(given.content), units=given.units, outputs=given.outputs) for _, given in parts
    )
    request.stretches = tuple(
        Stretch(start, start + given.outputs, StretchKind.MEDIA, item)
        for item, (start, given) in enumerate(parts)
    )
