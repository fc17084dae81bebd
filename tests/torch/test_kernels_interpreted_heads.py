"""What a draft head needs around its products, through Triton's interpreter; tests/gpu has it on the card."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from tests.gpu import kernel_head_cases as cases


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_goes_with_the_state_before_it(dtype: torch.dtype) -> None:
    cases.check_inputs("cpu", runs=20, width=24, dtype=dtype)


@pytest.mark.parametrize("limit", [0, 2, 4])
def test_guesses_are_drawn_with_the_noise_of_their_rows(limit: int) -> None:
    cases.check_draws("cpu", rows=24, vocabulary=50, known=20, limit=limit)


@pytest.mark.parametrize(("width", "guessed"), [(4, 4), (7, 3), (1, 1)])
def test_the_source_that_is_trusted_more_drafts(width: int, guessed: int) -> None:
    cases.check_merge("cpu", slots=70, width=width, guessed=guessed)
