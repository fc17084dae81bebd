"""A world over its hours: what comes where, what is sent on to other regions, what dies and comes back.

Owns the clocks, the rule by which a region sends requests on (when the wait saved is longer than the way there and
back), deaths and what is written down of all that. What a replica does with requests is `flow`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.world.curve import ReplicaCurve
from paceline.lab.world.flow import Away, Flags, Flow
from paceline.lab.world.world_file import Death, World

Floats = NDArray[np.float64]

TICK_S = 1.0
WINDOW_S = 10.0  # for which figures are written down
# Around a death: before it, looked at after it, and how close is well.
CALM_S, AFTER_S, RECOVERY = 60.0, 600.0, 1.2
BALANCE = 1e-6  # of all requests: what rounding may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldWindow:
    """Some seconds of the world; lists are by region."""

    at_s: float
    at_once: float
    came: list[float]  # requests, from the region itself
    sent_on: list[float]  # of these, served elsewhere
    waiting: list[float]  # at the end
    finished: list[float]
    rows: list[float]
    alive: list[float]
    ttft_p50_s: list[float]
    ttft_p99_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A death, and when first tokens in its region took about as long as before."""

    death: Death
    resumed: float  # requests that had begun or waited there
    before_p99_s: float
    worst_p99_s: float
    after_s: float | None  # until p99 stayed under 1.2 times what it was; None: not while it was looked at


@dataclass(slots=True, kw_only=True)
class Day:
    """What became of it."""

    world: World
    curve: ReplicaCurve
    windows: list[WorldWindow] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    arrived: float = 0.0
    finished: float = 0.0
    left: float = 0.0  # in the world at the end
    good_in: Floats  # requests within both bounds, by the region that served them
    ttft_p50_s: float = math.nan
    ttft_p99_s: float = math.nan

    @property
    def good(self) -> float:
        return float(self.good_in.sum())

    @property
    def lost(self) -> float:
        """Requests that are nowhere."""
        return self.arrived - self.finished - self.left

    @property
    def replica_hours(self) -> float:
        return self.world.num_replicas * self.world.hours

    @property
    def cost(self) -> float:
        world = self.world
        return (
            sum(each.replicas * world.ranks * each.device_hour_price for each in world.regions) * world.hours
        )

    @property
    def cost_per_million(self) -> float:
        """Of output tokens."""
        tokens = self.finished * self.curve.output_tokens
        return 1e6 * self.cost / tokens if tokens else math.inf


def live(
    world: World,
    curve: ReplicaCurve,
    *,
    on_hour: Callable[[int], None] = lambda hour: None,
    stands_for: int = 1,
) -> Day:
    """Let the hours pass. `stands_for`: so many replicas are one column, for a quick look; then nothing dies."""
    return _Life(world, curve, stands_for).run(on_hour)


