"""A step that fails on the device: whatever it left there, the requests end with what they would have said."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.runner.cpu import StepCompute
from paceline.runner.device_rows import DeviceRows, FlatBatch
from tests.bits import Between
from tests.torch.parity import BACKENDS, Play, Scenario, fill_blocks, subject

FAILING = (2, 20, 45)  # steps


class DeviceLost(RuntimeError):
    """An injected failure."""


class Failing(Between):
    """Steps of which some fail after they have written everywhere on the device."""

    def __init__(self, compute: StepCompute) -> None:
        super().__init__(compute)
        self._calls = 0

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64]) -> NDArray[np.bool_]:
        self._calls += 1
        good = super().forward(rows, batch, due)
        if self._calls in FAILING:
            fill_blocks(self._compute, float("nan"), first=0)
            raise DeviceLost(f"call {self._calls}")
        return good


class FailingPlay(Play):
    """A scenario in which some steps fail."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, subject(scenario.architecture), change=Failing)
        self.failed = 0

    def _look_for_errors(self) -> None:
        if isinstance(self.engine.last_error, DeviceLost):  # which the engine has recovered from
            self.engine.last_error = None
            self.failed += 1
        super()._look_for_errors()


def slowest(disturbance: str, depth: int, backend: str) -> bool:
    return (disturbance, backend) == ("swap", "torch") and depth < 2


@pytest.mark.parametrize(
    ("disturbance", "depth", "backend"),
    [
        pytest.param(*case, marks=[pytest.mark.campaign] if slowest(*case) else [])
        for case in product(("none", "swap", "n=4"), (0, 1, 2), BACKENDS)
    ],
)
def test_outputs_survive_failed_steps(disturbance: str, depth: int, backend: str) -> None:
    scenario = Scenario(architecture="gemma3", disturbance=disturbance, depth=depth, backend=backend)
    play = FailingPlay(scenario)
    outcome = play.run()
    assert play.failed >= 2
    assert not outcome.wrong
