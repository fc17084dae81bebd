"""Which adapters an engine has: those that requests may name, and those that are only still computed with.

Names are the business of the server: here an adapter is a number. Folders are read in a thread, not between two steps.
Which adapters are in memory the scheduler decides (`scheduler.adapters`); its orders are carried out here. One that is
let go of is refused to new requests at once; its matrices go when the last request that has it has ended and no step
under way can touch them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.config.engine import ModelConfig
from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.errors import ConfigError, InvalidAdapter, PacelineError, UnknownAdapter
from paceline.models.files.adapter_files import Adapter, PublishedAdapter, make_adapter, open_adapter
from paceline.models.spec import ModelSpec
from paceline.scheduler.scheduler import Scheduler

_logger = logging.getLogger("paceline")
Done = Callable[[AdapterInfo | PacelineError], None]
Work = Callable[[], Adapter]


class AdapterMemory(Protocol):
    """Where a runner keeps matrices of adapters, by number. One that has to lay them out anew has `prepare` for it,
    which takes an adapter and returns one, in any thread. One that copies beside the steps has `is_there`, of a number:
    rows may have it at once, but would wait."""

    def put(self, number: int, adapter: Adapter) -> None: ...
    def drop(self, number: int) -> None: ...


class Reads(Protocol):
    """Reads folders beside the steps."""

    def start(self, number: int, work: Work) -> None: ...

    def done(self) -> list[tuple[int, Work]]:
        """What has been read since the last look; each gives the adapter, or raises what went wrong."""
        ...


class ThreadedReads:
    """One after the other, in a thread that begins with the first."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[int, Future[Adapter]] = {}

    def start(self, number: int, work: Work) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._under_way[number] = self._threads.submit(work)

    def done(self) -> list[tuple[int, Work]]:
        found = [(number, future) for number, future in self._under_way.items() if future.done()]
        for number, _ in found:
            del self._under_way[number]
        return [(number, future.result) for number, future in found]


class _Asked(NamedTuple):
    """What a caller wants under a number."""

    name: str
    folder: str  # nothing where it is in memory
    work: Work
    identity: str = ""
    done: Done | None = None


