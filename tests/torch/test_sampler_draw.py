"""The draw: the definition token by token, the distribution it gives, and the bounds that make it cheap."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.noise import gumbel, lane_words
from paceline.runner.sampling.sampler import BATCH, Draws, Sampler, draw, noise_bound
from tests.torch.sampler_helpers import Story, i32, random_logits, sample_one, token_reference

FLAT = np.array([-np.inf], dtype=np.float32)


def histogram(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> NDArray[np.int64]:
    """How often each token is drawn, from as many rows at as many positions, each row with a separate seed."""
    num_rows = 250
    sampler = Sampler(num_rows, len(logits), ())
    for row in range(num_rows):
        sampler.join(row, replace(params, seed=row), i32([0]), 1)
    counts = np.zeros(len(logits), dtype=np.int64)
    for position in range(1, 1 + num_draws // num_rows):
        batch = logits.repeat(num_rows, 1)
        drawn = sampler.sample(batch.numpy(), np.arange(num_rows), np.full(num_rows, position))
        assert drawn.finite.all()
        counts += np.bincount(drawn.tokens, minlength=len(logits))
    return counts


def chi_square(counts: NDArray[np.int64], probabilities: torch.Tensor) -> float:
    expected = probabilities.double().numpy() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def critical_value(degrees: int) -> float:
    """What chi-square exceeds with a probability of one in a million, by Wilson and Hilferty."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


LOGITS = torch.tensor([2.0, 1.5, 1.4, 0.0, -0.5, 1.9, -1.0, 0.7, 0.2, -2.0, 1.1])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_distribution_is_the_softmax(temperature: float) -> None:
    counts = histogram(LOGITS, SamplingParams(temperature=temperature), 20_000)
    limit = critical_value(len(LOGITS) - 1)
    assert chi_square(counts, (LOGITS / temperature).softmax(0)) < limit
    # The test itself: a temperature 15 % off is noticed.
    assert chi_square(counts, (LOGITS / (temperature * 1.15)).softmax(0)) > limit


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=4), SamplingParams(top_p=0.8), SamplingParams(min_p=0.3, temperature=1.5)],
)
def test_what_is_kept_is_drawn_in_proportion(params: SamplingParams) -> None:
    counts = histogram(LOGITS, params, 20_000)
    kept = torch.from_numpy(counts > 0)
    assert 2 <= kept.sum() < len(LOGITS)
    assert LOGITS[kept].min() > LOGITS[~kept].max()
    probabilities = (LOGITS / params.temperature).masked_fill(~kept, -math.inf).softmax(0)
    assert chi_square(counts, probabilities) < critical_value(int(kept.sum()) - 1)


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    """Pairs of tokens over two equal tokens: each of the four pairs in a quarter of the cases."""
    logits = torch.zeros(400, 2)
    for seeds, positions in [(np.arange(400), (9, 10)), (np.arange(0, 800, 2), (9, 9))]:
        tokens = []
        for shift, position in enumerate(positions):
            sampler = Sampler(400, 2, ())
            for row, seed in enumerate(seeds.tolist()):
                sampler.join(row, SamplingParams(seed=seed + shift * (positions == (9, 9))), i32([0]), 1)
            tokens.append(
                sampler.sample(logits.clone().numpy(), np.arange(400), np.full(400, position)).tokens
            )
        pairs = np.bincount(tokens[0] * 2 + tokens[1], minlength=4)
        assert chi_square(pairs, torch.full((4,), 0.25)) < critical_value(3)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 6, 7, 64, 65, 66, 67])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 2.0])
def test_tokens_are_those_of_the_definition(vocab_size: int, temperature: float) -> None:
    for seed in range(20):
        logits = random_logits(seed, 1, vocab_size)[0]
        params = SamplingParams(temperature=temperature, seed=seed - 10)
        expected = token_reference(logits.numpy(), Story(params, [1, 2, 3], 3))
        assert sample_one(params, logits).tokens[0] == expected


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [3 * BATCH, 4 * BATCH + 17, 9 * BATCH])
def test_bounds_never_change_the_winner(scale: float, vocab_size: int) -> None:
    """Large vocabularies, where most tokens are ruled out early: the same as noise for every token."""
    rows = 6
    logits = random_logits(3, rows, vocab_size, scale).numpy()
    keys, positions = np.arange(rows, dtype=np.uint64), np.arange(50, 50 + rows)
    temperature = np.array([0.2, 0.7, 1.0, 1.0, 1.5, 2.0])
    groups = np.arange(-(-vocab_size // 4))
    drawn = draw(
        Draws(
            logits=logits,
            best=logits.argmax(axis=1),
            floor=FLAT.repeat(rows),
            temperature=temperature,
            key=keys,
            position=positions,
        )
    )
    for row in range(rows):
        noise = gumbel(lane_words(keys[row : row + 1], positions[row : row + 1], groups)).ravel()[:vocab_size]
        offset = logits[row].astype(np.float64) - float(logits[row].max())
        assert drawn[row] == (offset / temperature[row] + noise).argmax()


def test_the_bound_of_the_noise_is_a_bound_and_close() -> None:
    generator = np.random.default_rng(1)
    words = generator.integers(0, 2**32, 100_000, dtype=np.uint32)
    words = np.concatenate(
        [words, 2**32 - 1 - 2 ** np.arange(32, dtype=np.uint32), np.arange(100, dtype=np.uint32)]
    )
    noise, bound = gumbel(words), noise_bound(words)
    assert (bound >= noise - 1e-4).all()
    high = (noise > 2) & (noise < 15)  # where a unit of 2^-32 is small beside the word
    assert (bound[high] - noise[high]).max() < 0.2


def test_a_token_with_the_largest_noise_is_in_reach() -> None:
    """The least likely of all tokens wins where its noise says so, however the others look."""
    best_gap = 0.0
    for seed in range(300):
        logits = torch.zeros(4000)
        logits[0] = 8.0
        token = int(sample_one(SamplingParams(seed=seed), logits).tokens[0])
        expected = token_reference_fast(logits, seed)
        assert token == expected
        best_gap = max(best_gap, float(logits[0] - logits[token]))
    assert best_gap == 8.0  # it did happen


def token_reference_fast(logits: torch.Tensor, seed: int) -> int:
    words = lane_words(np.array([seed], dtype=np.uint64), np.array([3]), np.arange(len(logits) // 4))
    return int((logits.double().numpy() + gumbel(words).ravel()).argmax())


def test_two_seeds_and_two_positions_differ() -> None:
    logits = torch.zeros(1000)
    tokens = {int(sample_one(SamplingParams(seed=seed), logits).tokens[0]) for seed in range(50)}
    assert len(tokens) > 40
    tokens = {
        int(sample_one(SamplingParams(seed=1), logits, [0] * length).tokens[0]) for length in range(1, 51)
    }
    assert len(tokens) > 40


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**32, 0])
def test_any_seed_is_taken(seed: int) -> None:
    logits = random_logits(1, 1, 40)[0]
    params = SamplingParams(seed=seed)
    assert sample_one(params, logits).tokens[0] == token_reference(
        logits.numpy(), Story(params, [1, 2, 3], 3)
    )


def test_huge_and_tiny_numbers_do_not_disturb_the_draw() -> None:
    logits = torch.tensor([3e38, -3e38, 2.9e38, -math.inf])
    for temperature in (2e-5, 0.1, 2.0):
        for given in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.9}):
            drawn = sample_one(SamplingParams(temperature=temperature, seed=1, **given), logits)
            assert drawn.finite.all() and drawn.tokens[0] == 0
