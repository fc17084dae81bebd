"""What a model is called in requests: a path of the machine is not shown unless the operator says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.engine import ModelConfig
from paceline.config.server import ApiConfig
from paceline.server.open_api import model_names


def names(model: str | None, served: str | None = None) -> tuple[str, ...]:
    return model_names(ModelConfig(model=model), ApiConfig(served_model_name=served))


def test_a_local_model_is_called_by_the_last_part_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secret" / "Tiny-1.5B"
    folder.mkdir(parents=True)
    file = tmp_path / "secret" / "tiny.q8.gguf"
    file.touch()
    assert names(str(folder)) == names(f"{folder}/") == ("Tiny-1.5B",)
    assert names(str(file)) == ("tiny.q8.gguf", "tiny.q8")
    monkeypatch.chdir(folder)
    assert names(".") == names("../Tiny-1.5B") == ("Tiny-1.5B",)


def test_a_model_of_the_hub_keeps_its_name() -> None:
    assert names("org/Model-1.5B") == ("org/Model-1.5B", "Model-1.5B")


def test_an_operator_may_call_it_anything(tmp_path: Path) -> None:
    assert names(str(tmp_path), f"{tmp_path}, b") == (str(tmp_path), "b")
