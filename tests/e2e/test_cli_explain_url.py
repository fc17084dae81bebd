"""`paceline explain ID --url`: a real server tells the key that sent a request why it went as it did."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client_server import KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.e2e.model_cli import COMMAND, environment


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server")) as running:
        running.wait_for(200)
        yield running


def explain(
    server: ClientServer, *arguments: str, cache: Path, key: str = KEY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "explain", *arguments, "--url", server.url],
        env=environment(cache, PACELINE_API_KEY=key),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def complete(server: ClientServer, **fields: object) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"model": MODEL, "prompt": "hello there", "max_tokens": 5, **fields})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", body, headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return str(answer["id"])


def test_the_story_of_a_request_that_has_ended(server: ClientServer, tmp_path: Path) -> None:
    request_id = complete(server, ignore_eos=True)
    done = explain(server, request_id, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0].startswith("request ") and told[0].endswith(" of the engine:")
    assert told[1].startswith("waited ") and "was admitted at step " in told[1]
    assert told[-1].startswith("reached its length after 5 tokens of output")
    values = json.loads(explain(server, request_id, "--json", cache=tmp_path).stdout)
    assert values["branches"][0]["sentences"] == told[1:] and values["branches"][0]["state"] == "ended"
    assert values["branches"][0]["decisions"][0]["kind"] == "admit"


def test_branches_are_told_apart(server: ClientServer, tmp_path: Path) -> None:
    done = explain(server, complete(server, n=2, temperature=1.0), cache=tmp_path)
    headings = [line.partition(", ")[2] for line in done.stdout.splitlines() if line.startswith("request ")]
    assert headings == ["branch 0:", "branch 1:"] and "shares the KV of" in done.stdout


def test_another_key_hears_that_there_is_no_such_request(server: ClientServer, tmp_path: Path) -> None:
    request_id = complete(server)
    for key, asked in ((NARROW_KEY, request_id), (KEY, "cmpl-never")):
        done = explain(server, asked, cache=tmp_path, key=key)
        assert (
            done.returncode == 1
            and "the server answered 404: this key has sent no request of that id" in done.stderr
        )
