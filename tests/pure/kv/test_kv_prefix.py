"""Block keys and the prefix cache: chains, tenants, collisions."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.core.request import BlockKey
from paceline.kv.prefix import KeyMaker, PrefixCache
from tests.dst.injected import CollidingKeyMaker

SIZE = 3
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=14)
names = st.text(alphabet="a:1\x00é", max_size=8)


def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def maker() -> KeyMaker:
    return KeyMaker(SIZE, b"k" * 32)


def keys_of(values: list[int], tenant: str = "t", model: int = 0, adapter: int = 0) -> list[BlockKey]:
    return maker().extend([], column(values), maker().root(tenant, model, adapter))


# -- keys --------------------------------------------------------------------------------------------------


@given(tokens)
def test_there_is_one_key_per_full_block(values: list[int]) -> None:
    made = keys_of(values)
    assert len(made) == len(values) // SIZE
    assert len({key.key for key in made}) == len(made)


@given(tokens, tokens)
def test_equal_beginnings_have_equal_keys_and_nothing_else_has(one: list[int], other: list[int]) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    for position, (left, right) in enumerate(zip(keys_of(one), keys_of(other), strict=False)):
        same = (position + 1) * SIZE <= common
        assert (left.key == right.key) == same
        assert (left.payload == right.payload) == same


@given(tokens, st.integers(0, 14))
def test_keys_made_in_two_goes_are_the_same(values: list[int], cut: int) -> None:
    root = maker().root("t")
    first = maker().extend([], column(values[:cut]), root)
    rest = maker().extend(first, column(values), root)
    assert first + rest == maker().extend([], column(values), root)
    assert maker().extend(first + rest, column(values), root) == []


def test_equal_tokens_after_another_prefix_have_another_key() -> None:
    one = keys_of([1, 2, 3, 7, 8, 9])
    other = keys_of([4, 5, 6, 7, 8, 9])
    assert one[1].key != other[1].key
    assert one[1].payload != other[1].payload, "a hit compares what came before as well"


@given(
    st.tuples(names, st.integers(0, 20), st.integers(0, 20)),
    st.tuples(names, st.integers(0, 20), st.integers(0, 20)),
)
def test_tenant_model_and_adapter_are_in_the_root(
    one: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    assume(one != other)
    assert maker().root(*one) != maker().root(*other)
    assert keys_of([1, 2, 3], *one)[0].key != keys_of([1, 2, 3], *other)[0].key


def test_names_cannot_run_into_the_numbers_behind_them() -> None:
    assert maker().root("a:1", 2) != maker().root("a", 1, 2)
    assert maker().root("a:0:0", 0, 0) != maker().root("a", 0, 0)
    assert maker().root("", 0, 0) != maker().root(":0:0", 0, 0)


def test_keys_are_keyed_by_the_process() -> None:
    """They cannot be computed outside: two processes make different keys from the same tokens."""
    one, other = KeyMaker(SIZE), KeyMaker(SIZE)
    assert one.root("t") != other.root("t")
    assert one.extend([], column([1, 2, 3]), b"r") != other.extend([], column([1, 2, 3]), b"r")


def test_token_boundaries_cannot_be_moved() -> None:
    """Tokens have a fixed width in the hash: 0x0102 and 0x01, 0x02 are different texts."""
    assert keys_of([0x0102, 0, 3])[0].key != keys_of([0x02, 0x01, 3])[0].key


def test_a_view_with_strides_gives_the_keys_of_its_values() -> None:
    wide = column([1, 99, 2, 99, 3, 99])
    assert maker().extend([], wide[::2], b"r") == maker().extend([], column([1, 2, 3]), b"r")


# -- the cache ---------------------------------------------------------------------------------------------


def test_a_hit_compares_the_payload_too() -> None:
    cache = PrefixCache(10)
    assert cache.add([4], [BlockKey(b"k", b"mine")])
    assert cache.find(BlockKey(b"k", b"mine")) == 4
    assert cache.find(BlockKey(b"k", b"yours")) is None
    assert cache.find(BlockKey(b"other", b"mine")) is None


def test_the_first_block_under_a_key_stays() -> None:
    cache = PrefixCache(10)
    assert cache.add([4], [BlockKey(b"k", b"mine")])
    assert not cache.add([5], [BlockKey(b"k", b"mine")])
    assert not cache.add([6], [BlockKey(b"k", b"yours")])
    assert cache.find(BlockKey(b"k", b"mine")) == 4
    assert cache.entries() == {4: BlockKey(b"k", b"mine")}


def test_what_is_dropped_is_found_no_more_and_its_key_is_free() -> None:
    cache = PrefixCache(10)
    cache.add([4], [BlockKey(b"k", b"mine")])
    cache.drop([4])
    assert cache.find(BlockKey(b"k", b"mine")) is None
    assert len(cache) == 0 and not cache.entries()
    assert cache.add([5], [BlockKey(b"k", b"yours")])


@given(st.lists(tokens, max_size=6))
def test_colliding_keys_never_give_anothers_block(prompts: list[list[int]]) -> None:
    """K5: with a hash that returns a constant, the payload alone keeps prefixes apart."""
    colliding = CollidingKeyMaker(SIZE, b"k" * 32)
    cache = PrefixCache(10)
    owner: dict[int, list[int]] = {}
    for values in prompts:
        keys = colliding.extend([], column(values), b"r" * 32)
        assert all(key.key == bytes(32) for key in keys)
        for position, key in enumerate(keys):
            prefix = values[: (position + 1) * SIZE]
            found = cache.find(key)
            assert found is None or owner[found] == prefix
            block = len(owner) + 1
            if cache.add([block], [key]):
                owner[block] = prefix
