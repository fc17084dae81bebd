"""A server's life with real signals: starting, draining, forced ends, keys, listeners, logs that do not flow."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import ROOT, FakeServer, fake_server, read_one, read_reply, request_bytes

SHUTTING_DOWN = "shutting_down"


def ended_after(server: FakeServer, limit_s: float) -> int:
    started_s = time.monotonic()
    code = server.process.wait(limit_s + 5.0)
    assert time.monotonic() - started_s <= limit_s
    return code


def test_before_the_model_is_loaded_everything_says_so() -> None:
    with fake_server(load_s=1.0) as server:
        server.wait_until(lambda: server.get("/health/live").status == 200)
        ready = server.get("/health/ready")
        assert (ready.status, ready.json["status"]) == (503, "starting")
        reply = server.post("/v1/chat/completions", {})
        assert (reply.status, reply.code) == (503, "starting")
        assert int(reply.headers["retry-after"]) > 0
        server.wait_until(lambda: server.get("/health/ready").status == 200)
        assert server.post("/v1/echo", {}).status == 200
        assert server.get("/health/deep").json["running"] == 2


def test_a_signal_while_loading_ends_it() -> None:
    with fake_server(load_s=60.0) as server:
        server.wait_until(lambda: server.get("/health/live").status == 200)
        server.process.send_signal(signal.SIGTERM)
        assert ended_after(server, 5.0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: signal.Signals) -> None:
    with fake_server() as server:
        server.process.send_signal(number)
        assert ended_after(server, 2.0) == 0


def test_what_is_under_way_may_finish_and_readiness_goes_first() -> None:
    with fake_server(drain_delay_s=0.5, drain_timeout_s=5.0) as server, server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/stream", b'{"count": 10, "pause_s": 0.1}'))
        assert b"200 OK" in client.recv(65536)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/health").status == 503)  # the listener is still open
        refused = server.post("/v1/echo", {})
        assert (refused.status, refused.code) == (503, SHUTTING_DOWN)
        data = b""
        while part := client.recv(65536):
            data += part
        assert b"[DONE]" in data
        assert ended_after(server, 5.0) == 0


def test_what_does_not_finish_is_told_so() -> None:
    with fake_server(drain_timeout_s=0.5) as server, server.connect() as stream, server.connect() as plain:
        stream.sendall(request_bytes("POST", "/v1/stream", b'{"count": 100000, "pause_s": 0.05}'))
        plain.sendall(request_bytes("POST", "/v1/slow", b"{}"))
        server.wait_until(lambda: server.seen()["started"] == 2)
        server.process.send_signal(signal.SIGTERM)
        reply = read_reply(plain)
        assert (reply.status, reply.code) == (503, SHUTTING_DOWN)
        streamed = read_reply(stream)
        last = streamed.body.split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == SHUTTING_DOWN
        assert b"[DONE]" not in streamed.body
        assert ended_after(server, 2.5) == 0


def test_half_sent_bodies_and_stalled_readers_do_not_hold_it_up() -> None:
    with fake_server(drain_timeout_s=0.5) as server:
        half, stalled, headless = server.connect(), server.connect(receive_bytes=4096), server.connect()
        with half, stalled, headless:
            half.sendall(request_bytes("POST", "/v1/slow", b"{", headers=("Content-Length: 50",)))
            headless.sendall(b"GET /hea")
            stalled.sendall(request_bytes("POST", "/v1/stream", b'{"count": 1000000, "size": 1000}'))
            server.wait_until(lambda: server.seen()["frames"] > 10)
            server.process.send_signal(signal.SIGTERM)
            assert ended_after(server, 2.5) == 0


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(number: signal.Signals, code: int) -> None:
    with fake_server(drain_timeout_s=60.0) as server, server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/slow", b"{}"))
        server.wait_until(lambda: server.seen()["started"] == 1)
        server.process.send_signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert ended_after(server, 2.0) == code


def test_an_engine_that_is_lost_ends_the_server_with_70() -> None:
    with fake_server(drain_timeout_s=60.0) as server, server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/slow", b"{}"))
        server.wait_until(lambda: server.seen()["started"] == 1)
        assert server.post("/v1/lose", {}).status == 200
        assert read_reply(client).status == 503
        assert ended_after(server, 3.0) == 70


def test_other_signals_do_no_harm(tmp_path: Path) -> None:
    with fake_server(log=tmp_path / "log") as server:
        for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGHUP):
            server.process.send_signal(number)
        server.wait_until(lambda: b'"message":"state"' in (tmp_path / "log").read_bytes())
        assert server.post("/v1/echo", {}).status == 200


# ---------------------------------------------------------------- keys and listeners


def keys_file(path: Path, *entries: dict[str, Any]) -> Path:
    lines = [
        json.dumps({**entry, "sha256": hashlib.sha256(entry["sha256"].encode()).hexdigest()})
        for entry in entries
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    path.chmod(0o600)
    return path


def test_every_route_but_the_probes_needs_the_key(tmp_path: Path) -> None:
    path = keys_file(
        tmp_path / "keys",
        {"name": "a", "sha256": "key-a"},
        {"name": "b", "sha256": "key-b", "enabled": False},
    )
    with fake_server(api_keys_file=str(path)) as server:
        for route in ("/health", "/health/live", "/health/ready", "/health/deep", "/ping"):
            assert server.get(route).status == 200
        for route in (
            "/metrics",
            "/version",
            "/openapi.json",
            "/v1/seen",
            "/v1/models/x",
            "/nowhere",
            "//health",
        ):
            reply = server.get(route)
            assert (reply.status, reply.code) == (401, "invalid_api_key"), route
            assert reply.headers["www-authenticate"] == "Bearer"
        for header in (
            "Authorization: Bearer",
            "Authorization: Bearer ",
            "Authorization: Basic key-a",
            "Authorization: Bearer kéy",
            "Authorization: Bearer key-a2",
            "x-api-key: ",
            "x-api-key: key",
            "Authorization: Bearer " + "k" * 9000,
        ):
            assert server.post("/v1/echo", {}, header).status == 401, header
        twice = ("Authorization: Bearer key-a", "Authorization: Bearer key-a")
        assert server.post("/v1/echo", {}, *twice).status == 401
        assert server.post("/v1/echo", {}, "Authorization: Bearer key-b").code == "key_disabled"
        for header in ("Authorization: Bearer key-a", "authorization: bearer key-a", "x-api-key: key-a"):
            assert server.post("/v1/echo", {}, header).json["tenant"] == "a"
        assert server.get("/nowhere", "x-api-key: key-a").status == 404

        keys_file(path, {"name": "c", "sha256": "key-c"})
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: server.post("/v1/echo", {}, "x-api-key: key-c").status == 200)
        assert server.post("/v1/echo", {}, "x-api-key: key-a").status == 401


def test_without_keys_an_empty_bearer_is_fine() -> None:
    with fake_server() as server:
        assert server.post("/v1/echo", {}, "Authorization: Bearer ").json["tenant"] == "default"


def test_metrics_on_a_port_of_their_own() -> None:
    with fake_server(metrics_port=0, environment={"PACELINE_API_KEY": "k"}) as server:
        assert server.get("/metrics", "x-api-key: k").status == 404
        page = server.get("/metrics", port=server.side)
        assert page.status == 200
        assert b'paceline:num_requests_running{engine="0",model_name="fake"} 2.0' in page.body
        assert server.get("/v1/seen", port=server.side).status == 401
        assert server.get("/health", port=server.side).status == 200


def test_metrics_without_a_key_where_they_are_asked_for() -> None:
    with fake_server(metrics_without_key=True, environment={"PACELINE_API_KEY": "k"}) as server:
        assert server.get("/metrics").status == 200
        assert server.get("/v1/seen").status == 401


def test_metrics_do_not_grow_with_odd_requests() -> None:
    with fake_server(disable_log_requests=True) as server:
        for index in range(200):
            server.get(f"/odd/{index}", method=("GET", "OPTIONS", "POST")[index % 3])
        page = server.get("/metrics").body.decode()
        assert "odd" not in page
        assert 'http_requests_total{handler="none",method="other",status="404"}' in page
        assert len(page) < 256 * 1024


def test_the_page_of_the_api_is_a_file_without_data_and_what_it_shows_needs_the_key() -> None:
    with fake_server(environment={"PACELINE_API_KEY": "k"}) as server:
        reply = server.get("/docs")
        page = reply.body.decode()
        assert reply.status == 200 and "http://" not in page and "https://" not in page
        assert "script-src 'self';" in reply.headers["content-security-policy"] and "<script>" not in page
        assert "/v1/" not in page, "routes come from /openapi.json"
        assert server.get("/openapi.json").status == 401
        paths = server.get("/openapi.json", "x-api-key: k").json["paths"]
        assert "/v1/models/{id}" in paths and "/v1/echo" in paths


# ---------------------------------------------------------------- logs


def test_one_line_per_request_and_no_text(tmp_path: Path) -> None:
    with fake_server(log=tmp_path / "log") as server:
        server.post("/v1/echo", {"prompt": "my secret words"}, "X-Request-Id: chosen-by-the-client")
        server.get("/evil%0aline")
        server.post("/v1/crash", {})
        assert server.stop() == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    echoed = [line for line in lines if line["message"] == "POST /v1/echo"]
    assert [(line["status"], line["tenant"]) for line in echoed] == [(200, "default")]
    assert "secret words" not in (tmp_path / "log").read_text()
    assert "chosen-by-the-client" not in (tmp_path / "log").read_text()
    assert [line["status"] for line in lines if line["message"] == "GET /evil%0aline"] == [404]
    assert any("the secret of the inside" in line.get("traceback", "") for line in lines)


def test_a_log_that_blocks_or_is_gone_stops_nothing() -> None:
    options = json.dumps({"port": 0, "log_level": "info"})
    for closes in (True, False):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_fake", options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        server = FakeServer.__new__(FakeServer)
        server.process, server.side, server._log = process, None, None
        server.port = json.loads(process.stdout.readline())["port"]
        try:
            server.wait_until(lambda s=server: s.get("/health").status == 200)
            if closes:
                process.stderr.close()
            with server.connect() as client:
                for _ in range(1500):  # more than a pipe holds
                    client.sendall(request_bytes("POST", "/v1/echo", b"{}", close=False))
                    assert read_one(client).status == 200
            process.send_signal(signal.SIGTERM)
            assert ended_after(server, 4.0) == 0
        finally:
            if not closes:
                process.stderr.close()
            server.close()


def test_running_out_of_file_descriptors_is_survived() -> None:
    import resource

    with fake_server() as server:
        pid = server.process.pid
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
        clients = []
        for _ in range(40):
            clients.append(server.connect())
        time.sleep(0.2)
        busy_s = _cpu_s(pid)
        time.sleep(0.5)
        assert _cpu_s(pid) - busy_s < 0.25  # it does not spin
        for client in clients:
            client.close()
        server.wait_until(lambda: server.get("/health").status == 200)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
