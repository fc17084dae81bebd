"""What virtual users ask for: every request of a run, drawn from a seed. Values only; nothing is sent here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

MODEL, OTHER = "tiny", "other"  # the first has a disk and adapters, the second sleeps
ADAPTERS = ("poet", "clerk", "bard")  # of the first; two of them have room at a time
SPARE_ADAPTER = "spare"  # comes and goes
ASKED = {MODEL: 6, OTHER: 1, **dict.fromkeys(ADAPTERS, 1)}  # what requests name, and how often
ADMIN = "key-of-the-operator"
SHARE_OPERATED = 0.02
KEYS = {"red": "key-of-red", "green": "key-of-green", "blue": "key-of-blue"}
LIMITED = "blue"  # may not have many requests under way
CONTEXT = 1024
SHARE_STREAMED, SHARE_ABORTED, SHARE_MALFORMED = 0.25, 0.15, 0.05
LARGE_BODY_BYTES = 300_000  # parsed beside the event loop
MEAN_PATIENCE_S = 0.4  # of clients that leave before their answer is complete
SENTENCE = "It was a bright cold day in April, and the clocks were striking thirteen. "
# A fixed stock of words: tokenizers remember some ten thousand of them, which is not a leak but looks like one.
WORDS = tuple(first + last for first in "bdfgklmnprst" for last in ("a", "en", "ill", "on", "ust", "yard"))
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_TYPE = "Content-Type: application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request, and what may become of it."""

    path: str
    body: bytes
    headers: tuple[str, ...]
    statuses: tuple[int, ...]  # what it may be answered with
    method: str = "POST"
    is_stream: bool = False
    is_raw: bool = False  # `body` is everything that is sent
    leaves_after_s: float | None = None  # closes the connection then, if it is not over
    sends: float = 1.0  # share of the bytes that are sent before leaving
    resets: bool = False  # leaves without a goodbye


class Planner:
    """Draws requests of one user."""

    def __init__(self, seed: int, user: int) -> None:
        self._random = random.Random(f"{seed}/{user}")
        self._tenant = list(KEYS)[user % len(KEYS)]

    def think_s(self, mean_s: float) -> float:
        """Until the next request; requests of all users together are a Poisson process."""
        return self._random.expovariate(1 / mean_s)

    def next(self) -> Plan:
        draw = self._random
        if draw.random() < SHARE_MALFORMED:
            return draw.choice(malformed("red"))
        if draw.random() < SHARE_OPERATED:
            return draw.choice(operated())
        is_stream = draw.random() < SHARE_STREAMED
        path, body = self._generation(is_stream)
        leaves = draw.random() < SHARE_ABORTED
        return Plan(
            path=path,
            body=json.dumps(body).encode(),
            headers=(_TYPE, key_header(self._tenant)),
            statuses=(200, 429),  # 429: the tenant has as many under way as it may
            is_stream=is_stream,
            leaves_after_s=draw.expovariate(1 / MEAN_PATIENCE_S) if leaves else None,
            sends=draw.random() if leaves and draw.random() < 0.1 else 1.0,
            resets=leaves and draw.random() < 0.5,
        )

    def _generation(self, is_stream: bool) -> tuple[str, dict[str, Any]]:
        draw = self._random
        path = draw.choices(GENERATION_PATHS, weights=(5, 3, 1, 1))[0]
        model = draw.choices(list(ASKED), weights=list(ASKED.values()))[0]
        text = self._prompt()
        most = draw.choice((2, 8, 24, 64, 128))
        if path == "/v1/messages":
            return path, {"model": model, "max_tokens": most, "messages": _said(text), "stream": is_stream}
        if path == "/v1/responses":
            return path, {"model": model, "max_output_tokens": most, "input": text, "stream": is_stream}
        body: dict[str, Any] = {"model": model, "max_tokens": most, "stream": is_stream}
        body |= {"prompt": text} if path == "/v1/completions" else {"messages": _said(text)}
        body |= {"temperature": draw.choice((0, 0.7, 1.0)), "ignore_eos": draw.random() < 0.7}
        return path, body | self._extras(path)

    def _extras(self, path: str) -> dict[str, Any]:
        draw = self._random
        extras: dict[str, Any] = {}
        if draw.random() < 0.15:
            extras["n"] = 2
        if draw.random() < 0.2:
            extras["stop"] = [draw.choice(("ab", "e", "\n\n", "zzz"))]
        if draw.random() < 0.1:
            extras |= {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
        if draw.random() < 0.3:
            extras["seed"] = draw.randrange(1000)
        if draw.random() < 0.005:  # a field that is not read, so that the body is large and the prompt is not
            extras["x_note"] = "x" * LARGE_BODY_BYTES
        return extras

    def _prompt(self) -> str:
        """Some share a beginning, some do not; a token each character."""
        draw = self._random
        if draw.random() < 0.5:
            return SENTENCE * draw.randint(1, 3) + str(draw.randrange(100))
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))


