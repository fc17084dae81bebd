"""Sampling parameters: each field at its limit and just beyond it, and the seeds of branches."""

import math
import tracemalloc
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import UNSUPPORTED, RequestOutputKind, SamplingParams, branch_seed
from paceline.errors import InvalidRequest, did_you_mean

INT_MAX = 2**31 - 1
TINY = 1e-12

# field, what is accepted, what is not
LIMITS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, INT_MAX], [0, -1, INT_MAX + 1]),
    ("min_tokens", [0, 16], [-1, INT_MAX + 1]),
    ("n", [1, 128], [0, -1, 129]),
    ("temperature", [0.0, 0, 2.0, 2], [-TINY, 2.0 + 1e-9, 3]),
    ("top_k", [-1, 0, 1, INT_MAX], [-2, INT_MAX + 1]),
    ("top_p", [1e-9, 0.5, 1.0, 1], [0.0, -0.1, 1.0 + 1e-9]),
    ("min_p", [0.0, 1.0], [-TINY, 1.0 + 1e-9]),
    ("repetition_penalty", [1e-3, 1.0, 100.0], [0.0, 0.99e-3, 100.1]),
    ("presence_penalty", [-2.0, 2.0], [-2.001, 2.001]),
    ("frequency_penalty", [-2.0, 2.0], [-2.001, 2.001]),
    ("seed", [None, 0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    ("logprobs", [None, -1, 0, 20], [-2, 21]),
    ("prompt_logprobs", [None, -1, 0, 20], [-2, 21]),
    ("stop", [(), ("x",) * 16, ("y" * 256,)], [("x",) * 17, ("",), ("y" * 257,)]),
    ("stop_token_ids", [(), tuple(range(64))], [tuple(range(65))]),
    ("logit_bias", [{}, dict.fromkeys(range(300), 1.0)], [dict.fromkeys(range(301), 1.0)]),
    ("logit_bias", [{0: -100, 1: 100}], [{0: -100.1}, {0: 100.1}, {0: math.nan}, {0: math.inf}, {"1": 1.0}]),
    ("allowed_token_ids", [None, (1,)], [()]),
    ("bad_words", [(), ((1, 2),) * 128], [((1,),) * 129]),
]
ACCEPTED = [(name, value) for name, good, _ in LIMITS for value in good]
REFUSED = [(name, value) for name, _, bad in LIMITS for value in bad]
WHOLE = ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs", "prompt_logprobs")
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def shorten(value: object) -> str:
    return repr(value)[:24]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=shorten)
def test_a_value_at_its_limit_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=shorten)
def test_a_value_beyond_its_limit_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name.split("_", maxsplit=1)[0]) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", (1,), math.nan], ids=repr)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_nothing_else(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a whole number") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None], ids=repr)
@pytest.mark.parametrize("name", REAL)
def test_real_numbers_are_finite_and_nothing_else(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a finite number") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", [*REAL, "logit_bias"])
def test_a_number_too_large_for_a_float_is_refused(name: str) -> None:
    value: Any = {3: 10**400} if name == "logit_bias" else 10**400
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_stop_strings_need_the_text_of_an_answer() -> None:
    with pytest.raises(InvalidRequest, match="leave detokenize on, or use stop_token_ids") as refused:
        SamplingParams(stop=("end",), detokenize=False)
    assert refused.value.param == "stop"
    assert SamplingParams(stop_token_ids=(7,), detokenize=False).stop_token_ids == (7,)


def test_a_bias_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={3: "heavy"})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "top_k", *REAL])
def test_only_what_may_be_absent_may_be_none(name: str) -> None:
    nothing: Any = None
    with pytest.raises(InvalidRequest):
        SamplingParams(**{name: nothing})


def test_min_tokens_may_equal_but_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequest, match=r"min_tokens \(5\) is larger than max_tokens \(4\)") as caught:
        SamplingParams(max_tokens=4, min_tokens=5)
    assert caught.value.param == "min_tokens"


IDS: list[tuple[str, Any]] = [
    ("stop_token_ids", lambda token: (1, token)),
    ("logit_bias", lambda token: {1: 0.5, token: 1.0}),
    ("allowed_token_ids", lambda token: (1, token)),
    ("bad_words", lambda token: ((1,), (1, token))),
]


