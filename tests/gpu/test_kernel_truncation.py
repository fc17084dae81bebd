"""Top-k, top-p and min-p on the card, token by token as the definition says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.truncation import allocate_floor_search, truncate
from tests.gpu import kernel_truncation_cases as cases
from tests.gpu.kernel_references import reference_floor


@pytest.mark.parametrize(
    "vocabulary, slots", [(151_936, 48), (262_144, 24), (49_152, 60), (5001, 120), (40, 60)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_what_the_definition_keeps(vocabulary: int, slots: int, dtype: torch.dtype) -> None:
    cases.check_truncation("cuda", slots=slots, vocabulary=vocabulary, dtype=dtype)


def test_rows_that_are_not_finite_stay_so_and_disturb_no_other() -> None:
    cases.check_rows_that_are_not_finite("cuda")


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    slots, vocabulary = 30, 151_936
    columns = cases.random_columns(slots, vocabulary, "cuda")
    source = cases.random_logits(slots, vocabulary).cuda()
    search = allocate_floor_search(slots)
    first = source.clone()
    truncate(first, columns, search)
    floor = search.floor.clone()
    logits = source.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        truncate(logits, columns, search)
    for _ in range(10):
        logits.copy_(source)
        graph.replay()
        assert torch.equal(logits, first) and torch.equal(search.floor, floor)
    # Rows that now ask for something else get it from the same graph.
    columns.top_k.fill_(20)
    columns.temperature.fill_(0.7)
    logits.copy_(source)
    graph.replay()
    for slot, row in enumerate(columns.slot_rows.tolist()):
        raw = source[slot].cpu()
        kept = reference_floor(raw, 0.7, 20, float(columns.top_p[row]), float(columns.min_p[row]))
        assert torch.equal(logits[slot].cpu(), torch.where(raw < kept, float("-inf"), raw))
