"""Random rules for rows and the comparison with their definition; used on the GPU and through the interpreter."""

from __future__ import annotations

import random
from dataclasses import fields

import torch
from torch import Tensor

from paceline.runner.gpu.kernels.logit_rules import (
    EVERYTHING,
    NO_PLACE,
    KnownTokens,
    RuleColumns,
    RulePool,
    allocate_rule_pool,
    apply_rules,
    fill_seen,
    mask_logits,
    note_drawn,
)
from tests.gpu.kernel_references import reference_rules, reference_seen

Lists = tuple[list[int] | None, list[int], list[int], dict[int, float]]  # allowed, banned, ends, bias


def write_lists(pool: RulePool, place: int, lists: Lists) -> None:
    allowed, banned, ends, bias = lists
    tokens = [*(allowed or []), *banned, *ends, *bias]
    first_biased = len(tokens) - len(bias)
    pool.tokens[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    pool.bias[place, first_biased : len(tokens)] = torch.tensor(list(bias.values()), dtype=torch.float32)
    number = EVERYTHING if allowed is None else len(allowed)
    pool.counts[place] = torch.tensor([number, len(banned), len(ends), len(bias)], dtype=torch.int32)


def random_lists(vocabulary: int) -> Lists:
    def some(most: int) -> list[int]:
        return random.choices(range(vocabulary), k=random.randrange(most))

    allowed = random.choice([None, None, [0, *some(30)]])
    return allowed, some(20), some(8), {token: random.uniform(-20, 20) for token in some(300)}


def random_known(rows: int, width: int, vocabulary: int, device: str) -> KnownTokens:
    """Few distinct tokens, so that counts grow; what lies beyond a row's length must not count."""
    tokens = torch.randint(0, min(vocabulary, width // 3 + 2), (rows, width), dtype=torch.int32)
    tokens[0, 0], tokens[0, 1] = -1, vocabulary  # no tokens of this vocabulary
    length = torch.randint(2, width + 1, (rows,), dtype=torch.int32)
    num_prompt = (length * torch.rand(rows)).to(torch.int32)
    length[-1], num_prompt[-1] = width, 0
    return KnownTokens(tokens=tokens.to(device), length=length.to(device), num_prompt=num_prompt.to(device))


def on_host(pool: RulePool) -> RulePool:
    return RulePool(**{field.name: getattr(pool, field.name).cpu() for field in fields(pool)})


def check_seen(device: str, *, rows: int, width: int, vocabulary: int) -> None:
    """Places hold what their rows know, others stay as they are, and drawn tokens are added."""
    pool = allocate_rule_pool(rows + 2, vocabulary, device)
    pool.seen.fill_(77)
    place = torch.randperm(rows + 2)[: rows + 1].to(torch.int32)
    place[1] = NO_PLACE
    known = random_known(rows + 1, width, vocabulary, device)
    filled = torch.randperm(rows + 1)[:rows].to(torch.int32)
    fill_seen(pool, filled.to(device), place.to(device), known)
    expected = torch.full((rows + 2, vocabulary), 77, dtype=torch.int32)
    for row in filled.tolist():
        if place[row] >= 0:
            expected[place[row]] = reference_seen(known, row, vocabulary)
    assert torch.equal(pool.seen.cpu(), expected)
    slot_rows = torch.tensor([*range(rows + 1), 1, 1], dtype=torch.int32)  # padding slots share a row
    drawn = torch.randint(-1, vocabulary, (rows + 3,), dtype=torch.int32)
    position = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    columns = RuleColumns(slot_rows=slot_rows.to(device), place=place.to(device), position=position)
    note_drawn(pool, columns, drawn.to(device))
    for row, token in zip(slot_rows.tolist(), drawn.tolist(), strict=True):
        if place[row] >= 0 and token >= 0:
            expected[place[row], token] += 1
    assert torch.equal(pool.seen.cpu(), expected)


def random_pool(places: int, vocabulary: int, device: str) -> RulePool:
    pool = allocate_rule_pool(places, vocabulary, device)
    known = random_known(places, 90, vocabulary, device)
    every = torch.arange(places, dtype=torch.int32, device=device)
    fill_seen(pool, every, every, known)
    for place in range(places):
        write_lists(pool, place, random_lists(vocabulary))
        if place % 3:
            penalties = [random.uniform(0.5, 2.0), random.uniform(-2, 2), random.uniform(-2, 2)]
            pool.penalties[place] = torch.tensor(penalties)
    pool.stop_from.copy_(torch.randint(0, 10, (places,), dtype=torch.int32))
    return pool


def check_rules(device: str, *, slots: int, vocabulary: int) -> None:
    """Bit for bit the definition; rows without a place are not touched."""
    places, rows = slots, slots + 3
    pool = random_pool(places, vocabulary, device)
    place = torch.full((rows,), NO_PLACE, dtype=torch.int32)
    place[torch.randperm(rows)[: places - 1]] = torch.randperm(places)[: places - 1].to(torch.int32)
    slot_rows = torch.randperm(rows)[:slots].to(torch.int32)
    position = torch.randint(0, 10, (rows,), dtype=torch.int64)
    columns = RuleColumns(
        slot_rows=slot_rows.to(device), place=place.to(device), position=position.to(device)
    )
    logits = torch.randn(slots, vocabulary) * 4
    found = logits.clone().to(device)
    apply_rules(found, pool, columns)
    host = on_host(pool)
    for slot, row in enumerate(slot_rows.tolist()):
        expected = logits[slot]
        if place[row] >= 0:
            expected = reference_rules(expected, host, int(place[row]), int(position[row]))
        assert torch.equal(found[slot].cpu(), expected), f"slot {slot}"


def apply_to_one(logits: Tensor, lists: Lists, *, stop_from: int = 0) -> Tensor:
    """One row, at position 5, with these lists and no penalties."""
    device = str(logits.device)
    pool = allocate_rule_pool(2, len(logits), device)
    write_lists(pool, 1, lists)
    pool.stop_from[1] = stop_from
    columns = RuleColumns(
        slot_rows=torch.zeros(1, dtype=torch.int32, device=device),
        place=torch.ones(1, dtype=torch.int32, device=device),
        position=torch.full((1,), 5, dtype=torch.int64, device=device),
    )
    found = logits.clone()[None]
    apply_rules(found, pool, columns)
    return found[0].cpu()


def check_bans_that_would_leave_nothing(device: str) -> None:
    nothing = float("-inf")
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    all_four: Lists = (None, [0, 1], [2, 3], {})
    assert apply_to_one(logits, all_four, stop_from=6).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert apply_to_one(logits, all_four, stop_from=5).tolist() == [nothing, nothing, 3.0, 4.0]
    assert apply_to_one(logits, ([2], [2, 1], [], {2: 1.5})).tolist() == [nothing, nothing, 4.5, nothing]
    assert apply_to_one(logits, ([2, 0], [2], [], {})).tolist() == [1.0, nothing, nothing, nothing]


def check_unusable_logits_stay(device: str) -> None:
    """A row that is not finite is still seen to be so when its bad logit is out by a rule."""
    logits = torch.zeros(5000, device=device)
    logits[4500], logits[7] = float("nan"), float("inf")
    found = apply_to_one(logits, ([1, 2], [7, 3], [], {}))
    assert found[4500].isnan() and found[7] == float("inf") and found[1] == 0
    assert int((found == float("-inf")).sum()) == 5000 - 4
    found = apply_to_one(logits, (None, [4500, 3], [], {}))
    assert found[4500].isnan() and found[3] == float("-inf")


def check_masks(device: str, *, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> None:
    """Of some rows what is not allowed becomes minus infinity, but for what no draw may miss; others stay."""
    words = (vocabulary + 31) // 32
    logits = torch.randn(rows, vocabulary, device=device).to(dtype)
    places = torch.randperm(rows)[: (rows + 1) // 2].to(torch.int32)
    first = int(places[0])
    logits[first, 1], logits[first, 2] = float("nan"), float("inf")
    bits = torch.randint(-(2**31), 2**31, (len(places), words), dtype=torch.int64)
    bits[0] = 0
    expected = logits.cpu().clone()
    token = torch.arange(vocabulary)
    for number, place in enumerate(places.tolist()):
        is_hidden = ((bits[number, token // 32] >> (token % 32)) & 1) == 0
        expected[place, is_hidden & (expected[place] < float("inf"))] = float("-inf")
    mask_of = torch.full((rows,), -1, dtype=torch.int32)
    mask_of[places.long()] = torch.arange(len(places), dtype=torch.int32)
    mask_logits(logits, bits.to(torch.int32).to(device), mask_of.to(device))
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)
