"""Matrix product with weights of four bits and rows of 16 bits, unpacked in registers.

A weight is a number of 0 to 15 times its group's scale plus the group's offset, rounded to 16 bits once: in the product
and where a matrix is unpacked alike. A word of 16 bits holds numbers that lie a quarter of a block apart, so that two
neighbouring words give neighbouring inputs of each quarter, by a shift and a mask for both:

    block of 4 * quarter inputs:   word i = n[i] | n[quarter + i] << 4 | n[2 quarter + i] << 8 | n[3 quarter + i] << 12

The words of 16 columns and a block lie together, and a scale lies beside its offset: whatever a turn of the loop needs
is then copied ahead of it, four bytes or more at a time.

As in `skinny_product`, the weights are the tall operand of the matrix instruction, the inner dimension may be split
into parts that `residual_norm` sums, and gate and up may go through the activation before they are stored.

It must not know the layer; how a shape is cut is a table in this file, never a measurement at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_ROWS,
    ProductTuning,
    fitting_parts,
    fitting_tile,
    launch_product,
    store_product,
)

COLUMNS_TOGETHER = 16
MAX_PACKED_ROWS = 512  # more are faster with the matrix unpacked
_FEWEST_ROWS = 8  # of a matrix instruction
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_PAIRS = {2: torch.int32, 4: torch.int64}  # a scale and an offset of so many bytes each, as one number


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Words [columns / 16, blocks, 16, quarter]; scales and offsets [groups, columns, 2] in the inputs' type."""

    q: Tensor
    pairs: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        several, blocks, together, quarter = self.q.shape
        return several * together, blocks * quarter * 4

    @property
    def group(self) -> int:
        return self.shape[1] // self.pairs.shape[0]

    @property
    def quarter(self) -> int:
        return self.q.shape[3]


