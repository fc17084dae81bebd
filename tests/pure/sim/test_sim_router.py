"""Routers: who gets the next request."""

import numpy as np

from paceline.cli.sim.flags import ROUTER_NAMES
from paceline.lab.sim.router import ROUTERS, LeastLoaded, Loads, PrefixAware, RoundRobin


def loads(*tokens: int) -> Loads:
    return np.array(tokens, np.int64)


def test_the_command_line_knows_the_routers_there_are() -> None:
    assert tuple(ROUTERS) == ROUTER_NAMES


def test_round_robin_takes_each_in_turn_whatever_their_load() -> None:
    router = RoundRobin()
    assert [router.choose(loads(9, 0, 0), 0, ()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_takes_the_first_of_the_least() -> None:
    assert LeastLoaded().choose(loads(5, 3, 3, 9), 0, ()) == 1


def test_prefix_aware_returns_to_who_served_the_longest_beginning() -> None:
    router = PrefixAware(imbalance=2.0, slack_tokens=10)
    assert router.choose(loads(0, 5, 5), 0, (1, 2)) == 0
    assert router.choose(loads(9, 0, 5), 0, (1, 3)) == 0, "half of the prompt is known there"
    assert router.choose(loads(9, 0, 5), 0, (7, 8)) == 1, "nothing is known: the least loaded"
    assert router.choose(loads(9, 2, 0), 0, (7, 8, 9)) == 1
    assert router.choose(loads(9, 2, 0), 0, (1, 2, 8)) == 1, "the longest match decides, not the first block"


def test_prefix_aware_leaves_an_overloaded_replica_and_remembers_the_new_one() -> None:
    router = PrefixAware(imbalance=2.0, slack_tokens=10)
    assert router.choose(loads(0, 5), 0, (1,)) == 0
    assert router.choose(loads(20, 5), 0, (1,)) == 0, "twice the least and ten more are allowed"
    assert router.choose(loads(21, 5), 0, (1,)) == 1
    assert router.choose(loads(0, 5), 0, (1,)) == 1, "it was served there last"


def test_prefix_aware_keeps_tenants_apart() -> None:
    router = PrefixAware()
    assert router.choose(loads(0, 1), 0, (1,)) == 0
    assert router.choose(loads(1, 0), 1, (1,)) == 1


def test_prefix_aware_forgets_what_was_used_longest_ago() -> None:
    router = PrefixAware(capacity=3)
    router.choose(loads(0, 1), 0, (1, 2))
    router.choose(loads(0, 1), 0, (3, 4))  # block 2 goes: the end of the older prompt
    assert router.choose(loads(1, 0), 0, (2,)) == 1
    assert router.choose(loads(1, 0), 0, (3, 4)) == 0


def test_without_ids_prefix_aware_is_least_loaded() -> None:
    router = PrefixAware()
    assert [router.choose(loads(4, 2, 3), 0, ()) for _ in range(3)] == [1, 1, 1]
