"""Rows of a step and the comparison with their definitions: inputs, draws, updates; on the GPU and interpreted."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.gumbel_sampling import SamplingColumns, allocate_candidates, sample
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.step_rows import (
    MAX_STOP_IDS,
    DrawnTokens,
    RowColumns,
    StepTokens,
    decode_inputs,
    span_inputs,
    span_values,
    update_rows,
    write_words,
)
from paceline.runner.gpu.kernels.token_logprobs import (
    MOST_LOGPROBS,
    REPORT_WIDTH,
    LogprobColumns,
    allocate_logprob_parts,
    token_logprobs,
)
from paceline.runner.sampling.sampler import token_logprobs as reference_token_logprobs
from tests.gpu.kernel_references import reference_decode_inputs, reference_sample, reference_update_rows


def column(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _room(count: int, groups: int, device: str) -> StepTokens:
    return StepTokens(
        ids=torch.full((count,), -5, dtype=torch.int32, device=device),
        positions=torch.full((count,), -5, dtype=torch.int32, device=device),
        slots=[torch.full((count,), -5, dtype=torch.int64, device=device) for _ in range(groups)],
    )


def _on(rows: RowColumns, device: str) -> RowColumns:
    return RowColumns(**{field.name: getattr(rows, field.name).to(device) for field in fields(rows)})


def _rows() -> tuple[RowColumns, list[Tensor]]:
    num_rows, width = 6, 200
    rows = RowColumns(
        length=column(1, 64, 65, 130, 0, 77),
        max_length=column(200, 200, 200, 200, 200, 200),
        active=column(1, 1, 1, 0, 1, 1),
        dropped=column(0, 0, 0, 64, 0, 64),
        stop_ids=torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int32),
        tokens=torch.randint(0, 1000, (num_rows, width), dtype=torch.int32),
    )
    return rows, [torch.randint(1, 50, (num_rows, 4), dtype=torch.int32) for _ in range(2)]


def check_decode_inputs(device: str) -> None:
    """The last token of each row, its place, and what the row's attention sees."""
    rows, tables = _rows()
    slot_rows = column(5, 3, 0, 2, 4, 1)
    into, visible = _room(6, 2, device), torch.full((6,), -5, dtype=torch.int32, device=device)
    there = [table.to(device) for table in tables]
    decode_inputs(into, visible, _on(rows, device), slot_rows.to(device), there)
    expected = reference_decode_inputs(rows, slot_rows, tables)
    for slot, (token, position, places, length) in enumerate(expected):
        assert (int(into.ids[slot]), int(into.positions[slot])) == (token, position)
        assert tuple(int(places_of[slot]) for places_of in into.slots) == places
        assert int(visible[slot_rows[slot]]) == length


