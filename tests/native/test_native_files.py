"""Whole models from files: the same bits in any batch, chunk, block size, after a hit or preemption, on any threads.

SmolLM2 is the default model, where it has been fetched; `PACELINE_GEMMA3` names a GGUF file of Gemma 3, which has two
kinds of layers, a window and norms of heads. What is not there is skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from paceline.models.files.open import open_checkpoint
from paceline.runner.native.model import NativeModel, build_model
from tests.bits import Circumstances, Prompt, Record, differences
from tests.native.runs import record_native
from tests.torch.gguf_reference import smollm2_path

NUM_NEW = 6
LENGTHS = (37, 20, 41)
GEMMA3 = os.environ.get("PACELINE_GEMMA3")
FILES = {"smollm2": smollm2_path(), "gemma3": Path(GEMMA3) if GEMMA3 else None}
AROUND = (
    Circumstances(budget=7),
    Circumstances(budget=50, block_size=32, threads=(2,)),
    Circumstances(budget=30, block_size=64, threads=(3,)),
    Circumstances(alone=True, caching=True, threads=(8,)),
    Circumstances(preempt="recompute", threads=(2, 1)),
    Circumstances(preempt="swap", block_size=32),
)


@cache
def loaded(name: str) -> NativeModel:
    path = FILES[name]
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    return build_model(open_checkpoint(path), max(LENGTHS) + NUM_NEW + 1)


def prompts(model: NativeModel) -> list[Prompt]:
    """The first two begin alike, for more than a block of 16."""
    shared = [7919 * place % (model.spec.vocab_size - 10) + 5 for place in range(max(LENGTHS))]
    return [
        tuple(shared[:length] if number < 2 else reversed(shared[:length]))
        for number, length in enumerate(LENGTHS)
    ]


@cache
def alone(name: str) -> Record:
    model = loaded(name)
    return record_native(model, prompts(model), Circumstances(alone=True, budget=512), num_new=NUM_NEW)


@pytest.mark.campaign
@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_a_model_has_the_same_bits_as_alone(name: str, around: Circumstances) -> None:
    model = loaded(name)
    run = record_native(model, prompts(model), around, num_new=NUM_NEW)
    assert not differences(run, alone(name))
    assert not run.changed and len(run.bits) > sum(LENGTHS) // 2
    assert bool(run.preempted) == bool(around.preempt)
    assert bool(run.hits) == around.caching
