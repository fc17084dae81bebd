"""A step that fails on the device: whatever it left there, the requests end with what they would have said."""

from __future__ import annotations

import pytest
import torch

from paceline.runner.flat_batch import FlatBatch
from tests.torch.parity import Play, Scenario, subject


class DeviceLost(RuntimeError):
    """An injected failure."""


class FailingPlay(Play):
    """A scenario in which some steps fail after they have written everywhere on the device."""

    def __init__(self, scenario: Scenario, failing: set[int]) -> None:
        super().__init__(scenario, subject(scenario.architecture))
        self.failed = 0
        forward = self.runner._forward
        calls = 0

        def failing_forward(batch: FlatBatch) -> torch.Tensor:
            nonlocal calls
            calls += 1
            hidden = forward(batch)
            if calls in failing:
                for pools in self.runner._kv.layers:
                    pools.keys.fill_(float("nan"))
                    pools.values.fill_(float("nan"))
                self.failed += 1
                raise DeviceLost(f"call {calls}")
            return hidden

        self.runner._forward = failing_forward  # type: ignore[method-assign]

    def _look_for_errors(self) -> None:
        if isinstance(self.engine.last_error, DeviceLost):  # which the engine has recovered from
            self.engine.last_error = None
        super()._look_for_errors()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("disturbance", ["none", "swap", "n=4"])
def test_outputs_survive_failed_steps(disturbance: str, depth: int) -> None:
    play = FailingPlay(Scenario(architecture="gemma3", disturbance=disturbance, depth=depth), {2, 20, 45})
    outcome = play.run()
    assert play.failed >= 2
    assert not outcome.wrong
