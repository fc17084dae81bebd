"""The server of a file of this folder, and what follows each of its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.media.picture_server import (
    DATA,
    MODEL,
    NUM_TOKENS,
    TEXT,
    Hosts,
    PictureServer,
    served,
    unharmed,
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[PictureServer]:
    with served(tmp_path_factory.mktemp("pictures"), hosts) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: PictureServer) -> str:
    """The answer of the same model without a server."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(str(server.folder / MODEL), load_format="dummy", num_blocks=600) as llm:
        content = [{"type": "image", "image": DATA}, TEXT]
        (output,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(autouse=True)
def harmless(server: PictureServer, wanted: str) -> Iterator[None]:
    """After every test."""
    with unharmed(server, wanted):
        yield
