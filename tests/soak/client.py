"""One virtual user's connections: sends plans byte by byte, leaves when it should, and notes what came of each."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field

from tests.soak.plans import Plan

HOST = "127.0.0.1"
PATIENCE_S = 120.0  # no answer takes longer, however busy the machine is
NO_LINGER = struct.pack("ii", 1, 0)
_ENDINGS = {
    "/v1/messages": b"event: message_stop",
    "/v1/responses": b"event: response.",  # completed or incomplete; a failure is looked for besides
}


class Broken(Exception):
    """An answer that is not what HTTP or the API says it is."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a plan."""

    plan: Plan
    status: int | None = None  # None: the client left before the answer was complete
    problem: str = ""
    was_sent: bool = True  # all of it


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class User:
    """Sends one request at a time; the connection is kept while the server keeps it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, plan: Plan) -> Outcome:
        outcome = Outcome(plan=plan)
        limit_s = PATIENCE_S if plan.leaves_after_s is None else plan.leaves_after_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._exchange(plan, outcome)
            outcome.problem = _problem_of(plan, answer)
            outcome.status = answer.status
            if plan.is_raw or answer.headers.get("connection") == "close":
                self.close()
        except TimeoutError:
            self.close(resets=plan.resets)
            if plan.leaves_after_s is None:
                outcome.problem = f"{plan.path} was not answered in {limit_s:g} s"
        except (OSError, EOFError, Broken, ValueError) as error:
            self.close()
            outcome.problem = f"{plan.path}: {type(error).__name__}: {error}"
        return outcome

    def close(self, *, resets: bool = False) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is None:
            return
        if resets:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            writer.transport.abort()
        else:
            writer.close()

    async def _exchange(self, plan: Plan, outcome: Outcome) -> Answer:
        data = request_bytes(plan)
        outcome.was_sent = False
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        assert self._reader is not None
        self._writer.write(data[: max(1, int(len(data) * plan.sends))])
        await self._writer.drain()
        if plan.sends < 1.0:
            await asyncio.sleep(PATIENCE_S)  # until it leaves
        outcome.was_sent = True
        return await read_answer(self._reader)


def request_bytes(plan: Plan) -> bytes:
    if plan.is_raw:
        return plan.body
    head = [f"{plan.method} {plan.path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(plan.body)}"]
    return "\r\n".join((*head, *plan.headers)).encode() + b"\r\n\r\n" + plan.body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    answer = Answer(int(first.split()[1]))
    answer.headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if answer.headers.get("transfer-encoding") != "chunked":
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
        return answer
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        if await reader.readexactly(2) != b"\r\n":
            raise Broken("a piece is longer than it says")
    await reader.readexactly(2)
    answer.body = b"".join(pieces)
    return answer


def _problem_of(plan: Plan, answer: Answer) -> str:
    """What is wrong with an answer; "" when nothing is."""
    if answer.status not in plan.statuses:
        return f"{plan.method} {plan.path} was answered with {answer.status}: {answer.body[:200]!r}"
    if answer.status != 200 or not plan.is_stream:
        has_error = "error" in (found := json.loads(answer.body)) and found["error"] is not None
        return "" if has_error == (answer.status != 200) else f"{plan.path}: {answer.body[:200]!r}"
    last = _ENDINGS.get(plan.path, b"data: [DONE]")
    ends_well = any(part.startswith(last) for part in answer.body.strip().split(b"\n\n")[-1:])
    if not ends_well or b'"error":{' in answer.body or b"response.failed" in answer.body:
        return f"{plan.path}: a stream ended with {answer.body[-200:]!r}"
    return ""


async def stall(port: int, plan: Plan, until: asyncio.Event) -> Outcome:
    """Ask for a long stream and read nothing until the server has cut it, or the run is over."""
    outcome = Outcome(plan=plan)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (HOST, port))
        await loop.sock_sendall(client, request_bytes(plan))
        while not _is_cut(client) and not until.is_set():
            await asyncio.sleep(0.1)
    return outcome


def _is_cut(client: socket.socket) -> bool:
    # The error of a socket that was reset is told without reading what came before.
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0 or _state(client) != 1


def _state(client: socket.socket) -> int:
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]  # 1 is ESTABLISHED


async def drip(port: int, until: asyncio.Event) -> bool | None:
    """Send a header a byte at a time; whether the server ended that with 408, None when it is not known yet."""
    reader, writer = await asyncio.open_connection(HOST, port)
    received = asyncio.ensure_future(reader.read())
    try:
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 10_000:
            if received.done() or until.is_set():
                break
            writer.write(bytes([byte]))
            await asyncio.wait((received,), timeout=0.2)
        return received.result().startswith(b"HTTP/1.1 408") if received.done() else None
    finally:
        received.cancel()
        writer.close()