class _Life:
    def __init__(self, world: World, curve: ReplicaCurve, stands_for: int) -> None:
        self._world, self._curve = world, curve
        self._trips_s = np.array(world.trips_s)
        self._alive, self._region, self._rack, weight = _places(world, stands_for)
        self.flow = Flow(
            curve,
            self._alive,
            tick_s=TICK_S,
            weight=weight,
            group=self._region,
            token_slo_s=world.token_slo_s,
        )
        self._num = len(world.regions)
        self._day = Day(world=world, curve=curve, good_in=np.zeros(self._num))
        self._total = self.flow.first_tokens.empty()
        self._waiting = np.zeros(self._num)
        self._to_come = [] if stands_for > 1 else sorted(_changes(world), key=lambda change: change[0])
        self._died: list[tuple[Death, float]] = []
        self._down: list[Death] = []  # deaths of which nothing has come back yet
        self._count_alive()

    def run(self, on_hour: Callable[[int], None]) -> Day:
        world, flow, day = self._world, self.flow, self._day
        ticks, window = round(world.hours * 3600.0 / TICK_S), round(WINDOW_S / TICK_S)
        sums = _Sums(self._num)
        for tick in range(ticks):
            now_s = tick * TICK_S
            if now_s % 3600.0 == 0.0:
                on_hour(int(now_s // 3600.0))
            while self._to_come and self._to_come[0][0] <= now_s:
                _, death, back = self._to_come.pop(0)
                self._come_back(death) if back else self._die(death)
            came = np.array(world.rates_at(now_s / 3600.0)) * TICK_S
            served, foreign, trip_s = self._send(came)
            cells = served[self._region] * self._part
            away = Away(foreign[self._region], trip_s[self._region]) if foreign.any() else None
            done = flow.step(cells, away)
            self._waiting = self._by_region_of(done.waiting)
            sums.add(came, self._sent_on, self._by_region_of(done.finished))
            if (tick + 1) % window == 0:
                self._write(now_s, sums, self._by_region_of(done.rows))
                sums = _Sums(self._num)
        day.arrived, day.finished, day.left = flow.arrived, flow.finished, flow.at_once
        assert abs(day.lost) <= BALANCE * max(day.arrived, 1.0), "a flow has lost requests"
        everything = self._total.sum(axis=0)
        day.ttft_p50_s, day.ttft_p99_s = flow.first_tokens.quantiles(everything, (0.5, 0.99))
        day.recoveries = [_recovery(day, death, resumed) for death, resumed in self._died]
        return day

    def _by_region_of(self, cells: Floats) -> Floats:
        return np.bincount(self._region, cells, self._num).astype(np.float64)

    def _send(self, came: Floats) -> tuple[Floats, Floats, Floats]:
        """What each region serves of `came`, which share of that is from elsewhere, and from how far.

        A region keeps what it can begin within the way to the nearest region that can take it, there and back, and
        sends on the rest. One without replicas sends on everything.
        """
        can = self._replicas * (self._curve.rate * TICK_S)
        served, self._sent_on = came.copy(), np.zeros(self._num)
        far, far_s = np.zeros(self._num), np.zeros(self._num)
        spare = np.maximum(can - came - self._waiting, 0.0)
        for one in range(self._num):
            for other in np.argsort(self._trips_s[one], kind="stable").tolist():
                trip_s = float(self._trips_s[one, other])
                if other == one or not spare[other]:
                    continue
                if self._replicas[one]:
                    if not self._world.follows_the_sun:
                        break
                    kept = can[one] * (TICK_S + trip_s) / TICK_S
                    over = self._waiting[one] + served[one] - kept
                else:
                    over = served[one]
                sent = min(max(over, 0.0), served[one], spare[other])
                if sent > 0.0:
                    served[one] -= sent
                    served[other] += sent
                    spare[other] -= sent
                    self._sent_on[one] += sent
                    far[other] += sent
                    far_s[other] += sent * trip_s
        homeless = served * (self._replicas == 0.0)
        if homeless.any():  # nowhere has room: all that are there share it
            shares = self._replicas / self._replicas.sum()
            served += homeless.sum() * shares - homeless
            far += homeless.sum() * shares
            far_s += homeless @ self._trips_s * shares
            self._sent_on += homeless
        return served, far / np.maximum(served, 1e-9), far_s / np.maximum(far, 1e-9)

    def _die(self, death: Death) -> None:
        dead = self._hit(death) & (self.flow.alive > 0.0)
        if dead.sum() == self.flow.alive.sum():
            raise InputError(f"deaths: at hour {death.hour:g} no replica is left in the world")
        self._down.append(death)
        lost, again = self.flow.die(dead)
        self._count_alive()
        here = self._region[:, None] == death.region
        if not self._replicas[death.region]:
            here = self._region[:, None] == int(np.argmax(self._replicas))
        self.flow.take_over(lost, again, np.broadcast_to(here, dead.shape))
        self._died.append((death, float(lost.sum())))

    def _come_back(self, death: Death) -> None:
        self._down.remove(death)
        back = self._hit(death)
        for other in self._down:
            back &= ~self._hit(other)
        self.flow.alive[back] = 1.0
        self._count_alive()

    def _hit(self, death: Death) -> Flags:
        hit: Flags = self._alive & (self._region[:, None] == death.region)
        if death.racks:
            hit &= self._rack < death.racks
        return hit

    def _count_alive(self) -> None:
        """Replicas by region, and the part of a region's requests that each of its cells gets."""
        in_cell = self.flow.alive.sum(axis=1) * self.flow.weight
        self._replicas = self._by_region_of(in_cell)
        self._part = in_cell / np.maximum(self._replicas[self._region], 1.0e-9)

    def _write(self, now_s: float, sums: _Sums, rows: Floats) -> None:
        first_tokens, day = self.flow.first_tokens, self._day
        counts = first_tokens.taken()
        self._total += counts
        quantiles = [first_tokens.quantiles(each, (0.5, 0.99)) for each in counts]
        day.good_in += [first_tokens.good(each, self._world.ttft_slo_s) for each in counts]
        window = WorldWindow(
            at_s=now_s + TICK_S - WINDOW_S,
            at_once=self.flow.at_once,
            came=sums.came.tolist(),
            sent_on=sums.sent_on.tolist(),
            waiting=self._waiting.tolist(),
            finished=sums.finished.tolist(),
            rows=rows.tolist(),
            alive=self._replicas.tolist(),
            ttft_p50_s=[each[0] for each in quantiles],
            ttft_p99_s=[each[1] for each in quantiles],
        )
        day.windows.append(window)


class _Sums:
    """Of a window, by region."""

    def __init__(self, regions: int) -> None:
        self.came, self.sent_on, self.finished = np.zeros((3, regions))

    def add(self, came: Floats, sent_on: Floats, finished: Floats) -> None:
        self.came += came
        self.sent_on += sent_on
        self.finished += finished


def _places(world: World, stands_for: int) -> tuple[Flags, NDArray[np.intp], NDArray[np.intp], Floats]:
    """Which places have a replica, the region of each cell, the rack of each place, and what a place stands for."""
    has = [-(-each.replicas // stands_for) for each in world.regions]
    cells = [-(-count // world.cell) for count in has]
    region = np.repeat(np.arange(len(cells)), cells)
    place = np.concatenate([np.arange(count * world.cell).reshape(count, world.cell) for count in cells])
    weight = np.array([each.replicas / max(count, 1) for each, count in zip(world.regions, has, strict=True)])
    return place < np.array(has)[region][:, None], region, place // world.rack, weight[region]


def _changes(world: World) -> list[tuple[float, Death, bool]]:
    """Deaths and what comes back, by time."""
    return [
        change
        for death in world.deaths
        for change in (
            (death.hour * 3600.0, death, False),
            (death.hour * 3600.0 + death.back_after_s, death, True),
        )
    ]


def _recovery(day: Day, death: Death, resumed: float) -> Recovery:
    """By the first tokens of the region, or of the world where all of the region died."""
    died_s = death.hour * 3600.0

    def p99_s(window: WorldWindow) -> float:
        own = window.ttft_p99_s[death.region]
        return max((each for each in window.ttft_p99_s if each == each), default=own) if own != own else own

    before = [p99_s(each) for each in day.windows if died_s - CALM_S <= each.at_s < died_s]
    after = [(each.at_s - died_s, p99_s(each)) for each in day.windows if 0.0 <= each.at_s - died_s < AFTER_S]
    calm_s = max(before, default=math.nan)
    late = [at_s + WINDOW_S for at_s, seen_s in after if seen_s > RECOVERY * calm_s]
    back_s = max(late, default=0.0)
    return Recovery(
        death=death,
        resumed=resumed,
        before_p99_s=calm_s,
        worst_p99_s=max((seen_s for _, seen_s in after), default=math.nan),
        after_s=None if back_s >= AFTER_S else back_s,
    )
