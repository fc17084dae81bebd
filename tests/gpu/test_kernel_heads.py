"""What a draft head needs around its products, on the card, as its definition says, on fresh random inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu import kernel_head_cases as cases


@pytest.mark.parametrize("width", [64, 576, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_goes_with_the_state_before_it(width: int, dtype: torch.dtype) -> None:
    cases.check_inputs("cuda", runs=200, width=width, dtype=dtype)


@pytest.mark.parametrize("vocabulary, known", [(50, 20), (49152, 8192), (32000, 32000)])
@pytest.mark.parametrize("limit", [0, 2, 4])
def test_guesses_are_drawn_with_the_noise_of_their_rows(vocabulary: int, known: int, limit: int) -> None:
    cases.check_draws("cuda", rows=150, vocabulary=vocabulary, known=known, limit=limit)


@pytest.mark.parametrize("width, guessed", [(4, 4), (7, 3), (1, 1)])
def test_the_source_that_is_trusted_more_drafts(width: int, guessed: int) -> None:
    cases.check_merge("cuda", slots=300, width=width, guessed=guessed)
