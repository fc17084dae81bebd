"""Inputs of a step, worked out by the interpreted kernels on the CPU as the definition says."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.kernels import BLOCK_SIZE
from paceline.kernels.prefill_plan import Spans
from paceline.kernels.row_update import MAX_STOP_IDS, RowColumns
from paceline.kernels.step_inputs import (
    StepTokens,
    decode_inputs,
    reference_decode_inputs,
    span_inputs,
    write_words,
)


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def room(count: int, groups: int) -> StepTokens:
    return StepTokens(
        ids=torch.full((count,), -5, dtype=torch.int32),
        positions=torch.full((count,), -5, dtype=torch.int32),
        slots=[torch.full((count,), -5, dtype=torch.int64) for _ in range(groups)],
    )


def make_rows() -> tuple[RowColumns, list[torch.Tensor]]:
    num_rows, width = 6, 200
    rows = RowColumns(
        length=column(1, 64, 65, 130, 0, 77),
        max_length=column(200, 200, 200, 200, 200, 200),
        active=column(1, 1, 1, 0, 1, 1),
        stop_ids=torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int32),
        tokens=torch.randint(0, 1000, (num_rows, width), dtype=torch.int32),
    )
    tables = [torch.randint(1, 50, (num_rows, 4), dtype=torch.int32) for _ in range(2)]
    return rows, tables


def test_the_last_token_of_each_row() -> None:
    rows, tables = make_rows()
    slot_rows = column(5, 3, 0, 2, 4, 1)
    into, visible = room(6, 2), torch.full((6,), -5, dtype=torch.int32)
    decode_inputs(into, visible, rows, slot_rows, tables)
    expected = reference_decode_inputs(rows, slot_rows, tables)
    for slot, (token, position, places, length) in enumerate(expected):
        assert (int(into.ids[slot]), int(into.positions[slot])) == (token, position)
        assert tuple(int(places_of[slot]) for places_of in into.slots) == places
        assert visible[slot_rows[slot]] == length


def test_the_tokens_of_spans() -> None:
    rows, tables = make_rows()
    spans = Spans(row=column(3, 0), first=column(2, 70), count=column(68, 3), position=column(60, 0))
    into = room(80, 2)
    span_inputs(into, spans, 68, rows.tokens, tables)
    for row, first, count, position in ((3, 2, 68, 60), (0, 70, 3, 0)):
        for index in range(count):
            place = position + index
            assert into.ids[first + index] == rows.tokens[row, place]
            assert into.positions[first + index] == place
            for group in range(2):
                block = int(tables[group][row, place // BLOCK_SIZE])
                assert into.slots[group][first + index] == block * BLOCK_SIZE + place % BLOCK_SIZE
    assert into.ids[:2].tolist() == [-5, -5] and into.ids[73] == -5


def test_words_go_to_their_addresses() -> None:
    memory = torch.zeros(5000, dtype=torch.int32)
    addresses = torch.randperm(5000)[:3000].to(torch.int32)
    changes = torch.stack([addresses, torch.arange(1, 3001, dtype=torch.int32)])
    write_words(memory, changes, 2500)
    expected = torch.zeros(5000, dtype=torch.int32)
    expected[addresses[:2500].long()] = torch.arange(1, 2501, dtype=torch.int32)
    assert torch.equal(memory, expected)
