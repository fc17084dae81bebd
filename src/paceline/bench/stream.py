"""Requests to a server over HTTP at given times, and when each piece of their answers came.

A small client for studies and for `paceline tune --verify`: one connection for each request, an open loop (a request
is sent when it is due, whether or not others have been answered), nothing retried. It knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from paceline.report.record import OUTCOMES, RunRecord
from paceline.workload import Workload

NUM_IDS = 90  # token ids that prompts are drawn from: every model has them, and no two prompts begin alike
WITHIN_S = 600.0  # for an answer
FAILED = OUTCOMES.index("failed")
LEAD_S = 0.5  # before the first request, so that all are made


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, and when: times are of `time.perf_counter`."""

    status: int
    headers: dict[str, str]
    sent_s: float
    piece_s: list[float] = field(default_factory=list)  # when each piece of text came
    ended_s: float

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.ended_s - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and the key it is asked with."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> Address:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if is_tls else 80)
        return cls(host=parts.hostname or "", port=port, is_tls=is_tls, path=path, key=key)


async def stream(address: Address, path: str, body: Mapping[str, Any]) -> Answer:
    """Send a request that streams and read its answer to the end."""
    payload = json.dumps({**body, "stream": True}).encode()
    key = f"Authorization: Bearer {address.key}\r\n" if address.key else ""
    head = (
        f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n{key}"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    sent_s, pieces = time.perf_counter(), list[float]()
    secure = ssl.create_default_context() if address.is_tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=secure)
    try:
        writer.write(head.encode() + payload)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        async for line in reader:
            # A chat's first frame names the speaker and has no text yet.
            if line.startswith(b"data: {") and (b'"content":"' in line or b'"text":"' in line):
                pieces.append(time.perf_counter())
    finally:
        writer.close()
    named = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in named}
    return Answer(
        status=int(lines[0].split()[1]),
        headers=headers,
        sent_s=sent_s,
        piece_s=pieces,
        ended_s=time.perf_counter(),
    )


async def at(
    origin_s: float, due_s: float, sending: Coroutine[Any, Any, Answer], within_s: float
) -> Answer | None:
    """Send at its time, whether or not others have been answered. None: nothing came in time."""
    await asyncio.sleep(max(0.0, origin_s + due_s - time.perf_counter()))
    try:
        return await asyncio.wait_for(sending, within_s)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return None


def send_workload(address: Address, model: str, workload: Workload, *, seed: int, label: str) -> RunRecord:
    """Send completions of random token ids and of the workload's lengths at its times; what the client saw."""
    return asyncio.run(_send_all(address, model, workload, seed, label))


async def _send_all(address: Address, model: str, workload: Workload, seed: int, label: str) -> RunRecord:
    random = np.random.default_rng(seed)
    origin_s = time.perf_counter() + LEAD_S
    jobs = []
    for index in range(len(workload)):
        body = {
            "model": model,
            "prompt": random.integers(0, NUM_IDS, int(workload.prompt_len[index])).tolist(),
            "max_tokens": int(workload.output_len[index]),
            "ignore_eos": True,
            "temperature": 0.0,
        }
        sending = stream(address, "/v1/completions", body)
        jobs.append(at(origin_s, float(workload.arrival_s[index]), sending, WITHIN_S))
    return _record(await asyncio.gather(*jobs), workload, origin_s, label)


def _record(answers: list[Answer | None], workload: Workload, origin_s: float, label: str) -> RunRecord:
    """Times from when a request was due. What a client cannot see, admission, is taken to be the first token."""
    good = [answer if answer is not None and answer.piece_s else None for answer in answers]
    done = np.array([answer is not None for answer in good])

    def column(index: int) -> NDArray[np.float64]:
        return np.array([np.nan if each is None else each.piece_s[index] - origin_s for each in good])

    first_s, last_s = column(0), column(-1)
    zeros = np.zeros(len(workload), np.int32)
    return RunRecord(
        label=label,
        config={},
        max_num_seqs=1,
        duration_s=float(np.nanmax(last_s, initial=0.0)),
        arrival_s=workload.arrival_s,
        admitted_s=first_s,
        first_token_s=first_s,
        finished_s=last_s,
        prompt_len=workload.prompt_len,
        output_len=np.where(done, workload.output_len, 0).astype(np.int32),
        cached_tokens=zeros,
        preemptions=zeros,
        tenant=workload.tenant,
        outcome=np.where(done, 0, FAILED).astype(np.uint8),
        itl_s=np.array(
            [gap for each in good if each is not None for gap in np.diff(each.piece_s).tolist()], np.float32
        ),
    )
