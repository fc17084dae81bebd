"""Moves slabs between the KV of models: which of them is short, what another can do without, and both are told.

Between steps only. A model that is short of blocks takes a free slab, or one that another model holds nothing in; what
was cached there is forgotten. Floors are never touched. For a model that wakes, its home and its floor are cleared:
rows of others that hold blocks there are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.engine.engine import Engine
from paceline.kv.slabs import SlabMarket


def wanted_blocks(engine: Engine) -> int:
    """Blocks that rows and those waiting requests that could have one would take next, about."""
    state = engine.scheduler.state
    running, waiting = state.rows.num_live, len(state.queue)
    if not waiting:
        return running
    could = min(waiting, state.most_rows - running)
    return running + could * (state.kv.blocks_for(state.queue.num_tokens // waiting) + 1)


class SlabTrade:
    """`engines` are those of the market's owners, in its order."""

    def __init__(self, market: SlabMarket, engines: Sequence[Engine]) -> None:
        self.market = market
        self.engines = list(engines)
        self.num_reclaimed = 0  # slabs that one model took from another

    def settle(self) -> None:
        """Give models that are short of blocks what is free, or what others can do without."""
        for owner, engine in enumerate(self.engines):
            if not engine.is_asleep and engine.has_requests:
                self._fill(owner, engine)

    def _fill(self, owner: int, engine: Engine) -> None:
        kv, wanted = engine.scheduler.state.kv, wanted_blocks(engine)
        while wanted > min(group.pool.num_empty for group in kv.groups):
            slab = self.market.take(owner)
            if slab is None:
                break
            engine.move_slab(slab, gained=True)
        lacking = wanted - kv.free_for(None)
        if lacking > 0:
            self.reclaim(owner, -(-lacking // kv.slabs.size))

    def reclaim(self, owner: int, count: int) -> int:
        """Take at most `count` slabs that other models can do without; returns how many there were."""
        taken = 0
        for donor in self.market.donors(owner, self._is_short):
            state = self.engines[donor].scheduler.state
            if state.rows.num_reserved:  # they would have to be preempted where others need room beside them
                continue
            for slab in state.kv.slabs.spare()[: self.market.above_floor(donor)]:
                if taken == count or not self.market.may_take(owner):
                    break
                taken += self._lose(slab, donor) and self._gain(owner)
        self.num_reclaimed += taken
        return taken

    def _is_short(self, owner: int) -> bool:
        engine = self.engines[owner]
        if engine.is_asleep or not engine.has_requests:
            return False
        return wanted_blocks(engine) > engine.scheduler.state.kv.free_for(None)

    def _gain(self, owner: int) -> bool:
        slab = self.market.take(owner)
        if slab is None:
            return False
        return self.engines[owner].move_slab(slab, gained=True)

    def _lose(self, slab: int, donor: int) -> bool:
        """False: a copy under way needs it."""
        if not self.engines[donor].move_slab(slab, gained=False):
            return False
        self.market.give(slab)
        return True

    # -- sleep ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All models are loaded: those that are awake get their floors."""
        for owner in self.market.awake():
            has_floor = self._raise_to_floor(owner)
            assert has_floor, "homes and floors of the models that are awake fit together"

    def slept(self, owner: int) -> None:
        """A model sleeps, which holds nothing any more: others may use its home and what its KV had."""
        for slab in self.market.slabs(owner):
            gone = self._lose(slab, owner)
            assert gone, "a sleeper holds nothing"
        self.market.leave_home(owner)

    def make_room(self, owner: int) -> bool:
        """A model is to wake: give it its home and its floor. False: a copy under way needs something of it yet."""
        others = [
            other for other, engine in enumerate(self.engines) if other != owner and not engine.is_asleep
        ]
        done = all(self._lose(slab, self.market.owner(slab)) for slab in self.market.in_the_way(owner))
        if done:
            self.market.come_home(owner)
        done = all([self._raise_to_floor(each) for each in others]) and done  # noqa: C419 - every one of them
        done = done and self._raise_to_floor(owner)
        if not done:
            self.slept(owner)
            for each in others:
                self._raise_to_floor(each)
        return done

    def _raise_to_floor(self, owner: int) -> bool:
        while self.market.above_floor(owner) < 0:
            if not self._gain(owner) and not self._take_by_force(owner):
                return False
        return True

    def _take_by_force(self, owner: int) -> bool:
        """Clear a slab that another model has above its floor."""
        for donor in self.market.donors(owner, lambda _: False):
            kv = self.engines[donor].scheduler.state.kv
            for slab in dict.fromkeys([*kv.slabs.spare(), *self.market.slabs(donor)]):
                if self._lose(slab, donor):
                    self.num_reclaimed += 1
                    return True
        return False


# What holds after every turn, in simulations and tests.


def broken_slabs(trade: SlabTrade) -> Iterator[str]:
    """M1: every slab has one owner or none, and models have the blocks of their own slabs and no others."""
    market = trade.market
    for owner, engine in enumerate(trade.engines):
        kv, name = engine.scheduler.state.kv, market.owners[owner].name
        has, should = kv.slabs.numbers(), market.slabs(owner)
        if has != should:
            yield f"M1: the model {name!r} has blocks of the slabs {has} and should have those of {should}"
        if owner not in market.awake() and has:
            yield f"M2: the model {name!r} sleeps and has the slabs {has}"
        if not engine.is_asleep and market.above_floor(owner) < 0:
            yield f"M1: the model {name!r} has {len(has)} slabs, less than its floor"
        taken = set(has) & {slab for each in market.awake() for slab in market.owners[each].home}
        if taken:
            yield f"M1: weights lie in the slabs {sorted(taken)} that {name!r} has for its KV"
