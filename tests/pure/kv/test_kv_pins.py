"""Pins: what they hold, for how long, of which limits, and what is paid for them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.engine import GroupSpec, KVConfig
from paceline.config.sized import Capacity
from paceline.core.request import BlockKey
from paceline.kv.manager import KVManager
from paceline.kv.pins import Bought, Pins

SECOND = 1_000_000


def keys(names: Sequence[str]) -> list[BlockKey]:
    return [BlockKey(name.encode(), name.encode()) for name in names]


class Cache:
    """Prompts of blocks of one token, by the names of their blocks; half of the pool may be pinned."""

    def __init__(self, num_blocks: int = 16, window: int | None = None) -> None:
        groups = (GroupSpec(),) if window is None else (GroupSpec(), GroupSpec(window=window))
        config = KVConfig(block_size=1, num_blocks=num_blocks + 1, eviction="lru", groups=groups)
        self.kv = KVManager(config, Capacity(num_rows=2, max_blocks_per_row=num_blocks + 1), max_chunk=1)
        self.pins: Pins = self.kv.pins
        self.pins.most, self.pins.most_of_tenant = num_blocks // 2, num_blocks // 4

    def ask(self, names: str) -> int:
        """Compute a prompt and let go of it; returns how many of its blocks were found."""
        match = self.kv.match(keys(names), len(names) + 1)
        self.kv.adopt(0, match)
        self.kv.extend(0, len(names))
        self.kv.publish(0, keys(names), len(names))
        self.kv.release(0)
        self.kv.settle()
        return match.num_blocks

    def flood(self) -> None:
        """Other prompts take all blocks there are."""
        count = self.kv.free_for()
        names = [f"other {number} of {self.kv.block_time.now_us}" for number in range(count)]
        self.kv.extend(0, count)
        self.kv.publish(0, keys(names), count)
        self.kv.release(0)
        self.kv.settle()

    def pin(self, names: str, ttl_s: int = 60, name: str = "", tenant: str = "alice") -> Bought:
        self.ask(names)
        return self.pins.pin(7, tenant, name, keys(names), ttl_s)

    def at(self, time_s: float) -> None:
        self.kv.block_time.set_time(time_s)
        self.pins.expire()

    @property
    def is_whole(self) -> bool:
        """All blocks are free, and none is counted as pinned."""
        return all(group.pool.num_free == group.pool.usable and not group.pinned for group in self.kv.groups)


def test_what_is_pinned_survives_a_flood_until_its_time_is_over() -> None:
    cache = Cache()
    assert cache.pin("abc") == Bought(3, 3 * 60 * SECOND)
    cache.at(59.0)
    cache.flood()
    assert cache.ask("abc") == 3
    cache.at(60.0)
    assert not cache.pins and [pin.owner for pin, _ in cache.pins.ended] == [7]
    cache.flood()
    assert cache.ask("abc") == 0 and cache.is_whole


def test_a_tenant_and_all_together_pin_no_more_than_they_may() -> None:
    cache = Cache(16)
    assert cache.pin("abcdef").num_blocks == 4, "the beginning is worth most"
    assert cache.pins.room_for("alice") == 0 and cache.pins.lacking("alice", keys("abcdef")) == 2
    assert cache.pin("abcdef").num_blocks == 4, "what is pinned takes no further room"
    assert cache.pin("ghijkl", tenant="bob").num_blocks == 4
    assert cache.pin("mn", tenant="carol") == Bought(), "all together have their half"
    assert cache.kv.groups[0].unpinned == 8


def test_a_context_that_is_deleted_leaves_what_others_have() -> None:
    cache = Cache()
    cache.pin("abc", name="ctx_1")
    cache.pin("abd", name="ctx_2")
    assert cache.pins.num_blocks == 4
    assert cache.pins.unpin("alice", "ctx_1") is not None
    assert cache.pins.unpin("alice", "ctx_1") is None and cache.pins.unpin("bob", "ctx_2") is None
    cache.flood()
    assert (cache.ask("abc"), cache.ask("abd")) == (2, 3)


def test_a_conversation_that_goes_on_has_one_pin() -> None:
    cache = Cache()
    cache.pin("ab", 60)
    cache.at(30.0)
    assert cache.pin("abcd", 60) == Bought(4, (2 * 30 + 2 * 60) * SECOND), (
        "what was paid for is not paid again"
    )
    assert len(cache.pins) == 1 and cache.pins.num_blocks == 4
    assert cache.pin("abcd", 10) == Bought(4, 0)
    cache.at(89.0)
    assert len(cache.pins) == 1, "a shorter time does not shorten it"
    cache.at(90.0)
    assert not cache.pins and cache.is_whole


def test_a_longer_wish_outlives_the_longer_prompt() -> None:
    cache = Cache()
    cache.pin("ab", 100)
    cache.pin("abc", 10)
    assert len(cache.pins) == 2
    cache.at(50.0)
    assert cache.pins.num_blocks == 2


def test_pins_of_forgotten_blocks_are_lost() -> None:
    cache = Cache()
    cache.pin("ab")
    cache.kv.reset_cache()
    assert not cache.pins and cache.pins.ended[0][1] and cache.is_whole


def test_a_row_that_is_not_trusted_takes_its_pins_along() -> None:
    cache = Cache()
    cache.kv.extend(0, 2)
    cache.kv.publish(0, keys("ab"), 2)  # it still runs when another request pins what it shares
    cache.pins.pin(7, "alice", "", keys("ab"), 60)
    cache.kv.quarantine(0)
    assert not cache.pins and cache.pins.ended[0][1]
    cache.kv.release(0)
    cache.kv.settle()
    assert cache.is_whole


def test_only_what_can_be_hit_is_pinned() -> None:
    cache = Cache()
    cache.ask("ab")
    assert cache.pins.pin(7, "alice", "", keys("abx"), 60).num_blocks == 2
    assert cache.pins.pin(7, "alice", "", keys("xy"), 60) == Bought()


def test_layers_with_a_window_pin_what_they_still_have() -> None:
    cache = Cache(16, window=2)
    assert cache.pin("abcd", 10) == Bought(4, 2 * 4 * 10 * SECOND), "each group is paid for"
    cache.flood()
    assert cache.ask("abcd") == 4
    cache.pins.unpin("alice", b"d".hex())
    assert cache.is_whole
