"""What a draft head needs around its products: its inputs, the states that rows keep, and tokens from its logits.

A *state* goes with each token: what the model thought before it. A row keeps the state that goes with its next token,
and the position of the token that it comes from: where that is not the one before, the state is not known and is taken
as zero. Inside a step the state of a token is that of the token before it, if that is of the same row.

A head's pass takes one token of each slot. `draw_guesses` ends it: the token that follows, the head's probability of
it in eighths, which is the guess's kind, and everything the next pass needs. Keys of guesses are written only where
the row has room for that draft, since nothing else says that it has a block there.

It must not know what a head computes between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.drafts import EIGHTHS, FOLLOWED, OF_MODEL
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.draft_layout import TRUST, Proposals
from paceline.runner.gpu.kernels.gumbel_sampling import GREEDY_BELOW, noise_in_bits, noise_words
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.step_rows import RowColumns, StepTokens

_TURN = 2048  # logits looked at together
_PER_PROGRAM = 64
_LANES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """What goes with the next token of each row."""

    state: Tensor  # [rows, width]
    position: Tensor  # int32 [rows]: of the token it comes from, or NO_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class InputWeights:
    """Of a head that takes a token and its state together."""

    embedding: Tensor  # [vocabulary, width]
    token_norm: Tensor  # [width]
    state_norm: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What a head has guessed, by slot."""

    token: Tensor  # int32 [slots, most]
    kind: Tensor  # int32 [slots, most]
    number: Tensor  # int32 [slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawColumns:
    """How rows draw, and what limits their drafts."""

    rows: RowColumns
    table: Tensor  # int32 [rows, blocks]
    may_draft: Tensor
    temperature: Tensor  # float64 [rows]
    seed: Tensor  # int64 [rows]
    limits: Tensor  # as in draft_layout.py


