"""What owners do with branches in a world: forks at earlier tokens, tokens put in, scores, and ends that are held.

A third of the worlds have them. They are drawn apart from the rest of the traffic, so that a seed of a world without
them stays what it is.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.request import OWN_REQUESTS, Request, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidTransition
from paceline.scheduler.invariants import InvariantViolation
from tests.dst.objectives import REFUSALS
from tests.guides import FakeGuide
from tests.reference_output import placed_of

if TYPE_CHECKING:
    from tests.dst.watch import Expectation
    from tests.dst.world import World

HOLDS_S = (0.01, 0.05, 0.5)


def has_trees(seed: int) -> bool:
    return random.Random(seed + 17).random() < 1 / 3


class TreeMoves:
    """Moves of one world."""

    def __init__(self, seed: int, world: World, allowed: bool) -> None:
        self._world = world
        self._rng = random.Random(seed + 19)
        self.is_on = allowed and has_trees(seed)

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Some answers are held at their end."""
        if self.is_on and self._rng.random() < 0.4:
            return replace(sampling, on_stop="hold", hold_s=self._rng.choice(HOLDS_S))
        return sampling

    def limits(self) -> TreeLimits | None:
        if not self.is_on or self._rng.random() < 0.7:
            return None
        rng = self._rng
        return TreeLimits(
            max_rows=rng.choice((None, 1, 2)),
            max_tokens=rng.choice((None, 40, 400)),
            max_branches=rng.choice((3, 5, 256)),
        )

    def perhaps(self) -> None:
        if self.is_on and self._rng.random() < 0.35:
            self._rng.choice((self._fork, self._extend, self._extend, self._score, self._cut))()

    def _pick(self) -> Request | None:
        """A live request; a held one if there is any, more often than not."""
        requests = self._world.engine.scheduler.state.requests
        requests = {number: request for number, request in requests.items() if number < OWN_REQUESTS}
        held = [number for number, request in requests.items() if request.held is not None]
        among = held if held and self._rng.random() < 0.6 else list(requests)
        return requests[self._rng.choice(among)] if among else None

    def _fork(self) -> None:
        world, rng = self._world, self._rng
        request = self._pick()
        if request is None:
            return
        self._receive()
        tokens = world.engine.scheduler.tokens_of(request.id).tolist()
        parent = world.clients[request.id]
        at = rng.randint(0, len(tokens) - request.num_prompt)
        begun = tokens[: request.num_prompt + at]
        start = len(parent.prompt) - parent.seen  # of what its guide sees
        append = self._more(parent, len(begun) - start)
        changes = {"seed": rng.randrange(1 << 40)} if rng.random() < 0.5 else {}
        if rng.random() < 0.5:
            changes["max_tokens"] = rng.randint(1, 20)
        world.admissions.begin()
        score = rng.choice((0.0, 0.0, 1.0, -1.0))
        count = rng.choice((1, 1, 2, 4))
        try:
            ids = world.engine.fork(request.id, count, at=at, append=append, changes=changes, score=score)
        except (*REFUSALS, InvalidTransition):
            world.admissions.check_refusal()
            return
        world.coverage.counts["fork at an earlier token"] += at < len(tokens) - request.num_prompt
        for rid in ids:
            world.expect(rid, begun + append, parent.tenant)
            branch = world.engine.scheduler.state.requests[rid]
            world.clients[rid].pictures, world.clients[rid].placed = parent.pictures, placed_of(branch)
            world.clients[rid].seen = len(begun) + len(append) - start

    def _more(self, client: Expectation, seen: int) -> list[int]:
        """Tokens to put in; behind `seen` tokens its guide allows them."""
        rng = self._rng
        tokens = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 2, 17)))]
        guide = FakeGuide.of(client.sampling, seen)
        if guide is None:
            return tokens
        allowed: list[int] = []
        for token in tokens:
            if guide.is_over or guide.breaks:
                break
            allowed.append(guide.choose(token))
            guide.consume((0,))
        return allowed

    def _extend(self) -> None:
        world, rng = self._world, self._rng
        request = self._pick()
        if request is None:
            return
        self._receive()
        client = world.live.get(request.id)
        if client is None or request.is_terminal:
            return
        tokens = self._more(client, client.seen + len(client.tokens)) or [rng.randrange(1000)]
        max_tokens = rng.choice((None, 1, 5, 30))
        is_guided = client.sampling.structured_outputs is not None
        modules = [] if is_guided else world.contexts.draw(tokens)
        world.admissions.begin()
        was_held = request.held is not None
        try:
            world.engine.extend(request.id, tokens, max_tokens=max_tokens, modules=modules)
        except (*REFUSALS, InvalidTransition):
            world.admissions.check_refusal()
            return
        expected, _ = world.alone(client, len(client.tokens))
        if client.tokens != expected:
            raise InvariantViolation("O1", f"request {request.id} got {client.tokens}, alone {expected}")
        events = world.engine.scheduler.take_events()
        if events.tokens:  # else a hook has failed
            world.coverage.counts["extend"] += 1
            world.coverage.counts["extend a held one"] += was_held
            num_placed = len(client.placed)
            client.continues(tokens, request)
            client.placed = placed_of(request)
            world.coverage.counts["extend by contexts"] += len(client.placed) > num_placed
        world.receive(events)

    def _cut(self) -> None:
        """A stop string is found behind an earlier token: what came later is gone, and something else may follow."""
        world = self._world
        requests = world.engine.scheduler.state.requests.values()
        among = [
            request.id
            for request in requests
            if request.sampling.on_stop == "hold" and len(world.live[request.id].tokens) > 1
        ]
        if not among:
            return
        number = self._rng.choice(among)
        client = world.live[number]
        client.stop_at = self._rng.randint(1, len(client.tokens) - 1)
        world.coverage.counts["cut"] += 1
        world.engine.scheduler.finish_at(number, client.before + client.stop_at)
        self._receive()

    def _score(self) -> None:
        request = self._pick()
        if request is not None:
            self._world.coverage.counts["score"] += request.tree is not None
            self._world.engine.set_score(request.id, self._rng.choice((-1.0, 0.0, 0.5, 2.0)))

    def _receive(self) -> None:
        self._world.receive(self._world.engine.scheduler.take_events())
