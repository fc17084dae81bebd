"""Uploads byte by byte against a real server: what is no form is refused by name, and leaves nothing behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.client_server import DISABLED_KEY, KEY, ClientServer, client_server
from tests.e2e.http_server import Reply, read_reply, request_bytes

MOST = 1_000_000
FORM = "Content-Type: multipart/form-data; boundary=xyz"
PURPOSE = b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n'
END = b"--xyz--\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("forms")
    flags = ("--batch-dir", str(folder / "kept"), "--max-file-bytes", str(MOST), "--body-timeout", "2")
    with client_server(folder, *flags, "--max-body-bytes", "8192") as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.log()


def kept(server: ClientServer, part: str = "files") -> list[str]:
    folder = server.folder / "kept" / part
    return [path.name for path in folder.iterdir()]


def connect(server: ClientServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def send(server: ClientServer, body: bytes, *headers: str, key: str = KEY) -> Reply:
    given = (f"Authorization: Bearer {key}", *(headers or (FORM,)))
    with connect(server) as client:
        client.sendall(request_bytes("POST", "/v1/files", body, headers=given))
        return read_reply(client)


def test_a_form_is_taken(server: ClientServer) -> None:
    reply = send(server, PURPOSE + FILE + END)
    assert reply.status == 200 and reply.json["filename"] == "a.jsonl"
    assert reply.json["id"] in kept(server)


def test_a_form_in_chunks_with_a_client_that_waits_for_the_word(server: ClientServer) -> None:
    headers = (f"Authorization: Bearer {KEY}", FORM, "Transfer-Encoding: chunked", "Expect: 100-continue")
    with connect(server) as client:
        client.sendall(request_bytes("POST", "/v1/files", b"", headers=headers))
        assert client.recv(100).startswith(b"HTTP/1.1 100 Continue")
        for piece in (PURPOSE, FILE, END):
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.sendall(b"0\r\n\r\n")
        assert read_reply(client).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{}", None),
        (PURPOSE.replace(b"xyz", b"abc") + END, None),
        (PURPOSE + FILE, None),
        (PURPOSE + FILE + END + b"more", None),
        (PURPOSE + b"--xyz\r\nX: " + b"y" * 5000 + b"\r\n\r\n{}\r\n" + END, None),
        (PURPOSE + b"--xyz\r\nContent-Disposition: form-data; name=other\r\n\r\n" + b"y" * 2000 + b"\r\n" + END, None),
        (PURPOSE * 1 + FILE + FILE + END, "file"),
        (PURPOSE + FILE.replace(b'; filename="a.jsonl"', b"") + END, "file"),
        (PURPOSE + FILE.replace(b"a.jsonl", b"") + END, "file"),
        (PURPOSE + FILE.replace(b'name="file"', b'name="data"') + END, "file"),
        (PURPOSE + FILE.replace(b"{}", b"") + END, "file"),
        (PURPOSE + END, "file"),
        (FILE + END, "purpose"),
        (PURPOSE.replace(b"batch", b"assistants") + FILE + END, "purpose"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused_and_leaves_nothing(
    server: ClientServer, body: bytes, param: str | None
) -> None:
    before = kept(server)
    reply = send(server, body)
    assert reply.status == 400 and reply.json["error"]["param"] == param
    assert kept(server) == before and kept(server, "incoming") == []


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Type: application/json",),
        ("Content-Type: multipart/mixed; boundary=xyz",),
        (FORM, "Content-Encoding: gzip"),
    ],
)
def test_another_kind_of_body_is_415(server: ClientServer, headers: tuple[str, ...]) -> None:
    assert send(server, PURPOSE + FILE + END, *headers).status == 415


def test_a_file_may_be_larger_than_other_bodies_and_not_larger_than_files(server: ClientServer) -> None:
    def of(size: int) -> bytes:
        return PURPOSE + FILE.replace(b"{}", b"x" * size) + END

    assert send(server, of(MOST)).json["bytes"] == MOST
    reply = send(server, of(MOST + 1))
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert send(server, of(10 * MOST)).status == 413  # known from its Content-Length
    assert kept(server, "incoming") == []


def test_without_a_key_nothing_of_a_file_is_read(server: ClientServer) -> None:
    for key, status in (("wrong", 401), (DISABLED_KEY, 403)):
        with connect(server) as client:
            headers = (f"Authorization: Bearer {key}", FORM, f"Content-Length: {MOST}")
            client.sendall(request_bytes("POST", "/v1/files", b"", headers=headers))
            assert read_reply(client).status == status


def test_a_client_that_goes_away_leaves_nothing(server: ClientServer) -> None:
    headers = (f"Authorization: Bearer {KEY}", FORM, f"Content-Length: {MOST}")
    with connect(server) as client:
        client.sendall(request_bytes("POST", "/v1/files", b"", headers=headers) + PURPOSE + FILE)
        server.wait_until(lambda: kept(server, "incoming") != [])
    server.wait_until(lambda: kept(server, "incoming") == [])


def test_a_file_that_comes_too_slowly_is_408(server: ClientServer) -> None:
    headers = (f"Authorization: Bearer {KEY}", FORM, f"Content-Length: {MOST}")
    with connect(server) as client:
        client.sendall(request_bytes("POST", "/v1/files", b"", headers=headers) + PURPOSE)
        assert read_reply(client).status == 408
    server.wait_until(lambda: kept(server, "incoming") == [])


def test_a_large_file_may_take_longer_than_other_bodies(server: ClientServer) -> None:
    pieces = 6
    body = PURPOSE + FILE.replace(b"{}", b"x" * (MOST - 1000)) + END
    size = -(-len(body) // pieces)
    headers = (f"Authorization: Bearer {KEY}", FORM, f"Content-Length: {len(body)}")
    with connect(server) as client:
        client.sendall(request_bytes("POST", "/v1/files", b"", headers=headers))
        for start in range(0, len(body), size):
            time.sleep(0.5)  # three seconds for all of it, and two are what other bodies have
            client.sendall(body[start : start + size])
        assert read_reply(client).json["bytes"] == MOST - 1000
