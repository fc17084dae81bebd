"""`paceline dial` and `paceline policy` against a real server: looked at, turned, held, changed; for admins only."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client_server import ADMIN, KEY, ClientServer, client_server
from tests.e2e.model_cli import run

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "dial.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("server")
    with client_server(folder, "--dial", "0.5", PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def steer(
    server: ClientServer, *arguments: str, cache: Path, key: str = ADMIN
) -> subprocess.CompletedProcess[str]:
    return run(*arguments, "--url", server.url, cache=cache, PACELINE_ADMIN_KEY=key)


def generate(server: ClientServer, count: int = 8) -> None:
    for _ in range(count):
        assert server.complete(prompt="hello " * 40, max_tokens=40, ignore_eos=True).status == 200


def test_a_dial_is_looked_at_turned_held_and_let_go(server: ClientServer, tmp_path: Path) -> None:
    first = steer(server, "dial", cache=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("The dial stands at 0.5 (0 is least latency between tokens")
    turned = steer(server, "dial", "0.1", cache=tmp_path)
    assert turned.stdout.startswith("The dial stands at 0.1 ") and "rows at most" in turned.stdout
    held = steer(server, "dial", "--itl-p99-ms", "40", cache=tmp_path)
    assert held.stdout.startswith("The target is a p99 inter-token latency of 40 ms; ")
    generate(server)
    values = json.loads(steer(server, "dial", "--json", cache=tmp_path).stdout)
    assert values["setting"] == {"itl_p99_ms": 40.0} and values["seen"]["itl_p99_ms"] > 0.0
    assert values["state"] in ("starting", "holding", "slack", "correcting", "unreachable")
    assert values["limits"]["step_target_ms"] is not None  # measured at the start, since a dial was given
    server.wait_until(lambda: server.metric("dial_target_seconds") == 0.04)
    assert 0.0 <= server.metric("dial_position") <= 1.0
    off = steer(server, "dial", "--off", cache=tmp_path)
    assert off.stdout.startswith("The dial is off")
    generate(server, 1)


def test_the_policy_is_changed_while_requests_come(server: ClientServer, tmp_path: Path) -> None:
    assert steer(server, "policy", cache=tmp_path).stdout.startswith("Requests are ordered by fcfs.")
    changed = steer(server, "policy", "fair", "--tenant-weights", "anybody=2", cache=tmp_path)
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.startswith("Requests are ordered by fair.\n") and "anybody=2" in changed.stdout
    assert "replace the weights there were: 1 for all tenants." in changed.stdout
    generate(server, 2)
    other = steer(server, "policy", "fair", "--tenant-weights", "somebody=3", cache=tmp_path).stdout
    assert "  tenant_weights = somebody=3 (1 for all others)\n" in other
    assert other.endswith("These replace the weights there were: anybody=2.\n")
    kept = steer(server, "policy", "fair", "--ageing-s", "4", cache=tmp_path).stdout
    assert "tenant_weights = somebody=3" in kept and "replace" not in kept, "nothing was said of weights"
    again = steer(server, "policy", "fair", "--tenant-weights", "anybody=2", cache=tmp_path).stdout
    assert again.endswith("These replace the weights there were: somebody=3.\n")
    found = server.ask("GET", "/v1/admin/policy", key=ADMIN).json
    assert (found["policy"], found["options"]["tenant_weights"]) == ("fair", "anybody=2")


def test_mistakes_are_told_by_name(server: ClientServer, tmp_path: Path) -> None:
    for arguments, message in (
        (("dial", "0.5", "--off"), "give one of VALUE, --itl-p99-ms, --ttft-p99-ms and --off"),
        (("dial", "3"), "VALUE must be at most 1.0"),
        (("policy", "--ageing-s", "3"), "name the policy whose options are to change"),
        (("policy", "sideways"), "the server answered 400: policy must be one of fcfs, deadline, fair"),
        (("policy", "fair", "--ageing-s", "-1"), "the server answered 400: --ageing-s must be at least"),
    ):
        done = steer(server, *arguments, cache=tmp_path)
        assert done.returncode and message in done.stderr, done.stderr
    refused = server.ask("PUT", "/v1/admin/dial", {"positon": 1}, key=ADMIN)
    assert (refused.status, refused.code) == (400, "unknown_parameter")
    assert refused.json["error"]["param"] == "positon"
    assert server.ask("POST", "/v1/admin/dial", {"position": 1}, key=ADMIN).status == 405


def test_other_keys_may_not(server: ClientServer, tmp_path: Path) -> None:
    for method, body in (("GET", None), ("PUT", {"position": 0.0})):
        for path in ("/v1/admin/dial", "/v1/admin/policy"):
            refused = server.ask(method, path, body)
            assert (refused.status, refused.code) == (403, "admin_only")
    done = steer(server, "dial", "0.2", cache=tmp_path, key=KEY)
    assert done.returncode == 1 and "the server answered 403: This route needs an admin key" in done.stderr
    assert server.ask("GET", "/v1/admin/dial", key="wrong").status == 401
