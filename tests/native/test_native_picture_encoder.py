"""The encoder of pictures on the native kernels: against torch, with the same bits however its work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.stretch import MediaInput
from paceline.models.encoder import Encoder
from paceline.models.files.encoder import VISION
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.runner.native.code import Code
from paceline.runner.native.encoder import objection
from paceline.runner.native.picture_encoder import LEAST_SIDE, NativePictureEncoder
from tests.kernels import checked_code, host_code, plain_code
from tests.torch.vision.tiny_models import picture, save_model

ALL = 10**6  # positions
# Heads and inner layers of sizes that are filled up, and all sizes as bytes need them.
SIZES: dict[str, dict[str, Any]] = {
    "smolvlm": {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 84},
    "idefics3": {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 96},
    "qwen2_5_vl": {"hidden_size": 96, "num_heads": 4, "intermediate_size": 84},
    # Behind the last layer there are two ends.
    "qwen3_vl": {
        "hidden_size": 96,
        "num_heads": 2,
        "intermediate_size": 96,
        "deepstack_visual_indexes": [0, 2, 4],
    },
}


@pytest.fixture(scope="module", params=list(SIZES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    save_model(request.param, folder, **SIZES[request.param])
    return open_checkpoint(folder)


def native(
    checkpoint: Checkpoint, code: Code, quantization: str = "none", threads: int = 2
) -> NativePictureEncoder:
    assert checkpoint.spec.vision is not None
    return NativePictureEncoder(checkpoint, code, threads, quantization=quantization)


def items_of(checkpoint: Checkpoint) -> list[MediaInput]:
    """Of several sizes, where the family has them."""
    name = checkpoint.path.name
    found = [picture(name, seed).given for seed in range(3)]
    if name == "idefics3":
        found.insert(1, picture(name, 9, (6, 10)).given)
    if name.startswith(
        "qwen"
    ):  # wider than the first tables of turns, and more units than are computed together
        found.insert(1, picture(name, 9, (2, LEAST_SIDE + 2)).given)
    return found


def encoded(encoder: Any, items: list[MediaInput], size: int = ALL) -> list[np.ndarray]:
    """In parts of so many positions."""
    line = encoder.begin(items)
    total = 2 * encoder.spec.num_layers * sum(item.units for item in items)
    for first in range(0, total, size):
        encoder.advance(line, first, min(size, total - first))
    found: list[np.ndarray] = encoder.vectors(line, items)
    return found


def assert_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_vectors_are_those_of_torch_and_nothing_but_its_own_memory_is_touched(
    checkpoint: Checkpoint, quantization: str
) -> None:
    items, encoder = items_of(checkpoint), native(checkpoint, checked_code(), quantization)
    found = encoded(encoder, items, 101)
    encoder.close()
    assert checkpoint.spec.vision is not None
    wanted = encoded(Encoder(checkpoint.spec.vision, checkpoint, VISION), items)
    far = max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True))
    assert far < (1e-4 if quantization == "none" else 2.0)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        cosine = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
        assert cosine.min() > (0.999999 if quantization == "none" else 0.995)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bits_do_not_depend_on_pieces_on_the_group_or_on_its_order(
    checkpoint: Checkpoint, quantization: str
) -> None:
    items, encoder = items_of(checkpoint), native(checkpoint, host_code(), quantization)
    alone = [encoded(encoder, [item], 50)[0] for item in items]
    whole = encoded(encoder, items)
    assert_equal(alone, whole)
    for size in (1, 37, 256, 1000):
        assert_equal(encoded(encoder, items, size), whole)
    assert_equal(encoded(encoder, items[::-1], 77)[::-1], whole)
    encoder.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bits_are_the_same_on_every_processor_and_any_number_of_threads(
    checkpoint: Checkpoint, quantization: str
) -> None:
    items, found = items_of(checkpoint), []
    for code, threads in ((host_code(), 2), (host_code(), 1), (host_code(), 3), (plain_code(), 2)):
        encoder = native(checkpoint, code, quantization, threads)
        found.append(encoded(encoder, items, 300))
        encoder.close()
    for other in found[1:]:
        assert_equal(other, found[0])


def test_lines_can_wait_for_each_other_and_threads_can_end_between_them(checkpoint: Checkpoint) -> None:
    items, encoder = items_of(checkpoint), native(checkpoint, host_code())
    wanted = encoded(encoder, items[:2])
    lines = [encoder.begin([item]) for item in items[:2]]
    for first in range(0, ALL, 41):
        going = False
        for line in lines:
            count = min(41, 2 * encoder.spec.num_layers * len(line.x) - first)
            if count > 0:
                encoder.advance(line, first, count)
                going = True
        if first == 41:
            encoder.close()
        if not going:
            break
    found = [encoder.vectors(line, [item])[0] for line, item in zip(lines, items, strict=False)]
    assert_equal(found, wanted)
    assert encoder.work().phase_s["attention"] > 0
    encoder.close()


@pytest.mark.parametrize(
    "name, sizes, quantization, says",
    [
        ("smolvlm", {}, "none", ""),
        ("smolvlm", {}, "int8", "its hidden size of 48 is not a multiple of 32"),
        ("qwen2_5_vl", {}, "none", ""),
        ("qwen3_vl", {}, "none", ""),
        (
            "qwen3_vl",
            {"patch_size": 3},
            "none",
            "its patches of 3 x 3 pixels are not a multiple of 4 numbers",
        ),
        (
            "qwen2_5_vl",
            {"spatial_merge_size": 1},
            "none",
            "its squares of 48 numbers are not a multiple of 32",
        ),
    ],
)
def test_sizes_that_it_does_not_have_are_told(
    name: str, sizes: dict[str, int], quantization: str, says: str, tmp_path: Path
) -> None:
    save_model(name, tmp_path, **sizes)
    checkpoint = open_checkpoint(tmp_path)
    assert objection(checkpoint, quantization, VISION) == says
