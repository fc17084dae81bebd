"""Drafts and the comparison with their definitions: guesses, layout, verification; on the GPU and interpreted."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.plan import DRAFT_KINDS, LEAST_CHANCE, draft_depth
from paceline.runner.drafts import (
    FATES,
    FOLLOWED,
    FOUND,
    MISSED,
    OF_HISTORY,
    PARTLY,
    THREE,
    WHOLLY,
    History,
    Prediction,
    RowText,
)
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.draft_history import allocate_ring, propose_history, remember
from paceline.runner.gpu.kernels.draft_layout import (
    FLOOR,
    NO_KIND,
    NUM_LIMITS,
    TOKENS,
    TRUST,
    WIDTH,
    DraftLayout,
    Proposals,
    allocate_layout,
    allocate_proposals,
    choose_drafts,
    write_drafted_tokens,
)
from paceline.runner.gpu.kernels.draft_predictions import (
    MOST_BEHIND,
    SEEN,
    STATE_WORDS,
    Predictions,
    propose_predictions,
)
from paceline.runner.gpu.kernels.drafters import Answers, DraftColumns, propose_answers, propose_ngrams
from paceline.runner.gpu.kernels.forced_tokens import CertainTokens, place_masks, propose_certain
from paceline.runner.gpu.kernels.step_rows import MAX_STOP_IDS, NOT_FINITE, RowColumns, StepTokens
from paceline.runner.gpu.kernels.verify import TALLIES, DrawnBehind, VerifiedTokens, verify

LONGEST_ROW = 300


def _draw(low: int, high: int, *sizes: int) -> Tensor:
    return torch.randint(low, high, sizes, dtype=torch.int32)


def random_rows(number: int, *, vocabulary: int) -> RowColumns:
    """Rows of all lengths, some ended, the last one the dummy."""
    rows = RowColumns(
        length=_draw(1, LONGEST_ROW - 20, number),
        max_length=_draw(LONGEST_ROW - 60, LONGEST_ROW, number),
        active=(torch.rand(number) < 0.85).to(torch.int32),
        dropped=torch.zeros(number, dtype=torch.int32),
        stop_ids=torch.where(
            torch.rand(number, MAX_STOP_IDS) < 0.2, _draw(0, vocabulary, number, MAX_STOP_IDS), -1
        ).to(torch.int32),
        tokens=_draw(0, vocabulary, number, LONGEST_ROW),
    )
    rows.max_length[:] = torch.maximum(rows.max_length, rows.length + 1)
    rows.active[-1] = rows.length[-1] = 0
    return rows


def moved(columns: RowColumns, device: str) -> RowColumns:
    """A copy: the interpreted kernel must not change what it is compared with."""
    return RowColumns(
        **{field.name: getattr(columns, field.name).clone().to(device) for field in fields(columns)}
    )


def _sent(value: DraftLayout | Proposals, device: str) -> dict[str, Tensor]:
    columns = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: column.to(device) for name, column in columns.items() if column is not None}


def check_ngrams(device: str, *, rows: int, vocabulary: int, width: int) -> None:
    """Guess by guess what the drafter of the CPU makes."""
    host = random_rows(rows, vocabulary=vocabulary)
    may_draft = (torch.rand(rows) < 0.9).to(torch.int32)
    fate = _draw(0, 3, rows)
    slot_rows = torch.randperm(rows).to(torch.int32)
    into = allocate_proposals(rows, width, device)
    drafts = DraftColumns(may_draft=may_draft.to(device), fate=fate.to(device))
    propose_ngrams(into, moved(host, device), drafts, slot_rows.to(device))
    num_found = 0
    for slot, row in enumerate(slot_rows.tolist()):
        length = int(host.length[row])
        text = RowText([])
        text.add(host.tokens[row, :length].tolist(), int(fate[row]))
        if not host.active[row] or not may_draft[row] or length < 4 or text.kind < 0:
            if length >= 4 or not host.active[row]:  # the CPU takes three tokens for a match of any two
                assert (int(into.kind[slot]), int(into.number[slot])) == (NO_KIND, 0)
            continue
        num_found += 1
        assert (int(into.kind[slot]), int(into.number[slot])) == (text.kind, width)
        assert into.guess[slot].tolist() == text.guess(width)
    assert num_found > rows // 8, "nothing was compared"


def check_answers(device: str, *, rows: int, acceptance: float) -> float:
    """Answers as far as they go, some tokens spoilt; returns the share of those that are right."""
    host, width, vocabulary = random_rows(rows, vocabulary=50), 6, 50
    answers = Answers(
        tokens=_draw(0, vocabulary, rows, LONGEST_ROW).to(device),
        end=torch.where(torch.rand(rows) < 0.8, host.length + _draw(0, 10, rows), 0)
        .to(torch.int32)
        .to(device),
        vocabulary=vocabulary,
        acceptance=acceptance,
    )
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    slot_rows = torch.randperm(rows).to(torch.int32)
    into = allocate_proposals(rows, width, device)
    columns = DraftColumns(may_draft=ones, fate=ones)
    propose_answers(into, moved(host, device), columns, slot_rows.to(device), answers)
    right = []
    for slot, row in enumerate(slot_rows.tolist()):
        length = int(host.length[row])
        number = max(0, min(width, int(answers.end[row]) - length)) if host.active[row] else 0
        assert int(into.number[slot]) == number and int(into.kind[slot]) == (0 if number else NO_KIND)
        for depth in range(number):
            token, expected = int(into.guess[slot, depth]), int(answers.tokens[row, length + depth])
            assert token in (expected, (expected + 1) % vocabulary)
            right.append(token == expected)
    return sum(right) / len(right)


def limits_of(width: int, tokens: int, floor: float, trust: NDArray[np.float64]) -> Tensor:
    words = np.zeros(NUM_LIMITS, np.int32)
    words[WIDTH], words[TOKENS] = width, tokens
    words[FLOOR] = np.float32(floor).view(np.int32)
    words[TRUST:] = trust.astype(np.float32).view(np.int32)
    return torch.from_numpy(words)


def _proposed(slots: int, width: int, vocabulary: int, *, of_each: bool = False) -> Proposals:
    kind = torch.where(torch.rand(slots) < 0.8, _draw(0, DRAFT_KINDS, slots), NO_KIND).to(torch.int32)
    number = torch.where(kind >= 0, _draw(0, width + 1, slots), 0).to(torch.int32)
    each = _draw(0, DRAFT_KINDS, slots, width) if of_each else None
    if each is not None:
        each[:, 0] = kind
    return Proposals(kind=kind, number=number, guess=_draw(0, vocabulary, slots, width), each=each)


def _chances(made: Proposals, slot: int, trust: list[float]) -> list[float]:
    """Of the drafts of a slot, each with those before it."""
    if made.each is None:
        kinds = [int(made.kind[slot])] * made.guess.shape[1]
    else:
        kinds = made.each[slot].tolist()
    usable = [trust[kind] if trust[kind] > LEAST_CHANCE else 0.0 for kind in kinds]
    found: list[float] = np.cumprod(np.array(usable, np.float32)).tolist()
    return found


def reference_choice(
    host: RowColumns, slot_rows: Tensor, made: Proposals, limits: tuple[int, int, float], trust: list[float]
) -> list[int]:
    """The definition, as `runner/drafts.py` has it: drafts of each slot, or -1 where the row does not run."""
    width, budget, floor = limits
    wanted = []
    for slot, row in enumerate(slot_rows.tolist()):
        kind, room = int(made.kind[slot]), int(host.max_length[row] - host.length[row]) - 1
        if not host.active[row] or not host.length[row]:
            wanted.append(-1)
        elif kind < 0:
            wanted.append(0)
        else:
            depth = draft_depth(trust[kind], floor, width)
            if made.each is not None:
                least = max(np.float32(floor), np.float32(LEAST_CHANCE))
                depth = min(sum(bool(chance >= least) for chance in _chances(made, slot, trust)), width)
            wanted.append(max(0, min(depth, int(made.number[slot]), room)))
    if sum(max(number, 0) for number in wanted) <= budget:
        return wanted
    ranked = sorted(
        (-chance, slot)
        for slot, number in enumerate(wanted)
        for chance in _chances(made, slot, trust)[: max(number, 0)]
    )
    kept = [min(number, 0) for number in wanted]
    for _, slot in ranked[:budget]:
        kept[slot] += 1
    return kept


def check_layout(
    device: str, *, rows: int, width: int, limit: int, budget: int, floor: float, of_each: bool = False
) -> None:
    """Which drafts are taken, and that every token of the step is where its row has it."""
    host, vocabulary = random_rows(rows, vocabulary=90), 90
    slot_rows = torch.cat([torch.randperm(rows - 1), torch.full((3,), rows - 1)]).to(torch.int32)
    slots, made = len(slot_rows), _proposed(len(slot_rows), width, vocabulary, of_each=of_each)
    trust = np.round(np.random.default_rng(rows + budget).uniform(0.0, 1.0, DRAFT_KINDS), 3)
    trust[::5] = 1.0
    there = Proposals(**_sent(made, device))
    tables = [_draw(1, 500, rows, -(-LONGEST_ROW // BLOCK_SIZE) + 1) for _ in range(2)]
    num_tokens = rows + budget + 5
    layout = allocate_layout(slots, num_tokens, device)
    into = StepTokens(
        ids=torch.full((num_tokens,), -5, dtype=torch.int32, device=device),
        positions=torch.full((num_tokens,), -5, dtype=torch.int32, device=device),
        slots=[torch.full((num_tokens,), -5, dtype=torch.int64, device=device) for _ in tables],
    )
    visible = torch.full((rows,), -5, dtype=torch.int32, device=device)
    words_around = torch.ones(TALLIES * DRAFT_KINDS + 40, dtype=torch.int32, device=device)
    tally = words_around[: TALLIES * DRAFT_KINDS]
    columns, at = moved(host, device), slot_rows.to(device)
    words = limits_of(limit, budget, floor, trust).to(device)
    choose_drafts(layout, visible, there, words, columns, at, tally)
    places = [table.to(device) for table in tables]
    write_drafted_tokens(into, layout, there, columns, at, places, num_tokens=num_tokens, dummy_row=rows - 1)
    assert not tally.any() and words_around[len(tally) :].all()
    kept = reference_choice(host, slot_rows, made, (limit, budget, floor), trust.tolist())
    first = 0
    for slot, (row, number) in enumerate(zip(slot_rows.tolist(), kept, strict=True)):
        assert int(layout.count[slot]) == number + 1
        length = int(host.length[row])
        assert int(visible[row]) == (length + number if number >= 0 else 0)
        if number < 0:
            continue
        assert int(layout.first[slot]) == first
        expected = [int(host.tokens[row, length - 1]), *made.guess[slot, :number].tolist()]
        assert into.ids[first : first + number + 1].tolist() == expected
        for depth in range(number + 1):
            position = length - 1 + depth
            assert int(into.positions[first + depth]) == position
            assert int(layout.draw_rows[first + depth]) == row
            assert int(layout.draw_positions[first + depth]) == position + 1
            for group, table in enumerate(tables):
                block = int(table[row, position // BLOCK_SIZE])
                assert int(into.slots[group][first + depth]) == block * BLOCK_SIZE + position % BLOCK_SIZE
        first += number + 1
    assert int(layout.total[0]) == first
    assert all((slots_of[first:] == -1).all() for slots_of in into.slots) and not into.ids[first:].any()
    assert (layout.draw_rows[first:] == rows - 1).all()


def reference_verify(
    rows: RowColumns,
    fate: Tensor,
    layout: DraftLayout,
    made: Proposals,
    slot_rows: Tensor,
    drawn: list[Tensor],
) -> tuple[list[tuple[int, int, int, list[int]]], list[int]]:
    """The definition, slot by slot: changes `rows` and `fate`; returns code, count, verified, tokens, and a tally."""
    ids, chosen, finite = (column.tolist() for column in drawn)
    report: list[tuple[int, int, int, list[int]]] = []
    tally = [0] * (TALLIES * DRAFT_KINDS)
    for slot, row in enumerate(slot_rows.tolist()):
        count, first, kind = int(layout.count[slot]), int(layout.first[slot]), int(made.kind[slot])
        if not count:
            report.append((-1, 0, 0, []))
            continue
        got: list[int] = []
        code = 0
        for at in range(first, first + count):
            if got and not finite[at]:
                break  # it is computed again, as the first
            got.append(chosen[at])
            rows.tokens[row, rows.length[row]] = chosen[at]
            rows.length[row] += 1
            if not finite[at]:
                code = NOT_FINITE
            elif chosen[at] in rows.stop_ids[row].tolist():
                code = 1
            elif rows.length[row] >= rows.max_length[row]:
                code = 2
            if code or at + 1 == first + count or ids[at + 1] != chosen[at]:
                break
        rows.active[row] = int(code == 0)
        report.append((code, len(got), count - 1, got))
        fate[row] = PARTLY
        if kind >= 0 and code != NOT_FINITE:
            compared, equal = 1, int(int(made.guess[slot, 0]) == got[0])
            if count > 1:
                compared, equal = min(len(got), count - 1), min(len(got) - 1, count - 1)
            for depth in range(compared):
                own = kind if made.each is None else int(made.each[slot, depth])
                tally[own] += 1
                tally[DRAFT_KINDS + own] += depth < equal
            tally[2 * DRAFT_KINDS + kind] += 1
            fate[row] = WHOLLY if equal == compared else PARTLY if equal else MISSED
    return report, tally


def check_verify(device: str, *, rows: int, width: int, of_each: bool = False) -> None:
    host, vocabulary = random_rows(rows, vocabulary=40), 40
    slot_rows = torch.cat([torch.randperm(rows - 1), torch.full((2,), rows - 1)]).to(torch.int32)
    slots, made = len(slot_rows), _proposed(len(slot_rows), width, vocabulary, of_each=of_each)
    layout = allocate_layout(slots, (width + 1) * slots, "cpu")
    ids = _draw(0, vocabulary, (width + 1) * slots + 1)
    first = 0
    for slot, row in enumerate(slot_rows.tolist()):
        room = int(host.max_length[row] - host.length[row]) - 1
        runs = bool(host.active[row]) and host.length[row] > 0
        count = 1 + min(room, int(made.number[slot]), slot % (width + 1)) if runs else 0
        layout.first[slot], layout.count[slot] = first, count
        ids[first + 1 : first + count] = made.guess[slot, : max(count - 1, 0)]
        first += count
    # Mostly what was guessed: chains of every length.
    chosen = torch.where(torch.rand(len(ids) - 1) < 0.8, ids[1:], _draw(0, vocabulary, len(ids) - 1))
    chosen = chosen.to(torch.int32)
    finite = (torch.rand(len(chosen)) < 0.95).to(torch.uint8)
    there, fate = moved(host, device), _draw(0, 3, rows)
    fate_there = fate.clone().to(device)
    report = VerifiedTokens(
        code=torch.full((slots,), -9, dtype=torch.int32, device=device),
        count=torch.full((slots,), -9, dtype=torch.int32, device=device),
        verified=torch.full((slots,), -9, dtype=torch.int32, device=device),
        predicted=torch.full((slots,), -9, dtype=torch.int32, device=device),
        tokens=torch.full((width + 1, slots), -9, dtype=torch.int32, device=device),
        tally=torch.zeros(TALLIES * DRAFT_KINDS, dtype=torch.int32, device=device),
    )
    placed = DraftLayout(**_sent(layout, device))
    drawn = DrawnBehind(ids=ids.to(device), chosen=chosen.to(device), finite=finite.to(device))
    proposals = Proposals(**_sent(made, device))
    verify(there, fate_there, report, placed, proposals, slot_rows.to(device), drawn)
    expected, tally = reference_verify(host, fate, layout, made, slot_rows, [ids, chosen, finite])
    for slot, (code, count, verified, tokens) in enumerate(expected):
        found = (int(report.code[slot]), int(report.count[slot]), int(report.verified[slot]))
        assert found == (code, count, verified)
        assert int(report.predicted[slot]) == (verified if int(made.kind[slot]) >= FOLLOWED else 0)
        assert report.tokens[:, slot].tolist() == tokens + [0] * (width + 1 - count)
    assert report.tally.tolist() == tally and sum(tally) > 0
    for field in fields(host):
        assert torch.equal(getattr(there, field.name).cpu(), getattr(host, field.name)), field.name
    assert torch.equal(fate_there.cpu(), fate)
    assert max(count for _, count, _, _ in expected) > min(width, 3), "no chain was long"


def check_history(device: str, *, rows: int, size: int, exact: bool) -> None:
    """Earlier texts are found where `History` finds them, by rows of the same number alone; `exact`: of equal hashes
    the last stays, as there."""
    vocabulary, width = 5, 6
    earlier, host = (random_rows(rows, vocabulary=vocabulary) for _ in range(2))
    texts = torch.randint(1, 3, (rows,), dtype=torch.int64)
    ring, history = allocate_ring(size, device), History(size)
    before, there = moved(earlier, device), moved(host, device)
    for row in range(rows):
        remember(ring, before, texts.to(device), row)
        length = int(earlier.length[row])
        if not earlier.active[row] and length:  # it has ended
            history.add(earlier.tokens[row, :length].numpy().astype(np.int64), int(texts[row]))
    slot_rows = torch.randperm(rows).to(torch.int32)
    into = allocate_proposals(rows, width, device)
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    trust = limits_of(width, 0, 0.0, np.full(DRAFT_KINDS, 0.5)).to(device)
    columns = DraftColumns(may_draft=ones, fate=ones)
    propose_history(into, there, columns, slot_rows.to(device), ring, texts.to(device), trust)
    num_found = 0
    kept = ring.tokens.tolist()
    owners = ring.owners.tolist()
    for slot, row in enumerate(slot_rows.tolist()):
        said = host.tokens[row, : int(host.length[row])].tolist()
        place, agreed = history.find(said, int(texts[row])) if host.active[row] else (0, 0)
        guess = history.guess(place, width) if place else []
        number = int(into.number[slot])
        found = into.guess[slot, :number].tolist()
        if exact:
            assert found == guess
            kind = OF_HISTORY + min(agreed - THREE, 3) * FATES + 1 if guess else NO_KIND
            assert int(into.kind[slot]) == kind
        num_found += bool(number)
        if number:  # its own number's text goes on like that
            spots = [at for at in range(THREE, size - number) if kept[at : at + number] == found]
            assert any(kept[at - THREE : at] == said[-THREE:] and owners[at] == texts[row] for at in spots)
    assert num_found > rows // 4, "nothing was found"


def check_predictions(device: str, *, rows: int, vocabulary: int, width: int) -> None:
    """Rows are in their texts where the CPU's have them, step after step, whatever came in between."""
    random = np.random.default_rng(rows)
    host, columns = random_rows(rows, vocabulary=vocabulary), torch.ones(rows, dtype=torch.int32)
    columns[::9] = 0  # no drafts are made for these
    num_prompt = torch.minimum(host.length, _draw(1, 60, rows))
    host.length[:] = num_prompt
    counts = torch.where(torch.rand(rows) < 0.8, _draw(1, LONGEST_ROW, rows), 0).to(torch.int32)
    texts = _draw(0, vocabulary, rows, LONGEST_ROW)
    for row in range(rows):  # what is said is in the text, from somewhere on, with a few tokens changed
        start = int(random.integers(0, 40))
        said = texts[row, start : start + LONGEST_ROW - int(num_prompt[row])].clone()
        said[torch.rand(len(said)) < 0.1] = 0
        host.tokens[row, int(num_prompt[row]) : int(num_prompt[row]) + len(said)] = said
    state = torch.zeros(rows, STATE_WORDS, dtype=torch.int32)
    state[:, SEEN] = num_prompt
    place = torch.randperm(rows).to(torch.int32)
    kept = torch.zeros(rows, LONGEST_ROW, dtype=torch.int32)
    kept[place.long()] = texts
    there = moved(host, device)
    predictions = Predictions(
        tokens=kept.to(device),
        place=place.to(device),
        count=counts.to(device),
        state=state.to(device),
        num_prompt=num_prompt.to(device),
    )
    slot_rows = torch.randperm(rows).to(torch.int32)
    trust = np.linspace(0.2, 0.8, DRAFT_KINDS)
    limits = limits_of(width, 0, 0.0, trust).to(device)
    drafts = DraftColumns(may_draft=columns.to(device), fate=columns.to(device))
    followers = [
        Prediction(texts[row, :count].tolist(), ()) if count else None
        for row, count in enumerate(counts.tolist())
    ]
    kinds_seen = set()
    for step in range(12):
        more = torch.minimum(_draw(0, 9 if step < 8 else MOST_BEHIND, rows), LONGEST_ROW - host.length)
        before, host.length[:] = host.length.clone(), host.length + more
        there.length.copy_(host.length)
        made = _proposed(rows, width, vocabulary)
        into = Proposals(**{name: value.clone() for name, value in _sent(made, device).items()})
        propose_predictions(into, there, drafts, slot_rows.to(device), predictions, limits)
        for slot, row in enumerate(slot_rows.tolist()):
            follower, own = followers[row], int(made.kind[slot])
            kind, guess = own, made.guess[slot].tolist()
            number = int(made.number[slot])
            if follower is not None and host.active[row] and columns[row]:
                follower.follow(host.tokens[row, before[row] : host.length[row]].tolist())
                own_trust = trust[own] if own >= 0 else -1.0
                if follower.kind == FOLLOWED or (follower.kind == FOUND and trust[FOUND] >= own_trust):
                    kind, guess = follower.kind, follower.guess(width)
                    number = len(guess)
                    kinds_seen.add(kind)
            assert (int(into.kind[slot]), int(into.number[slot])) == (kind, number)
            assert into.guess[slot, :number].tolist() == guess[:number]
    assert kinds_seen == {FOLLOWED, FOUND}


