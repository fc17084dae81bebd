"""Each rule against the processor of the same name in transformers, and against the definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.processors import LogitRules, Penalties, floors, keep_allowed
from tests.torch.sampler_helpers import i32, random_logits, sample_one

VOCAB = 500
EOS = (7, 9)
PROMPT = [3, 3, 5, 100, 200, 41]
OUTPUT = [5, 5, 42, 300]
TOKENS = PROMPT + OUTPUT


def ruled(
    logits: torch.Tensor, tokens: list[int] = TOKENS, num_prompt: int = len(PROMPT), **given: Any
) -> torch.Tensor:
    """One row's logits after the rules."""
    rules = LogitRules(SamplingParams(**given), i32(tokens), num_prompt, EOS)
    changed = logits.clone()
    rules.apply(changed.numpy(), len(tokens))
    return changed


def theirs(processor: Any, logits: torch.Tensor, tokens: list[int] = TOKENS) -> torch.Tensor:
    result: torch.Tensor = processor(torch.tensor([tokens]), logits.clone().reshape(1, -1))[0]
    return result


@pytest.fixture(params=range(3))
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    return random_logits(request.param, 1, VOCAB)[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty(logits: torch.Tensor, penalty: float) -> None:
    expected = theirs(hf.RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert not torch.equal(expected, logits)
    torch.testing.assert_close(ruled(logits, repetition_penalty=penalty), expected)


def test_allowed_token_ids(logits: torch.Tensor) -> None:
    allowed = (1, 40, 499)
    banned = [token for token in range(VOCAB) if token not in allowed]
    expected = theirs(hf.SuppressTokensLogitsProcessor(banned), logits)
    assert torch.equal(ruled(logits, allowed_token_ids=allowed), expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("words", [VOCAB // 32, VOCAB // 32 + 1, VOCAB // 32 + 3])
def test_tokens_that_are_not_in_a_mask_or_behind_its_end_are_out(
    logits: torch.Tensor, words: int, share: float
) -> None:
    allowed = np.random.default_rng(3).random(words * 32) < share
    found = logits.numpy().copy()
    found[:3] = np.inf, -np.inf, -0.0
    expected = found.copy()
    keep_allowed(found, np.packbits(allowed, bitorder="little").view(np.uint32))
    expected[np.flatnonzero(~np.pad(allowed, (0, VOCAB))[:VOCAB])] = -np.inf
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "words",
    [
        ((42,),),
        ((42, 300, 8),),  # the row ends in 42, 300
        ((300, 8), (5, 300, 9), (300, 42, 10)),
        ((1,), (100, 200, 41, 5, 5, 42, 300, 11)),  # reaches back into the prompt
        ((*range(12), 6),),  # longer than the row
    ],
)
def test_bad_words(logits: torch.Tensor, words: tuple[tuple[int, ...], ...]) -> None:
    expected = theirs(hf.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=0), logits)
    assert torch.equal(ruled(logits, bad_words=words), expected)


def test_bad_words_that_do_not_match_change_nothing(logits: torch.Tensor) -> None:
    words = ((299, 8), (300, 42, 10), ())
    assert torch.equal(ruled(logits, bad_words=words), logits)


def test_a_bad_word_is_followed_as_the_row_grows(logits: torch.Tensor) -> None:
    rules = LogitRules(SamplingParams(bad_words=((1, 2, 3),)), i32([0, 1]), 2, EOS)
    for token, is_out in [(2, True), (1, False), (2, True), (3, False)]:
        rules.note(token)
        changed = logits.clone()
        rules.apply(changed.numpy(), 0)
        assert (changed[3].item() == -np.inf) is is_out


@pytest.mark.parametrize("min_tokens, is_out", [(len(OUTPUT), False), (len(OUTPUT) + 1, True)])
def test_min_tokens(logits: torch.Tensor, min_tokens: int, is_out: bool) -> None:
    stops = (200, 201)
    expected = theirs(
        hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, list(stops + EOS), device="cpu"), logits
    )
    changed = ruled(logits, min_tokens=min_tokens, max_tokens=100, stop_token_ids=stops)
    assert torch.equal(changed, expected)
    assert (changed[list(stops + EOS)] == -np.inf).all().item() is is_out


def test_logit_bias(logits: torch.Tensor) -> None:
    bias = {3: 100.0, 250: -100.0, 499: 0.25}
    expected = theirs(
        hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]), logits
    )
    torch.testing.assert_close(ruled(logits, logit_bias=bias), expected)


def test_presence_and_frequency_count_output_only(logits: torch.Tensor) -> None:
    changed = ruled(logits, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[5] -= 0.5 + 2 * 0.25
    expected[42] -= 0.5 + 0.25
    expected[300] -= 0.5 + 0.25
    torch.testing.assert_close(changed, expected)
    assert torch.equal(
        ruled(logits, TOKENS, len(TOKENS), presence_penalty=0.5, frequency_penalty=0.25), logits
    )


def test_penalties_follow_the_row_as_it_grows(logits: torch.Tensor) -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.25)
    grown = Penalties(params, i32(PROMPT), len(PROMPT))
    later = list(range(400, 490))
    for token in OUTPUT + later:
        grown.note(token)
    from_grown, from_known = logits.clone(), logits.clone()
    grown.apply(from_grown.numpy())
    Penalties(params, i32(TOKENS + later), len(PROMPT)).apply(from_known.numpy())
    assert torch.equal(from_grown, from_known)
    assert not torch.equal(from_grown, logits)


