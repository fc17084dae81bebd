"""Weights of a layer as the device keeps them: matrices of 16 bits, or of eight or four with scales; those of its
experts are stacked.

A quantised matrix says how its values are made of what is stored; the step's products are the decoder's business
(forward.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.decoder import Layer
from paceline.models.layers import DenseLinear, Experts, FeedForward, RMSNorm
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.kernels.block_product import (
    BlockWeight,
    block_product,
    block_tuning,
    unpack_blocks,
)
from paceline.runner.gpu.kernels.expert_product import ExpertMatrices, ExpertWeights
from paceline.runner.gpu.kernels.packed_product import (
    MAX_PACKED_ROWS,
    PackedWeight,
    group_numbers,
    packed_product,
    packed_tuning,
    packed_weight,
    unpack,
)
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExperts:
    """The experts of one layer, and their router."""

    router: Tensor
    weights: ExpertWeights
    per_token: int
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """Weights of one layer."""

    qkv: DeviceLinear
    output: DeviceLinear
    gate_up: DeviceLinear | None
    down: DeviceLinear | None
    experts: DeviceExperts | None
    head_norm: HeadNorm | None
    norm_before_attention: Tensor
    norm_before_feed_forward: Tensor
    norm_after_attention: Tensor | None
    norm_after_feed_forward: Tensor | None

    @property
    def linears(self) -> list[DeviceLinear]:
        """Those without experts."""
        parts = (self.qkv, self.output, self.gate_up, self.down)
        return [linear for linear in parts if linear is not None]


def fold_kv_scales(
    layers: Sequence[Layer], spec: ModelSpec, scales: Mapping[int, tuple[float, float]]
) -> None:
    """Make keys and values smaller by a file's scales, and queries and the output matrix larger, so that nothing but
    their range changes. Of a scale the next power of two is taken: eight bits of floating point keep as many of a
    number's bits with the one as with the other, and weights are not rounded again."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for index, layer in enumerate(layers):
        attention = layer.attention
        of_keys, of_values = (2.0 ** math.ceil(math.log2(scale)) for scale in scales.get(index, (1.0, 1.0)))
        qkv = cast(DeviceLinear, attention.qkv)
        factors = [(slice(queries + keys, None), 1 / of_values)]
        if attention.head_norm is None:
            factors += [(slice(queries), of_keys), (slice(queries, queries + keys), 1 / of_keys)]
        else:
            attention.head_norm.weight[: spec.num_heads] *= of_keys
            attention.head_norm.weight[spec.num_heads :] /= of_keys
        for columns, factor in factors:
            multiply_columns(qkv, columns, factor)
            if qkv.bias is not None:
                qkv.bias[columns] *= factor
        multiply_columns(cast(DeviceLinear, attention.output), slice(None), of_values)


def device_layer(layer: Layer, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> DeviceLayer:
    def norm(part: RMSNorm | None) -> Tensor | None:
        return None if part is None else part.weight.to(device)

    head_norm = None
    if layer.attention.head_norm is not None:
        weight = layer.attention.head_norm.weight.to(device)
        head_norm = HeadNorm(
            query_weight=weight[0].contiguous(), key_weight=weight[-1].contiguous(), epsilon=spec.norm_eps
        )
    fed = layer.feed_forward
    dense = fed if isinstance(fed, FeedForward) else None
    return DeviceLayer(
        qkv=cast(DeviceLinear, layer.attention.qkv),
        output=cast(DeviceLinear, layer.attention.output),
        gate_up=cast(DeviceLinear, dense.gate_up) if dense is not None else None,
        down=cast(DeviceLinear, dense.down) if dense is not None else None,
        experts=_stacked(fed, spec, device, dtype) if isinstance(fed, Experts) else None,
        head_norm=head_norm,
        norm_before_attention=layer.norm_before_attention.weight.to(device),
        norm_before_feed_forward=layer.norm_before_feed_forward.weight.to(device),
        norm_after_attention=norm(layer.norm_after_attention),
        norm_after_feed_forward=norm(layer.norm_after_feed_forward),
    )


def stacked_matrices(linears: Sequence[DeviceLinear], dtype: torch.dtype) -> ExpertMatrices:
    """Matrices as one; those of several kinds are unpacked."""
    weights = [linear.weight for linear in linears]
    if len({type(weight) for weight in weights}) > 1:
        weights = [dense_matrix(linear, dtype) for linear in linears]
    if isinstance(weights[0], Tensor):
        return ExpertMatrices(q=_stack(cast(list[Tensor], weights)))
    kept = [weight for weight in weights if not isinstance(weight, Tensor)]
    return ExpertMatrices(q=_stack([each.q for each in kept]), scale=_stack([_scales(each) for each in kept]))


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one: the memory they have, where they lie behind one another in it (`Home`)."""
    first, size = tensors[0], tensors[0].numel()
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    if len({tensor.dtype for tensor in tensors}) == 1 and all(
        tensor.untyped_storage().data_ptr() == memory
        and tensor.storage_offset() == start + place * size
        and tensor.is_contiguous()
        for place, tensor in enumerate(tensors)
    ):
        return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))
    kind = first.dtype  # torch stacks no e4m3 everywhere
    return torch.stack([each.view(torch.uint8) if kind.itemsize == 1 else each for each in tensors]).view(
        kind
    )


def _scales(weight: ScaledWeight | BlockWeight | PackedWeight) -> Tensor:
    """By group, then by row."""
    if isinstance(weight, PackedWeight):
        return weight.pairs
    return weight.scale if isinstance(weight, BlockWeight) else weight.scale[None]


def _stacked(experts: Experts, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> DeviceExperts:
    """All experts of a layer as one tensor of each kind; the router is built on the host in float32."""
    assert spec.experts is not None
    gate_up = stacked_matrices([cast(DeviceLinear, expert.gate_up) for expert in experts.experts], dtype)
    down = stacked_matrices([cast(DeviceLinear, expert.down) for expert in experts.experts], dtype)
    router = cast(DenseLinear, experts.router).weight.to(device, dtype)
    experts.experts.clear()  # what was stacked need not be there twice
    return DeviceExperts(
        router=router,
        weights=ExpertWeights(gate_up=gate_up, down=down),
        per_token=spec.experts.per_token,
        normalize=spec.experts.normalize,
    )
