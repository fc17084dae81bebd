"""Several models on one device: which of them makes the next step, which of them sleeps, which is woken.

Each model has an engine of its own; the device does one step of one of them at a time. Turns are shared in
device-seconds: the next step belongs to the model with the least seconds over its share (its virtual time), among
those that have something to compute. A model that comes back from having nothing to do begins where the others
are: it has saved nothing up, and nothing is held against it. No model that could step waits while the device is idle.

Decides only, on numbers it is given: it reads no clock, knows no engine and moves no memory, so that the server, the
simulator and tests run the same (docs/decisions/0051-several-models.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.config.model_set import ModelShare
from paceline.core.standing import WEIGHTS_DROPPED, Standing
from paceline.engine.engine import Engine
from paceline.errors import ConfigError

MOST_FAILED_WAKES = 2
# A model that was woken is not put to sleep for another one before it has run this many times what waking takes.
LEAST_AWAKE_IN_WAKES = 10.0


class Needs(NamedTuple):
    """Bytes that a model takes of the memory that models share."""

    awake: int = 0
    kept: int = 0  # at the first level of sleep


class SleepOrder(NamedTuple):
    """Put a model to sleep, or wake it (level 0)."""

    model: int
    level: int


@dataclass(slots=True, eq=False)
class Seat:
    """One model as the conductor knows it."""

    config: ModelShare
    needs: Needs = field(default_factory=Needs)
    standing: Standing = Standing.AWAKE
    level: int = 0  # of sleep
    device_s: float = 0.0  # of all its steps
    virtual_s: float = 0.0
    is_backlogged: bool = False
    longest_step_s: float = 0.0
    wakes_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # what waking took last, by level
    failed_wakes: int = 0
    busy_s: float = 0.0  # when it last had a request
    woken_s: float = 0.0
    wanted_since_s: float | None = None  # asleep, and a request waits for it
    is_called: bool = False  # asleep, and an operator wants it awake

    @property
    def wake_s(self) -> float:
        """What waking it takes, from where it is; of one that is awake, from where it would sleep."""
        return self.wakes_s[self.level or self.config.sleep_level]

    @property
    def held(self) -> int:
        """Bytes it takes now."""
        if self.standing in (Standing.AWAKE, Standing.WAKING):
            return self.needs.awake
        return 0 if self.level == WEIGHTS_DROPPED or self.standing is Standing.FAILED else self.needs.kept


class Conductor:
    """Shares a device between models. `memory`: bytes for those that are awake; None: all fit."""

    def __init__(self, seats: Sequence[Seat], memory: int | None = None, now_s: float = 0.0) -> None:
        self.seats = list(seats)
        self.memory = memory
        self._virtual_s = 0.0  # where a model begins that had nothing to do
        for seat in self.seats:
            seat.busy_s = now_s

    # -- turns ---------------------------------------------------------------------------------------------

    def next(self, ready: Sequence[bool]) -> int | None:
        """The model to step: of those that could, the one furthest behind its share. None: none could."""
        if len(ready) == 1:
            return 0 if ready[0] else None
        chosen: int | None = None
        for index, (seat, is_ready) in enumerate(zip(self.seats, ready, strict=True)):
            if is_ready and not seat.is_backlogged:
                seat.virtual_s = max(seat.virtual_s, self._virtual_s)
            seat.is_backlogged = is_ready
            if is_ready and (chosen is None or seat.virtual_s < self.seats[chosen].virtual_s):
                chosen = index
        if chosen is None:
            self._virtual_s = max(seat.virtual_s for seat in self.seats)
        else:
            self._virtual_s = max(self._virtual_s, self.seats[chosen].virtual_s)
        return chosen

    def charge(self, model: int, seconds: float) -> None:
        """A step of a model has taken the device for so long."""
        seat = self.seats[model]
        seat.device_s += seconds
        seat.virtual_s += seconds / seat.config.share
        seat.longest_step_s = max(seat.longest_step_s, seconds)

    # -- sleep ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All models are loaded: those that find no room sleep, the later ones first. Raises ConfigError where there is
        not room for the pinned ones and any other one."""
        if self.memory is None:
            return
        stays = [seat for seat in self.seats if seat.config.pinned]
        for seat in self.seats:
            beside = stays if seat in stays else [*stays, seat]
            needed = sum(each.needs.awake for each in beside)
            if needed > self.memory:
                names = ", ".join(f"{each.config.name} {_gib(each.needs.awake)}" for each in beside)
                raise ConfigError(
                    f"memory_bytes of the models is {_gib(self.memory)}, and these are awake together: {names}; "
                    f"give at least {needed}, less kv_cache_memory_bytes, or pin fewer models"
                )
        left = self.memory - sum(each.needs.awake for each in stays)
        for seat in self.seats:
            if seat in stays:
                continue
            if seat.needs.awake <= left:
                left -= seat.needs.awake
            else:
                seat.standing, seat.level = Standing.ASLEEP, WEIGHTS_DROPPED

    def orders(self, now_s: float, busy: Sequence[bool]) -> list[SleepOrder]:
        """What is to be put to sleep or woken now; `busy`: a model has requests. To be carried out in this order."""
        for seat, is_busy in zip(self.seats, busy, strict=True):
            if is_busy:
                seat.busy_s = now_s
        wanted = [
            index
            for index, (seat, is_busy) in enumerate(zip(self.seats, busy, strict=True))
            if seat.standing is Standing.ASLEEP and (is_busy or seat.is_called)
        ]
        for index in wanted:
            found = self._room_for(index, now_s, busy)
            if found:  # one at a time: the next finds out what room this one has left
                return found
        return list(self._idle(now_s, busy))

    def call(self, model: int) -> None:
        """An operator wants it awake; one that was given up is tried once more."""
        seat = self.seats[model]
        if seat.standing is Standing.FAILED:
            seat.standing, seat.failed_wakes = Standing.ASLEEP, MOST_FAILED_WAKES - 1
        seat.is_called = seat.standing is Standing.ASLEEP

    @property
    def is_settled(self) -> bool:
        """All are awake and none of them ever sleeps unless it is told to: there is nothing to order."""
        if self.memory is not None:
            return False
        for seat in self.seats:
            if seat.standing is not Standing.AWAKE or seat.config.idle_sleep_s is not None:
                return False
        return True

    def _idle(self, now_s: float, busy: Sequence[bool]) -> Iterator[SleepOrder]:
        for index, (seat, is_busy) in enumerate(zip(self.seats, busy, strict=True)):
            after_s = seat.config.idle_sleep_s
            is_idle = after_s is not None and not is_busy and now_s - seat.busy_s >= after_s
            if is_idle and seat.standing is Standing.AWAKE:
                yield SleepOrder(index, seat.config.sleep_level)

    def _room_for(self, model: int, now_s: float, busy: Sequence[bool]) -> list[SleepOrder]:
        """A request waits for a model that sleeps: wake it, and put others to sleep where there is no room."""
        seat = self.seats[model]
        if seat.wanted_since_s is None:
            seat.wanted_since_s = now_s
        missing = 0
        if self.memory is not None:
            others = sum(each.held for each in self.seats if each is not seat)
            missing = others + seat.needs.awake - self.memory
        found: list[SleepOrder] = []
        for index in self._victims(model, now_s, busy) if missing > 0 else ():
            found.append(SleepOrder(index, WEIGHTS_DROPPED))
            missing -= self.seats[index].held
            if missing <= 0:
                break
        return [*found, SleepOrder(model, 0)] if missing <= 0 else []

    def _victims(self, model: int, now_s: float, busy: Sequence[bool]) -> list[int]:
        """Models that may be put to sleep for another one: those longest without a request first, busy ones last."""
        waker = self.seats[model]
        has_waited = now_s - (waker.wanted_since_s or now_s) >= waker.wake_s

        def may_sleep(index: int, seat: Seat) -> bool:
            if index == model or seat.config.pinned or not seat.held:
                return False
            if seat.standing is Standing.WAKING:
                return False
            has_run = now_s - seat.woken_s >= LEAST_AWAKE_IN_WAKES * seat.wakes_s[WEIGHTS_DROPPED]
            return not busy[index] or (has_waited and has_run)

        found = [index for index, seat in enumerate(self.seats) if may_sleep(index, seat)]
        return sorted(found, key=lambda index: (busy[index], self.seats[index].busy_s))

    def slept(self, model: int, level: int) -> None:
        """A model has been put to sleep."""
        seat = self.seats[model]
        seat.standing, seat.level, seat.is_backlogged = Standing.ASLEEP, level, False
        seat.wanted_since_s, seat.is_called = None, False

    def waking(self, model: int) -> None:
        """Waking it has begun."""
        self.seats[model].standing = Standing.WAKING

    def woke(self, model: int, now_s: float, seconds: float) -> None:
        """It is awake again, which took so long."""
        seat = self.seats[model]
        seat.wakes_s[seat.level] = seconds
        seat.standing, seat.level, seat.failed_wakes = Standing.AWAKE, 0, 0
        seat.woken_s, seat.busy_s, seat.wanted_since_s, seat.is_called = now_s, now_s, None, False

    def wake_failed(self, model: int) -> None:
        """It could not be woken; the second time in a row it is given up, until an operator asks for it again."""
        seat = self.seats[model]
        seat.failed_wakes += 1
        is_lost = seat.failed_wakes >= MOST_FAILED_WAKES
        seat.standing = Standing.FAILED if is_lost else Standing.ASLEEP


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


