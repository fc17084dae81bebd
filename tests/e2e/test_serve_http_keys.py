"""Keys of a running server: limits by the minute, and a file that is read again while streams run."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

from tests.e2e.http_server import FakeServer, fake_server, parse_reply, request_bytes

A, B = "x-api-key: key-a", "x-api-key: key-b"


def write_keys(path: Path, **limits: dict[str, Any]) -> Path:
    """A keys file with an entry for each name; the key of `a` is `key-a`."""
    lines = [
        json.dumps({"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), **more})
        for name, more in limits.items()
    ]
    return write_text(path, "\n".join(lines))


def write_text(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path


def reload_keys(server: FakeServer, log: Path, message: bytes) -> None:
    before = log.read_bytes().count(message)
    server.process.send_signal(signal.SIGHUP)
    server.wait_until(lambda: log.read_bytes().count(message) > before)


def metric(server: FakeServer, name: str, **labels: str) -> float:
    for line in server.get("/metrics", B).body.decode().splitlines():
        wanted = [f'{label.rstrip("_")}="{value}"' for label, value in labels.items()]
        if line.startswith(f"paceline:{name}{{") and all(label in line for label in wanted):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no metric {name}")


def test_a_key_is_held_to_its_requests(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", a={"requests_per_minute": 2, "class": "spot"}, b={})
    with fake_server(api_keys_file=str(path), log=tmp_path / "log") as server:
        first = server.post("/v1/echo", {}, A)
        assert first.status == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert server.post("/v1/stream", {}, A).headers["x-ratelimit-remaining-requests"] == "0"
        refused = server.post("/v1/echo", {}, A)
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert "requests_per_minute" in refused.json["error"]["message"]
        assert 20 <= int(refused.headers["retry-after"]) <= 30, "one in thirty seconds"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert server.get("/v1/models/x", A).status == 200, "what costs nothing is not counted"
        for _ in range(3):
            other = server.post("/v1/echo", {}, B)
            assert other.status == 200 and "x-ratelimit-limit-requests" not in other.headers
        limit = "requests_per_minute"
        assert metric(server, "requests_refused_by_key_limit_total", class_="spot", limit=limit) == 1
        assert metric(server, "requests_refused_by_key_limit_total", class_="standard", limit=limit) == 0
        assert (
            metric(server, "api_keys", class_="spot") == metric(server, "api_keys_limited", limit=limit) == 1
        )
        assert "key-a" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_request_that_is_sent_away_is_not_counted(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", a={"requests_per_minute": 5, "tokens_per_minute": 10})
    with fake_server(api_keys_file=str(path)) as server:
        assert server.post("/v1/echo", {"tokens": 10}, A).headers["x-ratelimit-remaining-tokens"] == "0"
        for _ in range(6):
            refused = server.post("/v1/echo", {"tokens": 10}, A)
            assert refused.status == 429 and "tokens_per_minute" in refused.json["error"]["message"]
            assert refused.headers["x-ratelimit-remaining-requests"] == "4"


def test_a_request_with_a_bad_body_counts_too(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", a={"requests_per_minute": 1})
    with fake_server(api_keys_file=str(path)) as server:
        assert server.post("/v1/echo", b"{", A).status == 400
        assert server.post("/v1/echo", {}, A).status == 429


def test_a_stream_survives_its_key(tmp_path: Path) -> None:
    path, log = write_keys(tmp_path / "keys", a={"requests_per_minute": 3}, b={}), tmp_path / "log"
    body = json.dumps({"count": 40, "pause_s": 0.05}).encode()
    with fake_server(api_keys_file=str(path), log=log) as server, server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/stream", body, headers=(A,)))
        data = client.recv(65536)
        write_keys(path, b={})
        reload_keys(server, log, b"the keys were read again")
        assert server.post("/v1/echo", {}, A).status == 401
        while part := client.recv(65536):
            data += part
        reply = parse_reply(data)
        assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")
        assert reply.body.count(b"data: ") == 41


def test_counters_survive_a_reload_and_follow_the_new_limit(tmp_path: Path) -> None:
    path, log = write_keys(tmp_path / "keys", a={"requests_per_minute": 2}, b={}), tmp_path / "log"
    with fake_server(api_keys_file=str(path), log=log) as server:
        assert [server.post("/v1/echo", {}, A).status for _ in range(3)] == [200, 200, 429]
        reload_keys(server, log, b"the keys were read again")
        assert server.post("/v1/echo", {}, A).status == 429, "the same limit, and it is still reached"
        write_keys(path, a={"requests_per_minute": 4}, b={})
        reload_keys(server, log, b"the keys were read again")
        assert [server.post("/v1/echo", {}, A).status for _ in range(3)] == [200, 200, 429]
        write_keys(path, a={}, b={})
        reload_keys(server, log, b"the keys were read again")
        assert server.post("/v1/echo", {}, A).status == 200


def test_a_broken_file_keeps_the_old_keys_and_is_told(tmp_path: Path) -> None:
    path, log = write_keys(tmp_path / "keys", a={}, b={"enabled": False}), tmp_path / "log"
    with fake_server(api_keys_file=str(path), log=log) as server:
        for text in ('{"name": "c", "weight": 2}', "", "{", "- [", '{"name": "a", "sha256": "x"}'):
            write_text(path, text)
            reload_keys(server, log, b"the keys were not read again")
            assert server.post("/v1/echo", {}, A).status == 200
            assert server.post("/v1/echo", {}, B).code == "key_disabled"
        told = log.read_text(encoding="utf-8")
        assert f"{path}, entry 1 (c): sha256 must be" in told


def test_admin_routes_are_for_admins(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", a={"admin": True}, b={})
    with fake_server(api_keys_file=str(path)) as server:
        assert server.get("/v1/admin/seen", A).status == 200
        refused = server.get("/v1/admin/seen", B)
        assert (refused.status, refused.code) == (403, "admin_only")
        assert server.get("/v1/admin/seen").status == 401
        assert server.post("/v1/echo", {}, B).status == 200
    with fake_server() as server:
        assert server.get("/v1/admin/seen").status == 200, "without keys only this machine gets here"
