"""Whole models from files: the same bits in any batch, chunk, block size, after a hit or preemption, on any threads.

SmolLM2 is the default model, where it has been fetched; `PACELINE_GEMMA3` names a GGUF file of Gemma 3, which has two
kinds of layers, a window and norms of heads. What is not there is skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import StoredTensor, decode_float, drop_pages, map_file
from paceline.runner.native.arena import build_arena
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


# ---------------------------------------------------------------- the file's own pages


def resident_bytes(path: Path) -> int:
    """What this process has of a mapped file in memory."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_pages_of_the_file_leave_memory_when_they_are_packed(tmp_path: Path) -> None:
    shape, path = (512, 1024), tmp_path / "weights"
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    path.write_bytes(bytes(100) + values.tobytes() + bytes(100))  # shares its first and last page
    raw = map_file(path)[100:-100]
    tensor = StoredTensor(name="w", shape=shape, dtype="F32", raw=raw, decode=decode_float)
    source = SimpleNamespace(tensor=lambda name: tensor)
    assert np.array_equal(tensor.to_float32(), values) and resident_bytes(path) > 0.9 * values.nbytes
    build_arena(source, ["w"], quantization="int8")
    assert resident_bytes(path) < 0.1 * values.nbytes
    assert np.array_equal(tensor.to_float32(), values), "they are read again"
    own = values.copy()
    drop_pages(own.view(np.uint8).reshape(-1))
    assert np.array_equal(own, values), "memory that is no file's stays as it is"