def check_span_inputs(device: str) -> None:
    """The tokens of spans, and nothing beside them; then the values of their rows."""
    rows, tables = _rows()
    # Row 3 has dropped a block: its places lie so much before its positions.
    columns = {"row": (3, 0), "first": (2, 70), "count": (68, 3), "position": (60, 0)}
    spans = Spans(**{name: column(*values, device=device) for name, values in columns.items()})
    into = _room(80, 2, device)
    span_inputs(into, spans, 68, _on(rows, device), [table.to(device) for table in tables])
    for row, first, count, position in zip(*columns.values(), strict=True):
        for index in range(count):
            place = position + index
            at = place + int(rows.dropped[row])
            assert into.ids[first + index] == int(rows.tokens[row, at])
            assert into.positions[first + index] == at
            for group in range(2):
                block = int(tables[group][row, place // BLOCK_SIZE])
                assert into.slots[group][first + index] == block * BLOCK_SIZE + place % BLOCK_SIZE
    assert into.ids[:2].tolist() == [-5, -5] and into.ids[73] == -5
    span_values(into.ids, column(8, 0, 0, 9, device=device), spans, 68)
    assert into.ids[:75].tolist() == [-5, -5, *[9] * 68, *[8] * 3, -5, -5]


def check_write_words(device: str) -> None:
    memory = torch.zeros(5000, dtype=torch.int32, device=device)
    addresses = torch.randperm(5000)[:3000].to(torch.int32)
    changes = torch.stack([addresses, torch.arange(1, 3001, dtype=torch.int32)])
    write_words(memory, changes.to(device), 2500)
    expected = torch.zeros(5000, dtype=torch.int32)
    expected[addresses[:2500].long()] = torch.arange(1, 2501, dtype=torch.int32)
    assert torch.equal(memory.cpu(), expected)


def check_row_update(device: str, *, rows: int, slots: int) -> None:
    """Rows take their tokens in and end, and say so."""

    def drawn_column(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows,), dtype=torch.int32)

    host = RowColumns(
        length=drawn_column(1, 9),
        max_length=drawn_column(5, 20),
        active=drawn_column(0, 2),
        dropped=torch.zeros(rows, dtype=torch.int32),
        stop_ids=torch.randint(-1, 20, (rows, MAX_STOP_IDS), dtype=torch.int32),
        tokens=torch.zeros(rows, 24, dtype=torch.int32),
    )
    there = _on(host, device)
    if device == "cpu":  # the interpreted kernel must not change what it is compared with
        there = RowColumns(**{field.name: getattr(there, field.name).clone() for field in fields(there)})
    slot_rows = torch.randperm(rows)[:slots].to(torch.int32)
    tokens = torch.randint(0, 100, (slots,), dtype=torch.int32)
    finite = torch.randint(0, 3, (slots,), dtype=torch.uint8)
    token, code = (torch.full((slots,), -9, dtype=torch.int32, device=device) for _ in range(2))
    drawn = DrawnTokens(token=token, code=code)
    update_rows(there, drawn, slot_rows.to(device), tokens.to(device), finite.to(device))
    report = reference_update_rows(host, slot_rows, tokens, finite)
    assert list(zip(token.tolist(), code.tolist(), strict=True)) == report
    for field in fields(host):
        assert torch.equal(getattr(there, field.name).cpu(), getattr(host, field.name)), field.name


def draw(logits: Tensor, columns: SamplingColumns) -> tuple[list[int], list[int]]:
    slots, device = len(logits), logits.device
    tokens = torch.full((slots,), -7, dtype=torch.int32, device=device)
    finite = torch.full((slots,), 7, dtype=torch.uint8, device=device)
    sample(tokens, finite, logits, columns, allocate_candidates(slots, logits.shape[1], device))
    return tokens.tolist(), finite.tolist()


def check_sampling(device: str, *, slots: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Token by token what the definition draws."""
    rows = slots + 16
    # bf16 logits of this spread have many exact ties, which the noise must tell apart
    logits = (torch.randn(slots, vocabulary, device=device) * 2).to(dtype)
    slot_rows = torch.randperm(rows)[:slots].to(torch.int32)
    choices = torch.tensor([0.0, 1e-6, 0.05, 0.6, 1.0, 2.5], dtype=torch.float64)
    temperature = choices[torch.randint(len(choices), (rows,))]
    seed = torch.randint(-(2**62), 2**62, (rows,), dtype=torch.int64)
    position = torch.randint(0, 2**34, (rows,), dtype=torch.int64)
    columns = SamplingColumns(
        slot_rows=slot_rows.to(device),
        temperature=temperature.to(device),
        seed=seed.to(device),
        position=position.to(device),
    )
    tokens, finite = draw(logits, columns)
    assert finite == [1] * slots
    expected = [
        reference_sample(logits[slot], float(temperature[row]), int(seed[row]), int(position[row]))
        for slot, row in enumerate(slot_rows.tolist())
    ]
    assert tokens == expected


def check_token_logprobs(device: str, *, draws: int, vocabulary: int, dtype: torch.dtype) -> None:
    """What is reported of random draws, of which one row in four does not ask; many logits are equal."""
    rows = draws + 3
    logits = torch.randn(draws, vocabulary) * 4
    logits[0] = torch.randint(-2, 3, (vocabulary,)) * torch.tensor(-0.0)  # zeros of both signs
    logits[1 % draws] = torch.randint(0, 3, (vocabulary,)).float()
    logits[2 % draws, : vocabulary // 2] = float("-inf")
    logits[2 % draws, vocabulary - min(15, vocabulary // 2) :] = float("-inf")
    logits[3 % draws, vocabulary // 3] = 80.0
    logits = logits.to(dtype)
    slot_rows = torch.randperm(rows)[:draws].to(torch.int32)
    wanted = (torch.arange(rows) % 4 != 3).to(torch.int32)
    tokens = torch.randint(0, vocabulary, (draws,), dtype=torch.int32)
    tokens[3 % draws] = vocabulary // 3
    report = torch.full((draws, REPORT_WIDTH), -7, dtype=torch.int32, device=device)
    columns = LogprobColumns(
        slot_rows=slot_rows.to(device), wanted=wanted.to(device), tokens=tokens.to(device)
    )
    token_logprobs(report, logits.to(device), columns, allocate_logprob_parts(draws, vocabulary, device))
    words = report.cpu().numpy()
    numbers = words.view(np.float32)
    most = min(MOST_LOGPROBS, vocabulary)
    for draw, row in enumerate(slot_rows.tolist()):
        if not wanted[row]:
            assert (words[draw] == -7).all()
            continue
        raw = logits[draw].float().numpy()
        found = reference_token_logprobs(raw, int(tokens[draw]), row, 0, most)
        assert words[draw, 1] == found.rank
        assert words[draw, 2 : 2 + most].tolist() == list(found.top_tokens)
        np.testing.assert_allclose(numbers[draw, 0], found.logprob, rtol=1e-5, atol=1e-5)
        at = 2 + MOST_LOGPROBS
        np.testing.assert_allclose(numbers[draw, at : at + most], found.top_logprobs, rtol=1e-5, atol=1e-5)
