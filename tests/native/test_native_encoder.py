"""An encoder on the native kernels: in the checking form, on the path of any processor, and against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.encoder import Encoder
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.runner.native.code import Code
from paceline.runner.native.encoder import NativeEncoder, objection
from tests.kernels import checked_code, host_code, plain_code
from tests.torch.embeddings.tiny_encoders import CONFIGS, VOCAB, save_encoder

SIZES = (1, 2, 15, 16, 17, 64, 33, 5, 5, 48)
SECONDS = (0, 1, 0, 7, 0, 30, 0, 0, 2, 0)


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(2, VOCAB, size) for size in SIZES]


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One head, so that its size suits products of bytes too."""
    folder = tmp_path_factory.mktemp(request.param)
    save_encoder(request.param, folder, num_attention_heads=1)
    return open_checkpoint(folder)


def states(checkpoint: Checkpoint, code: Code, quantization: str, threads: int = 2) -> list[np.ndarray]:
    encoder = NativeEncoder(checkpoint, code, threads, quantization=quantization)
    try:
        return encoder.forward(texts(), lambda: None, SECONDS)
    finally:
        encoder.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_nothing_but_its_own_memory_is_touched(checkpoint: Checkpoint, quantization: str) -> None:
    found = states(checkpoint, checked_code(), quantization)
    wanted = Encoder(checkpoint.spec, checkpoint).forward(texts(), lambda: None, SECONDS)
    near = 2e-5 if quantization == "none" else 0.2
    assert max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)) < near


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bits_are_the_same_on_every_processor_and_any_number_of_threads(
    checkpoint: Checkpoint, quantization: str
) -> None:
    here = states(checkpoint, host_code(), quantization)
    for code, threads in ((host_code(), 1), (host_code(), 3), (plain_code(), 2)):
        for one, other in zip(here, states(checkpoint, code, quantization, threads), strict=True):
            np.testing.assert_array_equal(one, other)


def test_memory_grows_with_a_larger_call_and_is_used_again(checkpoint: Checkpoint) -> None:
    encoder = NativeEncoder(checkpoint, checked_code(), 2)
    given, found = texts(), []
    for part in (given[:1], given, given[2:4], given):
        found.append(encoder.forward(part, lambda: None))
    encoder.close()
    for one, other in zip(found[1], found[3], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    "more", [{"intermediate_size": 48}, {"num_attention_heads": 4}], ids=["inner", "heads"]
)
def test_sizes_between_those_of_the_kernels_are_filled_up(more: dict[str, Any], tmp_path: Path) -> None:
    save_encoder("bert", tmp_path, **more)
    checkpoint = open_checkpoint(tmp_path)
    assert objection(checkpoint) == ""
    wanted = Encoder(checkpoint.spec, checkpoint).forward(texts(), lambda: None, SECONDS)
    for one, other in zip(states(checkpoint, checked_code(), "none"), wanted, strict=True):
        assert np.abs(one - other).max() < 2e-5


def test_sizes_that_it_does_not_have_are_told(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path, hidden_size=40, num_attention_heads=1)
    checkpoint = open_checkpoint(tmp_path)
    assert objection(checkpoint) == "its hidden size of 40 is not a multiple of 16"
