"""What is measured of placed texts: nothing is lost where they stand as they were computed."""

from __future__ import annotations

import numpy as np

from paceline.config.engine import EngineConfig
from paceline.core.blend_quality import PassagePrompt, PromptPart
from paceline.models.load import build_decoder
from paceline.runner.blending import measure_blending
from paceline.runner.torch_step import TorchStep
from tests.quantized_helpers import QuantizedSource, tiny_spec


def prompt(*lengths: int, seed: int = 0) -> PassagePrompt:
    """Parts of these lengths; those of negative ones are placed."""
    rng = np.random.default_rng(seed)
    return tuple(
        PromptPart(tuple(rng.integers(3, 160, abs(length)).tolist()), length < 0) for length in lengths
    )


def torch_step(source: QuantizedSource, config: EngineConfig) -> TorchStep:
    return TorchStep(build_decoder(source, 512), config.kv)


def test_a_text_that_stands_at_the_beginning_loses_nothing() -> None:
    """It was computed as it would have been, and is not turned; only what is behind its full blocks is computed."""
    source = QuantizedSource(tiny_spec(), "F32")
    found = measure_blending(lambda config: torch_step(source, config), [prompt(-61, 9), prompt(-100, 30)])
    assert found.left_out > 1e-3 and found.divergence < 1e-9
    assert found.kept is not None and found.kept > 0.9999 and found.agreement == 1.0


def test_texts_too_short_to_be_placed_are_computed() -> None:
    source = QuantizedSource(tiny_spec(), "F32")
    found = measure_blending(
        lambda config: torch_step(source, config), [prompt(5, -20, 3, -40, 9), prompt(5, -31, -31, 7)]
    )
    assert found.left_out > 1e-3 and found.kept is not None and found.kept < 0.9999, (
        "what stands elsewhere is not quite what it would be"
    )
    assert found.num_prompts == 2
