"""A second sampler, written from the definitions one token at a time, and small ways to call the real one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.sampler import Sampled, Sampler

F32 = NDArray[np.float32]
MASK = 0xFFFFFFFF


def random_logits(seed: int, num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def i32(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@dataclass
class Story:
    """One sequence as its owner sees it: what it asked for and what it has."""

    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    drawn: list[int] = field(default_factory=list)

    def join(self, sampler: Sampler, row: int) -> None:
        sampler.join(row, self.params, i32(self.tokens), self.num_prompt)

    def extend(self, token: int) -> None:
        self.tokens.append(token)
        self.drawn.append(token)


def sample_one(
    params: SamplingParams,
    logits: torch.Tensor,
    tokens: Sequence[int] = (1, 2, 3),
    num_prompt: int | None = None,
    eos: tuple[int, ...] = (),
) -> Sampled:
    """One step of one row in a separate sampler."""
    sampler = Sampler(1, logits.shape[-1], eos)
    sampler.join(0, params, i32(tokens), len(tokens) if num_prompt is None else num_prompt)
    return sampler.sample(logits.reshape(1, -1).clone().numpy(), np.array([0]), np.array([len(tokens)]))


# ---------------------------------------------------------------- the definitions, one token at a time


def philox_reference(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def noise_reference(seed: int, position: int, token: int) -> float:
    bits = seed % 2**64
    counter = (position & MASK, position >> 32, token // 4, 0)
    word = philox_reference(counter, (bits & MASK, bits >> 32))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def processed_reference(raw: F32, sequence: Story, eos: tuple[int, ...]) -> F32:
    """The logits after every rule that also holds for greedy rows."""
    params, tokens, out = sequence.params, sequence.tokens, raw.copy()
    output = tokens[sequence.num_prompt :]
    for token in range(len(out)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -np.inf
    allowed = out.copy()
    for word in params.bad_words:
        assert not isinstance(word, str)
        if len(tokens) >= len(word) - 1 and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1]):
            out[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids + eos:
            out[token] = -np.inf
    if out.max() == -np.inf:  # what forbids everything forbids nothing
        out = allowed
    for token, bias in params.logit_bias.items():
        out[token] += np.float32(bias)
    for token in range(len(out)):
        if params.repetition_penalty != 1 and token in tokens:
            penalty = np.float32(params.repetition_penalty)
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        out[token] -= np.float32(params.presence_penalty) * np.float32(token in output)
    return out


def kept_reference(logits: F32, params: SamplingParams) -> list[int]:
    """The tokens that min-p, top-k and top-p leave in the draw."""
    values = [float(value) for value in logits]
    top, temperature = max(values), params.temperature
    kept = [token for token, value in enumerate(values) if value > -math.inf]
    if params.min_p > 0:
        kept = [token for token in kept if (values[token] - top) / temperature >= math.log(params.min_p)]
    if 0 < params.top_k < len(kept):
        smallest = sorted((values[token] for token in kept), reverse=True)[params.top_k - 1]
        kept = [token for token in kept if values[token] >= smallest]
    if params.top_p < 1:
        mass = {token: math.exp((values[token] - top) / temperature) for token in kept}
        needed = params.top_p * math.fsum(mass.values())
        kept = [
            token
            for token in kept
            if math.fsum(mass[other] for other in kept if values[other] > values[token]) < needed
        ]
    return kept


def token_reference(raw: F32, sequence: Story, eos: tuple[int, ...] = ()) -> int | None:
    """The next token, or None where there is nothing to choose from."""
    params = sequence.params
    logits = processed_reference(raw, sequence, eos)
    if not np.isfinite(logits.max()):
        return None
    if params.temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[0])
    assert params.seed is not None
    top, position = float(logits.max()), len(sequence.tokens)
    scores = {
        token: (float(logits[token]) - top) / params.temperature
        + noise_reference(params.seed, position, token)
        for token in kept_reference(logits, params)
    }
    return max(scores, key=lambda token: (scores[token], -token))
