"""The kernels of encoders and of vectors on tiny shapes through Triton's interpreter; tests/gpu has the real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.gpu.kernels.ragged_attention import RaggedTuning
from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_encoder_cases as encoders

SMALL = cases.Shape(device="cpu", dtype=torch.float32)
TILES = RaggedTuning(query_rows=32, keys=16)


@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 72, 80, 128])
@pytest.mark.parametrize("reach", [0, 9])
def test_attention_of_sequences_one_behind_the_other(head_dim: int, reach: int) -> None:
    shape = replace(SMALL, head_dim=head_dim)
    encoders.check_ragged_attention(shape, [1, 70, 16, 32, 5], heads=2, reach=reach, tuning=TILES)


def test_attention_with_the_tiles_of_the_card() -> None:
    encoders.check_ragged_attention(SMALL, [130, 3, 64], heads=1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_update, keeps_sum", [(False, False), (True, False), (True, True)])
def test_layer_norm(has_update: bool, has_bias: bool, keeps_sum: bool) -> None:
    encoders.check_layer_norm(SMALL, 3, 48, has_update=has_update, has_bias=has_bias, keeps_sum=keeps_sum)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_inner_activation(activation: str, gated: bool) -> None:
    encoders.check_inner_activation(SMALL, 2, 1100, activation, gated=gated)


@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_heads_are_turned_in_place(rotary_dim: int) -> None:
    encoders.check_rotate_heads(SMALL, 5, 11, rotary_dim=rotary_dim)


def test_sums_of_runs_go_on_or_begin() -> None:
    runs = [(3, 0, 1, 0), (0, 1, 40, 1), (1, 41, 16, 0), (2, 57, 0, 0)]
    encoders.check_span_sums(SMALL, runs, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, scale", [(48, 1.0), (1100, 33.9)])
@pytest.mark.parametrize("pictures", [False, True])
def test_inputs_are_embeddings_or_vectors(
    dtype: torch.dtype, width: int, scale: float, pictures: bool
) -> None:
    shape = replace(SMALL, dtype=dtype)
    encoders.check_token_inputs(shape, 7, width, scale=scale, pictures=pictures, wide_ids=pictures)
