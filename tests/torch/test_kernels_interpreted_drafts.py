"""Kernels of drafts through Triton's interpreter, as their definitions say; tests/gpu has them on the card."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from tests.gpu import kernel_draft_cases as cases


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def test_ngrams_are_those_of_the_cpu() -> None:
    cases.check_ngrams("cpu", rows=60, vocabulary=6, width=7)
    cases.check_ngrams("cpu", rows=40, vocabulary=3, width=4)


def test_answers_are_spoilt_at_the_given_rate() -> None:
    assert cases.check_answers("cpu", rows=70, acceptance=1.0) == 1.0
    assert cases.check_answers("cpu", rows=70, acceptance=0.0) == 0.0
    assert 0.5 < cases.check_answers("cpu", rows=150, acceptance=0.7) < 0.9


def test_earlier_texts_are_found_as_on_the_cpu() -> None:
    cases.check_history("cpu", rows=60, size=8192, exact=True)
    cases.check_history("cpu", rows=60, size=1024, exact=True)  # most have been written over


def test_rows_are_found_in_what_they_are_expected_to_say() -> None:
    cases.check_predictions("cpu", rows=20, vocabulary=12, width=5)


def test_what_is_certain_comes_before_other_drafts() -> None:
    cases.check_certain("cpu", rows=150, width=5)


@pytest.mark.parametrize("budget", [0, 1, 17, 40, 400])
@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_the_likeliest_drafts_are_laid_out(budget: int, floor: float) -> None:
    cases.check_layout("cpu", rows=40, width=7, limit=5, budget=budget, floor=floor)
    cases.check_layout("cpu", rows=40, width=7, limit=5, budget=budget, floor=floor, of_each=True)


@pytest.mark.parametrize("width", [1, 4, 7])
def test_drafts_count_as_far_as_they_are_right(width: int) -> None:
    cases.check_verify("cpu", rows=150, width=width)
    cases.check_verify("cpu", rows=150, width=width, of_each=True)
