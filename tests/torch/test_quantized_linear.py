"""Matrices that stay quantised: the product of the dequantised matrix, and the same bits for a row in any company."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.models.files.config_fields import CheckpointError
from paceline.models.layers import DenseLinear, Linear
from paceline.models.load import DenseStorage
from paceline.models.quantized import (
    GROUP,
    ByteLinear,
    DynamicLinear,
    QuantizedEmbedding,
    QuantizedStorage,
    StackedLinear,
    fast_product,
)
from tests.quantized_helpers import BY_HAND, quantized, stored_matrix

PRODUCT = fast_product()
FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", *BY_HAND)
SHAPES = ((96, 64), (960, 576), (3072, 576), (576, 1536))  # the last three are those of a small real model
pytestmark = pytest.mark.skipif(PRODUCT is None, reason="this machine has no fast 4-bit product")


def storage() -> QuantizedStorage:
    assert PRODUCT is not None
    return QuantizedStorage(PRODUCT)


def shape_for(dtype: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Formats of 256 to a block need rows of whole blocks."""
    return (shape[0], -(-shape[1] // 256) * 256) if dtype in BY_HAND else shape


def inputs(num_rows: int, width: int, seed: int = 1) -> Tensor:
    """Rows of different scale, a few outliers and a row of zeros among them, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator)
    x *= torch.exp(torch.randn(num_rows, 1, generator=generator))
    x[:, 3] *= 20
    x[num_rows // 2] = 0
    return x


def make(dtype: str, shape: tuple[int, int]) -> tuple[Linear, Tensor]:
    stored = stored_matrix(shape_for(dtype, shape), dtype)
    linear = storage().linear([stored], None)
    if isinstance(linear, DenseLinear):
        pytest.skip(f"{dtype} is kept dense on this machine")
    return linear, torch.from_numpy(stored.to_float32())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_dequantised_matrix(dtype: str, shape: tuple[int, int]) -> None:
    linear, weight = make(dtype, shape)
    x = inputs(33, weight.shape[1])
    expected = x.double() @ weight.double().T
    difference = linear(x).double() - expected
    # Inputs have eight bits over a row's range, or bfloat16's: an error of half a step each, of random sign.
    step = (
        x.amax(dim=1, keepdim=True).clamp(min=0) - x.amin(dim=1, keepdim=True).clamp(max=0)
    ).double() / 255
    rounding = step / 12**0.5 * (weight.double() ** 2).sum(dim=1).sqrt() * 2.5
    scales = (x.double() ** 2 @ (weight.double() ** 2).T).sqrt() * 2**-7
    # A row of zeros, whose range is nothing, is taken as whole numbers: what is left is float32's rounding.
    assert (difference.abs() <= 5 * (rounding + scales) + 5e-3).all()
    assert float(difference.square().mean().sqrt()) < 0.03 * float(expected.square().mean().sqrt())


@pytest.mark.skipif(PRODUCT != "dynamic", reason="inputs are not quantised to whole numbers here")
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1"])
def test_whole_numbers_are_multiplied_exactly(dtype: str) -> None:
    """Scales that are powers of two and inputs that are bytes leave nothing to round: every nibble is in place."""
    rng = np.random.default_rng(3)
    limit = {"Q4_0": 8, "Q4_1": 15}[dtype]
    values = rng.integers(0 if dtype == "Q4_1" else -limit, limit + (dtype != "Q4_0"), (48, 128)).astype(
        np.float32
    )
    values[:, ::GROUP] = -limit if dtype == "Q4_0" else limit  # fixes each group's scale
    values[:, 1::GROUP] = 0
    values *= 0.25
    stored = quantized("w", values, dtype)
    assert np.array_equal(stored.to_float32(), values)
    x = torch.from_numpy(rng.integers(-128, 128, (5, 128)).astype(np.float32))
    x[:, 0], x[:, 1] = -128, 127
    expected = x.double() @ torch.from_numpy(values).double().T
    out = storage().linear([stored], None)(x).double()
    assert torch.equal(out, expected), float((out - expected).abs().max())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_gets_the_same_bits_among_any_number_of_rows(dtype: str, shape: tuple[int, int]) -> None:
    linear, weight = make(dtype, shape)
    x = inputs(70, weight.shape[1])
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count]), alone[:count]), count


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_gets_the_same_bits_beside_any_neighbour(dtype: str) -> None:
    linear, weight = make(dtype, (960, 576))
    x = inputs(24, weight.shape[1])
    expected = linear(x)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[order]), expected[order])
    for stranger in (1e20, float("inf"), float("nan"), -0.0):
        mixed = x.clone()
        mixed[::3] = stranger
        out = linear(mixed)
        kept = torch.arange(24) % 3 != 0
        assert torch.equal(out[kept], expected[kept]), stranger


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_1"), ("Q4_1", "Q4_1", "Q8_0"), ("Q4_0", "F32")])
def test_matrices_of_one_input_side_by_side(kinds: tuple[str, ...], bias: bool) -> None:
    parts = [stored_matrix((64, 96), kind, seed) for seed, kind in enumerate(kinds)]
    offsets = torch.randn(64 * len(parts)) if bias else None
    x = inputs(9, 96)
    apart = torch.cat([storage().linear([part], None)(x) for part in parts], dim=-1)
    together = storage().linear(parts, offsets)(x)
    expected = apart if offsets is None else apart + offsets
    torch.testing.assert_close(together, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.skipif(PRODUCT != "dynamic", reason="eight bits are kept dense here")
def test_what_is_kept_quantised() -> None:
    made = storage()
    assert isinstance(made.linear([stored_matrix((32, 64), "Q4_1")], None), DynamicLinear)
    assert isinstance(made.linear([stored_matrix((32, 64), "Q8_0")], None), ByteLinear)
    assert torch.backends.quantized.engine != "onednn", "packing leaves torch's own setting alone"
    assert isinstance(
        made.linear([stored_matrix((32, 64), kind) for kind in ("Q4_0", "Q8_0")], None), StackedLinear
    )
    assert isinstance(made.linear([stored_matrix((32, 64), "F32")], None), DenseLinear)
    assert isinstance(made.embedding(stored_matrix((32, 64), "Q8_0")), QuantizedEmbedding)


@pytest.mark.parametrize("dtype", ["F32", "Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_damaged_weights_are_refused_by_the_name_of_their_tensor(dtype: str) -> None:
    good = stored_matrix(shape_for(dtype, (32, 64)), dtype)
    raw = good.raw.copy()
    size = {"F32": 4, "Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q6_K": 210}[dtype]
    # The upper half of a float, or the half that is a block's scale.
    at = size - 2 if dtype in ("F32", "Q6_K") else 0
    raw[3 * size + at : 3 * size + at + 2] = (0xC0, 0x7F) if dtype == "F32" else (0x00, 0x7C)  # NaN, infinity
    for kept in (DenseStorage(), storage()):
        kept.linear([good], None)
        with pytest.raises(CheckpointError, match="the tensor w holds values that are not finite"):
            kept.linear([replace(good, raw=raw)], None)


@pytest.mark.skipif(PRODUCT != "dynamic", reason="eight bits are kept dense here")
def test_rows_that_are_not_finite_come_out_so() -> None:
    linear = storage().linear([stored_matrix((32, 64), "Q8_0")], None)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = inputs(4, 64)
        x[2, 5] = value
        assert torch.isfinite(linear(x)).all(dim=1).tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_1", "F32", "Q5_0", "Q6_K"])
def test_embeddings_are_the_rows_of_the_table(dtype: str) -> None:
    stored = stored_matrix(shape_for(dtype, (50, 96)), dtype)
    table = torch.from_numpy(stored.to_float32())
    tokens = torch.tensor([0, 49, 7, 7, 31])
    rows = storage().embedding(stored)(tokens)
    # Formats between four and eight bits are kept as eight: half a step of 1/127 of a group's largest value.
    step = (
        table.view(50, -1, GROUP).abs().amax(dim=-1, keepdim=True).expand(-1, -1, GROUP).reshape(table.shape)
        / 127
    )
    slack = 0.0 if dtype in ("Q8_0", "Q4_1", "F32") else 0.5001
    assert ((rows - table[tokens]).abs() <= slack * step[tokens] + 1e-7).all()
    assert torch.equal(storage().embedding(stored)(tokens[2:3]), rows[2:3])
