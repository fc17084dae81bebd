"""One connection: uvicorn's protocol with the limits it lacks.

Owns sizes and counts of the request line, headers and body, the timeouts of a connection, what is answered to
requests that never reach the application, and readers that stopped reading. It knows no route.

A request that arrives while another is being answered ends the connection after that answer: no request is served out
of order, and an answer can never be mixed with the refusal of what came behind it.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.config.server import ServerConfig
from paceline.server.errors import Refusal, openai_body, problem_of
from paceline.server.http.request_headers import CONNECTION, new_id

WRITE_BUFFER_BYTES = 65_536
NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset, at once
MIN_UPLOAD_BYTES_PER_S = 16_384  # below it a large body does not arrive, it occupies a connection
LINGER_S = 1.0  # how long a refused client's bytes are swallowed, so that it gets to read its answer
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
_OTHER_METHOD = re.compile(rb"[A-Z]{1,32} /[\x21-\x7e]* HTTP/1\.[01]\r?\n")


@dataclass(slots=True)
class ConnectionCounts:
    """What happened to connections; read by the metrics."""

    refused: int = 0
    stalled: int = 0
    timed_out: int = 0


class Refused(Exception):
    """Leaves the parser's callbacks; what to answer is already noted."""


class GuardedProtocol(HttpToolsProtocol):
    """Subclassed with its limits by `guarded_protocol`."""

    limits: ServerConfig
    counts: ConnectionCounts
    large_bodies: Mapping[bytes, int] = {}  # paths to which more bytes may be posted than to others

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_shut = False  # nothing more is read from this connection
        self._in_head = False
        self._in_body = False
        self._is_upgrade = False
        self._refusal = ""
        self._num_headers = 0
        self._head_bytes = 0
        self._body_bytes = 0
        self._timed_bytes = 0  # of the body, when its timer was set
        self._max_body_bytes = self.limits.max_body_bytes
        self._quiet_bytes = 0  # received since the parser last had something to tell
        self._made_progress = False

    # ------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._refuse("too_many_connections")
        else:
            self._arm(self.limits.header_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_shut = True
        self._disarm()
        self._end_stall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_shut:
            return
        self._unset_keepalive_if_required()
        if self._timer is None and not self._in_body and self._is_idle:
            self._arm(self.limits.header_timeout_s, self._head_is_late)
        self._made_progress = False
        self._feed(data)
        if self._made_progress:
            self._quiet_bytes = 0
            return
        self._quiet_bytes += len(data)
        if self._quiet_bytes > self.limits.max_line_bytes + self.limits.max_header_bytes:
            self._refuse("headers_too_large")

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            known = _OTHER_METHOD.match(data) is not None
            self._refuse("method_not_allowed" if known else "bad_request")
        except httptools.HttpParserError:
            self._refuse(self._refusal or "bad_request")

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Some clients offer HTTP/2 with every request; they are answered as if they had not."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self._is_upgrade = False
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # ------------------------------------------------------------ what the parser found

    def on_message_begin(self) -> None:
        if not self._is_idle:
            self._stop("bad_request")
        self._in_head, self._in_body = True, False
        self._num_headers = self._head_bytes = self._body_bytes = self._timed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) + 16 > self.limits.max_line_bytes:
            self._stop("uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._num_headers > self.limits.max_headers or self._head_bytes > self.limits.max_header_bytes:
            self._stop("headers_too_large")
        if self._in_head:  # what comes behind the body is counted, and says nothing about the request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._made_progress = True
        self._in_head = False
        if self.parser.get_method() == b"CONNECT":  # asks for a tunnel, which cannot be read as anything else
            self._stop("bad_request")
        if self.parser.should_upgrade():
            self._is_upgrade = True
            return
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._stop("bad_version")
        if not self.url.startswith(b"/"):
            self._stop("bad_request")
        self._disarm()
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._stop("bad_request")
        self._max_body_bytes = self._allowed_bytes()
        if self._declared_bytes() > self._max_body_bytes:
            self._stop("body_too_large")
        self._arm(self.limits.body_timeout_s, self._body_is_late)
        super().on_headers_complete()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._in_body = True  # from here on `cycle` is this request's own

    def _allowed_bytes(self) -> int:
        usual = self.limits.max_body_bytes
        if self.parser.get_method() != b"POST":
            return usual
        return self.large_bodies.get(self.url.partition(b"?")[0], usual)

    def _declared_bytes(self) -> int:
        # The parser has seen to it that there is one at most, and that it is a number.
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def on_body(self, body: bytes) -> None:
        self._made_progress = True
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self._stop("body_too_large")
        if self.cycle.response_complete:  # refused before it was there: the rest is not worth reading
            self._max_body_bytes = min(self._max_body_bytes, self.limits.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._made_progress = True
        if self._is_upgrade:
            return
        self._in_body = False
        self._disarm()
        super().on_message_complete()
        if self.cycle.response_complete:  # answered before the body was there
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ------------------------------------------------------------ refusing

    def _stop(self, code: str) -> None:
        self._refusal = code
        raise Refused

    def _refuse(self, code: str) -> None:
        """Answer this connection's request here, unless an earlier one is being answered, and end it."""
        if self._is_shut:
            return
        self._is_shut = True
        self._disarm()
        self.counts.refused += 1
        cycle = self.cycle
        is_own = cycle is not None and self._in_body
        if cycle is not None and not cycle.response_complete and not (is_own and not cycle.response_started):
            cycle.keep_alive = False  # closes when its answer is complete
            return
        if not (is_own and cycle.response_complete):
            self.transport.write(refusal_bytes(code))
        if is_own and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._arm(LINGER_S, self.transport.abort)

    # ------------------------------------------------------------ time

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        self.counts.timed_out += 1
        if self._in_head:
            self._refuse("request_timeout")
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        self._timer = None
        arrived, self._timed_bytes = self._body_bytes - self._timed_bytes, self._body_bytes
        is_large = self._max_body_bytes > self.limits.max_body_bytes
        if is_large and arrived >= MIN_UPLOAD_BYTES_PER_S * self.limits.body_timeout_s:
            self._arm(self.limits.body_timeout_s, self._body_is_late)
            return
        self.counts.timed_out += 1
        self._refuse("request_timeout")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.limits.stalled_client_timeout_s, self._has_stalled)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _has_stalled(self) -> None:
        self._stall_timer = None
        self.counts.stalled += 1
        self.abort()

    def write_chunk(self, body: bytes) -> bool:
        """Write a piece of a chunked answer that has begun; False when it has to go the long way, and wait there."""
        if self.flow.write_paused or self.cycle.disconnected or not self.cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def abort(self) -> None:
        """Cut the connection, whatever is under way.

        With a reset: what a reader left unread would otherwise stay in the system's buffers, for as long as the
        reader lives and does not read.
        """
        bound = self.transport.get_extra_info("socket")
        if bound is not None and bound.family != socket.AF_UNIX:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


def guarded_protocol(
    limits: ServerConfig, counts: ConnectionCounts, large_bodies: Mapping[bytes, int] | None = None
) -> type[GuardedProtocol]:
    """The protocol class of a listener with these limits."""
    own = {"limits": limits, "counts": counts, "large_bodies": {} if large_bodies is None else large_bodies}
    return type("Connection", (GuardedProtocol,), own)


def refusal_bytes(code: str) -> bytes:
    """A whole answer for a request that never reached the application."""
    problem = problem_of(Refusal(code))
    body = openai_body(problem)
    lines = [
        STATUS_LINE[problem.status].rstrip(),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-request-id: " + new_id().encode(),
        b"connection: close",
    ]
    if problem.retry_after_s is not None:
        lines.append(b"retry-after: %d" % problem.retry_after_s)
        lines.append(b"retry-after-ms: %d" % (1000 * problem.retry_after_s))
    if problem.status == 405:
        lines.append(b"allow: GET, HEAD, POST, DELETE")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
