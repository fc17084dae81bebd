"""Random rows to truncate and the comparison with the definition; used on the GPU and through the interpreter."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from paceline.runner.gpu.kernels.truncation import (
    FloorSearch,
    TruncationColumns,
    allocate_floor_search,
    truncate,
)
from tests.gpu.kernel_references import reference_floor


def _pick(choices: list[float], number: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), (number,))]


def random_columns(slots: int, vocabulary: int, device: str) -> TruncationColumns:
    rows = slots + 5
    float64 = torch.float64
    sizes = [0, 0, 1, 2, 20, vocabulary // 3, vocabulary, vocabulary + 5]
    columns = TruncationColumns(
        slot_rows=torch.randperm(rows)[:slots].to(torch.int32),
        temperature=_pick([0.0, 0.05, 0.6, 1.0, 1.0, 2.5], rows, float64),
        top_k=_pick([float(size) for size in sizes], rows, torch.int32),
        top_p=_pick([1.0, 1.0, 0.999, 0.95, 0.5, 1e-3], rows, float64),
        min_p=_pick([0.0, 0.0, 1e-3, 0.05, 1.0], rows, float64),
    )
    return TruncationColumns(
        **{field.name: getattr(columns, field.name).to(device) for field in fields(columns)}
    )


def random_logits(slots: int, vocabulary: int) -> Tensor:
    """Flat and peaked rows, rows with many equals, with zeros of both signs, and with tokens that are out."""
    logits = torch.randn(slots, vocabulary) * 2
    for slot in range(slots):
        kind = slot % 6
        if kind == 1:
            tail = -(1 - torch.rand(vocabulary)).log()  # of numbers above 0: every logit is finite
            logits[slot] = tail * 1.5 - 30
        elif kind == 2:
            logits[slot] = logits[slot].round() * torch.tensor([-0.0, 1.0])[torch.arange(vocabulary) % 2]
        elif kind == 3:
            logits[slot, 7:] = float("-inf")
        elif kind == 4:
            logits[slot] = logits[slot] * 1e-3 + 1000
        elif kind == 5:
            logits[slot] = 0.25
    return logits


def check_search_is_clean(search: FloorSearch) -> None:
    assert not search.histogram.any() and not search.arrived.any()
    assert bool((search.peak == -(2**31)).all())


def check_truncation(device: str, *, slots: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Exactly the tokens of the definition are left, with their logits."""
    columns = random_columns(slots, vocabulary, device)
    logits = random_logits(slots, vocabulary).to(dtype)
    found = logits.clone().to(device)
    search = allocate_floor_search(slots + 2, device)
    truncate(found, columns, search)
    for slot, row in enumerate(columns.slot_rows.tolist()):
        temperature, top_p, min_p = (
            float(column[row]) for column in (columns.temperature, columns.top_p, columns.min_p)
        )
        raw, top_k = logits[slot].float(), int(columns.top_k[row])
        floor = reference_floor(raw, temperature, top_k, top_p, min_p)
        expected = torch.where(raw < floor, float("-inf"), raw)
        what = f"slot {slot}: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}"
        assert torch.equal(found[slot].float().cpu(), expected), what
    check_search_is_clean(search)


def check_rows_that_are_not_finite(device: str) -> None:
    logits = torch.randn(5, 300)
    logits[0, 17], logits[1, 299], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, 200] = -float("nan")
    rows = torch.arange(5, dtype=torch.int32, device=device)
    ones = torch.ones(5, dtype=torch.float64, device=device)
    columns = TruncationColumns(
        slot_rows=rows, temperature=ones, top_k=torch.full_like(rows, 3), top_p=ones * 0.9, min_p=ones * 0.1
    )
    found = logits.clone().to(device)
    search = allocate_floor_search(5, device)
    truncate(found, columns, search)
    found = found.cpu()
    assert found[0, 17].isnan() and found[1, 299] == float("inf") and found[3, 200].isnan()
    assert torch.equal(found[2], logits[2])
    floor = reference_floor(logits[4], 1.0, 3, 0.9, 0.1)
    assert torch.equal(found[4], torch.where(logits[4] < floor, float("-inf"), logits[4]))
    check_search_is_clean(search)