def test_the_order_is_bias_then_repetition_then_frequency_and_presence() -> None:
    params = SamplingParams(
        logit_bias={0: -3.0, 1: 5.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    changed = torch.tensor([1.0, -1.0, 2.0])
    LogitRules(params, i32([0, 1, 1]), 1, ()).apply(changed.numpy(), 3)
    assert changed.tolist() == [(1.0 - 3.0) * 2, (-1.0 + 5.0) / 2 - 2 * 0.5 - 0.25, 2.0]


def test_no_bias_brings_back_what_is_out(logits: torch.Tensor) -> None:
    changed = ruled(
        logits,
        allowed_token_ids=(1, 2),
        bad_words=((1,),),
        logit_bias={1: 100.0, 3: 100.0},
        repetition_penalty=0.5,
    )
    assert torch.isfinite(changed).nonzero().flatten().tolist() == [2]


# ---------------------------------------------------------------- truncation


def kept(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[bool]:
    (floor,) = floors(
        logits.reshape(1, -1).numpy(),
        np.array([temperature]),
        np.array([top_k]),
        np.array([top_p]),
        np.array([min_p]),
    )
    result: list[bool] = (logits >= float(floor)).tolist()
    return result


def their_kept(logits: torch.Tensor, temperature: float, *warpers: Any) -> list[bool]:
    for warper in (hf.TemperatureLogitsWarper(temperature), *warpers):
        logits = theirs(warper, logits)
    result: list[bool] = torch.isfinite(logits).tolist()
    return result


@pytest.mark.parametrize("top_k", [1, 2, 50, 499, 500, 501, 10**9])
def test_top_k(logits: torch.Tensor, top_k: int) -> None:
    assert kept(logits, 0.8, top_k=top_k) == their_kept(logits, 0.8, hf.TopKLogitsWarper(top_k))
    assert sum(kept(logits, 0.8, top_k=top_k)) == min(top_k, VOCAB)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_top_p(logits: torch.Tensor, temperature: float, top_p: float) -> None:
    assert kept(logits, temperature, top_p=top_p) == their_kept(
        logits, temperature, hf.TopPLogitsWarper(top_p)
    )


def test_top_p_of_a_flat_distribution_looks_beyond_the_head() -> None:
    logits = random_logits(1, 1, 4096, 40.0)[0].clamp(max=20.0).sub(torch.arange(4096) * 1e-4)
    logits[0] = 40.0  # the others are e^-10 times as likely or less, but many
    assert kept(logits, 1.9, top_p=0.99) == their_kept(logits, 1.9, hf.TopPLogitsWarper(0.99))
    assert sum(kept(logits, 1.9, top_p=0.99)) > 100


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.5, 1.0])
def test_min_p(logits: torch.Tensor, temperature: float, min_p: float) -> None:
    assert kept(logits, temperature, min_p=min_p) == their_kept(
        logits, temperature, hf.MinPLogitsWarper(min_p)
    )


@pytest.mark.parametrize("shift, is_kept", [(-1e-9, True), (1e-9, False)])
def test_min_p_is_exact_between_two_floats(shift: float, is_kept: bool) -> None:
    logits = torch.tensor([1.0, 0.3])
    min_p = float(np.exp(float(logits[1]) - 1.0 + shift))
    assert kept(logits, 1.0, min_p=min_p) == [True, is_kept]


@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(40, 0.8, 0.0), (40, 0.8, 0.02), (0, 0.7, 0.05), (3, 0.999, 0.01), (480, 0.9, 0.0)],
)
def test_together_in_the_order_min_p_top_k_top_p(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> None:
    warpers = [hf.MinPLogitsWarper(min_p)] if min_p else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)]
    assert kept(logits, 1.5, top_k, top_p, min_p) == their_kept(logits, 1.5, *warpers)


def test_a_large_top_k_gives_what_sorting_gives() -> None:
    logits = random_logits(5, 1, 5000)[0]
    for top_k in (1024, 1025, 4999):
        expected = their_kept(logits, 1.0, hf.TopKLogitsWarper(top_k), hf.TopPLogitsWarper(0.95))
        assert kept(logits, 1.0, top_k, 0.95) == expected


def test_rows_with_and_without_top_p_side_by_side() -> None:
    """A neighbour's top-p costs a row nothing, not even tokens too unlikely to show in a sum."""
    logits = torch.tensor([[0.0, -1.0, -90.0, -95.0]]).repeat(4, 1)
    floor = floors(
        logits.numpy(),
        np.ones(4),
        np.array([3, 3, 0, 2]),
        np.array([1.0, 0.5, 1.0, 0.99]),
        np.array([0.0, 0.0, 0.5, 0.0]),
    )
    assert (logits.numpy() >= floor[:, None]).sum(axis=1).tolist() == [3, 1, 1, 2]


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0, 3.0])
    assert kept(logits, 1.0, top_k=2) == [False, True, True, True, False, True]
    assert kept(logits, 1.0, top_p=0.6) == [False, True, True, True, False, True]
    # The tokens that equal the k-th count in the mass: 3.0 alone is under half of it, but over 40 %.
    assert kept(logits, 1.0, top_k=2, top_p=0.5) == [False, True, True, True, False, True]
    assert kept(logits, 1.0, top_k=2, top_p=0.45) == [False, False, False, False, False, True]


def test_temperature_does_not_touch_greedy_rows(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    assert (
        sample_one(SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9), logits).tokens[0] == best
    )
    assert sample_one(SamplingParams(temperature=1e-6, seed=1), logits).tokens[0] == best


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(64)
    logits[[50, 20, 33]] = 1.0
    assert sample_one(SamplingParams(temperature=0.0), logits).tokens[0] == 20
