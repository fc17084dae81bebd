"""Stopping: end of sequence, stop ids, `ignore_eos`, and `min_tokens` that holds all of them back."""

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.sampler import Sampler
from tests.torch.sampler_helpers import i32, sample_one

EOS = (2, 6)


def favouring(*tokens: int) -> torch.Tensor:
    """Logits under which the first token is the best, then the second, and so on."""
    logits = torch.zeros(10)
    for i, token in enumerate(tokens):
        logits[token] = 10.0 - i
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize(
    "token, stop_ids, ignore_eos, stopped",
    [
        (2, (), False, True),
        (6, (), False, True),
        (3, (), False, False),
        (2, (), True, False),
        (3, (3,), False, True),
        (3, (4, 3, 5), True, True),
        (2, (3,), True, False),
        (2, (2,), True, True),  # asked for by name
        (0, (), False, False),
    ],
)
def test_what_stops(
    temperature: float, token: int, stop_ids: tuple[int, ...], ignore_eos: bool, stopped: bool
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, stop_token_ids=stop_ids, ignore_eos=ignore_eos)
    drawn = sample_one(params, favouring(token), eos=EOS)
    assert drawn.tokens[0] == token
    assert drawn.stopped[0] == stopped


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_every_stop_back_until_it_is_reached(ignore_eos: bool) -> None:
    params = SamplingParams(
        temperature=0.0, min_tokens=2, stop_token_ids=(8,), ignore_eos=ignore_eos, max_tokens=9
    )
    sampler = Sampler(1, 10, EOS)
    sampler.join(0, params, i32([1, 1, 1]), 3)
    logits = favouring(8, 2, 6, 4)
    drawn = [sampler.sample(logits[None].clone().numpy(), np.array([0]), np.array([3 + i])) for i in range(4)]
    assert [int(one.tokens[0]) for one in drawn] == [4, 4, 8, 8]
    assert [bool(one.stopped[0]) for one in drawn] == [False, False, True, True]


def test_min_tokens_counts_output_from_before_a_preemption() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert sample_one(params, favouring(2, 5), [1, 1, 1], 2, EOS).tokens[0] == 5
    assert sample_one(params, favouring(2, 5), [1, 1, 1, 1], 2, EOS).tokens[0] == 2


def test_rows_with_few_and_many_stop_ids_side_by_side() -> None:
    sampler = Sampler(3, 100, EOS)
    many = tuple(range(30, 94))
    for row, stop_ids in enumerate([(), many, (7,)]):
        params = SamplingParams(temperature=0.0, stop_token_ids=stop_ids)
        sampler.join(row, params, i32([1]), 1)
    for token, expected in [(93, [False, True, False]), (7, [False, False, True]), (6, [True] * 3)]:
        logits = torch.zeros(3, 100)
        logits[:, token] = 1.0
        assert (
            sampler.sample(logits.numpy(), np.arange(3), np.ones(3, dtype=np.int64)).stopped.tolist()
            == expected
        )


def test_stop_ids_of_a_former_owner_are_gone() -> None:
    sampler = Sampler(1, 10, EOS)
    for params, stopped in [
        (SamplingParams(temperature=0.0, stop_token_ids=(3, 4, 5)), True),
        (SamplingParams(temperature=0.0, stop_token_ids=(4,), ignore_eos=True), False),
    ]:
        sampler.join(0, params, i32([1]), 1)
        assert sampler.sample(favouring(5)[None].numpy(), np.array([0]), np.array([1])).stopped[0] == stopped


def test_an_end_of_sequence_the_model_has_no_logit_for() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    drawn = sample_one(params, favouring(2, 5), eos=(2, 10, 50_000))
    assert drawn.tokens[0] == 5
