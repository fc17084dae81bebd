"""Matrices as the device keeps them: of 16 bits (`DenseLinear`), or of eight or four with scales.

A quantised matrix says how its values are made of what is stored; the step's products are the decoder's business
(forward.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.layers import DenseLinear
from paceline.runner.gpu.kernels.block_product import (
    BlockWeight,
    block_product,
    block_tuning,
    unpack_blocks,
)
from paceline.runner.gpu.kernels.packed_product import (
    MAX_PACKED_ROWS,
    PackedWeight,
    group_numbers,
    packed_product,
    packed_tuning,
    packed_weight,
    unpack,
)
from paceline.runner.gpu.kernels.scaled_product import INNER_STEP, ScaledWeight
from paceline.runner.gpu.kernels.scaled_rows import EIGHT_BITS
from paceline.runner.gpu.kernels.skinny_product import MAX_ROWS, ProductTuning

GROUPS = (128, 64, 32)  # inputs that share a scale, of four bits
_ROWS_AT_ONCE = 4096  # float32 of a whole matrix would take four times what is kept of it
_TINY = 1e-20  # the largest number of a row of zeros


class ScaledLinear:
    """Weights of eight bits with a scale per row; inputs are rounded to eight bits, row by row, on their way in."""

    def __init__(self, weight: ScaledWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product with inputs as they are."""
        return F.linear(x, dense_matrix(self, x.dtype), self.bias)


class GroupedLinear:
    """Weights of four bits, or of e4m3, with scales for groups of inputs; inputs stay as they are."""

    def __init__(self, weight: PackedWeight | BlockWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, dense_matrix(self, x.dtype), self.bias)

    @property
    def most_rows(self) -> int:
        """Of a product; more are multiplied with the matrix unpacked."""
        return MAX_ROWS if isinstance(self.weight, BlockWeight) else MAX_PACKED_ROWS

    def tuning(self, rows: int, columns: int, *, narrow: bool = False, gated: bool = False) -> ProductTuning:
        """How a product of few rows is cut; `columns` of its result."""
        inner = self.weight.shape[1]
        if isinstance(self.weight, BlockWeight):
            return block_tuning(rows, columns, inner, self.weight.group, narrow=narrow)
        return packed_tuning(rows, columns, inner, narrow=narrow, gated=gated)

    def product(
        self, out: Tensor, x: Tensor, *, tuning: ProductTuning, gated: bool = False, overlapped: bool = False
    ) -> None:
        """Of few rows, without the bias: see `packed_product`."""
        if isinstance(self.weight, BlockWeight):
            block_product(out, x, self.weight, tuning=tuning, gated=gated, overlapped=overlapped)
        else:
            packed_product(out, x, self.weight, tuning=tuning, gated=gated, overlapped=overlapped)

    def unpack(self, out: Tensor) -> None:
        if isinstance(self.weight, BlockWeight):
            unpack_blocks(out, self.weight)
        else:
            unpack(out, self.weight)


DeviceLinear = DenseLinear | ScaledLinear | GroupedLinear


def dense_matrix(linear: DeviceLinear, dtype: torch.dtype) -> Tensor:
    """A matrix with a number for each of its entries."""
    if isinstance(linear, GroupedLinear):
        weight = linear.weight
        dense = torch.empty(weight.shape, dtype=dtype, device=weight.q.device)
        linear.unpack(dense)
        return dense
    if isinstance(linear, ScaledLinear):
        return (linear.weight.q.float() * linear.weight.scale[:, None]).to(dtype)
    return linear.weight


def multiply_columns(linear: DeviceLinear, columns: slice, factor: float) -> None:
    """Make these columns of what a matrix gives, without its bias, `factor` times as large: a power of two, so that no
    number is rounded."""
    weight = linear.weight
    if isinstance(weight, PackedWeight):
        weight.pairs[:, columns] *= factor
    elif isinstance(weight, BlockWeight):
        weight.scale[:, columns] *= factor
    elif isinstance(weight, ScaledWeight):
        weight.scale[columns] *= factor
    else:
        weight[columns] *= factor


def quantized(matrix: Tensor, dtype: torch.dtype) -> ScaledWeight:
    """A matrix of 16 or 32 bits as eight bits: the largest of each row becomes the largest they hold."""
    most = EIGHT_BITS[dtype]
    q = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    scale = torch.empty(len(matrix), device=matrix.device)
    for first in range(0, len(matrix), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = matrix[part].float()
        scale[part] = values.abs().amax(dim=1).clamp_min_(_TINY) / most
        values.div_(scale[part, None])
        q[part] = (values.round_() if dtype == torch.int8 else values).clamp_(-most, most).to(dtype)
    return ScaledWeight(q, scale)


def packed(matrix: Tensor, dtype: torch.dtype) -> PackedWeight:
    """A matrix of 16 or 32 bits as four bits in the largest groups that divide it."""
    group = next(group for group in GROUPS if matrix.shape[1] % group == 0)
    found = []
    for first in range(0, len(matrix), _ROWS_AT_ONCE):
        rows = matrix[first : first + _ROWS_AT_ONCE].float()
        found.append(packed_weight(*group_numbers(rows, group, dtype)))
    return PackedWeight(torch.cat([each.q for each in found]), torch.cat([each.pairs for each in found], 1))


def packed_of(numbers: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype) -> PackedWeight | None:
    """Numbers [columns, inner] with scales and offsets [columns, groups]; None for groups that kernels do not take."""
    group = numbers.shape[1] // scale.shape[1]
    # A block has whole groups: larger ones are cut.
    size = next((size for size in GROUPS if group % size == 0), 0)
    if not size or not fits_four_bits(*numbers.shape):
        return None
    scale, offset = (part.repeat_interleave(group // size, dim=1).to(dtype) for part in (scale, offset))
    return packed_weight(numbers, scale, offset)


def fits_four_bits(columns: int, inner: int) -> bool:
    return columns % 16 == 0 and inner % 64 == 0


def fits_eight_bits(columns: int, inner: int) -> bool:
    """Whether products of eight bits can be made with a matrix of this shape."""
    return columns % 16 == 0 and inner % INNER_STEP == 0
