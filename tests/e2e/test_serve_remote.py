"""A server with engines that were started elsewhere: streams go on with the same text when one of them is killed, ends
or comes back, and engines outlive their server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.client_server import ClientServer, client_server
from tests.e2e.remote_engines import RemoteEngine, remote_engines
from tests.e2e.test_serve_fleet import FORMS, Answer, stream, wait_for_engines
from tests.waiting import wait_until

USED = {name: FORMS[name] for name in ("seeded", "branches", "logprobs", "structure")}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RemoteEngine]]:
    with remote_engines(tmp_path_factory.mktemp("engines"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engines: list[RemoteEngine]) -> Iterator[ClientServer]:
    with serving(tmp_path_factory.mktemp("server"), engines) as running:
        yield running


def serving(folder: Path, engines: list[RemoteEngine]):  # type: ignore[no-untyped-def]
    addresses = ",".join(engine.address for engine in engines)
    return client_server(folder, "--engines", addresses, "--router", "round-robin")


def test_every_stream_is_the_same_when_an_engine_is_killed_or_ends_under_it(
    server: ClientServer, engines: list[RemoteEngine]
) -> None:
    server.wait_for(200)
    wait_for_engines(server)
    with ThreadPoolExecutor(len(USED)) as pool:
        undisturbed = dict(zip(USED, pool.map(lambda form: stream(server, form), USED.values()), strict=True))
    assert all(len(each.texts[0]) > 100 for each in undisturbed.values())
    for number, lose in enumerate((engines[0].kill, engines[1].end)):
        wait_for_engines(server)
        before = server.metric("failovers_total")
        answers = disturbed(server, lose)
        for name, answer in answers.items():
            assert answer.told == undisturbed[name].told, name
            assert answer.is_whole and not answer.errors
        assert server.metric("failovers_total") == before + len(USED) // 2
        assert engines[number].process.poll() == (-9 if not number else 0)
        engines[number].start_again()


def disturbed(server: ClientServer, lose: Callable[[], object]) -> dict[str, Answer]:
    """Streams that have begun when an engine is lost."""
    answers = {name: Answer() for name in USED}
    with ThreadPoolExecutor(len(USED)) as pool:
        running = [pool.submit(stream, server, form, answers[name]) for name, form in USED.items()]
        wait_until(lambda: all(len(each.texts.get(0, "")) > 20 for each in answers.values()), 60)
        lose()
        for future in running:
            future.result(120)
    return answers


def test_strangers_and_a_second_server_are_kept_out(
    server: ClientServer, engines: list[RemoteEngine], tmp_path: Path
) -> None:
    wait_for_engines(server)
    host, port = engines[0].address.rsplit(":", 1)
    answer = Answer()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, {"seed": 1, "max_tokens": 1000}, answer)
        wait_until(lambda: len(answer.texts.get(0, "")) > 10, 60)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"PL" + b"\xff" * 60, b"PL"):
            with socket.create_connection((host, int(port)), 10) as stranger:
                stranger.sendall(said)
                while stranger.recv(1000):  # until it is closed
                    pass
        with client_server(tmp_path, "--engines", engines[0].address) as second:
            second.wait_until(lambda: "another server has this engine" in second.log())
            assert second.ask("GET", "/health").status == 503
        running.result(120)
    assert answer.is_whole and not answer.errors
    assert "a connection was refused" in engines[0].log()


def test_engines_outlive_their_server(
    server: ClientServer, engines: list[RemoteEngine], tmp_path: Path
) -> None:
    """The last test of this file."""
    wait_for_engines(server)
    text = stream(server, USED["seeded"]).texts
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # under way when the server is killed
            pool.submit(lambda: stream(server, {"seed": 3, "max_tokens": 50_000}))
        server.wait_until(lambda: server.metric("num_requests_running") == 2)
        server.process.kill()
    assert all(engine.process.poll() is None for engine in engines)
    with serving(tmp_path, engines) as next_one:
        next_one.wait_for(200)
        wait_for_engines(next_one)
        next_one.wait_until(next_one.is_idle)
        assert stream(next_one, USED["seeded"]).texts == text
