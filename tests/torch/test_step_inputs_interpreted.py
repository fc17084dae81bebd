"""Inputs of a step, worked out by the interpreted kernels on the CPU as the definition says."""

from __future__ import annotations

import pytest

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from tests.gpu import kernel_row_cases as cases


def test_the_last_token_of_each_row() -> None:
    cases.check_decode_inputs("cpu")


def test_the_tokens_of_spans() -> None:
    cases.check_span_inputs("cpu")


def test_words_go_to_their_addresses() -> None:
    cases.check_write_words("cpu")


def test_rows_take_their_tokens() -> None:
    cases.check_row_update("cpu", rows=30, slots=20)
