"""Links to an engine over TLS: certificates of both sides, and what is refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.config.engine import ModelConfig
from paceline.config.links import LinkConfig
from paceline.config.model_set import ModelEntry, ModelSet
from paceline.config.server import FleetConfig
from paceline.models.files.digest import model_digest
from paceline.process.client import EngineState
from paceline.process.fleet.processes import FleetProcess
from paceline.process.remote.elsewhere import Elsewhere
from tests.e2e.model_cli import ENDLESS_CONTEXT, run, run_process
from tests.e2e.process_helpers import GREEDY, PROMPT, config, read, until
from tests.e2e.remote_engines import RemoteEngine, certificates, remote_engines
from tests.model_folder import write_model

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[RemoteEngine]:
    with remote_engines(tmp_path_factory.mktemp("engines"), 1, *certificates(folder)) as (made,):
        yield made


@asynccontextmanager
async def front(
    tmp_path: Path, address: str, flags: Sequence[str] = (), digest: str = ""
) -> AsyncIterator[FleetProcess]:
    """A server's side of links; it has not waited for any engine."""
    model = write_model(tmp_path / "model", max_position_embeddings=ENDLESS_CONTEXT)
    names = ("tls_cert", "tls_key", "tls_ca")
    links = LinkConfig(**dict(zip(names, flags[1::2], strict=False)))
    elsewhere = Elsewhere.read(address, links)._replace(digest=digest or model_digest(model))
    models = ModelSet(entries=[ModelEntry(model=ModelConfig(model=str(model)), given={})])
    made = FleetProcess(models, config(), FleetConfig(engines=address), [], elsewhere)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def test_an_engine_is_used_over_tls(engine: RemoteEngine, folder: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with front(tmp_path, engine.address, certificates(folder, "front")) as running:
            await running.wait_ready()
            texts = [await read(running.client.submit(PROMPT, GREEDY, tenant="a")) for _ in range(2)]
            assert texts[0][0].tokens == texts[1][0].tokens and len(texts[0][0].tokens) == GREEDY.max_tokens
            ending = texts[0][0].ending
            assert ending is not None and abs(ending.time_s - asyncio.get_running_loop().time()) < 60

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@pytest.mark.parametrize("case", ["no certificate", "another authority", "another name", "another model"])
def test_who_cannot_be_trusted_gets_no_link(
    case: str, engine: RemoteEngine, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags: tuple[str, ...] = certificates(folder, "front")
    address, digest = engine.address, ""
    if case == "no certificate":
        flags = ()
    elif case == "another authority":
        flags = (*certificates(tmp_path / "other", "front")[:4], *flags[4:])
    elif case == "another name":
        address = address.replace("127.0.0.1", "localhost")
    else:
        digest = "another"
    told = {"another name": "verify failed", "another model": "another model"}

    async def test() -> None:
        async with front(tmp_path, address, flags, digest) as running:
            await until(lambda: "trying again" in caplog.text)
            assert running.client.state is not EngineState.READY

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))
    assert told.get(case, f"the engine at {address}") in caplog.text


def test_what_cannot_be_listened_on_or_linked_to_is_said_at_the_start(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    for words in (
        ("engine", model, "--listen", "0.0.0.0:7000"),
        ("serve", model, "--engines", "10.0.0.7:7000"),
    ):
        refused = run(*words)
        assert refused.returncode == 78 and "--tls-cert" in refused.stderr
    mistakes: tuple[tuple[str | Path, ...], ...] = (
        ("engine", model),
        ("engine", model, "--listen", "7000"),
        ("engine", model, "--listen", "127.0.0.1:0", "--tls-cert", "a"),
        ("serve", model, "--engines", "127.0.0.1"),
    )
    for wrong in mistakes:
        assert run(*wrong).returncode == 2, wrong
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = run_process("engine", model, "--load-format", "dummy", "--listen", place, cache=tmp_path)
    assert refused.returncode == 78 and "in use" in refused.stderr
