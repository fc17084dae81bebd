"""What tests with tensors share: a tiny model, and one thread, so that they are quick beside each other and give the
same sums."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import LLM
from tests.model_folder import write_model
from tests.torch.llm_helpers import OPTIONS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm
