"""Top-k, top-p and min-p through Triton's interpreter, and against the CPU's; tests/gpu has larger shapes."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from tests.gpu import kernel_truncation_cases as cases


@pytest.mark.parametrize("vocabulary, slots", [(17_000, 6), (300, 36)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_what_the_definition_keeps(vocabulary: int, slots: int, dtype: torch.dtype) -> None:
    cases.check_truncation("cpu", slots=slots, vocabulary=vocabulary, dtype=dtype)


def test_rows_that_are_not_finite_stay_so_and_disturb_no_other() -> None:
    cases.check_rows_that_are_not_finite("cpu")
