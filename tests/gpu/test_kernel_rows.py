"""Inputs of a step, draws and updates of rows on the card, as the definitions say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.gumbel_sampling import SamplingColumns
from tests.gpu import kernel_row_cases as cases
from tests.gpu.kernel_references import reference_sample


def test_the_last_token_of_each_row() -> None:
    cases.check_decode_inputs("cuda")


def test_the_tokens_of_spans() -> None:
    cases.check_span_inputs("cuda")


def test_words_go_to_their_addresses() -> None:
    cases.check_write_words("cuda")


def test_rows_take_their_tokens_and_end() -> None:
    cases.check_row_update("cuda", rows=1500, slots=1000)


@pytest.mark.parametrize("vocabulary", [151_936, 49_152, 1000, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_are_those_of_the_definition(vocabulary: int, dtype: torch.dtype) -> None:
    cases.check_sampling("cuda", slots=24, vocabulary=vocabulary, dtype=dtype)


def test_rows_that_are_not_finite_say_so_and_disturb_no_other() -> None:
    logits = torch.randn(6, 5000, device="cuda")
    logits[0, 17] = float("nan")
    logits[1, 4999] = float("inf")
    logits[2] = float("-inf")
    logits[3, 100:] = float("-inf")
    logits[4, :] = float("-inf")
    logits[4, 4321] = -50.0
    columns = SamplingColumns(
        slot_rows=torch.arange(6, dtype=torch.int32, device="cuda"),
        temperature=torch.full((6,), 0.7, dtype=torch.float64, device="cuda"),
        seed=torch.arange(6, dtype=torch.int64, device="cuda"),
        position=torch.arange(6, dtype=torch.int64, device="cuda"),
    )
    tokens, finite = cases.draw(logits, columns)
    assert finite == [0, 0, 0, 1, 1, 1]
    assert tokens[3] < 100 and tokens[4] == 4321
    assert tokens[5] == reference_sample(logits[5], 0.7, 5, 5)


@pytest.mark.parametrize("vocabulary", [151_936, 128_256, 49_152, 1000, 5001, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_those_of_the_definition(vocabulary: int, dtype: torch.dtype) -> None:
    cases.check_token_logprobs("cuda", draws=24, vocabulary=vocabulary, dtype=dtype)
