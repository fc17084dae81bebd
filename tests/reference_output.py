"""What a request must get from the runner without a model (`tests.fakes`), computed alone and without a cache."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.parameters import CHOICE, MEAN, PoolingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import MediaPart, StretchKind
from tests.guides import PRIME, FakeGuide

MASK = (1 << 64) - 1
NONE: Mapping[int, int] = MappingProxyType({})


def picture_vector(content: bytes, index: int) -> int:
    """A picture's vector number `index`: a number, for a runner without a model."""
    return zlib.crc32(b"%d:" % index + content)


def vectors_of(parts: Sequence[MediaPart]) -> dict[int, int]:
    """By position, the vectors of a prompt's pictures."""
    return {
        start + index: picture_vector(given.content, index)
        for start, given in parts
        for index in range(given.outputs)
    }


# Of each text: its first token, the first that is placed, and the end.
Placed = Sequence[tuple[int, int, int]]


def placed_of(request: Request) -> Placed:
    """What of a request is placed."""
    return [
        (start, start + request.modules[item].recompute, end)
        for start, end, kind, item in request.stretches
        if kind is StretchKind.PLACED
    ]


class Stretches(NamedTuple):
    """What is not plain text in a prompt."""

    pictures: Mapping[int, int] = NONE  # by position, the vector that stands there
    placed: Placed = ()  # what is copied from elsewhere


NO_STRETCHES = Stretches()


def turned(value: int, shift: int) -> int:
    """What the KV of a module's token becomes in another place."""
    return (value * PRIME + shift + 7) & MASK


def placed_values(tokens: Sequence[int], placed: Placed, start: int = 0) -> dict[int, int]:
    """By position, what placed tokens are: what they would be at the beginning of a prompt, turned."""
    found = {}
    for first, begin, end in placed:
        value = start
        for position in range(first, min(end, len(tokens))):
            value = (value * PRIME + tokens[position] + 1) & MASK
            if position >= begin:
                found[position] = turned(value, first)
    return found


def reference_output(
    prompt: list[int],
    sampling: SamplingParams,
    at_most: int | None = None,
    seen: int = 0,
    block_size: int = 1,
    before: int = 0,
    start: int = 0,
    stretches: Stretches = NO_STRETCHES,
) -> tuple[list[int], str]:
    """What a request must produce, computed alone and without any cache: the oracle of O1 and O5.

    With `at_most`, no more than that number of tokens of it. `seen`: tokens of its prompt that its guide has seen.
    `block_size` counts for a request that drops blocks, and so does how much of its prompt is output (`before`).
    `start`: what its adapter stands for. `stretches`: its pictures, and what is placed.
    """
    if sampling.pin is not None and sampling.pin.computes:
        return [], "stop"
    value, num_prompt = start, len(prompt) - before
    jumps = placed_values(prompt, stretches.placed, start)
    for position, token in enumerate(prompt):
        salt = unseen(sampling, position, num_prompt, block_size) if before else 0
        salt += stretches.pictures.get(position, 0)
        value = (value * PRIME + token + 1 + salt) & MASK
        value = jumps.get(position, value)
    seed, stop_below = (sampling.seed or 0) & MASK, stop_bound(sampling)
    output: list[int] = []
    limit = sampling.max_tokens if at_most is None else min(at_most, sampling.max_tokens)
    guide = FakeGuide.of(sampling, seen)
    if guide is not None and guide.is_over:
        return [], "stop"
    while len(output) < limit:
        token = (((value ^ seed) * PRIME) & MASK) >> 44  # 20 bits: below VOCAB
        if guide is not None:
            token = guide.choose(token)
            guide.consume((token,))
        output.append(token)
        if token < stop_below:
            return output, "stop"
        if guide is not None and guide.is_over:
            return output, "length" if len(output) == sampling.max_tokens else "stop"
        position = len(prompt) + len(output) - 1
        salt = unseen(sampling, position, num_prompt, block_size)
        value = (value * PRIME + token + 1 + salt) & MASK
    return output, "length"


def reference_vector(
    prompt: list[int], pooling: PoolingParams, start: int = 0, pictures: Mapping[int, int] = NONE
) -> NDArray[np.float32]:
    """What a request that ends with a vector must end with."""
    value, total = start, 0
    for position, token in enumerate(prompt):
        value = (value * PRIME + token + 1 + pictures.get(position, 0)) & MASK
        total += value
    return vector_of(pooling, value, total)


def vector_of(pooling: PoolingParams, last: int, total: int) -> NDArray[np.float32]:
    """A vector of a row whose last token has the hash `last`, and all its tokens together `total`."""
    value = (total if pooling.kind == MEAN else last) & MASK
    if pooling.kind == CHOICE:
        numbers = [((value ^ token) * PRIME & MASK) >> 48 for token in pooling.token_ids]
    else:
        numbers = [value >> shift & 0xFFFF for shift in (0, 16, 32, 48)][: pooling.dimensions]
    return np.array(numbers, "<f4")


def unseen(sampling: SamplingParams, position: int, num_prompt: int, block_size: int) -> int:
    """Tokens before it that the token at a position must not see: they are part of its hash."""
    kept = sampling.kv_keep
    if kept is None:
        return 0
    return (kept.end(position, num_prompt, block_size) - kept.start(block_size)) * block_size


def stop_bound(sampling: SamplingParams) -> int:
    """Tokens below the first stop id stop: a range, so that random tokens hit it with a chosen probability."""
    return sampling.stop_token_ids[0] if sampling.stop_token_ids else 0
