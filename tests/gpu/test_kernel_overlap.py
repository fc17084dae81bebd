"""Kernels that start before the one before them has ended give the same bits as those that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from benchmarks.gpu.step import DecodeStep, ModelShape

TINY = ModelShape(name="tiny", layers=12, width=1024, heads=16, inner=2048, vocabulary=8192)


def run(step: DecodeStep, start: tuple[Tensor, Tensor], times: int) -> list[Tensor]:
    """Logits, keys and residual after the step has run `times` times in a graph, from the same start."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    for _ in range(times):
        step.hidden.copy_(start[0])
        step.residual.copy_(start[1])
        graph.replay()
        torch.cuda.synchronize()
        found += [step.logits.clone(), step.residual.clone(), step.kv[-1].keys.clone()]
    return found


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_overlapped_launches_change_no_bit(rows: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("overlapped launches need Hopper")
    torch.manual_seed(rows)
    plain = DecodeStep(TINY, rows, context=200)
    torch.manual_seed(rows)
    overlapped = DecodeStep(TINY, rows, context=200, overlapped=True)
    start = plain.hidden.clone(), plain.residual.clone()
    expected, found = run(plain, start, 1), run(overlapped, start, 20)
    for index, tensor in enumerate(found):
        assert torch.equal(tensor, expected[index % len(expected)]), f"replay {index // len(expected)}"
