"""Guesses, layout and verification of drafts on the card, as their definitions say, on fresh random inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu import kernel_draft_cases as cases


@pytest.mark.parametrize("rows, vocabulary, width", [(700, 6, 7), (700, 3, 4), (300, 9, 15), (64, 2, 1)])
def test_ngrams_are_those_of_the_cpu(rows: int, vocabulary: int, width: int) -> None:
    cases.check_ngrams("cuda", rows=rows, vocabulary=vocabulary, width=width)


@pytest.mark.parametrize("size", [1 << 15, 1 << 12])
def test_earlier_texts_are_found_by_their_tenant_alone(size: int) -> None:
    cases.check_history("cuda", rows=300, size=size, exact=False)


@pytest.mark.parametrize("rows, vocabulary, width", [(300, 12, 7), (200, 4, 1), (200, 200, 15)])
def test_rows_are_found_in_what_they_are_expected_to_say(rows: int, vocabulary: int, width: int) -> None:
    cases.check_predictions("cuda", rows=rows, vocabulary=vocabulary, width=width)


@pytest.mark.parametrize("rows, width", [(900, 7), (64, 1), (300, 15)])
def test_what_is_certain_comes_before_other_drafts(rows: int, width: int) -> None:
    cases.check_certain("cuda", rows=rows, width=width)


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.8, 1.0])
def test_answers_are_spoilt_at_the_given_rate(acceptance: float) -> None:
    assert abs(cases.check_answers("cuda", rows=1500, acceptance=acceptance) - acceptance) < 0.05


@pytest.mark.parametrize("rows, width, limit", [(40, 7, 5), (500, 4, 4), (1200, 15, 15), (3, 1, 1)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_the_likeliest_drafts_are_laid_out(
    rows: int, width: int, limit: int, share: float, floor: float
) -> None:
    budget = int(rows * share)
    for of_each in (False, True):
        cases.check_layout(
            "cuda", rows=rows, width=width, limit=limit, budget=budget, floor=floor, of_each=of_each
        )


@pytest.mark.parametrize("width", [1, 4, 7, 15])
def test_drafts_count_as_far_as_they_are_right(width: int) -> None:
    cases.check_verify("cuda", rows=1300, width=width)
    cases.check_verify("cuda", rows=1300, width=width, of_each=True)