def allocate_guesses(slots: int, most: int, device: torch.device | str = "cuda") -> Guesses:
    def room(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    return Guesses(token=room(slots, most), kind=room(slots, most), number=room(slots))


def head_inputs(
    out: Tensor,
    tokens: StepTokens,
    rows: Tensor,
    weights: InputWeights,
    kept: RowStates,
    *,
    behind: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """`out` [tokens, 2 * width]: the norm of each token's embedding, and that of its state. What is no number is zero.

    `rows` int32 [tokens]: whose they are. `behind` [tokens, width]: the states that come from these tokens, where some
    follow others. `states` [tokens, width] gets the states themselves.
    """
    count, width = rows.shape[0], kept.state.shape[1]
    assert out.is_contiguous() and weights.embedding.is_contiguous() and kept.state.is_contiguous()
    _input_kernel[(count,)](
        out,
        kept.state if states is None else states,
        kept.state if behind is None else behind,
        tokens.ids,
        tokens.positions,
        rows,
        kept.state,
        kept.position,
        weights.embedding,
        weights.token_norm,
        weights.state_norm,
        weights.epsilon,
        HAS_BEHIND=behind is not None,
        GIVES_STATES=states is not None,
        OF_ROWS=True,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        num_warps=min(8, max(1, triton.next_power_of_2(width) // 256)),
    )


def next_inputs(out: Tensor, tokens: StepTokens, weights: InputWeights, states: Tensor) -> None:
    """The same for tokens whose `states` [tokens, width] are given."""
    count, width = states.shape
    assert out.is_contiguous() and states.is_contiguous()
    _input_kernel[(count,)](
        out,
        states,
        states,
        tokens.ids,
        tokens.positions,
        tokens.ids,
        states,
        tokens.ids,
        weights.embedding,
        weights.token_norm,
        weights.state_norm,
        weights.epsilon,
        HAS_BEHIND=False,
        GIVES_STATES=False,
        OF_ROWS=False,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        num_warps=min(8, max(1, triton.next_power_of_2(width) // 256)),
    )


@triton.jit
def _input_kernel(
    out,
    states,
    behind,
    ids,
    positions,
    rows,
    row_states,
    row_positions,
    embedding,
    token_norm,
    state_norm,
    epsilon,
    HAS_BEHIND: tl.constexpr,
    GIVES_STATES: tl.constexpr,
    OF_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    number = tl.load(ids + token).to(tl.int64)
    embedded = tl.load(embedding + number * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
    if OF_ROWS:
        row = tl.load(rows + token).to(tl.int64)
        position = tl.load(positions + token)
        is_known = tl.load(row_positions + row) == position - 1
        state = tl.load(row_states + row * WIDTH + lane, mask=mask & is_known, other=0.0).to(tl.float32)
        if HAS_BEHIND:
            before = tl.maximum(token - 1, 0)
            follows = (token > 0) & (tl.load(rows + before) == row)
            follows = follows & (tl.load(positions + before) == position - 1)
            there = tl.load(behind + before * WIDTH + lane, mask=mask & follows, other=0.0).to(tl.float32)
            state = tl.where(follows, there, state)
    else:
        state = tl.load(row_states + token * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
    state = _number(state)
    if GIVES_STATES:
        tl.store(states + token * WIDTH + lane, state.to(states.dtype.element_ty), mask=mask)
    into = out + token * (2 * WIDTH) + lane
    tl.store(
        into, _normed(embedded, token_norm + lane, mask, epsilon, WIDTH, out.dtype.element_ty), mask=mask
    )
    into += WIDTH
    tl.store(into, _normed(state, state_norm + lane, mask, epsilon, WIDTH, out.dtype.element_ty), mask=mask)


def states_of_rows(out: Tensor, tokens: StepTokens, rows: Tensor, kept: RowStates) -> None:
    """`out` [tokens, width] gets the states that go with `tokens`, each the next of one of `rows`."""
    count, width = out.shape
    assert out.is_contiguous()
    _state_kernel[(count,)](
        out,
        tokens.positions,
        rows,
        kept.state,
        kept.position,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _state_kernel(out, positions, rows, row_states, row_positions, WIDTH: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    is_known = tl.load(row_positions + row) == tl.load(positions + token) - 1
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    state = tl.load(row_states + row * WIDTH + lane, mask=mask & is_known, other=0.0)
    tl.store(out + token * WIDTH + lane, state, mask=mask)


@triton.jit
def _number(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # NaN is not below anything


@triton.jit
def _normed(x, weight, mask, epsilon, WIDTH: tl.constexpr, KIND: tl.constexpr):
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    return _number(x * inverse * tl.load(weight, mask=mask, other=0.0).to(tl.float32)).to(KIND)


def span_rows(into: Tensor, spans: Spans, longest: int) -> None:
    """`into` int32 [tokens] gets the row of each token of `spans`, none longer than `longest`."""
    _span_kernel[(spans.row.shape[0], triton.cdiv(longest, _LANES))](
        into, spans.row, spans.first, spans.count, LANES=_LANES, num_warps=4
    )


@triton.jit
def _span_kernel(into, rows, firsts, counts, LANES: tl.constexpr):
    span = tl.program_id(0)
    offset = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.zeros([LANES], tl.int32) + tl.load(rows + span)
    tl.store(into + tl.load(firsts + span) + offset, row, mask=offset < tl.load(counts + span))


def keep_states(
    kept: RowStates,
    behind: Tensor,
    tokens: StepTokens,
    rows: Tensor,
    first: Tensor | None = None,
    count: Tensor | None = None,
) -> None:
    """Rows keep the state that comes from the last of their tokens: of `rows[i]` int32 [runs], the tokens `first[i]` to
    `first[i] + count[i] - 1`, or the token i. `behind` [tokens, width]: the states that come from the step's tokens.
    """
    width = kept.state.shape[1]
    assert behind.stride(1) == 1
    _keep_kernel[(rows.shape[0],)](
        kept.state,
        kept.position,
        behind,
        tokens.positions,
        tokens.slots[0],
        rows,
        rows if first is None else first,
        rows if count is None else count,
        behind.stride(0),
        ONE_EACH=first is None,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        num_warps=min(8, max(1, triton.next_power_of_2(width) // 256)),
    )


@triton.jit(do_not_specialize=["behind_stride"])
def _keep_kernel(
    row_states,
    row_positions,
    behind,
    positions,
    places,
    rows,
    firsts,
    counts,
    behind_stride,
    ONE_EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    run = tl.program_id(0)
    row = tl.load(rows + run).to(tl.int64)
    if ONE_EACH:
        last = run
    else:
        count = tl.load(counts + run)
        if count < 1:
            return
        last = tl.load(firsts + run) + count - 1
    if tl.load(places + last) < 0:  # its row does not run
        return
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    state = tl.load(behind + tl.cast(last, tl.int64) * behind_stride + lane, mask=mask, other=0.0)
    tl.store(row_states + row * WIDTH + lane, state, mask=mask)
    tl.store(row_positions + row, tl.load(positions + last))


def draw_guesses(
    into: Guesses,
    tokens: StepTokens,
    visible: Tensor,
    logits: Tensor,
    to_target: Tensor,
    slot_rows: Tensor,
    columns: DrawColumns,
    *,
    depth: int,
) -> None:
    """The guess of number `depth` of each of `slot_rows` [slots] from `logits` [slots, draft vocabulary], drawn with
    the row's own noise; `to_target` int32 has the model's number of each token. `tokens` and `visible` become those of
    the next pass."""
    slots, vocabulary = logits.shape
    assert logits.stride(1) == 1
    rows, table = columns.rows, columns.table
    _draw_kernel[(slots,)](
        into.token,
        into.kind,
        into.number,
        tokens.ids,
        tokens.positions,
        tokens.slots[0],
        visible,
        logits,
        to_target,
        slot_rows,
        rows.length,
        rows.max_length,
        rows.active,
        columns.may_draft,
        columns.temperature,
        columns.seed,
        columns.limits,
        table,
        logits.stride(0),
        table.stride(0),
        vocabulary,
        depth,
        MOST=into.token.shape[1],
        TURN=min(_TURN, max(16, triton.next_power_of_2(vocabulary))),
        OF_MODEL=OF_MODEL,
        EIGHTHS=EIGHTHS,
        BLOCK=BLOCK_SIZE,
        GREEDY=GREEDY_BELOW,
        FAST_LOG=not triton.knobs.runtime.interpret,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["logits_stride", "table_stride", "vocabulary", "depth"])
def _draw_kernel(
    guesses,
    kinds,
    numbers,
    ids,
    positions,
    places,
    visible,
    logits,
    to_target,
    slot_rows,
    lengths,
    max_lengths,
    active,
    may_draft,
    temperatures,
    seeds,
    limits,
    table,
    logits_stride,
    table_stride,
    vocabulary,
    depth,
    MOST: tl.constexpr,
    TURN: tl.constexpr,
    OF_MODEL: tl.constexpr,
    EIGHTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_rows + slot).to(tl.int64)
    length = tl.load(lengths + row)
    runs = (tl.load(active + row) != 0) & (length > 0)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = (length + depth).to(tl.int64)
    per_bit = (1.4426950408889634 / tl.maximum(temperature, GREEDY)).to(tl.float32)

    peak = tl.full([TURN], float("-inf"), tl.float32)
    mass = tl.zeros([TURN], tl.float32)
    best = tl.full([TURN], float("-inf"), tl.float32)
    best_logit = tl.full([TURN], float("-inf"), tl.float32)
    best_token = tl.zeros([TURN], tl.int32)
    bad = tl.zeros([TURN], tl.int32)
    for begin in range(0, vocabulary, TURN):
        column = begin + tl.arange(0, TURN)
        present = column < vocabulary
        x = tl.load(logits + slot * logits_stride + column, mask=present, other=float("-inf")).to(tl.float32)
        bad = bad | ((x != x) | (x == float("inf"))).to(tl.int32)
        x = tl.where(x == x, x, float("-inf"))
        token = tl.load(to_target + column, mask=present, other=0)
        new_peak = tl.maximum(peak, x)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        mass = mass * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = new_peak
        score = x
        if temperature >= GREEDY:
            w0, w1, w2, w3 = noise_words(seed, position, token // 4)
            at = token % 4
            word = tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3)))
            score = x * per_bit + noise_in_bits(word, FAST_LOG)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_logit = tl.where(is_better, x, best_logit)
        best_token = tl.where(is_better, token, best_token)

    top = tl.max(peak, 0)
    total = tl.sum(mass * tl.exp(tl.where(peak == float("-inf"), float("-inf"), peak - top)), 0)
    winner = tl.min(tl.where(best == tl.max(best, 0), best_token, 2147483647), 0)
    logit = tl.max(tl.where(best_token == winner, best_logit, float("-inf")), 0)
    chance = tl.exp(logit - top) / total
    kind = OF_MODEL + tl.minimum((chance * EIGHTHS).to(tl.int32), EIGHTHS - 1)
    before = tl.load(numbers + slot, mask=depth > 0, other=0)
    is_usable = runs & (tl.max(bad, 0) == 0) & (top > float("-inf")) & (before == depth)
    is_usable = is_usable & (tl.load(may_draft + row) != 0)
    token = tl.where(is_usable, winner, 0)
    tl.store(guesses + slot * MOST + depth, token)
    tl.store(kinds + slot * MOST + depth, tl.where(is_usable, kind, OF_MODEL))
    tl.store(numbers + slot, tl.where(is_usable, depth + 1, before))

    room = tl.minimum(tl.load(limits), tl.load(max_lengths + row) - length - 1)
    behind = tl.minimum(depth + 1, tl.maximum(room, 0))
    is_stored = is_usable & (depth < room)
    here = tl.where(runs, length - 1 + behind, 0)
    block = tl.load(table + row * table_stride + here // BLOCK, mask=is_stored, other=0).to(tl.int64)
    tl.store(ids + slot, token)
    tl.store(positions + slot, here)
    tl.store(places + slot, tl.where(is_stored, block * BLOCK + here % BLOCK, -1))
    tl.store(visible + row, tl.where(runs, length + behind, 0))


def merge_guesses(into: Proposals, guesses: Guesses, slots: int, limits: Tensor) -> None:
    """Guesses of a head replace what the first `slots` have where the first is trusted more; `into.each` gets the kind
    of each draft. `limits` as in draft_layout.py."""
    most = into.guess.shape[1]
    assert into.each is not None and guesses.token.shape[1] <= most
    _merge_kernel[(triton.cdiv(slots, _PER_PROGRAM),)](
        into.kind,
        into.number,
        into.guess,
        into.each,
        guesses.token,
        guesses.kind,
        guesses.number,
        limits,
        slots,
        MOST=most,
        GUESSED=guesses.token.shape[1],
        SLOTS=_PER_PROGRAM,
        TRUST_AT=TRUST,
        FOLLOWED=FOLLOWED,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["slots"])
def _merge_kernel(
    kinds,
    numbers,
    drafts,
    each,
    guesses,
    guess_kinds,
    guess_numbers,
    limits,
    slots,
    MOST: tl.constexpr,
    GUESSED: tl.constexpr,
    SLOTS: tl.constexpr,
    TRUST_AT: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    kind = tl.load(kinds + slot, mask=present, other=-1)
    number = tl.load(guess_numbers + slot, mask=present, other=0)
    first = tl.load(guess_kinds + slot * GUESSED, mask=number > 0, other=0)
    trust = tl.load(limits + TRUST_AT + kind, mask=present & (kind >= 0), other=0)
    own = tl.where(kind >= 0, trust.to(tl.float32, bitcast=True), -1.0)
    own = tl.where(kind == FOLLOWED, 1.0, own)  # it is what the request asked for
    trust = tl.load(limits + TRUST_AT + first, mask=number > 0, other=0).to(tl.float32, bitcast=True)
    taken = (number > 0) & (trust > own)
    tl.store(kinds + slot, first, mask=taken)
    tl.store(numbers + slot, number, mask=taken)
    for depth in tl.static_range(MOST):
        if depth < GUESSED:
            guess = tl.load(guesses + slot * GUESSED + depth, mask=taken, other=0)
            tl.store(drafts + slot * MOST + depth, guess, mask=taken)
            of_guess = tl.load(guess_kinds + slot * GUESSED + depth, mask=taken, other=0)
            tl.store(each + slot * MOST + depth, tl.where(taken, of_guess, kind), mask=present)
        else:
            tl.store(each + slot * MOST + depth, kind, mask=present)
