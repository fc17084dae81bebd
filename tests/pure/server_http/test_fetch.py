"""Links to pictures: only listed hosts, only public addresses, only the address that was checked, within limits."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from paceline.errors import ConfigError, MediaFetchFailed, MediaNotAllowed
from paceline.models.media.headers import MAX_BYTES
from paceline.server.http.fetch_url import (
    FAILED,
    Connection,
    Fetcher,
    FetchTarget,
    _resolvers,
    is_public,
    tls_context,
)

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def answer(head: str, body: bytes = b"") -> Serve:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + b"\r\n\r\n" + body)

    return serve


class World:
    """A resolver, and a listener that every connection leads to."""

    def __init__(self, *serves: Serve, addresses: Sequence[Sequence[str]] = ((PUBLIC,),)) -> None:
        self.serves = list(serves)
        self.addresses = [list(each) for each in addresses]
        self.asked: list[tuple[str, int]] = []
        self.dialled: list[tuple[str, FetchTarget]] = []
        self.requests: list[bytes] = []

    def fetch(self, url: str, domains: Sequence[str] = ("pics.example",), timeout_s: float = 5.0) -> bytes:
        return asyncio.run(self._run(url, domains, timeout_s))

    async def _run(self, url: str, domains: Sequence[str], timeout_s: float) -> bytes:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def resolve(host: str, port: int) -> Sequence[str]:
            self.asked.append((host, port))
            return self.addresses[min(len(self.asked), len(self.addresses)) - 1]

        async def connect(address: str, target: FetchTarget) -> Connection:
            self.dialled.append((address, target))
            return await asyncio.open_connection("127.0.0.1", port)

        fetcher = Fetcher(domains, resolve=resolve, connect=connect, timeout_s=timeout_s)
        try:
            return await fetcher.fetch(url)
        finally:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            await self.serves[min(len(self.requests), len(self.serves)) - 1](self.requests[-1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


OK = answer("HTTP/1.1 200 OK\r\nContent-Length: 3", b"png")


def test_a_picture_is_fetched_from_the_address_that_was_checked() -> None:
    # What the name resolves to a moment later is never asked.
    world = World(OK, addresses=[(PUBLIC, OTHER), ("127.0.0.1",)])
    assert world.fetch("https://Pics.Example./a b.png?q=ä".replace(" ", "%20")) == b"png"
    assert world.asked == [("pics.example", 443)]
    assert [(address, target.host, target.port) for address, target in world.dialled] == [
        (PUBLIC, "pics.example", 443)
    ]
    head = world.requests[0].decode()
    assert head.startswith("GET /a%20b.png?q=%C3%A4 HTTP/1.1\r\nHost: pics.example\r\n")


async def _hints_first(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\npng")


@pytest.mark.parametrize(
    "serve",
    [
        answer("HTTP/1.1 200 OK", b"png"),
        answer("HTTP/1.0 200 OK\r\nConnection: close", b"png"),
        answer("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"1\r\np\r\n2\r\nng\r\n0\r\n\r\n"),
        answer("HTTP/1.1 103 Early Hints\r\nLink: </a>", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\npng"),
        _hints_first,
    ],
)
def test_bodies_in_every_shape(serve: Serve) -> None:
    assert World(serve).fetch("http://pics.example/a") == b"png"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/a.png",
        "https://pics.example.evil.example/a.png",
        "https://evil-pics.example/a.png",
        "https://sub.pics.example/a.png",
        "https://user@pics.example/a.png",
        "https://pics.example@evil.example/a.png",
        "https://pics.example:8443/a.png",
        "https://pics.example:99999/a.png",
        "ftp://pics.example/a.png",
        "file:///etc/passwd",
        "gopher://pics.example/",
        "https:///a.png",
        "https://[::1",
        "https://pics.example/a\r\nHost: evil",
        "https://127.0.0.1/a.png",
        "https://pics.example\\@evil.example/",
        "https://pics.example/" + "a" * 5_000,
    ],
)
def test_other_links_are_refused_without_a_question(url: str) -> None:
    world = World(OK)
    with pytest.raises(MediaNotAllowed):
        world.fetch(url)
    assert not world.asked and not world.dialled


@pytest.mark.parametrize(
    "addresses",
    [
        *((each,) for each in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.4", "169.254.169.254")),
        *((each,) for each in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")),
        *((each,) for each in ("::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::", "2001:db8::1")),
        *((each,) for each in ("fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1")),
        *((each,) for each in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::")),
        (PUBLIC, "10.0.0.1"),
    ],
)
def test_addresses_that_are_not_public_are_not_dialled(addresses: Sequence[str]) -> None:
    assert not all(map(is_public, addresses))
    world = World(OK, addresses=[addresses])
    with pytest.raises(MediaNotAllowed, match="not one of the public internet"):
        world.fetch("https://pics.example/a.png")
    assert world.asked and not world.dialled


def test_addresses_of_the_internet_are_public() -> None:
    assert all(map(is_public, (PUBLIC, OTHER, "8.8.8.8", "64:ff9b::808:808", "::ffff:8.8.8.8")))


def _redirect(to: str, status: int = 302) -> Serve:
    return answer(f"HTTP/1.1 {status} Found\r\nLocation: {to}\r\nContent-Length: 0")


def test_redirects_are_followed_and_checked_anew() -> None:
    world = World(_redirect("/b.png"), _redirect("http://cdn.example/c.png", 308), OK)
    assert world.fetch("https://pics.example/a.png", ("pics.example", "cdn.example")) == b"png"
    assert world.asked == [("pics.example", 443), ("pics.example", 443), ("cdn.example", 80)]


@pytest.mark.parametrize(
    "to", ["https://evil.example/", "http://127.0.0.1/", "file:///etc/passwd", "//evil.example"]
)
def test_a_redirect_to_elsewhere_is_not_followed(to: str) -> None:
    world = World(_redirect(to), OK)
    with pytest.raises(MediaNotAllowed):
        world.fetch("https://pics.example/a.png")
    assert len(world.dialled) == 1


def test_a_redirect_to_a_name_that_has_turned_is_not_followed() -> None:
    world = World(_redirect("/b.png"), OK, addresses=[(PUBLIC,), ("169.254.169.254",)])
    with pytest.raises(MediaNotAllowed):
        world.fetch("https://pics.example/a.png")
    assert len(world.dialled) == 1


def test_redirects_without_end() -> None:
    world = World(_redirect("/again"))
    with pytest.raises(MediaFetchFailed):
        world.fetch("https://pics.example/a.png")
    assert len(world.dialled) == 4


async def _drip(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _endless(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1 << 20))
        await writer.drain()


async def _endless_head(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"y" * 1000 + b"\r\n")
        await writer.drain()


async def _endless_hints(request: bytes, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    "serve",
    [
        answer("HTTP/1.1 404 Not Found\r\nContent-Length: 6", b"secret"),
        answer("HTTP/1.1 500 secret\r\nContent-Length: 0"),
        answer("HTTP/1.1 302 Found\r\nContent-Length: 0"),
        answer(f"HTTP/1.1 200 OK\r\nContent-Length: {MAX_BYTES + 1}"),
        answer("HTTP/1.1 200 OK\r\nContent-Length: 10", b"short"),
        answer("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3", b"png"),
        answer("SSH-2.0-secret"),
        answer("HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket", b"secret"),
        answer("HTTP/1.1 100 Continue"),
        _endless_hints,
        answer(""),
        _drip,
        _endless,
        _endless_head,
    ],
)
def test_what_goes_wrong_is_one_sentence(serve: Any) -> None:
    world = World(serve)
    with pytest.raises(MediaFetchFailed) as found:
        world.fetch("http://pics.example/a.png", timeout_s=2.0 if serve is not _drip else 0.3)
    assert str(found.value) == FAILED


def test_what_follows_a_body_is_bounded() -> None:
    head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"
    short, long = (f"3\r\npng\r\n0\r\nX-More: {'y' * size}\r\n\r\n".encode() for size in (1_000, 1_000_000))
    assert World(answer(head, short)).fetch("http://pics.example/a.png") == b"png"
    with pytest.raises(MediaFetchFailed):
        World(answer(head, long)).fetch("http://pics.example/a.png")


def test_the_certificates_of_the_system_are_read_once() -> None:
    assert tls_context() is tls_context()
    assert tls_context().check_hostname and tls_context().verify_mode is ssl.CERT_REQUIRED


def test_names_that_do_not_resolve() -> None:
    with pytest.raises(MediaFetchFailed):
        World(OK, addresses=[()]).fetch("https://pics.example/a.png")


def test_hosts_are_listed_in_any_spelling() -> None:
    world = World(OK)
    assert world.fetch("https://bücher.example/a.png", ("Bücher.example.",)) == b"png"
    assert world.asked == [("xn--bcher-kva.example", 443)]
    with pytest.raises(ConfigError, match="'a..b' is no name of a host"):
        Fetcher(("a..b",))


def test_a_name_server_that_does_not_answer_holds_up_links_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def look_up(*given: object, **named: object) -> list[Any]:
        answers.wait()
        return []

    monkeypatch.setattr("socket.getaddrinfo", look_up)

    async def read_beside_links() -> str:
        fetcher = Fetcher(("pics.example",), timeout_s=60.0)
        links = [asyncio.create_task(fetcher.fetch("https://pics.example/a")) for _ in range(64)]
        while not _resolvers()._threads:
            await asyncio.sleep(0.0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: "a file"), 30.0)
        finally:
            answers.set()
            await asyncio.gather(*links, return_exceptions=True)

    assert asyncio.run(read_beside_links()) == "a file"
