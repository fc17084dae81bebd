"""Which engine holds which block: exact by news, expected for two seconds after a choice."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.routing.prefix_map import EXPECTED_S, PrefixMap

KEYS = [b"%08d" % number for number in range(200)]


def held(prefixes: PrefixMap, keys: list[bytes], num_engines: int = 4) -> list[int]:
    found: list[int] = prefixes.blocks_held(keys, num_engines).tolist()
    return found


def test_the_longest_beginning_counts_and_not_what_is_behind_a_hole() -> None:
    prefixes = PrefixMap()
    prefixes.stored(0, KEYS[:3])
    prefixes.stored(1, KEYS[:1] + KEYS[2:5])
    prefixes.stored(3, KEYS)
    assert held(prefixes, KEYS[:5]) == [3, 1, 0, 5]
    assert held(prefixes, KEYS) == [3, 1, 0, 200]
    assert held(prefixes, [b"x", *KEYS]) == [0, 0, 0, 0] == held(prefixes, [])
    prefixes.evicted(3, [KEYS[100], KEYS[0]])
    assert held(prefixes, KEYS) == [3, 1, 0, 0]
    prefixes.stored(3, [KEYS[0]])
    assert held(prefixes, KEYS) == [3, 1, 0, 100]


def test_what_is_expected_is_there_until_time_or_news_says_otherwise() -> None:
    prefixes = PrefixMap()
    prefixes.expect(2, KEYS[:4], 10.0)
    assert held(prefixes, KEYS) == [0, 0, 4, 0]
    prefixes.stored(2, KEYS[:2])
    prefixes.pass_time(10.0 + EXPECTED_S - 0.01)
    assert held(prefixes, KEYS) == [0, 0, 4, 0]
    prefixes.pass_time(10.0 + EXPECTED_S)
    assert held(prefixes, KEYS) == [0, 0, 2, 0], "what news has confirmed stays"


def test_a_second_choice_keeps_what_it_expects_itself() -> None:
    prefixes = PrefixMap()
    prefixes.expect(0, KEYS[:2], 0.0)
    prefixes.expect(0, KEYS[:4], 1.5, start=2)
    prefixes.pass_time(2.5)
    assert held(prefixes, KEYS[2:]) == [2, 0, 0, 0] and held(prefixes, KEYS) == [0, 0, 0, 0]


def test_an_expectation_lasts_as_long_as_the_first_choice_said_and_two_engines_have_their_own() -> None:
    prefixes = PrefixMap()
    prefixes.expect(0, KEYS[:2], 0.0)
    prefixes.expect(1, KEYS[:2], 1.0)
    prefixes.expect(0, KEYS[:3], 1.0)
    assert held(prefixes, KEYS) == [3, 2, 0, 0]
    prefixes.pass_time(2.5)
    assert held(prefixes, KEYS) == [0, 2, 0, 0] and held(prefixes, KEYS[2:]) == [1, 0, 0, 0]
    prefixes.pass_time(3.5)
    assert held(prefixes, KEYS) == held(prefixes, KEYS[2:]) == [0, 0, 0, 0]


def test_old_news_of_an_eviction_does_not_take_an_expectation() -> None:
    prefixes = PrefixMap()
    prefixes.expect(0, KEYS[:2], 0.0)
    prefixes.evicted(0, KEYS[:2])
    assert held(prefixes, KEYS) == [2, 0, 0, 0]


def test_an_engine_that_goes_takes_its_blocks_along_and_no_others() -> None:
    prefixes = PrefixMap()
    for engine in (0, 1):
        prefixes.stored(engine, KEYS[:3])
    prefixes.expect(1, KEYS[3:6], 0.0)
    prefixes.forget(1)
    assert held(prefixes, KEYS) == [3, 0, 0, 0] and len(prefixes) == 3 and not prefixes.held(1)
    prefixes.expect(1, KEYS[3:6], 1.0)
    prefixes.pass_time(2.5)
    assert held(prefixes, KEYS[3:]) == [0, 3, 0, 0], (
        "an expectation of the engine before ends nothing of the one after"
    )


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([3, 8, 64, 70]))
def test_the_map_is_what_a_set_for_each_engine_would_be(seed: int, num_engines: int) -> None:
    draw = random.Random(seed)
    prefixes = PrefixMap()
    truth: list[set[bytes]] = [set() for _ in range(num_engines)]
    for _ in range(60):
        engine, start = draw.randrange(num_engines), draw.randrange(190)
        keys = KEYS[start : start + draw.randrange(1, 80)]
        action = draw.random()
        if action < 0.6:
            prefixes.stored(engine, keys)
            truth[engine].update(keys)
        elif action < 0.9:
            prefixes.evicted(engine, keys)
            truth[engine].difference_update(keys)
        else:
            prefixes.forget(engine)
            truth[engine].clear()
        asked = KEYS[start:]
        expected = [
            next((at for at, key in enumerate(asked) if key not in each), len(asked)) for each in truth
        ]
        assert held(prefixes, asked, num_engines) == expected
    assert len(prefixes) == len(set().union(*truth))
