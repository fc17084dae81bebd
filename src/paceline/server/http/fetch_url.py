"""Fetches a picture from a host that the operator has listed. The one place from which this server connects elsewhere.

A name is resolved once, every address it has must be one of the public internet, and the address that was checked is
the one that is dialled, so that a name which resolves to something else a moment later changes nothing. Redirects are
checked as the first link was. GET only, no proxy, no cookies, within limits of time and bytes. What went wrong is
answered with one sentence: nothing of what a host says reaches the client, which cannot explore a network with it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httptools

from paceline.errors import ConfigError, MediaFetchFailed, MediaNotAllowed
from paceline.models.media.headers import MAX_BYTES

TIMEOUT_S = 5.0
MAX_REDIRECTS = 3
NUM_RESOLVERS = 8
MAX_HEAD_BYTES = 32_768
MAX_URL_CHARS = 4_096
_READ_BYTES = 65_536
_PORTS = {"http": 80, "https": 443}
_IN_ADVANCE = range(100, 200)
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREADABLE = (httptools.HttpParserError, httptools.HttpParserUpgrade)
_NAT64 = IPv6Network("64:ff9b::/96")
FAILED = f"the picture could not be fetched within {TIMEOUT_S:g} s and {MAX_BYTES} bytes"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FetchTarget(NamedTuple):
    """A link that may be followed, as far as its text tells."""

    url: str
    scheme: str
    host: str
    port: int
    path: str  # with its query

    @property
    def host_header(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.port == _PORTS[self.scheme] else f"{shown}:{self.port}"


class Fetcher:
    """Fetches from these hosts and no others."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        resolve: Resolve | None = None,
        connect: Callable[[str, FetchTarget], Awaitable[Connection]] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._domains = frozenset(map(_listed, domains))
        self._resolve = resolve or _resolve
        self._connect = connect or _connect
        self._timeout_s = timeout_s

    async def fetch(self, url: str) -> bytes:
        """Raises MediaNotAllowed before any connection, MediaFetchFailed for everything later."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(1 + MAX_REDIRECTS):
                    target = self._target(url)
                    answer = await self._get(await self._address(target), target)
                    if answer.status == 200:
                        return bytes(answer.body)
                    if answer.status not in _REDIRECTS or not answer.location:
                        break
                    url = urljoin(target.url, answer.location)
        except (OSError, TimeoutError, ValueError, EOFError, *_UNREADABLE):
            pass
        raise MediaFetchFailed(FAILED)

    def _target(self, url: str) -> FetchTarget:
        if len(url) > MAX_URL_CHARS or any(character <= " " or character == "\x7f" for character in url):
            raise MediaNotAllowed("the link is too long or has spaces in it")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
            host = _encoded(host)
        except ValueError:
            raise MediaNotAllowed("the link is not valid") from None
        if parts.scheme not in _PORTS or port not in (None, *_PORTS.values()):
            raise MediaNotAllowed("links are http or https, on ports 80 and 443")
        if "@" in parts.netloc:
            raise MediaNotAllowed("links carry no user names")
        if not host or host not in self._domains:
            raise MediaNotAllowed(
                "the host is not one that this server fetches from (--allowed-media-domains)"
            )
        query = f"?{parts.query}" if parts.query else ""
        path = quote((parts.path or "/") + query, safe="/?:@!$&'()*+,;=%-._~[]")
        return FetchTarget(url, parts.scheme, host, port or _PORTS[parts.scheme], path)

    async def _address(self, target: FetchTarget) -> str:
        """One address of the host, all of which were checked."""
        addresses = await self._resolve(target.host, target.port)
        if not addresses:
            raise OSError("no address")
        if not all(is_public(address) for address in addresses):
            raise MediaNotAllowed("the host has an address that is not one of the public internet")
        return addresses[0]

    async def _get(self, address: str, target: FetchTarget) -> _Answer:
        reader, writer = await self._connect(address, target)
        try:
            head = (
                f"GET {target.path} HTTP/1.1\r\nHost: {target.host_header}\r\nUser-Agent: paceline\r\n"
                "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode("ascii"))
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            answer.status_of = parser.get_status_code
            while not answer.is_whole:
                data = await reader.read(_READ_BYTES)
                if not data:
                    if answer.ends_with_connection:
                        break
                    raise EOFError
                parser.feed_data(data)
                answer.check_size(len(data))
            return answer
        finally:
            writer.transport.abort()


class _Answer:
    """What a host answers, as the parser reads it. Raises ValueError for too much."""

    def __init__(self) -> None:
        self.status_of: Callable[[], int] = lambda: 0
        self.status = 0
        self.location = ""
        self.body = bytearray()
        self.is_whole = False
        self._has_length = False
        self._has_head = False
        self._num_read = 0  # bytes, of which the body is a part

    @property
    def ends_with_connection(self) -> bool:
        return self._has_head and not self._has_length

    def check_size(self, num_more: int) -> None:
        """What is not body is headers, and the sizes of chunks: no more than the body behind them."""
        self._num_read += num_more
        if self._num_read - 2 * len(self.body) > MAX_HEAD_BYTES and not self.is_whole:
            raise ValueError("the headers are too large")

    def on_message_begin(self) -> None:
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"location":
            self.location = value.decode("latin-1")
        elif name == b"content-length":
            self._has_length = True
            if int(value) > MAX_BYTES:
                raise ValueError("the body is too large")
        elif name == b"transfer-encoding":
            self._has_length = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise ValueError("the body is compressed")

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.status = self.status_of()
        # Of redirects and errors the body is not read; behind what is told in advance (103) comes the answer.
        self.is_whole = self.status not in _IN_ADVANCE and self.status != 200

    def on_body(self, body: bytes) -> None:
        self.body += body
        if len(self.body) > MAX_BYTES:
            raise ValueError("the body is too large")

    def on_message_complete(self) -> None:
        self.is_whole = self.status not in _IN_ADVANCE


def _listed(domain: str) -> str:
    try:
        return _encoded(domain.strip().rstrip(".").lower())
    except ValueError:
        raise ConfigError(f"--allowed-media-domains: {domain!r:.80} is no name of a host") from None


def _encoded(host: str) -> str:
    """A name as it is looked up. Raises ValueError for one that is none."""
    return host if ":" in host else host.encode("idna").decode()


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet, and so are those that it stands for."""
    try:
        address = ip_address(text)
    except ValueError:  # with a zone
        return False
    inner: list[IPv4Address | None] = []
    if isinstance(address, IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(IPv4Address(int(address) & 0xFFFFFFFF))
    found: list[IPv4Address | IPv6Address] = [each for each in inner if each is not None] or [address]
    return all(map(_is_global, found))


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.is_site_local:  # private in networks of old
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def _resolve(host: str, port: int) -> list[str]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(), look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@cache
def _resolvers() -> ThreadPoolExecutor:
    """Threads of their own: a name server that does not answer holds up nothing but links."""
    return ThreadPoolExecutor(NUM_RESOLVERS, thread_name_prefix="paceline-names")


async def _connect(address: str, target: FetchTarget) -> Connection:
    """To the address, in the name of the host."""
    if target.scheme == "http":
        return await asyncio.open_connection(address, target.port)
    return await asyncio.open_connection(address, target.port, ssl=tls_context(), server_hostname=target.host)


@cache
def tls_context() -> ssl.SSLContext:
    """Made once: reading the certificates of the system takes tens of milliseconds of the event loop."""
    return ssl.create_default_context()
