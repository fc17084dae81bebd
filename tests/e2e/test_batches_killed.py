"""A batch outlives its server: killed at any moment or told to stop, the next one goes on with what is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.batch_client import begin, jsonl, num_completed, request, results, wait
from tests.e2e.client_server import ENDLESS, KEY, PATIENCE_S, ClientServer, client_server
from tests.e2e.http_server import read_reply, request_bytes

NUM_LINES = 60
FORM = "Content-Type: multipart/form-data; boundary=x"


def openai_client(server: ClientServer) -> OpenAI:
    server.wait_for(200)
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def flags(folder: Path) -> tuple[str, ...]:
    return ("--batch-dir", str(folder / "kept"), "--max-batch-rows", "3")


def recorded(folder: Path) -> dict[str, Any]:
    """The results that are on the disk, by their custom ids; read from a copy, as the server's own is not touched."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "kept", copy)
    with contextlib.closing(sqlite3.connect(copy / "batches.sqlite3")) as database:
        lines = [json.loads(data) for (data,) in database.execute("SELECT data FROM results")]
    return {line["custom_id"]: line for line in lines}


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_killed_in_the_middle_no_line_is_lost_or_run_twice(tmp_path: Path, kills: int) -> None:
    rng = random.Random(7)
    lines = [request(f"r{i}", max_tokens=rng.randrange(1, 60)) for i in range(NUM_LINES)]
    batch_id = ""
    kept: dict[str, Any] = {}
    for _ in range(kills):
        with client_server(tmp_path, *flags(tmp_path)) as server, openai_client(server) as client:
            batch_id = batch_id or begin(client, jsonl(*lines)).id
            wanted = len(kept) + rng.randrange(3, 15)
            until_s = time.monotonic() + PATIENCE_S
            while num_completed(client, batch_id) < wanted:
                assert time.monotonic() < until_s
                time.sleep(rng.random() * 0.02)
            server.process.kill()
            server.process.wait()
        found = recorded(tmp_path)
        assert len(found) >= wanted and kept.items() <= found.items(), "a result was lost or made again"
        kept = found
    with client_server(tmp_path, *flags(tmp_path)) as server, openai_client(server) as client:
        batch = wait(client, batch_id)
        assert batch.status == "completed" and batch.request_counts.completed == NUM_LINES
        output = results(client, batch.output_file_id)
        assert list(output) == [f"r{i}" for i in range(NUM_LINES)]
        assert kept.items() <= output.items()
        assert recorded(tmp_path) == {}, "what is in the files is not kept a second time"


def test_a_stopping_server_leaves_its_batches_and_does_not_wait_for_them(tmp_path: Path) -> None:
    with client_server(tmp_path, *flags(tmp_path), "--drain-timeout", "30") as server:
        with openai_client(server) as client:
            batch = begin(client, jsonl(request("short"), request("endless", max_tokens=ENDLESS)))
            server.wait_until(lambda: num_completed(client, batch.id) == 1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as upload:
            head = request_bytes(
                "POST",
                "/v1/files",
                b"",
                headers=(f"Authorization: Bearer {KEY}", FORM, "Content-Length: 999"),
            )
            upload.sendall(head + b"--x\r\n")
            server.wait_until(lambda: list((tmp_path / "kept" / "incoming").iterdir()) != [])
            server.terminate()
            assert read_reply(upload).status == 503, "an upload is not waited for either"
        assert server.process.wait(timeout=10) == 0
        assert list((tmp_path / "kept" / "incoming").iterdir()) == []
        assert "Traceback" not in server.log()
    with client_server(tmp_path, *flags(tmp_path)) as server, openai_client(server) as client:
        server.wait_until(server.is_running)
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress" and num_completed(client, batch.id) == 1
        client.batches.cancel(batch.id)
        assert list(results(client, wait(client, batch.id).output_file_id)) == ["short"]


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with client_server(tmp_path / "a", *flags(tmp_path)) as first:
        first.wait_for(200)
        with client_server(tmp_path / "b", *flags(tmp_path)) as second:
            assert second.process.wait(timeout=PATIENCE_S) not in (0, 1)
            assert "is used by another server" in second.log()


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_folder_that_cannot_be_used_is_said_so(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place" / "deeper" if kind == "missing" else tmp_path / "place"
    if kind == "file":
        place.write_text("in the way")
    with client_server(tmp_path, "--batch-dir", str(place)) as server:
        assert server.process.wait(timeout=PATIENCE_S) not in (0, 1)
        assert f"--batch-dir {place} cannot be used" in server.log()


def test_an_engine_that_is_killed_costs_a_batch_nothing_but_time(tmp_path: Path) -> None:
    with client_server(tmp_path, *flags(tmp_path)) as server, openai_client(server) as client:
        batch = begin(client, jsonl(*(request(f"r{i}", max_tokens=40) for i in range(20))))
        server.wait_until(lambda: num_completed(client, batch.id) >= 2 and server.is_running())
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        done = wait(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 20
        assert list(results(client, done.output_file_id)) == [f"r{i}" for i in range(20)]
