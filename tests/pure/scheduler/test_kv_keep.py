"""Requests that drop the KV between their beginning and what is recent."""

from __future__ import annotations

import pytest

from paceline.config.engine import GroupSpec
from paceline.config.speculative import DraftConfig
from paceline.core.parameters import KVKeep
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.reference_output import reference_output

SIZE = 4
KEPT = KVKeep(first=6, recent=9)


def test_what_a_token_sees_follows_from_its_position() -> None:
    assert KEPT.start(SIZE) == 2
    ends = [KEPT.end(position, 17, SIZE) for position in range(26)]
    assert ends == [2] * 17 + [2, 2, 2, 3, 3, 3, 3, 4, 4]  # whole blocks before the last nine tokens
    for position in range(60):
        count = KEPT.alike(position, 17, SIZE)
        sees = [KEPT.end(position + further, 17, SIZE) for further in range(count + 1)]
        assert count > 0 and len(set(sees[:-1])) == 1
        assert sees[-1] != sees[0] or position + count == 17
    assert KEPT.end(KEPT.sees_all(17, SIZE) - 1, 17, SIZE) == 2 < KEPT.end(KEPT.sees_all(17, SIZE), 17, SIZE)


@pytest.mark.parametrize(
    "given",
    [
        {"first": -1, "recent": 4},
        {"first": 0, "recent": 0},
        {"first": 2**31, "recent": 4},
        {"first": 1.5, "recent": 4},
        {"first": True, "recent": 4},
        {"first": 4},
        {"first": 4, "recent": 4, "last": 4},
        [4, 4],
        "all",
    ],
)
def test_what_is_out_of_range_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidRequest, match="kv_keep") as caught:
        SamplingParams(kv_keep=given)  # type: ignore[arg-type]
    assert caught.value.param == "kv_keep"


def test_logprobs_of_the_prompt_are_refused_beside_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(kv_keep=KEPT, prompt_logprobs=1)
    assert caught.value.param == "kv_keep"
    assert SamplingParams(kv_keep={"first": 6, "recent": 9}, logprobs=1).kv_keep == KEPT  # type: ignore[arg-type]


def bench(**changes: object) -> Bench:
    return Bench(engine_config(block_size=SIZE, **changes))  # type: ignore[arg-type]


def test_blocks_come_back_as_they_are_dropped() -> None:
    made = bench(num_blocks=40)
    request = made.add(prompt(17), 40, kv_keep=KEPT)
    kv, most = made.scheduler.state.kv, 0
    while made.scheduler.state.requests:
        made.step()
        if made.tokens.get(request):
            most = max(most, kv.groups[0].pool.usable - kv.groups[0].pool.available)
    # Two blocks of the beginning, and those of nine recent tokens and the next one.
    assert most <= 2 + 4
    expected, _ = reference_output(prompt(17), sampling(40), block_size=SIZE)
    assert made.tokens[request] == expected
    assert made.finished[request].cost.dropped == (57 - 1 - 9) // SIZE * SIZE - 8


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, kv_keep=KEPT)


def test_only_what_saw_everything_is_offered_to_others() -> None:
    made = bench(num_blocks=60)
    first = made.add(prompt(17), 30, kv_keep=KEPT)
    made.run()
    whole = [*prompt(17), *made.tokens[first]]
    again = made.add(whole, 4)
    made.run()
    cached = made.finished[again].num_cached
    assert cached == 16, "the prompt, and nothing that was computed behind what is dropped"
    assert made.tokens[again] == reference_output(whole, SamplingParams(max_tokens=4))[0]


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_it_goes_on_as_it_would_have(swap: bool) -> None:
    made = bench(num_blocks=60, num_host_blocks=60 if swap else 0, max_preemptions=0)
    request = made.add(prompt(17), 40, kv_keep=KEPT)
    for _ in range(5):
        made.step(6)
        assert made.scheduler.preempt(request, swap=swap)
    made.run()
    assert made.tokens[request] == reference_output(prompt(17), sampling(40), block_size=SIZE)[0]
    assert bool(made.finished[request].cost.swaps) == swap


def test_a_branch_of_one_that_dropped_sees_its_prompt_whole() -> None:
    made = bench(num_blocks=80)
    parent = made.add(prompt(17), 40, kv_keep=KEPT)
    made.step(30)
    (child,) = made.fork(RequestId(parent))
    tokens = [*prompt(17), *made.tokens[parent]]
    made.run()
    left = 40 - len(tokens) + 17
    assert made.tokens[child] == reference_output(tokens, sampling(left), block_size=SIZE)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": (GroupSpec(window=16),)},
        {"drafts": DraftConfig(width=2)},
        {"mode": "static", "batch_size": 2},
    ],
)
def test_engines_that_cannot_drop_say_so(changes: dict[str, object]) -> None:
    made = bench(num_blocks=60, **changes)
    with pytest.raises(InvalidRequest, match="kv_keep: this") as caught:
        made.add(prompt(9), 10, kv_keep=KEPT)
    assert caught.value.param == "kv_keep"