@pytest.mark.parametrize(("name", "with_token"), IDS, ids=[name for name, _ in IDS])
def test_token_ids_are_checked_against_the_vocabulary(name: str, with_token: Any) -> None:
    SamplingParams(**{name: with_token(31)}).check_vocabulary(32)
    SamplingParams(**{name: with_token(0)}).check_vocabulary(32)
    for token in (32, -1):
        params = SamplingParams(**{name: with_token(token)})
        with pytest.raises(InvalidRequest, match=rf"{name}: token id {token} is not in \[0, 32\)") as caught:
            params.check_vocabulary(32)
        assert caught.value.param == name


def test_no_ids_need_no_vocabulary() -> None:
    SamplingParams().check_vocabulary(1)


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_the_default_bias_cannot_be_written_to_by_accident() -> None:
    with pytest.raises(TypeError):
        SamplingParams().logit_bias[3] = 1.0  # type: ignore[index]


seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds)
def test_branch_zero_keeps_the_seed(seed: int) -> None:
    assert branch_seed(seed, 0) == seed


@given(seeds, st.integers(1, 200))
def test_a_branch_seed_is_a_valid_seed_and_always_the_same(seed: int, branch: int) -> None:
    made = branch_seed(seed, branch)
    assert made == branch_seed(seed, branch)
    assert SamplingParams(seed=made).seed == made


@given(seeds)
def test_branches_of_one_request_differ(seed: int) -> None:
    made = [branch_seed(seed, branch) for branch in range(129)]
    assert len(set(made)) == len(made)


@given(seeds, seeds, st.integers(1, 9))
def test_equal_branches_of_different_seeds_differ(one: int, other: int, branch: int) -> None:
    assert (branch_seed(one, branch) == branch_seed(other, branch)) == (one == other)


def test_branch_seeds_are_pinned() -> None:
    """A recorded run must give the same tokens after an upgrade."""
    assert branch_seed(1, 1) != branch_seed(11, 1)
    assert branch_seed(1, 11) != branch_seed(11, 1)
    assert [branch_seed(42, branch) for branch in (1, 2)] == [1984979838283651376, 1180275854781279639]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name_with_a_hint(name: str) -> None:
    given: dict[str, Any] = {name: True}
    nothing: dict[str, Any] = {name: None}
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported: .") as caught:
        SamplingParams(**given)
    assert caught.value.param == name
    assert SamplingParams(**nothing, top_p=0.5) == SamplingParams(top_p=0.5), "None asks for nothing"


def test_a_name_of_millions_of_characters_is_not_compared_as_a_whole() -> None:
    name = "temprature" + "e" * 3_000_000
    tracemalloc.start()
    hint = did_you_mean(name, ["temperature", "top_p"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not hint and peak < 100_000
    assert did_you_mean("temprature", ["temperature", "top_p"]) == "; did you mean temperature?"


def test_an_unknown_name_suggests_the_closest() -> None:
    given: dict[str, Any] = {"temprature": 0.5}
    with pytest.raises(
        TypeError, match="^SamplingParams has no argument temprature; did you mean temperature\\?$"
    ):
        SamplingParams(**given)


def test_the_kind_of_output_is_one_of_three() -> None:
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    wrong: Any = "delta"
    with pytest.raises(InvalidRequest, match="output_kind must be a RequestOutputKind"):
        SamplingParams(output_kind=wrong)


def test_parameters_of_a_branch_are_those_with_other_lengths() -> None:
    whole = SamplingParams(
        n=3, max_tokens=64, min_tokens=9, temperature=0.5, seed=7, prompt_logprobs=2, stop=("a",), top_k=5
    )
    expected = replace(whole, max_tokens=5, min_tokens=2, n=1, prompt_logprobs=None)
    assert whole.of_branch(5, 2) == expected
    assert whole.of_branch(5, 2, {"top_k": 3}) == replace(expected, top_k=3)
    assert (whole.n, whole.max_tokens) == (3, 64)
