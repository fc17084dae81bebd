"""Cost models that come with the package: taken for their device and model, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.costs import fit
from paceline.costs.cost_model import StepShape
from paceline.costs.fit import FittedCost, preset_cost
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import Roofline

XEON, SMALL = device_spec("cpu-2core-xeon"), model_shape("smollm2-135m")


def test_a_recorded_model_is_taken_for_its_device_and_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "RECORDED", tmp_path)
    shapes = [StepShape(decode_rows=rows, logit_rows=rows) for rows in range(1, 41)]
    fitted = FittedCost.fit([(shape, 1e-3 * shape.tokens) for shape in shapes])
    fitted.save(tmp_path / "cpu-2core-xeon.smollm2-135m.json")
    found = preset_cost(SMALL, XEON)
    assert isinstance(found, FittedCost) and found.to_json() == fitted.to_json()
    assert isinstance(preset_cost(SMALL, device_spec("cpu-2core")), Roofline)
    assert isinstance(preset_cost(model_shape("qwen3-0.6b"), XEON), Roofline)
