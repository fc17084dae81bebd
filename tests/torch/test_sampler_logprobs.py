"""Log-probabilities: those of the raw logits, in order, with the chosen token and its rank."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.sampler import prompt_logprobs
from tests.torch.sampler_helpers import random_logits, sample_one

VOCAB = 300


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("top", [-1, 0, 1, 20])
def test_values_are_the_log_softmax(temperature: float, top: int) -> None:
    logits = random_logits(top + 5, 1, VOCAB)[0]
    drawn = sample_one(SamplingParams(temperature=temperature, seed=4, logprobs=top), logits, [8, 9])
    (entry,) = drawn.logprobs
    expected = logits.double().log_softmax(0)
    assert (entry.row, entry.position, entry.token) == (0, 2, drawn.tokens[0])
    assert entry.logprob == pytest.approx(expected[entry.token].item(), abs=1e-9)
    assert entry.rank == 1 + int((logits > logits[entry.token]).sum())
    values, tokens = expected.sort(descending=True)
    count = VOCAB if top == -1 else top
    assert entry.top_tokens == tuple(tokens[:count].tolist())
    assert entry.top_logprobs == pytest.approx(values[:count].tolist(), abs=1e-9)


def test_the_chosen_token_is_reported_outside_the_top_too() -> None:
    logits = random_logits(1, 1, VOCAB)[0]
    last = int(logits.argmin())
    params = SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=(last,))
    (entry,) = sample_one(params, logits).logprobs
    assert (entry.token, entry.rank) == (last, VOCAB)
    assert entry.logprob == pytest.approx(logits.log_softmax(0)[last].item(), abs=1e-5)
    assert last not in entry.top_tokens and len(entry.top_tokens) == 2


def test_a_token_has_one_number_wherever_it_stands() -> None:
    """Clients compare the chosen token's value with the largest one for equality."""
    for seed in range(10):
        (entry,) = sample_one(
            SamplingParams(temperature=0.0, logprobs=3), random_logits(seed, 1, VOCAB)[0]
        ).logprobs
        assert entry.rank == 1 and entry.logprob == entry.top_logprobs[0]


@pytest.mark.parametrize(
    "rules",
    [
        {"logit_bias": {3: 50.0}},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0},
        {"temperature": 0.1, "top_k": 2},
        {"allowed_token_ids": (1, 2, 3)},
        {"min_tokens": 2, "stop_token_ids": (1, 5, 9)},
    ],
)
def test_rules_and_temperature_do_not_show(rules: dict[str, Any]) -> None:
    logits = random_logits(2, 1, VOCAB)[0]
    (plain,) = sample_one(SamplingParams(seed=1, logprobs=20), logits).logprobs
    (ruled,) = sample_one(SamplingParams(**{"seed": 1, "logprobs": 20, **rules}), logits).logprobs
    assert ruled.top_tokens == plain.top_tokens
    assert ruled.top_logprobs == plain.top_logprobs


def test_equals_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    params = SamplingParams(temperature=0.0, logprobs=4, allowed_token_ids=(5,))
    (entry,) = sample_one(params, logits).logprobs
    assert entry.top_tokens == (1, 3, 2, 4)
    assert entry.rank == 3


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    (entry,) = sample_one(
        SamplingParams(temperature=0.0, logprobs=20), torch.tensor([0.0, 1.0, -torch.inf])
    ).logprobs
    assert entry.top_tokens == (1, 0, 2)
    assert entry.top_logprobs[2] == -np.inf


def test_rows_that_did_not_ask_get_none() -> None:
    assert sample_one(SamplingParams(temperature=0.0), torch.zeros(4)).logprobs == ()


# ---------------------------------------------------------------- of the prompt


@pytest.mark.parametrize("top", [0, 2, -1])
def test_of_a_prompt(top: int) -> None:
    logits = random_logits(3, 5, VOCAB)
    targets, positions = np.array([4, 9, 299, 0, 4]), np.arange(11, 16)
    entries = prompt_logprobs(logits.numpy(), targets, positions, row=6, top=top)
    expected = logits.double().log_softmax(1)
    assert [entry.row for entry in entries] == [6] * 5
    assert [entry.position for entry in entries] == positions.tolist()
    assert [entry.token for entry in entries] == targets.tolist()
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[i, targets[i]].item(), abs=1e-9)
        assert entry.rank == 1 + int((logits[i] > logits[i, targets[i]]).sum())
        values, tokens = expected[i].sort(descending=True)
        count = VOCAB if top == -1 else top
        assert entry.top_tokens == tuple(tokens[:count].tolist())
        assert entry.top_logprobs == pytest.approx(values[:count].tolist(), abs=1e-9)


def test_of_a_prompt_with_numbers_that_are_not_usable() -> None:
    logits = random_logits(3, 4, VOCAB)
    logits[1, 8], logits[2, 9] = torch.nan, torch.inf
    entries = prompt_logprobs(logits.numpy(), np.array([1, 2, 3, 4]), np.arange(4), row=0, top=1)
    assert [entry.position for entry in entries] == [0, 3]


def test_of_no_prompt() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert prompt_logprobs(np.zeros((0, VOCAB), np.float32), nothing, nothing, row=0, top=1) == ()