def check_certain(device: str, *, rows: int, width: int) -> None:
    """What is certain replaces other drafts where a row is inside of it; the masks of a row follow each other."""
    host, most = random_rows(rows, vocabulary=50), 2 * width + 1
    count = torch.where(torch.rand(rows) < 0.7, _draw(0, most + 1, rows), 0).to(torch.int32)
    first = host.length - _draw(-1, most + 1, rows)
    tokens = _draw(0, 50, rows, most)
    slot_rows = torch.randperm(rows).to(torch.int32)
    made = _proposed(rows, width, 50)
    into = Proposals(**{name: value.clone() for name, value in _sent(made, device).items()})
    there = moved(host, device)
    certain = CertainTokens(tokens=tokens.to(device), first=first.to(device), count=count.to(device))
    propose_certain(into, there, slot_rows.to(device), certain)
    num_found = 0
    for slot, row in enumerate(slot_rows.tolist()):
        at, kind, guess = int(host.length[row] - first[row]), int(made.kind[slot]), made.guess[slot].tolist()
        number = int(made.number[slot])
        if host.active[row] and 0 <= at < int(count[row]):
            kind, guess = FOLLOWED, tokens[row, at : int(count[row])].tolist()[:width]
            number, num_found = len(guess), num_found + 1
        assert (int(into.kind[slot]), int(into.number[slot])) == (kind, number)
        assert into.guess[slot, :number].tolist() == guess[:number]
    assert num_found > rows // 8
    layout, draws = allocate_layout(rows, 3 * rows, device), 3 * rows
    layout.draw_rows.copy_(_draw(0, rows, draws))
    depth = _draw(0, width + 1, draws)
    layout.draw_positions.copy_(host.length[layout.draw_rows.cpu().long()] + depth)
    firsts = torch.where(torch.rand(rows) < 0.5, _draw(0, 90, rows), -1).to(torch.int32)
    mask_of = torch.full((draws + 7,), -5, dtype=torch.int32, device=device)
    place_masks(mask_of[:draws], layout, there, firsts.to(device))
    of_draws = firsts[layout.draw_rows.cpu().long()]
    assert torch.equal(mask_of[:draws].cpu(), torch.where(of_draws >= 0, of_draws + depth, -1))
    assert (mask_of[draws:] == -5).all()
