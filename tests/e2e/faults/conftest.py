"""The models of this folder, and the server that the tests of a file share.

A file says in `FLAGS` with which flags its server runs, in `HOOKS` where faults strike it and, if it needs any, in
`VARIABLES` what its environment holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults.live import LiveServer, live_server, unharmed
from tests.model_folder import write_model

LONG_CONTEXT = 20_000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny; its greedy text never ends before its length."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for answers that no buffer holds."""
    return write_model(tmp_path_factory.mktemp("model") / "long", max_position_embeddings=LONG_CONTEXT)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = request.module
    model = request.getfixturevalue(getattr(file, "MODEL_FIXTURE", "model"))
    work = tmp_path_factory.mktemp("server") / "w"
    variables = getattr(file, "VARIABLES", None)
    with live_server(model, work, *file.FLAGS, hooks=file.HOOKS, variables=variables) as running:
        yield running


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """The file's server; each test leaves it as it was."""
    with unharmed(shared):
        yield shared
