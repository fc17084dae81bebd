"""How a model is called in the engine's log."""

from __future__ import annotations

from paceline.config.model_set import ModelShare
from paceline.process.engine_service import called


def test_a_model_that_is_alone_is_not_called_by_its_number() -> None:
    assert called(ModelShare(name="left")) == "the model left"
    assert called(ModelShare()) == "the model"
