"""Sockets that are listened on, and the connections they brought.

Binding is separate from serving: a port in use is reported before a model is loaded. A listener never decides when to
stop; `lifecycle` closes it, asks its connections to end, and cuts them at last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from paceline.config.server import ServerConfig
from paceline.errors import PacelineError
from paceline.server.http.protocol import ConnectionCounts, GuardedProtocol, guarded_protocol

# The system's send buffer of a connection: the most a stalled reader can pile up there.
SEND_BUFFER_BYTES = 131_072


class CannotListen(PacelineError):
    """An address cannot be bound."""

    exit_code = 78


def bind_tcp(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A socket on which clients may queue from now on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"--host {host} is not an address of this machine ({error.strerror})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        bound.bind(address)
        bound.listen()  # only now it is certain that no other process has it
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"port {port} of {host} is in use; choose another with {flag}, or 0 for a free one"
            ) from error
        raise CannotListen(f"cannot listen on {host} port {port}: {error.strerror}; see {flag}") from error
    return bound


class Listener:
    """One bound socket, served."""

    def __init__(
        self,
        app: Any,
        bound: socket.socket,
        config: ServerConfig,
        *,
        uses_tls: bool = False,
        large_bodies: Mapping[bytes, int] | None = None,
    ) -> None:
        self.counts = ConnectionCounts()
        self.socket = bound
        self._address = bound.getsockname()
        self._is_unix = bound.family == socket.AF_UNIX
        self._backlog = config.backlog
        self._settings = uvicorn.Config(
            app,
            http=guarded_protocol(config, self.counts, large_bodies),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]
            ssl_certfile=config.ssl_certfile if uses_tls else None,
            ssl_keyfile=config.ssl_keyfile if uses_tls else None,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen and serve; returns at once."""
        loop = asyncio.get_running_loop()
        self._settings.load()
        protocol: Any = self._settings.http_protocol_class
        self.refresh_date()

        def connection() -> GuardedProtocol:
            made: GuardedProtocol = protocol(
                config=self._settings, server_state=self._state, app_state={}, _loop=loop
            )
            return made

        make = loop.create_unix_server if self._is_unix else loop.create_server
        self._server = await make(connection, sock=self.socket, ssl=self._settings.ssl, backlog=self._backlog)

    def refresh_date(self) -> None:
        """To be called about once a second: the Date header of answers."""
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]

    @property
    def address(self) -> str:
        """Where it listens, as the part of a URL behind the scheme."""
        if self._is_unix:
            return str(self._address)
        host, port = self._address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.socket.close()
        if self._is_unix:
            with contextlib.suppress(OSError):
                os.unlink(self._address)

    def end_connections(self) -> None:
        """Close idle connections now and the others with the answer they are waiting for."""
        for connection in self._connections():
            connection.shutdown()

    def abort_connections(self) -> None:
        for connection in self._connections():
            connection.abort()

    def _connections(self) -> Iterator[GuardedProtocol]:
        for connection in list(self._state.connections):
            assert isinstance(connection, GuardedProtocol)
            yield connection
