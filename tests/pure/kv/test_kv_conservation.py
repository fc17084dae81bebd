"""Random use of a KV manager with two groups: whatever is done in whatever order, every block is accounted for."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.config.engine import GroupSpec
from paceline.kv.manager import Blocks
from tests.pure.kv.kv_helpers import FULL, SIZE, check_conservation, free, keys, make_kv

ROWS = 5


@dataclass
class Row:
    """What a row's owner knows of it."""

    text: str
    computed: int
    shared: bool = False  # may write into a block that others read


@dataclass
class Away:
    """A request whose KV lies on the host, or is on its way there."""

    owner: int
    row: Row
    places: tuple[Blocks, ...]


@dataclass
class Model:
    rows: dict[int, Row] = field(default_factory=dict)
    away: list[Away] = field(default_factory=list)
    next_owner: int = 1


class ManagerMachine(RuleBasedStateMachine):
    """Rows start from the cache or from another row, grow, slide, leave, and move to the host and back."""

    @initialize(
        blocks=st.integers(9, 24),
        window=st.sampled_from((None, 3, 8)),
        host=st.sampled_from((0, 6, 40)),
        caching=st.booleans(),
    )
    def start(self, blocks: int, window: int | None, host: int, caching: bool) -> None:
        groups = (FULL,) if window is None else (FULL, GroupSpec(window=window, num_blocks=blocks + 2))
        self.kv = make_kv(num_blocks=blocks, groups=groups, host=host, caching=caching, rows=ROWS)
        self.model = Model()

    def idle_rows(self) -> list[int]:
        return [row for row in range(ROWS) if row not in self.model.rows]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.rows)))

    @precondition(lambda self: self.idle_rows())
    @rule(text=st.text(alphabet="ab", min_size=1, max_size=6))
    def admit(self, text: str) -> None:
        kv, row = self.kv, self.idle_rows()[0]
        match = kv.match(keys(text), len(text) * SIZE)
        if any(
            need > group.pool.num_free
            for need, group in zip(kv.cost(match, len(text) * SIZE), kv.groups, strict=True)
        ):
            return
        before = free(kv)
        new = [
            int((group.pool.refs[found] == 0).sum())
            for group, found in zip(kv.groups, match.blocks, strict=True)
        ]
        kv.adopt(row, match)
        assert free(kv) == [had - lost for had, lost in zip(before, new, strict=True)]
        self.model.rows[row] = Row(text, match.num_blocks * SIZE)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), count=st.integers(1, 2 * SIZE))
    def compute(self, data: st.DataObject, count: int) -> None:
        kv, number = self.kv, self.pick(data)
        row = self.model.rows[number]
        end = min(row.computed + count, len(row.text) * SIZE)
        if kv.missing(number, end) + row.shared > kv.free_for(number):
            return
        if row.shared:
            kv.copy_on_write(number, row.computed)
            row.shared = False
        kv.slide(number, row.computed)
        kv.extend(number, end)
        kv.publish(number, keys(row.text), end)
        row.computed = end

    @precondition(lambda self: self.model.rows and self.idle_rows())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        row = self.model.rows[parent]
        if row.computed and self.kv.can_share(parent, row.computed):
            child = self.idle_rows()[0]
            self.kv.share(parent, child, row.computed)
            self.model.rows[child] = Row(row.text, row.computed, shared=True)
            row.shared = True

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = self.pick(data)
        self.kv.release(number)
        del self.model.rows[number]

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        self.kv.quarantine(self.pick(data))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        number = self.pick(data)
        row = self.model.rows[number]
        if self.kv.can_swap_out(number, row.computed):
            owner, self.model.next_owner = self.model.next_owner, self.model.next_owner + 1
            places = self.kv.swap_out(number, row.computed, owner)
            del self.model.rows[number]
            self.model.away.append(Away(owner, row, places))

    @precondition(lambda self: self.model.away and self.idle_rows())
    @rule()
    def swap_in(self) -> None:
        kv, away = self.kv, self.model.away[0]
        if kv.is_moving(away.owner) or kv.blocks_for(away.row.computed) > kv.free_for():
            return
        number = self.idle_rows()[0]
        kv.swap_in(number, away.places, away.row.computed, away.owner)
        self.model.rows[number] = Row(away.row.text, away.row.computed)
        self.model.away.pop(0)

    @precondition(lambda self: self.model.away)
    @rule()
    def drop(self) -> None:
        away = self.model.away.pop()
        self.kv.drop_places(away.places, away.owner)

    @rule()
    def submit(self) -> None:
        self.kv.submitted += 1
        self.kv.delta.take()

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        kv = self.kv
        kv.complete(data.draw(st.integers(kv.completed, kv.submitted)))
        for number in sorted(kv.tickets.open):
            if data.draw(st.booleans()):
                kv.complete_ticket(number)
                kv.settle()
        kv.settle()

    @rule()
    def reset_cache(self) -> None:
        self.kv.reset_cache()

    @invariant()
    def accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        check_conservation(self.kv)
        for number in range(ROWS):
            row = self.model.rows.get(number)
            for group in self.kv.groups:
                table = group.blocks_of(number)
                assert (row is not None or not len(table)) and np.all(table > 0)
                assert len(set(table.tolist())) == len(table)
                assert row is None or int(group.held[number]) * SIZE >= row.computed
        for host in self.kv.places:
            assert len(set(host.free_places())) == host.num_free

    def teardown(self) -> None:
        """When all have left and all copies are done, everything is free."""
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        for number in self.model.rows:
            kv.release(number)
        for away in self.model.away:
            kv.drop_places(away.places, away.owner)
        kv.complete(kv.submitted + 1)
        kv.settle()
        for number in list(kv.tickets.open):
            kv.complete_ticket(number)
            kv.settle()
        check_conservation(kv)
        assert free(kv) == [group.pool.usable for group in kv.groups]
        assert all(host.num_free == host.num_places for host in kv.places)


ManagerMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)
TestConservation = ManagerMachine.TestCase
