"""Rotary positions: how fast each pair of a head's entries turns, and the turning itself.

The formulas are those of the papers (linear interpolation, dynamic NTK, YaRN, Llama 3), written so that fp32 gives
the same numbers as the reference implementation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, length: int = 0) -> Tensor:
    """Radians per position for each pair. `length` is the sequence's, which only the dynamic kind looks at."""
    theta = rope.theta
    if rope.kind == "axial":  # each of two numbers turns half of the pairs, at all speeds
        return inverse_frequencies(replace(rope, rotary_dim=rope.rotary_dim // 2, kind="default")).repeat(2)
    if rope.kind == "dynamic":
        stretch = rope.factor * max(length, rope.trained_positions) / rope.trained_positions - (
            rope.factor - 1
        )
        theta = theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, 1.0 / (rope.theta**exponents))
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Slow pairs are slowed further, fast ones stay, those between go from one to the other."""
    wavelength = 2 * math.pi / plain
    longest = rope.trained_positions / rope.low_freq_factor
    shortest = rope.trained_positions / rope.high_freq_factor
    slowed = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.trained_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, (1 - blend) * slowed / rope.factor + blend * slowed, slowed)


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Pairs that turn often within the trained length stay, those that turn seldom are interpolated."""

    def pair_that_turns(times: float) -> float:
        ratio = rope.trained_positions / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def shift_turn(rope: RopeSpec, shift: int) -> tuple[Tensor, Tensor]:
    """cos and sin [1, 1, rotary_dim] of what turns a key from its position to one `shift` further, as `rotate` takes
    them. The factor that some kinds put on a rotation is in the key already."""
    assert rope.kind != "dynamic", "rotations that depend on the length of a sequence do not add up"
    angles = (shift * inverse_frequencies(rope).double())[None, None]
    return _both_halves(angles.cos()).float(), _opposed_halves(angles.sin()).float()


class Rotary:
    """cos and sin of every position of one kind of rotation."""

    def __init__(self, rope: RopeSpec, max_positions: int) -> None:
        self._rope = rope
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(rope))
        self._cos = _both_halves(angles.cos()) * rope.attention_factor
        self._sin = _opposed_halves(angles.sin()) * rope.attention_factor
        self._axes = torch.tensor(2 * rope.axes)

    def cos_sin(
        self, positions: Tensor, lengths: Tensor, turns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """For each token, [tokens, 1, rotary_dim]. `lengths`: of its sequence when the token was first computed.
        `turns` [3, tokens]: what they turn by, where that is not their position.

        Beyond the trained length the dynamic kind turns faster the longer a sequence is. A token keeps the
        rotation it was computed with, as in generation one token at a time.
        """
        if turns is not None and len(self._axes):
            places = turns[self._axes].T
            return self._cos.gather(0, places).unsqueeze(1), self._sin.gather(0, places).unsqueeze(1)
        cos, sin = self._cos[positions], self._sin[positions]
        if self._rope.kind == "dynamic":
            for length in torch.unique(lengths[lengths > self._rope.trained_positions]).tolist():
                mine = lengths == length
                angles = torch.outer(positions[mine].float(), inverse_frequencies(self._rope, length))
                cos[mine], sin[mine] = _both_halves(angles.cos()), _opposed_halves(angles.sin())
        return cos.unsqueeze(1), sin.unsqueeze(1)


def cos_sin_of(rope: RopeSpec, turns: Tensor) -> tuple[Tensor, Tensor]:
    """For tokens that turn by several numbers [axes, tokens], however large: worked out, not looked up."""
    angles = turns[torch.tensor(rope.axes)].T.float() * inverse_frequencies(rope)
    return _both_halves(angles.cos()).unsqueeze(1), _opposed_halves(angles.sin()).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim entries of each head; heads are [tokens, heads, head_dim].

    Entry i of the first half and entry i of the second are a pair: (a cos - b sin, b cos + a sin).
    """
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        turned, rest = torch.split(heads, [width, heads.shape[-1] - width], dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)
    return torch.addcmul(heads * cos, heads.roll(width // 2, dims=-1), sin)


def _both_halves(values: Tensor) -> Tensor:
    return torch.cat((values, values), dim=-1)


def _opposed_halves(values: Tensor) -> Tensor:
    return torch.cat((-values, values), dim=-1)
