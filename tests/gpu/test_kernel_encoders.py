"""The kernels of encoders and of vectors on the card: head sizes of texts and pictures, long sequences, windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_encoder_cases as encoders

PLAIN = cases.Shape(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 128])
@pytest.mark.parametrize("reach", [0, 64])
def test_attention_of_sequences_one_behind_the_other(head_dim: int, reach: int) -> None:
    lengths = [1, 512, 64, 129, 5, 1023, 128]
    encoders.check_ragged_attention(replace(PLAIN, head_dim=head_dim), lengths, heads=4, reach=reach)


@pytest.mark.parametrize("head_dim, lengths", [(80, [4096, 64, 36]), (72, [729] * 3), (64, [8192])])
def test_attention_of_pictures_and_long_texts(head_dim: int, lengths: list[int]) -> None:
    encoders.check_ragged_attention(replace(PLAIN, head_dim=head_dim), lengths, heads=2)


def test_attention_of_half_precision() -> None:
    shape = cases.Shape(device="cuda", dtype=torch.float16)
    encoders.check_ragged_attention(shape, [300, 7, 64], reach=20)


@pytest.mark.parametrize("tokens, width", [(1, 768), (300, 1024), (7, 1152), (5, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_update, keeps_sum", [(False, False), (True, False), (True, True)])
def test_layer_norm(tokens: int, width: int, has_update: bool, has_bias: bool, keeps_sum: bool) -> None:
    how = {"has_update": has_update, "has_bias": has_bias, "keeps_sum": keeps_sum}
    encoders.check_layer_norm(PLAIN, tokens, width, **how)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_inner_activation(activation: str, gated: bool) -> None:
    encoders.check_inner_activation(PLAIN, 300, 4304, activation, gated=gated)


@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (80, 80), (128, 64)])
def test_heads_are_turned_in_place(head_dim: int, rotary_dim: int) -> None:
    encoders.check_rotate_heads(replace(PLAIN, head_dim=head_dim), 333, 24, rotary_dim=rotary_dim)


def test_sums_of_runs_go_on_or_begin() -> None:
    runs = [(3, 0, 1, 0), (0, 1, 4000, 1), (1, 4001, 16, 0), (2, 4017, 0, 0), (5, 4017, 512, 1)]
    encoders.check_span_sums(PLAIN, runs, 1024)


@pytest.mark.parametrize("tokens, width", [(1, 576), (300, 4096), (12_288, 2560)])
@pytest.mark.parametrize("scale", [1.0, 50.6])
@pytest.mark.parametrize("pictures", [False, True])
def test_inputs_are_embeddings_or_vectors(tokens: int, width: int, scale: float, pictures: bool) -> None:
    encoders.check_token_inputs(PLAIN, tokens, width, scale=scale, pictures=pictures)
