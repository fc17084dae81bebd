"""Which drafts a step verifies, and where their tokens lie in it.

A draft's chance is the product of the trust in its kind over the drafts up to it. Those above the floor are wanted;
where more are wanted than the step has room for, the likeliest stay, of equals those of the first slots. A row that
runs has its last token and behind it its drafts, one row behind the other: a row without drafts costs one token, one
that has ended none. Tokens that are left over belong to the dummy row and are stored nowhere.

How many rows and tokens there are never leaves the device: the host says how many drafts a row and the step may have,
and launches for the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.plan import DRAFT_KINDS, LEAST_CHANCE
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.step_rows import RowColumns, StepTokens

# Words that say how many drafts a step may have: most of a row, most of all, and as bits of float32 the least chance
# that is worth a token; from TRUST on the chance of each kind, likewise.
WIDTH, TOKENS, FLOOR, TRUST = 0, 1, 2, 4
NUM_LIMITS = TRUST + DRAFT_KINDS
NO_KIND = -1
_SLOTS, _LANES = 64, 256  # slots and tokens a program writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """What could be drafted, by slot."""

    kind: Tensor  # int32 [slots]; NO_KIND: there is nothing
    number: Tensor  # int32 [slots]: how many guesses there are
    guess: Tensor  # int32 [slots, width]
    # int32 [slots, width]: the kind of each guess; None: those of a slot are of one kind. `kind` is that of the first.
    each: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayout:
    """The tokens of a step with drafts: those of a slot, and what is drawn behind each."""

    first: Tensor  # int32 [slots]
    count: Tensor  # int32 [slots]: the row's last token and its drafts; 0: the row does not run
    total: Tensor  # int32 [1]: tokens in use
    draw_rows: Tensor  # int32 [tokens]: the row of each, the dummy row where it has none
    draw_positions: Tensor  # int32 [tokens]: of the token that is drawn behind each


def allocate_proposals(
    slots: int, width: int, device: torch.device | str = "cuda", *, of_each: bool = False
) -> Proposals:
    def room(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    return Proposals(
        kind=room(slots).fill_(NO_KIND),
        number=room(slots),
        guess=room(slots, width),
        each=room(slots, width) if of_each else None,
    )


def allocate_layout(slots: int, tokens: int, device: torch.device | str = "cuda") -> DraftLayout:
    def room(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return DraftLayout(
        first=room(slots),
        count=room(slots),
        total=room(1),
        draw_rows=room(tokens),
        draw_positions=room(tokens),
    )


def choose_drafts(
    layout: DraftLayout,
    visible: Tensor,
    proposals: Proposals,
    limits: Tensor,
    rows: RowColumns,
    slot_rows: Tensor,
    tally: Tensor,
) -> None:
    """How many tokens each of `slot_rows` [slots] has, and where they begin; `visible` int32 [rows] gets how much its
    last one sees. `limits` int32 [NUM_LIMITS] is as above. `tally` is emptied for the step."""
    slots = slot_rows.shape[0]
    _choose_kernel[(1,)](
        layout.first,
        layout.count,
        layout.total,
        visible,
        tally,
        proposals.kind,
        proposals.kind if proposals.each is None else proposals.each,
        proposals.number,
        limits,
        slot_rows,
        rows.length,
        rows.max_length,
        rows.active,
        slots,
        MAX_SLOTS=256 if slots <= 256 else max(1024, triton.next_power_of_2(slots)),
        MOST=proposals.guess.shape[1],
        DEPTHS=0 if proposals.each is None else max(2, triton.next_power_of_2(proposals.guess.shape[1])),
        TOKENS_AT=TOKENS,
        FLOOR_AT=FLOOR,
        TRUST_AT=TRUST,
        LEAST=LEAST_CHANCE,
        TALLY=tally.numel(),
        LANES=triton.next_power_of_2(tally.numel()),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["slots"])
def _choose_kernel(
    firsts,
    counts,
    total,
    visible,
    tally,
    kinds,
    each,
    numbers,
    limits,
    slot_rows,
    lengths,
    max_lengths,
    active,
    slots,
    MAX_SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    DEPTHS: tl.constexpr,
    TOKENS_AT: tl.constexpr,
    FLOOR_AT: tl.constexpr,
    TRUST_AT: tl.constexpr,
    LEAST: tl.constexpr,
    TALLY: tl.constexpr,
    LANES: tl.constexpr,
):
    slot = tl.arange(0, MAX_SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0)
    length = tl.load(lengths + row, mask=present, other=0)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0) & (length > 0)
    kind = tl.load(kinds + slot, mask=runs, other=-1)
    drafts = runs & (kind >= 0)
    trust = tl.load(limits + TRUST_AT + kind, mask=drafts, other=0).to(tl.float32, bitcast=True)
    trust = tl.where(trust > LEAST, tl.minimum(trust, 1.0), 0.0)
    floor = tl.load(limits + FLOOR_AT).to(tl.float32, bitcast=True)
    floor = tl.minimum(tl.maximum(floor, LEAST), 1.0)
    room = tl.load(max_lengths + row, mask=runs, other=0) - length - 1
    most = tl.minimum(tl.load(numbers + slot, mask=drafts, other=0), tl.load(limits))
    most = tl.maximum(tl.minimum(most, room), 0)

    budget = tl.load(limits + TOKENS_AT)
    if DEPTHS > 0:
        depth = tl.arange(0, DEPTHS)
        is_draft = depth[None, :] < most[:, None]
        kind_of_each = tl.load(each + slot[:, None] * MOST + depth[None, :], mask=is_draft, other=0)
        bits = tl.load(limits + TRUST_AT + kind_of_each, mask=is_draft, other=0)
        trust_of_each = bits.to(tl.float32, bitcast=True)
        trust_of_each = tl.where(trust_of_each > LEAST, tl.minimum(trust_of_each, 1.0), 0.0)
        chances = tl.cumprod(trust_of_each, 1)
        wanted = tl.sum((chances >= floor).to(tl.int32), 1)
        if tl.sum(wanted, 0) > budget:
            wanted = _likeliest_of_each(wanted, chances, budget, DEPTHS)
    else:
        wanted = tl.zeros([MAX_SLOTS], tl.int32)
        chance = tl.full([MAX_SLOTS], 1.0, tl.float32)
        for depth in tl.static_range(MOST):
            chance *= trust
            wanted += ((chance >= floor) & (depth < most)).to(tl.int32)
        if tl.sum(wanted, 0) > budget:
            wanted = _likeliest(wanted, trust, budget, MAX_SLOTS, MOST)

    count = tl.where(runs, wanted + 1, 0)
    tl.store(firsts + slot, tl.cumsum(count, 0) - count, mask=present)
    tl.store(counts + slot, count, mask=present)
    tl.store(total, tl.sum(count, 0))
    tl.store(visible + row, tl.where(runs, length + wanted, 0), mask=present)
    entry = tl.arange(0, LANES)
    tl.store(tally + entry, tl.zeros([LANES], tl.int32), mask=entry < TALLY)


@triton.jit
def _likeliest(wanted, trust, budget, MAX_SLOTS: tl.constexpr, MOST: tl.constexpr):
    """Of the wanted drafts as many as the budget has room for: the chance of the last that fits is found bit by bit
    (floats above zero are ordered as their bits are), and what is equal to it goes by slot."""
    edge = tl.zeros([1], tl.int32)
    bit = tl.full([1], 1 << 29, tl.int32)  # bits of 1.0 have none above it
    for _ in range(30):
        trial = edge | bit
        bit = bit >> 1
        bound = trial.to(tl.float32, bitcast=True)
        number = tl.zeros([MAX_SLOTS], tl.int32)
        chance = tl.full([MAX_SLOTS], 1.0, tl.float32)
        for depth in tl.static_range(MOST):
            chance *= trust
            number += ((chance >= bound) & (depth < wanted)).to(tl.int32)
        edge = tl.where(tl.sum(number, 0) >= budget, trial, edge)
    bound = edge.to(tl.float32, bitcast=True)
    above = tl.zeros([MAX_SLOTS], tl.int32)
    equal = tl.zeros([MAX_SLOTS], tl.int32)
    chance = tl.full([MAX_SLOTS], 1.0, tl.float32)
    for depth in tl.static_range(MOST):
        chance *= trust
        above += ((chance > bound) & (depth < wanted)).to(tl.int32)
        equal += ((chance == bound) & (depth < wanted)).to(tl.int32)
    left = budget - tl.sum(above, 0) - (tl.cumsum(equal, 0) - equal)
    return tl.where(budget > 0, above + tl.minimum(tl.maximum(left, 0), equal), 0)


@triton.jit
def _likeliest_of_each(wanted, chances, budget, DEPTHS: tl.constexpr):
    """The same where drafts of a row have a chance each [slots, depths]; it never rises along a row."""
    is_wanted = tl.arange(0, DEPTHS)[None, :] < wanted[:, None]
    chances = tl.where(is_wanted, chances, -1.0)
    edge = tl.zeros([1, 1], tl.int32)
    bit = tl.full([1, 1], 1 << 29, tl.int32)
    for _ in range(30):
        trial = edge | bit
        bit = bit >> 1
        number = tl.sum(tl.sum((chances >= trial.to(tl.float32, bitcast=True)).to(tl.int32), 1), 0)
        edge = tl.where(number >= budget, trial, edge)
    bound = edge.to(tl.float32, bitcast=True)
    above = tl.sum((chances > bound).to(tl.int32), 1)
    equal = tl.sum((chances == bound).to(tl.int32), 1)
    left = budget - tl.sum(above, 0) - (tl.cumsum(equal, 0) - equal)
    return tl.where(budget > 0, above + tl.minimum(tl.maximum(left, 0), equal), 0)


def write_drafted_tokens(
    into: StepTokens,
    layout: DraftLayout,
    proposals: Proposals,
    rows: RowColumns,
    slot_rows: Tensor,
    tables: Sequence[Tensor],
    *,
    num_tokens: int,
    dummy_row: int,
) -> None:
    """Ids, positions and slots of the tokens of a step, of which there are `num_tokens` with those left over."""
    slots = slot_rows.shape[0]
    programs = max(triton.cdiv(slots, _SLOTS), triton.cdiv(num_tokens, _LANES))
    for group, table in enumerate(tables):
        _write_kernel[(programs,)](
            into.ids,
            into.positions,
            into.slots[group],
            layout.draw_rows,
            layout.draw_positions,
            layout.first,
            layout.count,
            layout.total,
            proposals.guess,
            slot_rows,
            rows.length,
            rows.tokens,
            table,
            rows.tokens.stride(0),
            table.stride(0),
            slots,
            num_tokens,
            dummy_row,
            MOST=proposals.guess.shape[1],
            SLOTS=_SLOTS,
            LANES=_LANES,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "slots", "num_tokens", "dummy_row"])
def _write_kernel(
    ids,
    positions,
    places,
    draw_rows,
    draw_positions,
    firsts,
    counts,
    total,
    guesses,
    slot_rows,
    lengths,
    tokens,
    table,
    tokens_stride,
    table_stride,
    slots,
    num_tokens,
    dummy_row,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    count = tl.load(counts + slot, mask=present, other=0)
    first = tl.load(firsts + slot, mask=present, other=0)
    length = tl.load(lengths + row, mask=count > 0, other=1)
    for depth in tl.static_range(MOST + 1):
        here = depth < count
        at = first + depth
        position = length - 1 + depth
        if depth == 0:
            token = tl.load(tokens + row * tokens_stride + position, mask=here, other=0)
        else:
            token = tl.load(guesses + slot * MOST + depth - 1, mask=here, other=0)
        block = tl.load(table + row * table_stride + position // BLOCK, mask=here, other=0).to(tl.int64)
        tl.store(ids + at, token, mask=here)
        tl.store(positions + at, position, mask=here)
        tl.store(places + at, block * BLOCK + position % BLOCK, mask=here)
        tl.store(draw_rows + at, row.to(tl.int32), mask=here)
        tl.store(draw_positions + at, position + 1, mask=here)

    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    spare = (lane >= tl.load(total)) & (lane < num_tokens)
    nothing = tl.zeros([LANES], tl.int32)
    tl.store(ids + lane, nothing, mask=spare)
    tl.store(positions + lane, nothing, mask=spare)
    tl.store(places + lane, nothing.to(tl.int64) - 1, mask=spare)
    tl.store(draw_rows + lane, nothing + dummy_row, mask=spare)
    tl.store(draw_positions + lane, nothing, mask=spare)
