"""The random numbers of sampling: Philox4x32-10 and the Gumbel noise made of it.

Noise is a pure function of (seed, position in the sequence, token id): there is no state to keep, to restore
after a preemption, or to share between rows. Every device that draws tokens repeats this definition:

    key      = the seed modulo 2^64 as two 32-bit words, low word first
    counter  = (position low word, position high word, token id // 4, 0)
    word     = output word (token id % 4) of Philox4x32-10
    u        = (word + 0.5) / 2^32, exact in float64, never 0 or 1
    noise    = -log(-log(u)) in float64, between -3.13 and 22.88
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Words = tuple[U64, U64, U64, U64]

LANES = 4  # tokens served by one call of Philox
MAX_NOISE = 22.88  # nothing is larger: -log(-log(1 - 2^-33)) is 22.874

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_0, _STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Words, key: tuple[U64, U64]) -> Words:
    """Philox4x32-10. Each argument holds 32-bit words in 64-bit integers; their shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        # The small operands meet first: where one row has one key, only the last operation is over all tokens.
        c0, c1 = (product_1 >> _HALF) ^ (c1 ^ k0), product_1 & _LOW
        c2, c3 = (product_0 >> _HALF) ^ (c3 ^ k1), product_0 & _LOW
        k0, k1 = (k0 + _STEP_0) & _LOW, (k1 + _STEP_1) & _LOW
    return c0, c1, c2, c3


def key_of(seed: int) -> np.uint64:
    """A seed as the 64 bits that make the key; negative seeds count from 2^64 down."""
    return np.uint64(seed % 2**64)


def lane_words(keys: U64, positions: I64, groups: I64) -> U32:
    """The words of tokens 4g .. 4g+3 for each group g, shape [groups, 4]; keys and positions broadcast."""
    low, high = _halves(keys)
    position_low, position_high = _halves(positions.astype(np.uint64))
    zero = np.zeros(1, dtype=np.uint64)
    words = philox((position_low, position_high, groups.astype(np.uint64), zero), (low, high))
    lanes = np.empty((len(groups), LANES), dtype=np.uint32)
    for lane, word in enumerate(words):
        lanes[:, lane] = word
    return lanes


def token_words(keys: U64, positions: I64, tokens: I64) -> U32:
    """The word of one token for each key and position."""
    lanes = lane_words(keys, positions, tokens // LANES)
    return lanes[np.arange(len(tokens)), tokens % LANES]


def gumbel(words: NDArray[np.unsignedinteger[Any]]) -> F64:
    """The noise of each word, as the module's docstring defines it."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: F64 = -np.log(-np.log(uniform))
    return noise


def _halves(values: U64) -> tuple[U64, U64]:
    return values & _LOW, values >> _HALF
