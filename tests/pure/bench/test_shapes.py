"""Shapes: each is a model the engine understands, of the size its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.lab.bench.shapes import SHAPES, write_shape
from paceline.lab.bench.workloads import OFFLINE, check_fits, check_vocabulary, make_workload
from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import tensor_names


@pytest.mark.parametrize(
    "name, parameters",
    [("qwen3-0.6b", 0.596e9), ("llama-3.1-8b", 8.03e9), ("qwen3-30b-a3b", 30.5e9), ("tiny", 0.35e6)],
)
def test_a_shape_has_the_size_of_its_name(name: str, parameters: float, tmp_path: Path) -> None:
    options = write_shape(name, tmp_path)
    checkpoint = open_checkpoint(options["model"], load_format=options["load_format"])
    total = 0
    for _, shape in tensor_names(checkpoint.spec):
        size = 1
        for length in shape:
            size *= length
        total += size
    assert total == pytest.approx(parameters, rel=0.01)
    assert set(checkpoint.spec.group_windows) == {None}
    check_vocabulary(checkpoint.spec.vocab_size)


@pytest.mark.slow
def test_every_workload_fits_every_shape() -> None:
    workloads = [make_workload(name, OFFLINE, [(3500, 500)] * 1000) for name in OFFLINE]
    check_fits(workloads, 4096)
    assert all(shape["max_position_embeddings"] >= 4096 for shape in SHAPES.values())
