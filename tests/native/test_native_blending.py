"""Prompts with placed texts on the native kernels, against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.load import build_decoder
from paceline.runner.blending import measure_blending
from paceline.runner.native.code import Code
from paceline.runner.native.model import build_model
from paceline.runner.native.step import NativeStep
from paceline.runner.torch_step import TorchStep
from tests.quantized_helpers import QuantizedSource, tiny_spec
from tests.torch.test_blending import prompt
from tests.torch.test_placing import ROPES

LONGEST = 512


def test_prompts_with_placed_texts_are_those_of_torch(code: Code) -> None:
    """Several of them, long and too short, one behind the other and not."""
    spec = replace(tiny_spec(), ropes=(ROPES["llama3"],))
    source = QuantizedSource(spec, "F32")
    prompts = [prompt(7, -50, 2, -90, -64, 11), prompt(3, -20, -130, 5, seed=1), prompt(-70, 4, seed=2)]
    model = build_model(source, LONGEST)
    native = measure_blending(lambda config: NativeStep(model, config, code, 2), prompts)
    torch = measure_blending(lambda config: TorchStep(build_decoder(source, LONGEST), config.kv), prompts)
    assert native.kept == pytest.approx(torch.kept, abs=1e-3)
    assert native.divergence == pytest.approx(torch.divergence, rel=1e-3)
    assert native.left_out == pytest.approx(torch.left_out, rel=1e-3)
