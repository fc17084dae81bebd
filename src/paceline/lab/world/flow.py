"""Replicas as columns of numbers, moved in ticks along the curve of one.

A request is a flow: it waits, is read as a prompt, and walks through stages of its output, as many as the spread of
output lengths asks for. A replica has how many rows are in each stage, how many wait, and what is left to read of
requests that came from a replica that died. Columns lie in cells, and a column may stand for several replicas. Knows
nothing of regions, prices and the time of day.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.lab.world.curve import POINTS, ReplicaCurve

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.intp]

MOST_STAGES = 4
TABLE = 1024  # entries of what is looked up by rows
FILL_ROUNDS = 2  # in which the least loaded are found
LEVELS = 32  # of rates, in the table of first tokens
SHORT_WAIT_S, LONGEST_WAIT_S, WAITS = 0.01, 1000.0, 64
SIZE = WAITS * LEVELS * 2
NOTHING = 1e-9


class Tick(NamedTuple):
    """What happened in one, by cell."""

    finished: Floats
    waiting: Floats  # at its end
    rows: Floats


class Away(NamedTuple):
    """By cell: the share of what comes that is from elsewhere, and how long the way there and back is."""

    share: Floats
    trip_s: Floats


class FirstTokens:
    """How long first tokens took, as a table of counts by the rate at which they came and how long they waited."""

    def __init__(self, curve: ReplicaCurve, group: Integers, token_slo_s: float = math.inf) -> None:
        self._group, self._num_groups = group[:, None] * SIZE, int(group.max(initial=0)) + 1
        self._rate_levels = LEVELS / max(curve.rates)
        at = (np.arange(LEVELS) + 0.5) / self._rate_levels
        points = np.array(curve.ttft_s)
        base = [np.interp(at, curve.rates, points[:, point]) for point in range(POINTS)]
        self._base_s = np.array(base).T  # [level, point]
        self._edges_s = np.concatenate(([0.0], np.geomspace(SHORT_WAIT_S, LONGEST_WAIT_S, WAITS - 1)))
        self._log_scale = (WAITS - 2) / math.log(LONGEST_WAIT_S / SHORT_WAIT_S)
        self._least_tokens_s = 1.0 / token_slo_s
        self.counts = self.empty()

    def empty(self) -> Floats:
        return np.zeros((self._num_groups, WAITS, LEVELS, 2))

    def note(
        self, came: Floats, rate: Floats, wait_s: Floats, tokens_s: Floats, away: Away | None = None
    ) -> None:
        """Requests that came to replicas, with the rate there, the wait, and how many tokens a second they get then."""
        level = np.minimum(rate * self._rate_levels, LEVELS - 1.0).astype(np.intp)
        plain = 2 * level + (tokens_s >= self._least_tokens_s) + self._group
        late = np.nonzero(wait_s > SHORT_WAIT_S)
        index = plain
        if len(late[0]):
            index = plain.copy()
            index[late] += 2 * LEVELS * self._place(wait_s[late])
        self._count(index, came if away is None else came * (1.0 - away.share[:, None]))
        if away is not None:
            cells = np.nonzero(away.share)[0]
            total_s = wait_s[cells] + away.trip_s[cells, None]
            far = plain[cells] + 2 * LEVELS * self._place(total_s)
            self._count(far, came[cells] * away.share[cells, None])

    def _place(self, wait_s: Floats) -> Integers:
        """Where a wait stands in the table; 0: none."""
        place = np.log(np.maximum(wait_s / SHORT_WAIT_S, 1.0)) * self._log_scale + 1.0
        return np.where(wait_s > SHORT_WAIT_S, np.minimum(place, WAITS - 1.0), 0.0).astype(np.intp)

    def _count(self, index: Integers, came: Floats) -> None:
        size = self._num_groups * SIZE
        self.counts += np.bincount(index.ravel(), came.ravel(), size).reshape(self.counts.shape)

    def taken(self) -> Floats:
        """The counts since this was asked last."""
        found, self.counts = self.counts, self.empty()
        return found

    def quantiles(self, counts: Floats, shares: tuple[float, ...]) -> list[float]:
        """Of first tokens of one group, or of several added up; NaN where there are none."""
        seconds, weights = self._samples(counts.sum(axis=2))
        if not len(weights):
            return [math.nan] * len(shares)
        order = np.argsort(seconds)
        up_to = np.cumsum(weights[order])
        places = [np.searchsorted(up_to, share * up_to[-1]) for share in shares]
        return [float(seconds[order[min(int(place), len(order) - 1)]]) for place in places]

    def good(self, counts: Floats, ttft_slo_s: float) -> float:
        """Requests whose first token came within the bound, and whose tokens take no longer than theirs."""
        seconds, weights = self._samples(counts[:, :, 1])
        return float(weights[seconds <= ttft_slo_s].sum())

    def _samples(self, counts: Floats) -> tuple[Floats, Floats]:
        wait, level = np.nonzero(counts)
        waits_s = np.append(self._edges_s, LONGEST_WAIT_S)
        middle_s = np.where(wait > 0, (waits_s[wait] + waits_s[wait + 1]) / 2.0, 0.0)
        seconds = middle_s[:, None] + self._base_s[level]
        weights = np.repeat(counts[wait, level] / POINTS, POINTS)
        return seconds.ravel(), weights


class Flow:
    """All replicas of a world. Arrays are [cell, place in it], stages [stage, cell, place]."""

    def __init__(
        self,
        curve: ReplicaCurve,
        alive: Flags,
        *,
        tick_s: float = 1.0,
        weight: Floats | None = None,
        group: Integers | None = None,
        token_slo_s: float = math.inf,
    ) -> None:
        """`alive`: which places have a replica. Of each cell: `weight`: how many replicas one place stands for;
        `group`: with which others its first tokens are counted."""
        self.curve, self._tick_s = curve, tick_s
        self.weight = np.ones(len(alive)) if weight is None else weight
        spread = max(curve.output_variation, 1e-3) ** -2
        self._num_stages = min(max(1, round(spread)), MOST_STAGES)
        self.alive = alive.astype(np.float64)
        self.stages = np.zeros((self._num_stages, *alive.shape))
        self.rows = np.zeros(alive.shape)
        self.waiting = np.zeros(alive.shape)
        self.reading = np.zeros(alive.shape)  # of requests from elsewhere, in prompts; their rows are there
        self.first_tokens = FirstTokens(
            curve, np.zeros(len(alive), np.intp) if group is None else group, token_slo_s
        )
        self._ended = np.zeros(alive.shape)
        self.wait_s = np.zeros(alive.shape)  # of requests that came in the last tick, behind those that wait
        self.arrived = self.finished = 0.0
        self._rows_scale = (TABLE - 1) / (curve.max_rows * 1.25)
        rows = np.arange(TABLE) / self._rows_scale
        self._token_s = _beyond(rows, curve)
        # Prompts per tick that are read at most, beside so many rows.
        self._most = tick_s / curve.prompt_s * curve.chunk_s / (curve.chunk_s + self._token_s)

    @property
    def at_once(self) -> float:
        """Requests that are in the world."""
        return float(((self.rows + self.waiting).sum(axis=1) * self.weight).sum())

    def step(self, coming: Floats, away: Away | None = None) -> Tick:
        """One tick, in which `coming` requests arrive in each cell."""
        curve, tick_s = self.curve, self._tick_s
        place = np.minimum(self.rows * self._rows_scale, TABLE - 1.0).astype(np.intp)
        most, token_s = self._most[place], self._token_s[place]
        came = self._spread(coming / self.weight, most)
        self.arrived += float(coming.sum())
        self.waiting += came
        to_read = self.waiting + self.reading
        share = np.minimum(1.0, most / np.maximum(to_read, NOTHING))
        # Those that end make room at once: about as many as in the tick before.
        room = np.maximum(curve.max_rows - self.rows + self._ended, 0.0)
        admitted = np.minimum(self.waiting * share, room)
        read = admitted + self.reading * share
        speed = np.maximum(1.0 - read * (curve.prompt_s / tick_s), 0.0) / token_s
        ended = self._move(admitted, np.minimum(self._num_stages * tick_s / curve.output_tokens * speed, 1.0))
        self._ended = ended
        self.waiting -= admitted
        if self.reading.any():
            self.reading -= self.reading * share
        left = self.waiting + self.reading
        # Behind a full replica, those that end make room; behind prompts, those that are read.
        self.wait_s = left * tick_s / np.maximum(np.maximum(read, ended), NOTHING)
        self.first_tokens.note(came * self.weight[:, None], came / tick_s, self.wait_s, speed, away)
        return Tick(
            finished=ended.sum(axis=1) * self.weight,
            waiting=self.waiting.sum(axis=1) * self.weight,
            rows=self.rows.sum(axis=1) * self.weight,
        )

    def _spread(self, coming: Floats, most: Floats) -> Floats:
        """To the replicas of each cell with the fewest requests, as far as these can read them; the rest to all."""
        load = self.rows + self.waiting  # nothing where there is no replica
        member = self.alive
        level = np.zeros_like(coming)
        for _ in range(FILL_ROUNDS):
            count = member.sum(axis=1)
            level = (coming + (load * member).sum(axis=1)) / np.maximum(count, 1.0)
            member = (load < level[:, None]) * self.alive
        came = np.minimum(np.maximum(level[:, None] - load, 0.0), most) * self.alive
        rest = coming - came.sum(axis=1)
        count = np.maximum(self.alive.sum(axis=1), 1.0)
        found: Floats = np.maximum(came + self.alive * (rest / count)[:, None], 0.0)
        return found

    def _move(self, admitted: Floats, share: Floats) -> Floats:
        """Every stage gives this share on to the next; the last one's ends."""
        moved = self.stages * share
        self.stages -= moved
        self.stages[1:] += moved[:-1]
        self.stages[0] += admitted
        ended: Floats = moved[-1]
        self.rows += admitted - ended
        self.finished += float((ended.sum(axis=1) * self.weight).sum())
        return ended

    def die(self, dead: Flags) -> tuple[Floats, float]:
        """These replicas end: what they had, by stage and then what waited there, and what is to be read of it again,
        in prompts. The caller says where it goes on."""
        weight = np.broadcast_to(self.weight[:, None], dead.shape)[dead]
        rows = (self.stages[:, dead] * weight).sum(axis=1)
        waited = float((self.waiting[dead] * weight).sum())
        behind = (np.arange(self._num_stages) + 0.5) / self._num_stages
        output = behind * self.curve.output_tokens / self.curve.prompt_tokens
        again = float((rows * (1.0 + output)).sum())
        for each in (self.rows, self.waiting, self.reading, self.alive, self._ended):
            each[dead] = 0.0
        self.stages[:, dead] = 0.0
        return np.append(rows, waited), again

    def take_over(self, lost: Floats, again: float, by: Flags) -> None:
        """What others had goes on here, spread evenly."""
        places = by & (self.alive > 0.0)
        count = float((places.sum(axis=1) * self.weight).sum())
        assert count, "the caller has found replicas"
        self.stages[:, places] += (lost[:-1] / count)[:, None]
        self.rows[places] += lost[:-1].sum() / count
        self.waiting[places] += lost[-1] / count
        self.reading[places] += again / count


def _beyond(rows: Floats, curve: ReplicaCurve) -> Floats:
    """Seconds between two tokens by rows; beyond what was measured on the line through its last half."""
    known, token_s = np.array(curve.rows), np.array(curve.token_s)
    middle = len(known) // 2
    slope = (token_s[-1] - token_s[middle]) / max(known[-1] - known[middle], NOTHING)
    found: Floats = np.interp(rows, known, token_s) + np.maximum(rows - known[-1], 0.0) * max(slope, 0.0)
    return found
