"""Clients that keep a server busy: more of them than it has rows, each with its next request at once.

What they are told does not depend on who else is served: their requests come round again and again, and have the same
answer each time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, takewhile
from typing import Any

from tests.e2e.catalogue.connections import ask_all
from tests.e2e.faults.live import without_fractions
from tests.e2e.http_server import Reply

CLIENTS = 10
# Drawn and greedy, short and long, with several answers, and with a form.
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 16, "logprobs": 2},
    {"temperature": 1, "seed": 7, "max_tokens": 12, "n": 2},
    {
        "temperature": 1,
        "seed": 8,
        "max_tokens": 20,
        "guided_regex": "[a-f]{4}( [a-f]{4}){2}",
        "ignore_eos": False,
    },
    {"temperature": 0.8, "seed": 9, "max_tokens": 24, "top_p": 0.9},
    {"temperature": 0, "max_tokens": 8, "echo": True},
)


def requests_of_a_crowd(
    model: str, sign: Callable[[str, dict[str, Any]], bytes], *, guided: bool = True
) -> list[bytes]:
    """`sign` makes bytes of a path and a body."""
    chosen = [fields for fields in REQUESTS if guided or "guided_regex" not in fields]
    shared = {"model": model, "ignore_eos": True}
    return [
        sign("/v1/completions", {**shared, "prompt": f"one of many, number {number} " * 3, **fields})
        for number, fields in enumerate(chosen * 3)
    ]


@contextmanager
def crowd(
    port: int, requests: Sequence[bytes], wait_until_full: Callable[[], None], *, clients: int = CLIENTS
) -> Iterator[None]:
    """Begins when requests wait for a row, ends when the last client has its answer."""
    said = dict[int, Any]()
    told, problems = 0, list[str]()

    def handle(number: int, reply: Reply | Exception) -> None:
        nonlocal told
        which = number % len(requests)
        if not isinstance(reply, Reply) or reply.status != 200:
            problems.append(f"{requests[which]!r}: {reply!r}")
            return
        told += 1
        choices = without_fractions(json.loads(reply.body)["choices"])
        if said.setdefault(which, choices) != choices:
            problems.append(f"{requests[which]!r}: {choices} instead of {said[which]}")

    def ask(data: Iterable[bytes], clients: int) -> None:
        asyncio.run(ask_all(port, data, handle, connections=clients))

    ask(requests, 1)  # each alone
    is_over = threading.Event()
    endless = takewhile(lambda _: not is_over.is_set(), cycle(requests))
    thread = threading.Thread(target=ask, args=(endless, clients))
    thread.start()
    try:
        wait_until_full()
        yield
    finally:
        is_over.set()
        thread.join()
        assert not problems, "\n".join(problems[:5])
    assert told > len(requests)
