"""Matrix product with weights of four bits, for up to 64 rows of 16 bits; for more, the matrix is unpacked.

A weight is a number of 0 to 15 times its group's scale plus the group's offset, rounded to 16 bits once: in the product
and where it is unpacked alike. A byte holds numbers that lie half a block apart, so that the lower halves of some bytes
are neighbouring inputs, and so are the upper ones:

    block of 2 * half inputs:   byte i = number[i] | number[half + i] << 4        half = 64, or 32 for groups of 32

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
from paceline.runner.gpu.kernels.skinny_product import MAX_ROWS, ProductTuning

_FEWEST_ROWS = 16  # of a matrix instruction
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_TILES = (64, 32, 16)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Numbers [columns, inner / 2], two in a byte; scales and offsets [groups, columns] in the inputs' type."""

    q: Tensor
    scale: Tensor
    offset: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1] * 2

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[0]

    @property
    def half(self) -> int:
        return half_block(self.group)


def half_block(group: int) -> int:
    """Inputs in half a block: a half lies in one group."""
    return min(group, 64)


def pack_halves(numbers: Tensor, group: int) -> Tensor:
    """uint8 [columns, inner] below 16, as bytes of two."""
    columns, inner = numbers.shape
    blocks = numbers.view(columns, -1, 2, half_block(group))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(columns, inner // 2)


def packed_tuning(rows: int, columns: int, inner: int, *, narrow: bool = False) -> ProductTuning:
    """How a product is cut; `narrow`: its parts may be summed by the next kernel."""
    parts = 1
    if narrow and columns <= 4096:
        parts = next((parts for parts in (4 if columns <= 2048 else 2, 2) if inner % (128 * parts) == 0), 1)
    tile = next((tile for tile in _TILES if columns % tile == 0), _TILES[-1])
    return ProductTuning(
        columns=tile, inner=128, parts=parts, num_stages=8 if rows <= 16 else 6 if rows <= 32 else 4
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
    rows, inner = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    assert rows <= MAX_ROWS and columns % tuning.columns == 0 and inner == weight.shape[1]
    assert inner % (2 * weight.half * tuning.parts) == 0 and weight.scale.dtype == x.dtype
    assert weight.q.is_contiguous() and x.is_contiguous() and out.is_contiguous()
    assert tuning.parts == 1 or not gated
    overlapped = overlapped and tuning.starts_early
    row_tile = max(_FEWEST_ROWS, triton.next_power_of_2(rows))
    _packed_kernel[(columns // tuning.columns, tuning.parts)](
        out,
        x,
        weight.q,
        weight.scale,
        weight.offset,
        rows,
        INNER=inner,
        COLUMNS=columns,
        GROUP=weight.group,
        PARTS=tuning.parts,
        TILE=tuning.columns,
        HALF=weight.half,
        ROWS=row_tile,
        GATED=gated,
        OVERLAPPED=overlapped,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=overlapped,
    )


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(
    out,
    x,
    weight,
    scale,
    offset,
    rows,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    TOTAL: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    PART: tl.constexpr = INNER // PARTS
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    weight_at = weight + column.to(tl.int64)[:, None] * (INNER // 2) + half[None, :]
    x_at = x + row[:, None] * INNER + half[None, :]
    present = (row < rows)[:, None]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    wait_and_announce(OVERLAPPED)
    for start in range(part * PART, (part + 1) * PART, 2 * HALF):
        first, second = start // GROUP * TOTAL + column, (start + HALF) // GROUP * TOTAL + column
        x_first = tl.trans(tl.load(x_at + start, mask=present, other=0.0))
        x_second = tl.trans(tl.load(x_at + start + HALF, mask=present, other=0.0))
        bytes_ = tl.load(weight_at + start // 2)
        lower, upper = _unpack(
            bytes_,
            tl.load(scale + first),
            tl.load(offset + first),
            tl.load(scale + second),
            tl.load(offset + second),
        )
        acc = tl.dot(lower, x_first, acc)
        acc = tl.dot(upper, x_second, acc)
        if GATED:
            bytes_ = tl.load(weight_at + COLUMNS * (INNER // 2) + start // 2)
            lower, upper = _unpack(
                bytes_,
                tl.load(scale + COLUMNS + first),
                tl.load(offset + COLUMNS + first),
                tl.load(scale + COLUMNS + second),
                tl.load(offset + COLUMNS + second),
            )
            up = tl.dot(lower, x_first, up)
            up = tl.dot(upper, x_second, up)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    into = out + (part * rows + row[None, :]) * COLUMNS + column[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :])


@triton.jit
def _unpack(bytes_, scale, offset, upper_scale, upper_offset):
    """Weights of the lower and the upper halves of bytes [rows, half], in the type of their scales [rows]."""
    KIND: tl.constexpr = scale.dtype
    if _IS_COMPILED and tl.bfloat16 == KIND:
        # A number in the lower bits of bfloat16 128.0 is 128 more: no conversion, which would be slow.
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, pair, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC300C300;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 pair, low, 0x43434343, 0x4140;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $0, pair, $5, $7;
            prmt.b32 pair, low, 0x43434343, 0x4342;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $1, pair, $6, $8;
            prmt.b32 pair, high, 0x43434343, 0x4140;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $2, pair, $9, $11;
            prmt.b32 pair, high, 0x43434343, 0x4342;
            fma.rn.bf16x2 pair, pair, one, less;
            fma.rn.bf16x2 $3, pair, $10, $12;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [
                bytes_,
                tl.broadcast_to(scale[:, None], bytes_.shape),
                tl.broadcast_to(offset[:, None], bytes_.shape),
                tl.broadcast_to(upper_scale[:, None], bytes_.shape),
                tl.broadcast_to(upper_offset[:, None], bytes_.shape),
            ],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        lower = _value(bytes_ & 15, scale[:, None], offset[:, None])
        upper = _value(bytes_ >> 4, upper_scale[:, None], upper_offset[:, None])
    return lower, upper


@triton.jit
def _value(number, scale, offset):
    value = number.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)
    return value.to(scale.dtype)


# -- many rows -----------------------------------------------------------------------------------------------


def unpack(out: Tensor, weight: PackedWeight) -> None:
    """`out` [columns, inner] = the weights, in the type of their scales."""
    columns, inner = weight.shape
    assert out.shape == (columns, inner) and out.is_contiguous() and out.dtype == weight.scale.dtype
    lanes = triton.next_power_of_2(inner // 2)
    _unpack_kernel[(columns,)](
        out,
        weight.q,
        weight.scale,
        weight.offset,
        columns,
        INNER=inner,
        GROUP=weight.group,
        HALF=weight.half,
        LANES=lanes,
        num_warps=min(8, max(1, lanes // 256)),
    )


@triton.jit(do_not_specialize=["columns"])
def _unpack_kernel(
    out,
    weight,
    scale,
    offset,
    columns,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < INNER // 2
    bytes_ = tl.load(weight + column * (INNER // 2) + lane, mask=mask, other=0)
    first = lane // HALF * (2 * HALF) + lane % HALF
    into = out + column * INNER
    at = (first // GROUP).to(tl.int64) * columns + column
    lower = _value(bytes_ & 15, _of(scale, at, mask), _of(offset, at, mask))
    tl.store(into + first, lower, mask=mask)
    at = ((first + HALF) // GROUP).to(tl.int64) * columns + column
    upper = _value(bytes_ >> 4, _of(scale, at, mask), _of(offset, at, mask))
    tl.store(into + first + HALF, upper, mask=mask)


@triton.jit
def _of(source, at, mask):
    return tl.load(source + at, mask=mask, other=0.0)


def group_numbers(values: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [columns, inner] as (numbers, scales, offsets): of a few widths of a group's range the one that comes
    closest in squared error. Scales and offsets [columns, groups] are numbers of `dtype`."""
    columns = len(values)
    grouped = values.view(columns, -1, group)
    low, high = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for width in _WIDTHS:
        scale = (reach * (2 * width / 15)).clamp_min(1e-10).to(dtype).float()
        offset = (middle - reach * width).to(dtype).float()
        q = ((grouped - offset) / scale).round_().clamp_(0, 15)
        error = (q * scale + offset - grouped).square_().sum(dim=-1, keepdim=True)
        if best is None:
            best = (error, q, scale, offset)
            continue
        closer = error < best[0]
        best = (
            torch.where(closer, error, best[0]),
            torch.where(closer, q, best[1]),
            torch.where(closer, scale, best[2]),
            torch.where(closer, offset, best[3]),
        )
    assert best is not None
    _, q, scale, offset = best
    return q.to(torch.uint8).view(values.shape), scale[..., 0].to(dtype), offset[..., 0].to(dtype)


_WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range that its sixteen numbers cover
