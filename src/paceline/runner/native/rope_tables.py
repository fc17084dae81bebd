"""cos and sin of every position, in float64 and rounded once.

Mathematical libraries differ in the last bit from one processor to the next, and so would a model's tokens. Powers and
logarithms come from decimal arithmetic here, cos and sin from additions and products alone, which round the same way
everywhere.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from paceline.models.spec import RopeSpec

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_AT_ONCE = 256  # positions, whose numbers stay in a near cache
_TERMS = 9  # of the series; the angle is at most an eighth of a turn
# pi / 2 = the sum of these, the first two with 33 bits
_QUARTER_TURN = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_DECIMALS = Context(prec=40)


def rope_tables(rope: RopeSpec, max_positions: int) -> tuple[Floats, Floats]:
    """[positions, rotary_dim / 2] each."""
    frequencies = _frequencies(rope)
    tables = [np.empty((max_positions, len(frequencies)), np.float32) for _ in range(2)]
    for start in range(0, max_positions, _AT_ONCE):
        positions = np.arange(start, min(start + _AT_ONCE, max_positions), dtype=np.float64)
        for table, values in zip(tables, cos_and_sin(np.outer(positions, frequencies)), strict=True):
            table[start : start + _AT_ONCE] = values * rope.attention_factor
    return tables[0], tables[1]


def cos_and_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Of angles from 0 to about a million, within 2e-16."""
    quarter = np.rint(angles * (2 / math.pi))
    rest = angles.copy()
    for part in _QUARTER_TURN:  # each but the last has few enough bits for an exact product
        rest -= quarter * part
    square = rest * rest
    cos, sin = np.zeros_like(rest), np.zeros_like(rest)
    for power in range(_TERMS, 0, -1):
        cos = (cos + 1) * square * (-1 / ((2 * power) * (2 * power - 1)))
        sin = (sin + 1) * square * (-1 / ((2 * power) * (2 * power + 1)))
    cos, sin = cos + 1, sin * rest + rest
    turn = quarter.astype(np.int64) & 3
    is_odd = turn & 1 == 1
    cos, sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    return np.where((turn == 1) | (turn == 2), -cos, cos), np.where(turn >= 2, -sin, sin)


def _frequencies(rope: RopeSpec) -> Doubles:
    assert rope.kind != "dynamic", "a rotation that depends on the length of a sequence has no table"
    theta = Decimal(rope.theta)
    exponents = (_DECIMALS.divide(-pair, rope.rotary_dim) for pair in range(0, rope.rotary_dim, 2))
    plain: Doubles = np.array([float(_DECIMALS.power(theta, exponent)) for exponent in exponents])
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeSpec, plain: Doubles) -> Doubles:
    """Slow pairs are slowed further, fast ones stay, those between go from one to the other."""
    wavelength = 2 * math.pi / plain
    longest = rope.trained_positions / rope.low_freq_factor
    shortest = rope.trained_positions / rope.high_freq_factor
    slowed = np.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.trained_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, (1 - blend) * slowed / rope.factor + blend * slowed, slowed)


def _yarn(rope: RopeSpec, plain: Doubles) -> Doubles:
    """Pairs that turn often within the trained length stay, those that turn seldom are interpolated."""

    def pair_that_turns(times: float) -> float:
        ratio = rope.trained_positions / (times * 2 * math.pi)
        return rope.rotary_dim * _log(ratio) / (2 * _log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    blended: Doubles = plain / rope.factor * ramp + plain * (1 - ramp)
    return blended


def _log(value: float) -> float:
    return float(_DECIMALS.ln(Decimal(value)))
