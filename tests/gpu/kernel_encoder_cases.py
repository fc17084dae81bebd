"""The kernels of encoders and of vectors against their definitions in float64; on the card and interpreted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.layers import ACTIVATIONS
from paceline.runner.gpu.kernels.inner_activation import inner_activation
from paceline.runner.gpu.kernels.layer_norm import layer_norm
from paceline.runner.gpu.kernels.ragged_attention import (
    RaggedTuning,
    ragged_attention,
    ragged_tiles,
    ragged_tuning,
)
from paceline.runner.gpu.kernels.rotate_heads import rotate_heads
from paceline.runner.gpu.kernels.span_sums import span_sums
from paceline.runner.gpu.kernels.token_inputs import NO_VECTOR, PicturePages, token_inputs
from tests.gpu.kernel_cases import Shape, assert_close

NAN = float("nan")
GAP = 3  # tokens between sequences that are in none of them


def reference_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Of one sequence, all [tokens, heads, head_dim]."""
    q, k, v = (part.double().transpose(0, 1) for part in (query, key, value))
    scores = q @ k.transpose(1, 2) * scale
    if reach:
        places = torch.arange(len(query), device=query.device)
        scores = scores.masked_fill((places[:, None] - places).abs() > reach, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check_ragged_attention(
    shape: Shape,
    lengths: Sequence[int],
    *,
    heads: int = 3,
    reach: int = 0,
    tuning: RaggedTuning | None = None,
) -> None:
    """Sequences with rubbish between them, and what each gives alone: the same bits."""
    head_dim, device = shape.head_dim, shape.device
    tuning = tuning or ragged_tuning(head_dim)
    counts = np.array(lengths)
    starts = np.cumsum(counts + GAP) - counts
    product = shape.random(int((counts + GAP).sum()) + GAP, 3, heads, head_dim)
    is_text = torch.zeros(len(product), dtype=torch.bool)
    for start, count in zip(starts.tolist(), lengths, strict=True):
        is_text[start : start + count] = True
    is_text = is_text.to(device)
    product[~is_text] = NAN
    query, key, value = product.unbind(1)
    tiles = ragged_tiles(starts, counts, tuning.query_rows)
    spare = np.zeros((2, tiles.shape[1]), np.int32)  # of a graph that has room for more
    scale = head_dim**-0.5

    def computed(these: np.ndarray) -> Tensor:
        out = torch.full_like(query.contiguous(), NAN)
        places = torch.from_numpy(these).to(device)
        ragged_attention(out, query, key, value, places, scale=scale, reach=reach, tuning=tuning)
        return out

    out = computed(np.concatenate([tiles, spare]))
    assert bool(out[~is_text].isnan().all())
    for start, count in zip(starts.tolist(), lengths, strict=True):
        own = slice(start, start + count)
        wanted = reference_attention(query[own], key[own], value[own], scale=scale, reach=reach)
        assert_close(out[own], wanted, shape.tolerance)
    longest = int(counts.argmax())
    alone = computed(ragged_tiles(starts[longest:][:1], counts[longest:][:1], tuning.query_rows))
    own = slice(int(starts[longest]), int(starts[longest] + counts[longest]))
    assert torch.equal(alone[own], out[own])


def check_layer_norm(
    shape: Shape, tokens: int, width: int, *, has_update: bool, has_bias: bool, keeps_sum: bool
) -> None:
    """With a sum that is kept the residual is float32, as where norms stand before the parts of a layer."""
    kind = torch.float32 if keeps_sum else shape.dtype
    residual = (shape.random(tokens, width) * 3 + 5).to(kind)
    update = shape.random(tokens, width) if has_update else None
    weight, bias = shape.random(width), shape.random(width) if has_bias else None
    total = residual.double() + (0 if update is None else update.double())
    wanted = F.layer_norm(total, (width,), weight.double(), None if bias is None else bias.double(), 1e-5)
    into = residual.clone()
    out = torch.full((tokens, width), NAN, device=shape.device, dtype=shape.dtype) if keeps_sum else into
    layer_norm(out, into, update, weight, bias, epsilon=1e-5, keeps_sum=keeps_sum)
    assert_close(out, wanted, shape.tolerance)
    if keeps_sum:
        assert_close(into, total, 1e-6)


def check_inner_activation(shape: Shape, tokens: int, width: int, activation: str, *, gated: bool) -> None:
    product = shape.random(tokens, (2 if gated else 1) * width) * 4
    product[0, :3] = torch.tensor([-300.0, 300.0, 0.0])
    gate, up = product.double().chunk(2, dim=1) if gated else (product.double(), 1.0)
    wanted = ACTIVATIONS[activation](gate) * up
    out = torch.full((tokens, width), NAN, device=shape.device, dtype=shape.dtype) if gated else product
    inner_activation(out, product, activation=activation)
    assert_close(out, wanted, shape.tolerance)


def check_rotate_heads(shape: Shape, tokens: int, number: int, *, rotary_dim: int) -> None:
    """Heads are the first of a wider row, of which the rest stays."""
    row = shape.random(tokens, number + 2, shape.head_dim)
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32, device=shape.device)
    angles = torch.rand(50, rotary_dim // 2, device=shape.device) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    wanted = row.double()
    turn = angles.double()[positions.long()][:, None]
    half = rotary_dim // 2
    first, second = wanted[:, :number, :half].clone(), wanted[:, :number, half:rotary_dim].clone()
    wanted[:, :number, :half] = first * turn.cos() - second * turn.sin()
    wanted[:, :number, half:rotary_dim] = second * turn.cos() + first * turn.sin()
    rest = row[:, number:].clone()
    rotate_heads(row[:, :number], table, positions)
    assert_close(row, wanted, shape.tolerance)
    assert torch.equal(row[:, number:], rest)


def check_span_sums(shape: Shape, runs: Sequence[tuple[int, int, int, int]], width: int) -> None:
    """`runs`: row of the sums, first token, how many, whether the sum goes on."""
    device = shape.device
    states = shape.random(max(first + count for _, first, count, _ in runs), width)
    sums = torch.randn(max(row for row, *_ in runs) + 2, width, device=device)
    wanted = sums.double()
    for row, first, count, goes_on in runs:
        if count:
            total = states[first : first + count].double().sum(0)
            wanted[row] = total + (wanted[row] if goes_on else 0)
    span_sums(sums, states, torch.tensor(runs, dtype=torch.int32, device=device).T.contiguous())
    assert_close(sums, wanted, 1e-5)


def reference_inputs(table: Tensor, ids: Tensor, scale: float, pages: PicturePages | None) -> Tensor:
    wanted = table[ids.long()]
    if scale != 1.0:
        wanted = wanted.mul_(scale)
    if pages is not None:
        seen = pages.slots != NO_VECTOR
        wanted[seen] = pages.vectors[pages.slots[seen].long()]
    return wanted


def check_token_inputs(
    shape: Shape,
    tokens: int,
    width: int,
    *,
    scale: float = 1.0,
    pictures: bool = True,
    wide_ids: bool = False,
) -> None:
    """The same bits as a gather and a product; slots that no token has hold rubbish."""
    table, vectors = shape.random(50, width), shape.random(40, width)
    vectors[7] = NAN
    kind = torch.int64 if wide_ids else torch.int32
    ids = torch.randint(0, 50, (tokens,), dtype=kind, device=shape.device)
    slots = torch.randint(0, 40, (tokens,), dtype=torch.int32, device=shape.device)
    slots[(slots == 7) | (torch.arange(tokens, device=shape.device) % 3 == 0)] = NO_VECTOR
    factor = torch.tensor(scale, dtype=shape.dtype).item()
    pages = PicturePages(vectors=vectors, slots=slots) if pictures else None
    out = torch.full((tokens + 1, width), NAN, device=shape.device, dtype=shape.dtype)
    token_inputs(out[:tokens], table, ids, scale=factor, pages=pages)
    wanted = reference_inputs(table, ids, factor, pages)
    assert bool(out[tokens:].isnan().all())
    if scale == 1.0 or table.is_cuda:
        assert torch.equal(out[:tokens], wanted)
    else:  # the interpreter rounds to 16 bits in its own way
        assert_close(out[:tokens], wanted.double(), shape.tolerance)