class Adapters:
    """The adapters of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: AdapterMemory | None = None,
        read: Callable[[Path], Adapter] | None = None,
        reads: Reads | None = None,
        make: Callable[[PublishedAdapter], Adapter] | None = None,
    ) -> None:
        """Without `memory` and `read` there are none, and none can be loaded. `make`: of one that is published."""
        self._scheduler = scheduler
        self._places = scheduler.state.adapters
        self._memory = memory
        self._read = read
        self._make = make
        self._reads: Reads = ThreadedReads() if reads is None else reads
        self._known: dict[int, AdapterInfo] = {}
        self._works: dict[int, Work] = {}  # how those that requests have, or may have, are read again
        self._held: set[int] = set()  # whose matrices the runner has
        self._asked: dict[int, _Asked] = {}
        self._reading: set[int] = set()
        self._copied: dict[int, None] = {}  # back from their folders, and on their way to the runner's memory
        self._is_there: Callable[[int], bool] = getattr(memory, "is_there", lambda number: True)
        self._last = 0
        # Let go of: the last plan that may have a row of it; None while requests have it.
        self._leaving: dict[int, int | None] = {}

    @property
    def is_leaving(self) -> bool:
        return bool(self._leaving)

    @property
    def is_reading(self) -> bool:
        return bool(self._reading or self._copied)

    @property
    def is_asked(self) -> bool:
        """A caller waits for a folder to be read."""
        return bool(self._asked)

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._known.values())

    def load(self, name: str, folder: Path, *, number: int | None = None, identity: str = "") -> AdapterInfo:
        """Read a folder under the next number, or under one that the caller gives; numbers only go up.

        `identity`: what it must be, where it was read before. Raises InvalidAdapter.
        """
        number = self._next_number(number)
        work = self._reading_of(folder)
        return self._take(number, _Asked(name, str(folder), work, identity), work())

    def publish(self, name: str, given: PublishedAdapter) -> AdapterInfo:
        """Take one that is in memory, under the next number; it is kept there until it is unloaded, for when its place
        has gone to others. Raises InvalidAdapter."""
        number, make = self._next_number(None), self._make
        assert make is not None
        return self._take(number, _Asked(name, "", lambda: make(given)), make(given))

    def load_later(self, name: str, folder: Path, number: int, done: Done) -> None:
        """The same while steps go on: `done` gets what comes of it. Raises InvalidAdapter."""
        self._last = self._next_number(number)
        asked = self._asked[number] = _Asked(name, str(folder), self._reading_of(folder), done=done)
        self._start(number, asked.work)

    def _reading_of(self, folder: Path) -> Work:
        read = self._read
        assert read is not None
        return lambda: read(folder)

    def _next_number(self, number: int | None) -> int:
        if self._memory is None or self._read is None:
            raise InvalidAdapter(
                "this engine was started without adapters; start it with --enable-lora", param="lora_path"
            )
        number = self._last + 1 if number is None else number
        if number <= self._last:
            raise InvalidAdapter(f"the number {number} of an adapter was used before")
        return number

    def _take(self, number: int, asked: _Asked, adapter: Adapter) -> AdapterInfo:
        """It has been read for the first time: from here on requests may have it."""
        if asked.identity and adapter.identity != asked.identity:
            raise InvalidAdapter(
                f"{asked.folder}: has changed since it was loaded; load it again", param="lora_path"
            )
        self._last = max(self._last, number)
        self._scheduler.set_adapter(number, adapter.identity)
        info = AdapterInfo(
            name=asked.name,
            folder=asked.folder,
            number=number,
            identity=adapter.identity,
            rank=adapter.rank,
        )
        self._known[number], self._works[number] = info, asked.work
        if number in self._places.resident:
            self._put(number, adapter)
        return info

    def unload(self, number: int) -> bool:
        """No new request may have it; False where there is none of that number."""
        if self._asked.pop(number, None) is not None:
            return True  # what is still being read is dropped when it comes
        if self._known.pop(number, None) is None:
            return False
        self._leaving[number] = None
        return True

    def identity_of(self, number: int) -> str:
        """What a number stands for; nothing where there is no such adapter."""
        return self._places.identities.get(number, "")

    def check(self, number: int) -> None:
        """Raises UnknownAdapter for a number that requests may not have."""
        if number != NO_ADAPTER and number not in self._known:
            raise UnknownAdapter("the adapter is not loaded any more", param="model")

    def release(self, oldest: int, submitted: int) -> None:
        """Give memory back. `oldest`: the first plan under way; all before it are complete. `submitted`: the last."""
        for number, last in list(self._leaving.items()):
            if last is None and number not in self._places.users:
                last = self._leaving[number] = submitted
            if last is not None and last < oldest:
                self._scheduler.set_adapter(number, "")
                self._drop(number)
                del self._leaving[number], self._works[number]

    # -- what the scheduler has ordered, and what has been read --------------------------------------------

    def obey(self) -> None:
        """Behind every plan: begin to read what it asks for, and let go of what it evicted."""
        orders, self._places.orders = self._places.orders, []
        for order in orders:
            if order.comes:
                self._start(order.number, self._works[order.number])
            else:
                self._drop(order.number)

    def take_read(self) -> None:
        """Before every plan: what has been read may be used."""
        for number, result in self._reads.done():
            self._reading.discard(number)
            asked = self._asked.pop(number, None)
            try:
                adapter = result()
                if asked is not None:
                    info = self._take(number, asked, adapter)
                    if asked.done is not None:
                        asked.done(info)
                elif number in self._places.coming:
                    self._came(number, adapter)
            except Exception as error:
                self._failed(number, asked, error)
        for number in [number for number in self._copied if self._is_there(number)]:
            del self._copied[number]
            self._scheduler.adapter_read(number)

    def _came(self, number: int, adapter: Adapter) -> None:
        """An adapter is back that was in memory before."""
        if adapter.identity != self._places.identities[number]:
            raise InvalidAdapter("its folder has changed since it was loaded; load it again")
        self._put(number, adapter)
        self._copied[number] = None

    def _failed(self, number: int, asked: _Asked | None, error: Exception) -> None:
        if not isinstance(error, PacelineError):
            _logger.exception("an adapter could not be read", exc_info=error)
            error = InvalidAdapter("the adapter could not be loaded; the log has more")
        if asked is not None:
            if asked.done is not None:
                asked.done(error)
            return
        name = self._known[number].name if number in self._known else number
        _logger.error("the adapter %s cannot be read again: %s", name, error)
        self._scheduler.adapter_read(number, failed=True)
        for request in list(self._scheduler.state.requests.values()):
            if request.adapter == number:
                self._scheduler.fail(request.id, "internal_error")

    def _start(self, number: int, work: Work) -> None:
        self._reading.add(number)
        self._reads.start(number, work)

    def _put(self, number: int, adapter: Adapter) -> None:
        assert self._memory is not None
        self._memory.put(number, adapter)
        self._held.add(number)

    def _drop(self, number: int) -> None:
        if number in self._held:
            assert self._memory is not None
            self._memory.drop(number)
            self._held.remove(number)
            self._copied.pop(number, None)


def first_adapters(
    model: ModelConfig, spec: ModelSpec, memory: AdapterMemory | None, scheduler: Scheduler
) -> Adapters:
    """The adapters of an engine, with those of the start in memory."""
    prepare: Callable[[Adapter], Adapter] = getattr(memory, "prepare", lambda adapter: adapter)
    made = Adapters(
        scheduler,
        memory,
        lambda folder: prepare(open_adapter(folder, spec, model.max_lora_rank)),
        make=lambda given: prepare(make_adapter(given, spec, model.max_lora_rank)),
    )
    for name, folder in model.first_adapters.items():
        try:
            made.load(name, Path(folder))
        except InvalidAdapter as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from None
    return made
