"""Requests of a simulation: made from a workload, given to replicas, compared with what a client measured."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.sim.flags import ROUTER_NAMES
from paceline.core.request import BlockKey
from paceline.errors import InputError
from paceline.lab.report.summary import summarize
from paceline.lab.sim.recorded import read_client_run
from paceline.lab.sim.run import RequestSource, draw_priorities
from paceline.lab.workload.workload import Workload
from paceline.routing.routers import ROUTERS
from tests.pure.lab.sim.sim_helpers import make_workload, sim_config, small_engine


def source(workload: Workload, block_size: int = 16) -> RequestSource:
    engine = small_engine()
    return RequestSource(workload, sim_config(replace(engine, kv=replace(engine.kv, block_size=block_size))))


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
    made = RequestSource(workload, sim_config(priorities="random:4", seed=1))
    assert [made.make(i).priority for i in range(50)] == drawn.tolist()


@pytest.mark.parametrize("form", ["", "random", "random:", "random:0", "random:1001", "random:-1", "tenants"])
def test_bad_priorities_are_refused(form: str) -> None:
    with pytest.raises(InputError, match="priorities"):
        draw_priorities(form, make_workload([0.0]), 0)


# ----------------------------------------------------------------
# Routers


def test_the_command_line_knows_the_routers_there_are() -> None:
    assert tuple(ROUTERS) == ROUTER_NAMES


# ----------------------------------------------------------------
# A client's result beside the simulator: what is read of it, and what is said of one that cannot be read.


RESULT: dict[str, Any] = {
    "input_lens": [10, 20, 30, 40],
    "output_lens": [3, 2, 0, 1],
    "ttfts": [0.5, 0.25, None, 0.1],
    "itls": [[0.1, 0.2], [0.3], [], []],
    "due_times": [2.0, 1.0, 3.0, 6.0],
    "start_times": [2.5, 1.5, 3.5, 6.5],
}


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_requests_that_were_answered_are_read_in_the_order_they_were_due(tmp_path: Path) -> None:
    run = read_client_run(write(tmp_path / "run.json", RESULT))
    assert run.num_left_out == 1
    assert run.workload.arrival_s.tolist() == [0.0, 1.0, 5.0]
    assert run.workload.prompt_len.tolist() == [20, 10, 40] and run.workload.output_len.tolist() == [2, 3, 1]
    assert run.record.first_token_s.tolist() == [0.25, 1.5, 5.1]
    assert run.record.finished_s.tolist() == pytest.approx([0.55, 1.8, 5.1])
    summary = summarize(run.record)
    assert summary.ttft_s.p50 == pytest.approx(0.25) and summary.itl_s.count == 3


def test_times_of_sending_stand_in_where_due_times_are_missing(tmp_path: Path) -> None:
    result = {name: value for name, value in RESULT.items() if name != "due_times"}
    run = read_client_run(write(tmp_path / "run.json", result))
    assert run.workload.arrival_s.tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"itls": None}, "itls missing"),
        ({"due_times": None, "start_times": None}, "due_times missing"),
        ({"input_lens": [1, 2]}, "differ in length"),
        ({"input_lens": ["a", 1, 2, 3]}, "'input_lens' is not a list of numbers"),
        ({"ttfts": [None] * 4}, "none of its requests was answered"),
        ({"ttfts": None}, "holds no times of requests"),
    ],
)
def test_what_is_wrong_with_a_result_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    merged = {**RESULT, **changes}
    result = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(InputError, match=said):
        read_client_run(write(tmp_path / "run.json", result))


@pytest.mark.parametrize(("text", "said"), [("", "neither a run log nor JSON"), ("[1]", "holds no times")])
def test_files_of_another_kind(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=said):
        read_client_run(tmp_path / "run.json")
    with pytest.raises(InputError, match="cannot read"):
        read_client_run(tmp_path / "missing.json")