def packed_weight(numbers: Tensor, scale: Tensor, offset: Tensor) -> PackedWeight:
    """uint8 [columns, inner] below 16, and what they are multiplied with, [columns, groups]."""
    columns, inner = numbers.shape
    quarter = 32 if inner % 128 == 0 else 16
    blocks = numbers.view(columns // COLUMNS_TOGETHER, COLUMNS_TOGETHER, -1, 4, quarter).to(torch.int16)
    words = blocks[:, :, :, 0] | blocks[:, :, :, 1] << 4 | blocks[:, :, :, 2] << 8 | blocks[:, :, :, 3] << 12
    pairs = torch.stack((scale.T, offset.T), dim=-1)
    return PackedWeight(words.transpose(1, 2).contiguous(), pairs.contiguous())


def packed_tuning(
    rows: int, columns: int, inner: int, *, narrow: bool = False, gated: bool = False
) -> ProductTuning:
    """How a product is cut, by measurements on an H200; `narrow`: its parts may be summed by the next kernel."""
    step, may_split = 128 if inner % 128 == 0 else 64, narrow and columns <= 4096
    if rows > MAX_ROWS and columns % 128 == 0:
        parts = fitting_parts(2, inner, step) if may_split else 1
        return ProductTuning(columns=128, inner=step, rows=128, parts=parts, num_warps=8, num_stages=3)
    tile, warps = fitting_tile(columns), 4
    if rows <= _FEWEST_ROWS:
        tile = tile if gated else min(tile, 32)  # more programs
        warps = tile // COLUMNS_TOGETHER
    return ProductTuning(
        columns=tile,
        inner=step,
        parts=fitting_parts(4, inner, step) if may_split else 1,
        num_warps=warps,
        num_stages=(3 if rows > 32 else 4) if gated else 4 if rows > 32 else 5 if rows > _FEWEST_ROWS else 8,
        fewest_rows=_FEWEST_ROWS,
    )


def packed_product(
    out: Tensor,
    x: Tensor,
    weight: PackedWeight,
    *,
    tuning: ProductTuning,
    gated: bool = False,
    overlapped: bool = False,
) -> None:
    """`out` = `x` [rows, inner] times `weight` [columns, inner] transposed.

    `out` is [rows, columns] for one part, else float32 [parts, rows, columns]. With `gated`, `weight` has 2 * columns,
    gate first, and `out` = silu(gate) * up. `overlapped`: see overlap.py.
    """
    assert x.shape[1] == weight.shape[1] and weight.pairs.dtype == x.dtype
    launch_product(
        _packed_kernel,
        out,
        (x, weight.q, as_numbers(weight.pairs)),
        sizes=(*x.shape, weight.shape[0]),
        tuning=tuning,
        gated=gated,
        overlapped=overlapped,
        GROUP=weight.group,
        QUARTER=weight.quarter,
        TOGETHER=COLUMNS_TOGETHER,
    )


def as_numbers(pairs: Tensor) -> Tensor:
    return pairs.view(_PAIRS[pairs.element_size()])


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(
    out,
    x,
    weight,
    pairs,
    rows,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    QUARTER: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    TOTAL: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    BLOCK: tl.constexpr = 4 * QUARTER
    BLOCKS: tl.constexpr = INNER // PARTS // BLOCK
    KIND: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    weight_at = words_of(weight, column, INNER, QUARTER, TOGETHER)
    x_at = x + row[:, None] * INNER + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    wait_and_announce(OVERLAPPED)
    for block in range(part * BLOCKS, (part + 1) * BLOCKS):
        xs = tl.trans(tl.load(x_at + block * BLOCK, mask=(row < rows)[:, None], other=0.0))
        words_at = weight_at + block * (TOGETHER * QUARTER)
        pair_at = pairs + block * BLOCK // GROUP * TOTAL + column
        acc = tl.dot(unpacked(words_at, pair_at, TOTAL, GROUP, TILE, QUARTER, KIND), xs, acc)
        if GATED:
            words_at += COLUMNS * (INNER // 4)
            up = tl.dot(unpacked(words_at, pair_at + COLUMNS, TOTAL, GROUP, TILE, QUARTER, KIND), xs, up)
    store_product(out, acc, up, part, rows, row, column, COLUMNS, GATED)


@triton.jit
def words_of(weight, column, INNER: tl.constexpr, QUARTER: tl.constexpr, TOGETHER: tl.constexpr):
    """Where the words of the first block of each column are, [columns, quarter]."""
    at = (column // TOGETHER).to(tl.int64) * (TOGETHER * INNER // 4) + column % TOGETHER * QUARTER
    return weight + at[:, None] + tl.arange(0, QUARTER)[None, :]


@triton.jit
def unpacked(
    words_at,
    pair_at,
    TOTAL: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    QUARTER: tl.constexpr,
    KIND: tl.constexpr,
):
    """The weights of a block, [columns, 4 * quarter]. Groups are a quarter, a half or all of it."""
    words = tl.load(words_at)
    one = tl.load(pair_at)
    two = one if GROUP > QUARTER else tl.load(pair_at + TOTAL)
    three = one if GROUP > 2 * QUARTER else tl.load(pair_at + 2 * QUARTER // GROUP * TOTAL)
    four = three if GROUP > QUARTER else tl.load(pair_at + 3 * TOTAL)
    if _IS_COMPILED and tl.bfloat16 == KIND:
        # A number in the lower bits of bfloat16 128.0 is 128 more: no conversion, which would be slow.
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 word, pair, scale, offset, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC300C300;
            prmt.b32 scale, $5, 0, 0x1010;
            prmt.b32 offset, $5, 0, 0x3232;
            lop3.b32 pair, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $0, pair, scale, offset;
            prmt.b32 scale, $7, 0, 0x1010;
            prmt.b32 offset, $7, 0, 0x3232;
            shr.u32 word, $4, 4;
            lop3.b32 pair, word, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $1, pair, scale, offset;
            prmt.b32 scale, $9, 0, 0x1010;
            prmt.b32 offset, $9, 0, 0x3232;
            shr.u32 word, $4, 8;
            lop3.b32 pair, word, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $2, pair, scale, offset;
            prmt.b32 scale, $11, 0, 0x1010;
            prmt.b32 offset, $11, 0, 0x3232;
            shr.u32 word, $4, 12;
            lop3.b32 pair, word, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $3, pair, scale, offset;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [
                words,
                tl.broadcast_to(one[:, None], words.shape),
                tl.broadcast_to(two[:, None], words.shape),
                tl.broadcast_to(three[:, None], words.shape),
                tl.broadcast_to(four[:, None], words.shape),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a = _values(words, one, KIND)
        b = _values(words >> 4, two, KIND)
        c = _values(words >> 8, three, KIND)
        d = _values(words >> 12, four, KIND)
    first = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (TILE, 2 * QUARTER))
    second = tl.reshape(tl.permute(tl.join(c, d), (0, 2, 1)), (TILE, 2 * QUARTER))
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (TILE, 4 * QUARTER))


@triton.jit
def _values(words, pair, KIND: tl.constexpr):
    """Of the lowest four bits of words [columns, quarter]."""
    BITS: tl.constexpr = KIND.primitive_bitwidth
    PART: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    scale = pair.to(PART).to(KIND, bitcast=True).to(tl.float32)
    offset = (pair >> BITS).to(PART).to(KIND, bitcast=True).to(tl.float32)
    return ((words & 15).to(tl.float32) * scale[:, None] + offset[:, None]).to(KIND)


# -- many rows -----------------------------------------------------------------------------------------------


def unpack(out: Tensor, weight: PackedWeight) -> None:
    """`out` [columns, inner] = the weights, in the type of their scales."""
    columns, inner = weight.shape
    assert out.shape == (columns, inner) and out.is_contiguous() and out.dtype == weight.pairs.dtype
    tile = fitting_tile(columns)
    _unpack_kernel[(columns // tile, inner // (4 * weight.quarter))](
        out,
        weight.q,
        as_numbers(weight.pairs),
        COLUMNS=columns,
        INNER=inner,
        GROUP=weight.group,
        TILE=tile,
        QUARTER=weight.quarter,
        TOGETHER=COLUMNS_TOGETHER,
    )


@triton.jit
def _unpack_kernel(
    out,
    weight,
    pairs,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    QUARTER: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    BLOCK: tl.constexpr = 4 * QUARTER
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1)
    words_at = words_of(weight, column, INNER, QUARTER, TOGETHER) + block * (TOGETHER * QUARTER)
    pair_at = pairs + block * BLOCK // GROUP * COLUMNS + column
    values = unpacked(words_at, pair_at, COLUMNS, GROUP, TILE, QUARTER, out.dtype.element_ty)
    into = out + column.to(tl.int64)[:, None] * INNER + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(into, values)


def group_numbers(values: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [columns, inner] as (numbers, scales, offsets): what a group's sixteen numbers cover is cut at each end
    as far as brings them closest in squared error. Scales and offsets [columns, groups] are numbers of `dtype`."""
    columns = len(values)
    grouped = values.view(columns, -1, group)
    whole = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    reach = whole[1] - whole[0]

    def covering(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        """The error, and what it is made with."""
        scale = ((high - low) / 15).clamp_min(1e-10).to(dtype).float()
        offset = low.to(dtype).float()
        q = ((grouped - offset) / scale).round_().clamp_(0, 15)
        error = (q * scale + offset - grouped).square_().sum(dim=-1, keepdim=True)
        return error, q, scale, offset, low, high

    best = covering(*whole)
    for is_high in (True, False):
        low, high = best[4:]
        for cut in _CUTS:
            found = (
                covering(low, whole[1] - cut * reach) if is_high else covering(whole[0] + cut * reach, high)
            )
            closer = found[0] < best[0]
            best = tuple(torch.where(closer, new, old) for new, old in zip(found, best, strict=True))
    _, q, scale, offset = best[:4]
    return q.to(torch.uint8).view(values.shape), scale[..., 0].to(dtype), offset[..., 0].to(dtype)


_CUTS = (0.025, 0.05, 0.075, 0.1)  # of a group's range
