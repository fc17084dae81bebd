"""The noise: known answers of Philox4x32-10, the layout of key and counter, and the mapping to Gumbel noise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runner.sampling.noise import LANES, MAX_NOISE, gumbel, key_of, lane_words, philox, token_words
from tests.torch.sampler_helpers import noise_reference, philox_reference

# The vectors of the Random123 distribution for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(-(2**63), 2**63 - 1)
POSITION = st.integers(0, 2**20) | st.integers(2**32, 2**40)  # the second needs the counter's high word


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in words_of(counter))
    k0, k1 = (np.array([word], dtype=np.uint64) for word in words_of(key))
    assert [int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))] == words_of(expected)
    assert philox_reference(words_of(counter), words_of(key)) == words_of(expected)


@given(SEED, POSITION, st.lists(st.integers(0, 2**18), min_size=1, max_size=8))
def test_key_and_counter_are_laid_out_as_defined(seed: int, position: int, tokens: list[int]) -> None:
    words = token_words(np.array([key_of(seed)]), np.array([position]), np.array(tokens))
    for token, noise in zip(tokens, gumbel(words).tolist(), strict=True):
        assert noise == pytest.approx(noise_reference(seed, position, token), rel=1e-14, abs=1e-14)


@given(st.lists(st.tuples(SEED, POSITION, st.integers(0, 2**18)), min_size=1, max_size=8))
def test_many_keys_at_once_give_the_words_of_each_alone(draws: list[tuple[int, int, int]]) -> None:
    keys = np.array([key_of(seed) for seed, _, _ in draws])
    positions, groups = np.array([p for _, p, _ in draws]), np.array([g for _, _, g in draws])
    together = lane_words(keys, positions, groups)
    assert together.shape == (len(draws), LANES)
    for i in range(len(draws)):
        alone = lane_words(keys[i : i + 1], positions[i : i + 1], groups[i : i + 1])
        assert (together[i] == alone[0]).all()


def test_the_mapping_is_finite_at_both_ends_and_bounded() -> None:
    ends = gumbel(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert ends[0] == pytest.approx(-math.log(33 * math.log(2)))
    assert ends[1] == pytest.approx(33 * math.log(2), abs=1e-9)
    assert ends[1] < MAX_NOISE


@given(st.lists(WORD, min_size=2, max_size=50))
def test_the_mapping_is_monotone(words: list[int]) -> None:
    noise = gumbel(np.array(sorted(words), dtype=np.uint32))
    assert (np.diff(noise) >= 0).all()


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert key_of(-1) == 2**64 - 1
    assert key_of(5) == 5
    assert key_of(-(2**63)) == 2**63