def key_header(tenant: str) -> str:
    return f"Authorization: Bearer {KEYS[tenant]}"


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def operated() -> list[Plan]:
    """What an operator does meanwhile: a model is put to sleep, an adapter comes, is asked for, and goes."""
    spare: dict[str, Any] = {"lora_name": SPARE_ADAPTER}
    load = {**spare, "lora_path": SPARE_ADAPTER, "load_inplace": True}
    asked = {"model": SPARE_ADAPTER, "prompt": "hello", "max_tokens": 8}

    def plan(statuses: tuple[int, ...], path: str, body: dict[str, Any]) -> Plan:
        headers = (_TYPE, f"Authorization: Bearer {ADMIN}")
        return Plan(path=path, body=json.dumps(body).encode(), headers=headers, statuses=statuses)

    return [
        plan((200, 409), f"/v1/models/{OTHER}/sleep", {}),  # 409: it has requests
        plan((200, 409), f"/v1/models/{OTHER}/sleep?level=2", {}),
        plan((200,), "/v1/load_lora_adapter", load),
        plan((200, 404), "/v1/unload_lora_adapter", spare),
        plan((200, 404), "/v1/completions", asked),
    ]


def malformed(tenant: str) -> list[Plan]:
    """Requests that are wrong in different ways, each with the one status it must get."""
    chat, key = "/v1/chat/completions", key_header(tenant)
    good = {"model": MODEL, "messages": _said("hi"), "max_tokens": 4}

    def plan(status: int, body: Any, *headers: str, path: str = chat, method: str = "POST") -> Plan:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Plan(path=path, body=data, headers=headers or (_TYPE, key), statuses=(status,), method=method)

    return [
        plan(400, b"{"),
        plan(400, b""),
        plan(400, b"[1, 2]"),
        plan(400, b'{"model": "tiny", "model": "tiny"}'),
        plan(400, b'{"temperature": NaN}'),
        plan(400, b"\xff\xfe{}"),
        plan(400, {**good, "temperature": "warm"}),
        plan(400, {**good, "max_tokens": -1}),
        plan(400, {**good, "n": 100_000}),
        plan(400, {**good, "messages": _said("x" * (CONTEXT + 1))}),
        plan(400, {**good, "messages": "hi"}),
        plan(400, {**good, "stop": ["x"] * 100}),
        plan(400, {"model": MODEL, "prompt": [10**9], "max_tokens": 4}, path="/v1/completions"),
        plan(401, good, _TYPE),
        plan(401, good, _TYPE, "Authorization: Bearer wrong"),
        plan(404, {**good, "model": "another"}),
        plan(404, good, path="/v1/nothing"),
        plan(405, good, method="DELETE"),
        plan(415, good, "Content-Type: text/plain", key),
        Plan(path="none", body=b"nonsense\r\n\r\n", headers=(), statuses=(400,), is_raw=True),
    ]


def stalled_plan() -> Plan:
    """A long stream of large pieces for a reader that does not read: more than all buffers on the way hold."""
    body = {
        "model": MODEL,
        "messages": _said("tell me everything"),
        "max_tokens": 600,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    return Plan(
        path="/v1/chat/completions",
        body=json.dumps(body).encode(),
        headers=(_TYPE, key_header("red")),
        statuses=(200, 429),
        is_stream=True,
    )
