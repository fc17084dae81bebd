"""What each kernel computes, in plain torch and float64: the definition that kernels are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.expert_product import ExpertWeights
from paceline.runner.gpu.kernels.gated_product import Activation
from paceline.runner.gpu.kernels.gumbel_sampling import GREEDY_BELOW
from paceline.runner.gpu.kernels.logit_rules import IN_PROMPT, KnownTokens, RulePool
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm, TokenPlaces
from paceline.runner.gpu.kernels.row_product import RowNorm
from paceline.runner.gpu.kernels.scaled_product import ScaledWeight
from paceline.runner.gpu.kernels.scaled_rows import EIGHT_BITS, ScaledRows
from paceline.runner.gpu.kernels.step_rows import (
    FORCED_STOP,
    LENGTH,
    NOT_FINITE,
    RUNNING,
    STOPPED,
    RowColumns,
)
from paceline.runner.sampling.noise import gumbel, key_of, lane_words
from paceline.runner.sampling.processors import floors


def as_movable(pool: Tensor) -> Tensor:
    """The same memory in a type that torch can index: of numbers of one byte it moves only whole ones."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def read_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """What lies in these blocks, in float64."""
    return as_movable(pool)[blocks].view(pool.dtype).double()


def reference_decode_attention(
    query: Tensor,
    kv: PagedKV,
    slot_rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The definition, row by row in float64: (out, log_sum)."""
    slots, heads, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    out = torch.zeros(slots, heads, head_dim, dtype=torch.float64, device=query.device)
    log_sum = torch.full((slots, heads), float("-inf"), dtype=torch.float64, device=query.device)
    for slot, row in enumerate(slot_rows.tolist()):
        length = int(lengths[row])
        begin = max(first, length - window if window else 0)
        if begin >= length:
            continue
        blocks = kv.block_table[row, : (length + BLOCK_SIZE - 1) // BLOCK_SIZE].long()
        q = query[slot].double().view(kv_heads, heads // kv_heads, head_dim)
        k, v = (
            read_blocks(part, blocks).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, begin:length]
            for part in (kv.keys, kv.values)
        )
        scores = q @ k.transpose(1, 2) * scale
        out[slot] = (scores.softmax(-1) @ v).view(heads, head_dim)
        log_sum[slot] = scores.logsumexp(-1).view(heads)
    return out, log_sum


def reference_expert_product(
    x: Tensor, chosen: Tensor, chosen_weight: Tensor, weights: ExpertWeights
) -> Tensor:
    """The definition in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(weights.down.shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ weights.gate_up.q[expert].double().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ weights.down.q[expert].double().T
        out.index_add_(0, token, result * chosen_weight[token, place, None].double())
    return out


def reference_order(chosen: Tensor, experts: int) -> tuple[list[int], list[int]]:
    """The definition on the host: pairs in order, and how many each expert has."""
    choices = chosen.flatten().tolist()
    pairs = [pair for pair, expert in enumerate(choices) if 0 <= expert < experts]
    pairs.sort(key=lambda pair: choices[pair])  # keeps the order of equals
    return pairs, [choices.count(expert) for expert in range(experts)]


def reference_gated_activation(product: Tensor, *, activation: Activation = "silu") -> Tensor:
    """The definition in float64."""
    gate, up = product.double().chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def reference_gated_product(x: Tensor, weight: Tensor, *, activation: Activation = "silu") -> Tensor:
    """The definition in float64."""
    return reference_gated_activation(x.double() @ weight.double().T, activation=activation)


def reference_sample(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """The definition for one row."""
    raw = logits.double().cpu()
    if temperature >= GREEDY_BELOW:
        key, groups = np.array([key_of(seed)]), np.arange(-(-len(raw) // 4))
        noise = gumbel(lane_words(key, np.array([position]), groups)).reshape(-1)[: len(raw)]
        raw = (raw - raw.max()) / temperature + torch.from_numpy(noise)
    return int(raw.argmax())


def reference_floor(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The lowest logit that one row of finite top keeps, or minus infinity."""
    if temperature < GREEDY_BELOW:
        return float("-inf")
    columns = (np.array([value]) for value in (temperature, top_k, top_p, min_p))
    return float(floors(logits.float().cpu().numpy()[None], *columns)[0])


def reference_rules(logits: Tensor, pool: RulePool, place: int, position: int) -> Tensor:
    """The definition for one row of float32 logits, with the rules of a place; returns new logits, on the host."""
    x, out = logits.float().cpu().clone(), torch.tensor(float("-inf"))
    num_allowed, num_banned, num_ends, num_biased = pool.counts[place].tolist()
    sizes = [max(num_allowed, 0), num_banned, num_ends, num_biased]
    allowed, banned, ends, biased = torch.split(pool.tokens[place, : sum(sizes)].long().cpu(), sizes)
    if num_allowed >= 0:
        kept = x[allowed]
        x[:] = out
        x[allowed] = kept
    bans = torch.cat([banned, ends]) if position < int(pool.stop_from[place]) else banned
    without = x.clone()
    without[bans] = out
    may_empty = num_allowed >= 0 or len(bans) >= len(x)
    if not may_empty or without.max() > out:
        x = without
    x[biased] += pool.bias[place, sum(sizes[:3]) : sum(sizes)].cpu()
    repetition, frequency, presence = pool.penalties[place].cpu()
    seen = pool.seen[place].cpu()
    count = seen & (IN_PROMPT - 1)
    penalised = torch.where(x > 0, x / repetition, x * repetition) if repetition != 1.0 else x
    penalised = penalised - frequency * count.float()
    penalised = penalised - presence * (count > 0).float()
    return torch.where(seen != 0, penalised, x)


def reference_seen(known: KnownTokens, row: int, vocabulary: int) -> Tensor:
    """What a place holds of a row, int32 [vocabulary], on the host."""
    length, num_prompt = int(known.length[row]), int(known.num_prompt[row])
    tokens = known.tokens[row, :length].long().cpu()
    prompt, output = (
        part[(part >= 0) & (part < vocabulary)] for part in (tokens[:num_prompt], tokens[num_prompt:])
    )
    in_prompt = (torch.bincount(prompt, minlength=vocabulary) > 0).to(torch.int32)
    return torch.bincount(output, minlength=vocabulary).to(torch.int32) + in_prompt * IN_PROMPT


def reference_prefill_attention(
    query: Tensor, kv: PagedKV, row: int, position: int, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """The definition for one span in float64: (out, log_sum) of `query` [tokens, heads, head_dim]."""
    tokens, heads, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    length = position + tokens
    begin = max(0, position + 1 - window) if window else 0  # what was before may be given back
    blocks = kv.block_table[row, : (length + BLOCK_SIZE - 1) // BLOCK_SIZE].long()
    k, v = (
        read_blocks(part, blocks).transpose(0, 1).reshape(kv_heads, 1, -1, head_dim)[:, :, begin:length]
        for part in (kv.keys, kv.values)
    )
    q = query.double().transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    scores = q @ k.transpose(2, 3) * scale
    sees = position + torch.arange(tokens, device=query.device)[:, None] + 1
    key = torch.arange(begin, length, device=query.device)[None, :]
    hidden = (key >= sees) | ((key < sees - window) if window else False)
    scores = scores.masked_fill(hidden, float("-inf"))
    out = (scores.softmax(-1) @ v).reshape(heads, tokens, head_dim).transpose(0, 1)
    return out, scores.logsumexp(-1).reshape(heads, tokens).transpose(0, 1)


def reference_residual_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The definition in float64: (norm, sum). The sum is rounded to the residual's type before the norm."""
    total = residual.double()
    if update is not None:
        total = total + (update.double().sum(0) if update.dim() == 3 else update.double())
    rounded = total.to(residual.dtype)
    x = rounded.double()
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double(), total


def reference_rope_kv_write(
    product: Tensor,
    places: TokenPlaces,
    rotation: Tensor,
    *,
    heads: int,
    kv_heads: int,
    norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in float64: turned queries, turned keys and values of each token, [tokens, heads, head_dim]."""
    head_dim = product.shape[1] // (heads + 2 * kv_heads)
    parts = product.double().view(len(product), -1, head_dim)
    q, k, v = torch.split(parts, [heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * weight.double()
            for x, weight in ((q, norm.query_weight), (k, norm.key_weight))
        )
    cosine, sine = rotation[places.positions.long()].double()[:, None, :].chunk(2, dim=-1)
    half = cosine.shape[-1]

    def turn(x: Tensor) -> Tensor:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], dim=-1)

    return turn(q), turn(k), v


def reference_placed(keys: Tensor, values: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64: of tokens with these keys and values [tokens, kv heads, head_dim] at their places,
    turned by angles [tokens, pairs]."""
    half, k = angles.shape[1], keys.double()
    cosine, sine = angles.double().cos()[:, None], angles.double().sin()[:, None]
    a, b, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], dim=-1), values


def reference_row_product(
    x: Tensor, weight: Tensor, *, norm: RowNorm | None = None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition in float64: (product, residual + x)."""
    total = x.double()
    row = total
    if norm is not None:
        total = norm.residual.double() + total
        rounded = total.to(norm.residual.dtype).double()
        row = rounded * (rounded.square().mean() + norm.epsilon).rsqrt() * norm.weight.double()
        row = row.to(x.dtype).double()
    product = weight.double() @ row
    if gated:
        gate, up = product.chunk(2)
        product = torch.nn.functional.silu(gate) * up
    return product, total


def reference_update_rows(
    rows: RowColumns, slot_rows: Tensor, tokens: Tensor, finite: Tensor
) -> list[tuple[int, int]]:
    """The definition, slot by slot on the host: changes `rows` and returns (token, code) of each slot."""
    report = []
    for row, token, is_finite in zip(slot_rows.tolist(), tokens.tolist(), finite.tolist(), strict=True):
        if not rows.active[row]:
            report.append((-1, -1))
            continue
        rows.tokens[row, rows.length[row]] = token
        rows.length[row] += 1
        code = LENGTH if rows.length[row] >= rows.max_length[row] else RUNNING
        code = STOPPED if is_finite == FORCED_STOP or token in rows.stop_ids[row].tolist() else code
        code = code if is_finite else NOT_FINITE
        rows.active[row] = int(code == RUNNING)
        report.append((token, code))
    return report


def reference_skinny_product(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """The definition in float64."""
    product = x.double() @ weight.double().T
    return reference_gated_activation(product) if gated else product


def reference_scaled_rows(x: Tensor, dtype: torch.dtype) -> ScaledRows:
    """The definition: the largest of a row becomes the largest that eight bits hold."""
    most = EIGHT_BITS[dtype]
    scale = x.double().abs().amax(dim=-1).clamp_min(1e-20) / most
    scaled = (x.double() / scale[:, None]).float()
    q = (scaled.round() if dtype == torch.int8 else scaled).clamp(-most, most).to(dtype)
    return ScaledRows(q, scale.float())


def reference_scaled_product(x: ScaledRows, weight: ScaledWeight, *, gated: bool = False) -> Tensor:
    """The definition in float64."""
    factors = (part.q.double() * part.scale.double()[:, None] for part in (x, weight))
    product = next(factors) @ next(factors).T
    return reference_gated_activation(product) if gated else product


def reference_scaled_row_product(
    x: Tensor, weight: ScaledWeight, *, norm: RowNorm | None = None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition: (product, residual + x). The row is rounded to eight bits behind the norm."""
    row, total = x.double(), x.double()
    if norm is not None:
        normed, both = reference_residual_norm(
            norm.residual[None], x[None], norm.weight, epsilon=norm.epsilon
        )
        row, total = normed[0], both[0]
    rows = reference_scaled_rows(row[None], weight.q.dtype)
    return reference_scaled_product(rows, weight, gated=gated)[0], total


def reference_packed(numbers: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The definition in float64: numbers [columns, inner] of four bits, scales and offsets [columns, groups]."""
    grouped = numbers.double().view(*scale.shape, -1)
    values = grouped * scale.double()[:, :, None] + offset.double()[:, :, None]
    return values.view(numbers.shape)


def reference_decode_inputs(
    rows: RowColumns, slot_rows: Tensor, tables: Sequence[Tensor]
) -> list[tuple[int, int, tuple[int, ...], int]]:
    """The definition, slot by slot: token, position, slot in each group, visible tokens."""
    found = []
    for row in slot_rows.tolist():
        length = int(rows.length[row])
        if not rows.active[row] or length < 1:
            found.append((0, 0, (-1,) * len(tables), 0))
            continue
        block, place = divmod(length - 1 - int(rows.dropped[row]), BLOCK_SIZE)
        places = tuple(int(table[row, block]) * BLOCK_SIZE + place for table in tables)
        seen = length - int(rows.dropped[row])
        found.append((int(rows.tokens[row, length - 1]), length - 1, places, seen))
    return found
