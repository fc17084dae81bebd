"""What a draft head needs around its products, compared with its definition; on the GPU and interpreted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.core.plan import DRAFT_KINDS
from paceline.runner.drafts import EIGHTHS, FOLLOWED, NO_STATE, OF_MODEL
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.draft_layout import Proposals
from paceline.runner.gpu.kernels.head_drafts import (
    DrawColumns,
    Guesses,
    InputWeights,
    RowStates,
    allocate_guesses,
    draw_guesses,
    head_inputs,
    keep_states,
    merge_guesses,
)
from paceline.runner.gpu.kernels.step_rows import StepTokens, allocate_step_tokens
from tests.gpu.kernel_draft_cases import LONGEST_ROW, limits_of, moved, random_rows
from tests.gpu.kernel_references import reference_sample

NAN, EPSILON = float("nan"), 1e-6
UNSURE = 1e-3  # of a probability, in eighths: the kernel's may be in the next one


def _draw(low: int, high: int, *sizes: int) -> Tensor:
    return torch.randint(low, high, sizes, dtype=torch.int32)


def check_inputs(device: str, *, runs: int, width: int, dtype: torch.dtype) -> None:
    """Tokens of runs of rows: each has the state of the one before it, the first that of its row if it is known."""
    counts = _draw(1, 6, runs).tolist()
    rows = torch.randperm(runs + 3)[:runs].to(torch.int32)
    token_rows = torch.repeat_interleave(rows, torch.tensor(counts))
    starts = _draw(0, 5, runs).tolist()
    positions = torch.cat(
        [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
    total = len(positions)
    state = torch.randn(runs + 3, width).to(dtype)
    position = torch.full((runs + 3,), NO_STATE, dtype=torch.int32)
    is_known = torch.rand(runs) < 0.6
    position[rows[is_known].long()] = torch.tensor(starts, dtype=torch.int32)[is_known] - 1
    behind, embedding = torch.randn(total, width).to(dtype), torch.randn(40, width).to(dtype)
    behind[total // 2] = NAN
    weights = InputWeights(
        embedding=embedding.to(device),
        token_norm=(1 + torch.rand(width)).to(device, dtype),
        state_norm=(1 + torch.rand(width)).to(device, dtype),
        epsilon=EPSILON,
    )
    tokens = allocate_step_tokens(total, 1, device)
    tokens.ids[:] = _draw(0, 40, total).to(device)
    tokens.positions[:] = positions.to(device, torch.int32)
    tokens.slots[0][:] = torch.where(torch.rand(total) < 0.9, positions, -1).to(device)
    out = torch.full((total, 2 * width), NAN, dtype=dtype, device=device)
    kept = RowStates(state=state.to(device), position=position.to(device))
    head_inputs(out, tokens, token_rows.to(device), weights, kept, behind=behind.to(device))

    before = torch.cat((torch.zeros(1, width), behind[:-1].float()))
    first = np.cumsum(counts) - counts
    before[first] = torch.where(is_known[:, None], state[rows.long()].float(), 0.0)
    ids = tokens.ids.cpu().long()
    halves = (
        (embedding[ids].float(), weights.token_norm),
        (torch.nan_to_num(before, 0.0), weights.state_norm),
    )
    expected = torch.cat([_normed(x, weight.cpu().float()) for x, weight in halves], dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)

    number = torch.tensor(
        [count if index % 5 else 0 for index, count in enumerate(counts)], dtype=torch.int32
    )
    number = torch.minimum(number, _draw(1, 6, runs))
    at = torch.from_numpy(first).to(device, torch.int32)
    keep_states(kept, behind.to(device), tokens, rows.to(device), at, number.to(device))
    for index, row in enumerate(rows.tolist()):
        last = int(first[index]) + int(number[index]) - 1
        if number[index] and int(tokens.slots[0][last]) >= 0:
            state[row], position[row] = behind[last], int(positions[last])
    assert torch.equal(kept.position.cpu(), position)
    assert torch.equal(torch.nan_to_num(kept.state.cpu(), 7.0), torch.nan_to_num(state, 7.0))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def check_draws(device: str, *, rows: int, vocabulary: int, known: int, limit: int) -> None:
    """Guess by guess: tokens, kinds, and where the next pass may write keys."""
    host, most = random_rows(rows, vocabulary=vocabulary), 4
    host.max_length[: rows // 4] = host.length[: rows // 4] + _draw(1, 5, rows // 4)
    slot_rows = torch.cat([torch.randperm(rows - 1), torch.full((2,), rows - 1)]).to(torch.int32)
    slots = len(slot_rows)
    table = _draw(1, 500, rows, -(-LONGEST_ROW // BLOCK_SIZE) + 1)
    may_draft = (torch.rand(rows) < 0.9).to(torch.int32)
    temperature = torch.where(torch.rand(rows) < 0.5, 0.0, 0.8).double()
    seed = torch.randint(0, 2**31, (rows,), dtype=torch.int64)
    to_target = torch.sort(torch.randperm(vocabulary)[:known]).values.to(torch.int32)
    limits = limits_of(limit, 10, 0.0, np.full(DRAFT_KINDS, 0.5)).to(device)
    columns = DrawColumns(
        rows=moved(host, device),
        table=table.to(device),
        may_draft=may_draft.to(device),
        temperature=temperature.to(device),
        seed=seed.to(device),
        limits=limits,
    )
    into, tokens = allocate_guesses(slots, most, device), allocate_step_tokens(slots, 1, device)
    visible = torch.full((rows,), -5, dtype=torch.int32, device=device)
    numbers = [0] * slots
    for depth in range(most):
        logits = torch.randn(slots, known) * 2.0
        logits[torch.rand(slots) < 0.1, known // 2] = NAN
        draw_guesses(
            into,
            tokens,
            visible,
            logits.to(device),
            to_target.to(device),
            slot_rows.to(device),
            columns,
            depth=depth,
        )
        for slot, row in enumerate(slot_rows.tolist()):
            length, runs = int(host.length[row]), bool(host.active[row]) and int(host.length[row]) > 0
            usable = runs and bool(may_draft[row]) and bool(torch.isfinite(logits[slot]).all())
            if usable and numbers[slot] == depth:
                whole = torch.full((vocabulary,), float("-inf"))
                whole[to_target.long()] = logits[slot]
                token = reference_sample(whole, float(temperature[row]), int(seed[row]), length + depth)
                _check_guess(into, slot, depth, token, torch.softmax(whole.double(), 0))
                numbers[slot] = depth + 1
            room = max(0, min(limit, int(host.max_length[row]) - length - 1))
            _check_next(tokens, slot, table[row], length, depth, room, is_stored=numbers[slot] > depth)
            assert int(visible[row]) == (length + min(depth + 1, room) if runs else 0)
    assert into.number.tolist() == numbers and max(numbers) == most and 0 in numbers


def _check_guess(into: Guesses, slot: int, depth: int, token: int, chances: Tensor) -> None:
    assert int(into.token[slot, depth]) == token
    eighths = float(chances[token]) * EIGHTHS
    if abs(eighths - round(eighths)) > UNSURE:
        assert int(into.kind[slot, depth]) == OF_MODEL + min(int(eighths), EIGHTHS - 1)


def _check_next(
    tokens: StepTokens, slot: int, blocks: Tensor, length: int, depth: int, room: int, *, is_stored: bool
) -> None:
    place = int(tokens.slots[0][slot])
    if not is_stored or depth >= room:
        assert place == -1, "a key would be written where the row may have no block"
        return
    position = length + depth
    assert int(tokens.positions[slot]) == position
    assert place == int(blocks[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def check_merge(device: str, *, slots: int, width: int, guessed: int) -> None:
    """A head's guesses are taken where the first is trusted more; a prediction that is followed stays."""
    kinds = torch.tensor([-1, 0, 3, FOLLOWED])[torch.randint(0, 4, (slots,))].to(torch.int32)
    own = Proposals(
        kind=kinds,
        number=_draw(1, width + 1, slots),
        guess=_draw(0, 90, slots, width),
        each=torch.full((slots, width), -9, dtype=torch.int32),
    )
    guesses = Guesses(
        token=_draw(100, 190, slots, guessed),
        kind=_draw(OF_MODEL, OF_MODEL + EIGHTHS, slots, guessed),
        number=_draw(0, guessed + 1, slots),
    )
    trust = np.random.default_rng(slots).uniform(0.1, 0.9, DRAFT_KINDS).astype(np.float32)
    assert own.each is not None
    into = Proposals(
        **{name: getattr(own, name).clone().to(device) for name in ("kind", "number", "guess", "each")}
    )
    made = Guesses(**{name: getattr(guesses, name).to(device) for name in ("token", "kind", "number")})
    merge_guesses(into, made, slots, limits_of(1, 1, 0.0, trust.astype(np.float64)).to(device))
    assert into.each is not None
    num_taken = 0
    for slot in range(slots):
        kind, first, number = int(kinds[slot]), int(guesses.kind[slot, 0]), int(guesses.number[slot])
        promise = -1.0 if kind < 0 else 1.0 if kind == FOLLOWED else trust[kind]
        is_taken = number > 0 and trust[first] > promise
        num_taken += is_taken
        assert int(into.kind[slot]) == (first if is_taken else kind)
        assert int(into.number[slot]) == (number if is_taken else int(own.number[slot]))
        for depth in range(width):
            if is_taken and depth < number:
                assert int(into.guess[slot, depth]) == int(guesses.token[slot, depth])
                assert int(into.each[slot, depth]) == int(guesses.kind[slot, depth])
            elif not is_taken:
                assert int(into.guess[slot, depth]) == int(own.guess[slot, depth])
                assert int(into.each[slot, depth]) == kind
    assert 0 < num_taken < slots
