"""Top-k, top-p and min-p through Triton's interpreter, and against the CPU's; tests/gpu has larger shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.sampling.processors import floors
from tests.gpu import kernel_truncation_cases as cases


@pytest.mark.parametrize("vocabulary, slots", [(17_000, 6), (300, 36)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_what_the_definition_keeps(vocabulary: int, slots: int, dtype: torch.dtype) -> None:
    cases.check_truncation("cpu", slots=slots, vocabulary=vocabulary, dtype=dtype)


def cpu_floor(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    if temperature < 1e-5:  # the sampler asks for no floor of a greedy row
        return float("-inf")
    columns = (np.array([value]) for value in (temperature, top_k, top_p, min_p))
    return float(floors(logits.numpy()[None], *columns)[0])


@pytest.mark.parametrize("vocabulary, slots", [(5001, 6), (300, 48)])
def test_what_is_kept_is_what_the_cpu_keeps(vocabulary: int, slots: int) -> None:
    cases.check_truncation("cpu", slots=slots, vocabulary=vocabulary, dtype=torch.float32, floors=cpu_floor)


def test_rows_that_are_not_finite_stay_so_and_disturb_nobody() -> None:
    cases.check_rows_that_are_not_finite("cpu")
