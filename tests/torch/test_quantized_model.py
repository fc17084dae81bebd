"""A model whose matrices stay quantised gives a request the same bits whatever the batch does around it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.load import build_decoder
from paceline.models.quantized import QuantizedStorage, fast_product
from tests.bits import Circumstances, Prompt, Record, differences
from tests.quantized_helpers import QuantizedSource, tiny_spec
from tests.torch.bits import record

PRODUCT = fast_product()
NUM_NEW = 12
MAX_LEN = 400
pytestmark = pytest.mark.skipif(PRODUCT is None, reason="this machine has no fast 4-bit product")

CIRCUMSTANCES = [
    Circumstances(),
    Circumstances(budget=1),
    Circumstances(budget=7),
    Circumstances(budget=300),
    Circumstances(block_size=8, budget=50),
    Circumstances(block_size=32),
    Circumstances(preempt="recompute", depth=1),
    Circumstances(preempt="swap", block_size=8),
    Circumstances(caching=True, depth=2),
    Circumstances(mode="static", caching=False),
    Circumstances(alone=True, budget=13, block_size=32),
    Circumstances(threads=(2, 1, 3)),
]

# Where eight bits are kept dense, float32 products decide the bits, and those depend on the number of rows.
MODELS: list[tuple[str, bool, int | None]] = [("Q4_1", False, None), ("Q8_0", True, 24)]
MODELS = MODELS if PRODUCT == "dynamic" else MODELS[:1]
# What the second model adds is seen in a few; a token a step takes long.
CASES = [
    pytest.param(
        model,
        around,
        marks=[] if around.budget > 1 and (model is MODELS[0] or around.preempt) else [pytest.mark.campaign],
    )
    for model in MODELS
    for around in CIRCUMSTANCES
]


def prompts() -> list[Prompt]:
    """Short and long ones, over several pieces of attention, two with a common beginning."""
    rng = random.Random(1)
    lengths = (1, 2, 5, 9, 16, 17, 31, 33, 47, 64, 90, 280)
    drawn = [tuple(rng.randrange(3, 140) for _ in range(length)) for length in lengths]
    return [*drawn, (*drawn[-2][:60], 5, 6, 7)]


@cache
def decoder(dtype: str, tied: bool, window: int | None) -> Decoder:
    assert PRODUCT is not None
    source = QuantizedSource(tiny_spec(tied=tied, window=window), dtype, mixed=PRODUCT == "dynamic")
    return build_decoder(source, MAX_LEN, QuantizedStorage(PRODUCT))


@cache
def alone(dtype: str, tied: bool, window: int | None) -> Record:
    return record(
        decoder(dtype, tied, window), prompts(), Circumstances(alone=True, budget=512), num_new=NUM_NEW
    )


@pytest.mark.parametrize("model, around", CASES, ids=str)
def test_the_same_bits_as_alone(model: tuple[str, bool, int | None], around: Circumstances) -> None:
    run = record(decoder(*model), prompts(), around, num_new=NUM_NEW, num_blocks=70)
    assert not differences(run, alone(*model))
    assert len(run.bits) > 700
    assert bool(run.preempted) == bool(around.preempt)


def test_a_neighbour_that_is_not_a_number_changes_no_bit() -> None:
    """Its rows stand in every product of the step beside the others'."""
    model = MODELS[0]
    clean = decoder(*model)
    used = {token for sequence in (*prompts(), *alone(*model).outputs) for token in sequence}
    poison = next(token for token in range(140, 160) if token not in used)
    embed = clean.parts.embedding

    def embedding(x: Tensor) -> Tensor:
        return torch.where((x == poison)[:, None], torch.nan, embed(x))

    poisoned = Decoder(clean.spec, replace(clean.parts, embedding=embedding), MAX_LEN)
    bad = [(poison,), (*prompts()[8][40:0:-1], poison, 5, 6)]
    run = record(poisoned, [bad[0], *prompts(), bad[1]], Circumstances(budget=50), num_new=NUM_NEW)
    assert run.outputs[0] == run.outputs[-1] == ()
    run.outputs = run.outputs[1:-1]
    assert not differences(run, alone(*model))


def test_a_changed_weight_is_noticed() -> None:
    """By one hundredth: products that round their inputs to eight bits may lose less."""
    model = ("Q4_1", False, None)
    run = record(decoder(*model), prompts()[:4], Circumstances(alone=True, budget=512), num_new=NUM_NEW)
    norm = decoder(*model).parts.layers[1].norm_before_attention
    right = norm.weight
    norm.weight = right.clone()
    norm.weight[3] *= 1.01
    try:
        other = record(decoder(*model), prompts()[:4], Circumstances(alone=True, budget=512), num_new=NUM_NEW)
    finally:
        norm.weight = right
    assert differences(run, other)


def test_outputs_are_varied() -> None:
    outputs = alone("Q4_1", False, None).outputs
    assert len(set(outputs)) == len(outputs)
    assert sum(len(set(output)) for output in outputs) > 4 * len(outputs)
