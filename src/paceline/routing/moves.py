"""Which running requests to move to another engine, so that less is waited.

Looked at once a second. A move pays where an engine is short of blocks: what waits there waits for rows to end, and a
row that goes sets its blocks free at once. What costs least goes first, and only where the wait it saves is more than
twice what it costs. Load that is on its way counts where it goes, at most two leave or reach an engine at a time, and
no request moves twice within ten seconds: without these, balancing chases its own tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.routing.view import NOBODY, EngineState, FleetView, Role

WORTH = 2.0  # the wait that is saved over what a move costs
AT_ONCE = 2  # moves that leave or reach an engine
REST_S = 10.0  # of a request between two moves
PAUSE_S = 0.02  # of the stream, around the hand-over


class Movable(NamedTuple):
    """A running request. A front knows what it has sent and what has come back."""

    request: int
    engine: int
    tokens: int  # that its row holds
    left: float  # tokens that are thought to come still
    fingerprint: str = ""


class Move(NamedTuple):
    request: int
    source: int
    target: int
    tokens: int
    saved_s: float
    cost_s: float


@dataclass(slots=True)
class _Room:
    """An engine as it will be once the moves that were chosen are over."""

    needed: float  # blocks that what waits there asks for
    free: float
    frees_per_s: float  # blocks that rows which end set free
    step_s: float
    row_s: float

    @property
    def short(self) -> float:
        return max(0.0, self.needed - self.free)


class Balancer:
    """Remembers what moves and what has moved. Time is an argument."""

    def __init__(self, copy_s: Callable[[int], float]) -> None:
        """`copy_s`: seconds that so many tokens take from one engine to another, the cheapest way."""
        self._copy_s = copy_s
        self._under_way: dict[int, Move] = {}
        self._moved_s: dict[int, float] = {}  # when a request began to move last

    def ended(self, request: int) -> None:
        """A move is over, however it ended."""
        self._under_way.pop(request, None)

    def choose(self, view: FleetView, movable: Iterable[Movable], now_s: float) -> list[Move]:
        """Moves to begin now. They count as under way until `ended`, and at their target at once."""
        self._moved_s = {each: when for each, when in self._moved_s.items() if now_s - when < REST_S}
        by_engine: dict[int, list[Movable]] = {}
        for each in movable:
            by_engine.setdefault(each.engine, []).append(each)
        rooms = {
            number: _room(view, number, by_engine.get(number, ()))
            for number in np.flatnonzero(view.state == EngineState.READY).tolist()
        }
        busy = Counter(engine for move in self._under_way.values() for engine in (move.source, move.target))
        resting = self._moved_s.keys() | self._under_way.keys()
        chosen: list[Move] = []
        for source in sorted(rooms, key=lambda number: -rooms[number].short):
            offered = [each for each in by_engine.get(source, ()) if each.request not in resting]
            for each in sorted(offered, key=lambda each: (each.tokens, each.request)):
                if busy[source] >= AT_ONCE or not rooms[source].short:
                    break
                move = self._move_of(view, each, rooms, busy)
                if move is not None:
                    _carry(rooms, move, each.left, view.block_tokens)
                    busy.update((source, move.target))
                    chosen.append(move)
        for move in chosen:
            self._under_way[move.request] = move
            self._moved_s[move.request] = now_s
            view.enter_move(move.target, move.tokens)
        return chosen

    def _move_of(
        self, view: FleetView, each: Movable, rooms: dict[int, _Room], busy: Counter[int]
    ) -> Move | None:
        source, blocks = rooms[each.engine], -(-each.tokens // view.block_tokens)
        whole = blocks + each.left / view.block_tokens
        best, best_s = NOBODY, 0.0
        for number, room in rooms.items():
            is_open = number != each.engine and busy[number] < AT_ONCE and room.free - room.needed >= whole
            is_same = view.fingerprint[number] == each.fingerprint and view.role[number] != Role.PREFILL
            if is_open and is_same:
                waited_s = min(source.short, blocks) / source.frees_per_s
                saved_s = waited_s + each.left * (source.step_s - room.step_s - room.row_s)
                if saved_s > best_s:
                    best, best_s = number, saved_s
        cost_s = self._copy_s(each.tokens) + PAUSE_S
        if best == NOBODY or best_s <= WORTH * cost_s:
            return None
        return Move(each.request, each.engine, best, each.tokens, best_s, cost_s)


def _room(view: FleetView, number: int, running: Sequence[Movable]) -> _Room:
    size, step_s = view.block_tokens, max(float(view.decode_s[number]), 1e-6)
    held = sum(each.tokens for each in running) / size
    left = sum(each.left for each in running) / len(running) if running else 1.0
    return _Room(
        needed=float(view.waiting_tokens[number]) / size,
        free=float(view.free_blocks[number]),
        frees_per_s=max(held / (max(left, 1.0) * step_s), 1e-6),
        step_s=step_s,
        row_s=float(view.row_s[number]),
    )


def _carry(rooms: dict[int, _Room], move: Move, left: float, size: int) -> None:
    blocks = -(-move.tokens // size)
    source, target = rooms[move.source], rooms[move.target]
    source.free += blocks
    source.step_s = max(source.step_s - source.row_s, 1e-6)
    target.free -= blocks + left / size  # it will grow there
    target.step_s += target.row_s
