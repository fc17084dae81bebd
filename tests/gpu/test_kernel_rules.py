"""Rules on logits on the card, bit for bit as the definition says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.logit_rules import RuleColumns, apply_rules, note_drawn
from tests.gpu import kernel_rule_cases as cases
from tests.gpu.kernel_references import reference_rules


@pytest.mark.parametrize(
    "rows, width, vocabulary", [(1, 9, 100), (16, 3000, 151_936), (5, 70, 49_152), (3, 2048, 5001)]
)
def test_places_hold_what_rows_know(rows: int, width: int, vocabulary: int) -> None:
    cases.check_seen("cuda", rows=rows, width=width, vocabulary=vocabulary)


@pytest.mark.parametrize("slots, vocabulary", [(2, 151_936), (40, 49_152), (64, 5001), (30, 300)])
def test_rules_are_those_of_the_definition(slots: int, vocabulary: int) -> None:
    cases.check_rules("cuda", slots=slots, vocabulary=vocabulary)


def test_bans_that_would_leave_nothing_are_skipped() -> None:
    cases.check_bans_that_would_leave_nothing("cuda")


def test_a_rule_hides_no_logit_that_is_not_finite() -> None:
    cases.check_unusable_logits_stay("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_logits_are_rounded(dtype: torch.dtype) -> None:
    slots, vocabulary = 8, 5001
    pool = cases.random_pool(slots, vocabulary, "cuda")
    every = torch.arange(slots, dtype=torch.int32, device="cuda")
    columns = RuleColumns(slot_rows=every, place=every, position=torch.full_like(every, 5))
    logits = torch.randn(slots, vocabulary, device="cuda").to(dtype)
    found = logits.clone()
    apply_rules(found, pool, columns)
    host = cases.on_host(pool)
    for slot in range(slots):
        expected = reference_rules(logits[slot], host, slot, 5)
        torch.testing.assert_close(found[slot].float().cpu(), expected, rtol=2**-6, atol=0.3)


def test_a_graph_of_rules_follows_what_changes_outside_of_it() -> None:
    slots, vocabulary = 6, 20_000
    pool = cases.random_pool(slots, vocabulary, "cuda")
    every = torch.arange(slots, dtype=torch.int32, device="cuda")
    position = torch.full_like(every, 5)
    columns = RuleColumns(slot_rows=every, place=every.clone(), position=position)
    source = torch.randn(slots, vocabulary, device="cuda")
    logits, drawn = source.clone(), torch.zeros(slots, dtype=torch.int32, device="cuda")
    apply_rules(logits, pool, columns)  # compiles
    note_drawn(pool, columns, drawn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_rules(logits, pool, columns)
        note_drawn(pool, columns, drawn)
    for step in range(3):
        host = cases.on_host(pool)
        logits.copy_(source)
        drawn.fill_(step)
        position.fill_(step * 5)
        graph.replay()
        for slot in range(slots):
            expected = reference_rules(source[slot], host, slot, step * 5)
            assert torch.equal(logits[slot].cpu(), expected)
        columns.place[step] = -1
        source[step] = 0.0
        pool.counts[step] = torch.tensor([-1, 0, 0, 0], device="cuda")
        pool.penalties[step] = torch.tensor([1.0, 0.0, 0.0], device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocabulary", [(1, 300), (64, 151_936), (9, 49_153)])
def test_masks_hide_what_is_not_allowed(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    cases.check_masks("cuda", rows=rows, vocabulary=vocabulary, dtype=dtype)