# What holds after every turn, in simulations and tests: M1 to M3.


def broken_rules(conductor: Conductor, engines: Sequence[Engine]) -> list[str]:
    """What does not hold, a sentence each; `engines` are those of the seats."""
    found = [*_memory(conductor), *_turns(conductor)]
    for seat, engine in zip(conductor.seats, engines, strict=True):
        found += _sleeping(seat, engine)
    return found


def _memory(conductor: Conductor) -> Iterator[str]:
    """M1: what models hold of the memory they share is no more than there is."""
    held = sum(seat.held for seat in conductor.seats)
    if conductor.memory is not None and held > conductor.memory:
        yield f"M1: models hold {held} bytes of the {conductor.memory} that they share"


def _sleeping(seat: Seat, engine: Engine) -> Iterator[str]:
    """M2: a model that sleeps has no runner, and no row, block or place whose memory went with it."""
    if engine.is_asleep != (seat.standing is not Standing.AWAKE):
        yield f"M2: the model {seat.config.name!r} is {seat.standing}, its engine is not"
    state = engine.scheduler.state
    in_use = sum(group.pool.usable - group.pool.num_free for group in state.kv.groups)
    places = [request.id for request in state.requests.values() if request.host_places]
    lost = state.kv.levels[: state.levels_lost]
    cached = sum(len(part.cache) for level in lost for part in level)
    if engine.is_asleep and (state.rows.num_live or in_use or places or cached):
        yield (
            f"M2: the model {seat.config.name!r} sleeps with {state.rows.num_live} rows, {in_use} blocks in use, "
            f"{cached} cached ones and host places of {len(places)} requests"
        )


def _turns(conductor: Conductor) -> Iterator[str]:
    """M3: what models that have had work all the time have got, over their shares, is at most two steps apart."""
    seats = [seat for seat in conductor.seats if seat.is_backlogged]
    if len(seats) < 2:
        return
    allowed = 2 * max(seat.longest_step_s / seat.config.share for seat in seats)
    ahead, behind = (pick(seats, key=lambda seat: seat.virtual_s) for pick in (max, min))
    gap = ahead.virtual_s - behind.virtual_s
    if gap > allowed * (1 + 1e-9):
        yield (
            f"M3: the model {behind.config.name!r} is {gap:.3f} s of its share behind {ahead.config.name!r}; two steps "
            f"are {allowed:.3f}"
        )
