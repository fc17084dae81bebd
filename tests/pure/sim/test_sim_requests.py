"""Requests made from a workload: lengths, prefix keys, priorities, and that nothing is stored."""

import itertools

import numpy as np
import pytest

from paceline.core.request import BlockKey
from paceline.errors import InputError
from paceline.lab.sim.run import RequestSource, draw_priorities
from paceline.lab.workload.workload import Workload
from tests.pure.sim.sim_helpers import make_workload


def source(workload: Workload, block_size: int = 16) -> RequestSource:
    return RequestSource(workload, block_size, priorities=np.zeros(len(workload), np.int32))


def names(keys: list[BlockKey]) -> list[bytes]:
    return [key.key for key in keys]


def test_a_request_has_the_lengths_of_the_workload() -> None:
    workload = make_workload([0.5, 2.0], prompt=[7, 300], output=[1, 40], tenant=[0, 1])
    request = source(workload).make(1)
    assert (request.id, request.num_prompt, request.max_total) == (1, 300, 340)
    assert (request.arrival_s, request.tenant, request.keys) == (2.0, "tenant1", [])
    assert request.sampling.ignore_eos and request.sampling.max_tokens == 40


def test_prompts_take_no_memory() -> None:
    workload = make_workload([0.0, 0.0], prompt=[2_000_000_000, 5], output=1)
    request = source(workload).make(0)
    assert request.num_tokens == 2_000_000_000
    assert request.tokens.strides == (0,) and request.tokens.dtype == np.int32


def test_keys_cover_the_full_blocks_of_the_prompt_only() -> None:
    workload = make_workload([0.0], prompt=[70], prefix_ids=[(5, 6, 7)], prefix_block=32)
    keys = source(workload, 16).keys(0)
    assert len(keys) == 4  # 70 tokens are four blocks of 16 and a rest
    assert len(set(names(keys))) == 4
    assert all(key.payload == key.key for key in keys)


def test_keys_stop_where_the_workload_names_nothing_more() -> None:
    workload = make_workload([0.0], prompt=[100], prefix_ids=[(5, 6)], prefix_block=32)
    assert len(source(workload, 16).keys(0)) == 4


@pytest.mark.parametrize("block_size", [4, 16, 32, 48, 64, 100])
def test_equal_beginnings_have_equal_keys_and_others_do_not(block_size: int) -> None:
    ids = [(1, 2, 3, 4), (1, 2, 9, 4), (8, 2, 3, 4)]
    workload = make_workload([0.0] * 3, prompt=128, prefix_ids=ids, prefix_block=32)
    keys = [names(source(workload, block_size).keys(index)) for index in range(3)]
    assert all(len(set(own)) == len(own) == 128 // block_size for own in keys)
    for one, other in itertools.combinations(range(3), 2):
        equal = sum(a == b for a, b in zip(ids[one], ids[other], strict=True))
        shared = next((i for i, (a, b) in enumerate(zip(ids[one], ids[other], strict=True)) if a != b), 4)
        common = [a == b for a, b in zip(keys[one], keys[other], strict=True)]
        # As many blocks from the start as lie wholly within the shared ids, and then a difference.
        full = min(shared * 32 // block_size, len(common))
        assert all(common[:full]), (one, other, equal)
        if full < len(common):
            assert not common[full]


def test_tenants_never_share() -> None:
    workload = make_workload([0.0, 0.0], prompt=32, tenant=[0, 1], prefix_ids=[(5,), (5,)], prefix_block=32)
    made = source(workload)
    assert not set(names(made.keys(0))) & set(names(made.keys(1)))


def test_priorities() -> None:
    workload = make_workload([0.0] * 50, tenant=[i % 3 for i in range(50)])
    assert not draw_priorities("none", workload, 1).any()
    np.testing.assert_array_equal(draw_priorities("tenant", workload, 1), workload.tenant)
    drawn = draw_priorities("random:4", workload, 1)
    assert set(drawn.tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(drawn, draw_priorities("random:4", workload, 1))
    assert (drawn != draw_priorities("random:4", workload, 2)).any()
    made = RequestSource(workload, 16, priorities=drawn)
    assert [made.make(i).priority for i in range(50)] == drawn.tolist()


@pytest.mark.parametrize("form", ["", "random", "random:", "random:0", "random:1001", "random:-1", "tenants"])
def test_bad_priorities_are_refused(form: str) -> None:
    with pytest.raises(InputError, match="priorities"):
        draw_priorities(form, make_workload([0.0]), 0)
