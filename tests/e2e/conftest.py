"""The server and the models that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.client_server import ADMIN, ClientServer, client_server
from tests.e2e.model_cli import ENDLESS_CONTEXT
from tests.model_folder import write_model


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    """One for each worker, without flags that a test is about."""
    with client_server(tmp_path_factory.mktemp("server"), PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


@pytest.fixture(scope="module")
def server(plain_server: ClientServer) -> Iterator[ClientServer]:
    """The same; a file leaves it as it was. Files whose server needs flags have a fixture of this name."""
    yield plain_server
    assert plain_server.process.poll() is None
    plain_server.wait_until(plain_server.is_idle)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose answers may be longer than a test waits for."""
    return str(write_model(tmp_path_factory.mktemp("endless"), max_position_embeddings=ENDLESS_CONTEXT))
