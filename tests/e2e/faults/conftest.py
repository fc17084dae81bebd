"""The model every server of this folder serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_folder import write_model

LONG_CONTEXT = 20_000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny; its greedy text never ends by itself."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for answers that no buffer holds."""
    return write_model(tmp_path_factory.mktemp("model") / "long", max_position_embeddings=LONG_CONTEXT)
