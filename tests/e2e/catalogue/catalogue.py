"""Runs entries against a live server and collects what is wrong with the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from tests.e2e.catalogue import (
    chats,
    contexts,
    http_layer,
    json_layer,
    memory,
    prompts,
    routes,
    sampling,
    structures,
    trees,
    vectors,
)
from tests.e2e.catalogue.entry import COMPLETIONS, Answer, Entry, answer_of, is_one_of
from tests.e2e.catalogue.served import NAME, TinyServer
from tests.e2e.http_server import Reply

ENTRIES: list[Entry] = [
    entry
    for module in (
        http_layer,
        json_layer,
        prompts,
        chats,
        contexts,
        sampling,
        structures,
        routes,
        trees,
        memory,
        vectors,
    )
    for entry in module.ENTRIES
]
GROWTH_BYTES = 5 * 2**20
TRIES = 3
# Greedy, with the probabilities beside the tokens: whatever leaks from one request into another changes a digit.
CANARY = {
    "model": NAME,
    "prompt": "The canary sings",
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": 5,
    "ignore_eos": True,
}


def canary(server: TinyServer) -> bytes:
    """What the server answers to a good request, without what differs by nature."""
    reply = server.post(COMPLETIONS, CANARY)
    assert reply.status == 200, reply.body
    return json.dumps(reply.json["choices"]).encode()


class Run:
    """One pass over entries. `more_answers` are what a server in this state may answer as well.

    The canary is listened to after every entry that makes the engine work, or only after every number of the
    catalogue, or (`sings=False`) not at all, where the server cannot answer it. `busy_s`: how much longer an answer may
    take because others are served.
    """

    def __init__(
        self,
        server: TinyServer,
        *,
        more_answers: tuple[Answer, ...] = (),
        sings: bool = True,
        listens_often: bool = True,
        busy_s: float = 0.0,
    ) -> None:
        self._server = server
        self._busy_s = busy_s
        self._more = more_answers
        self._song = canary(server) if sings else None
        self._listens_often = listens_often
        self.failures: list[str] = []

    def over(self, entries: Sequence[Entry]) -> list[str]:
        last = entries[0].number
        for entry in entries:
            if entry.number != last:
                self._listen(f"after all of {last}")
                last = entry.number
            self._try(entry)
            if self._listens_often and entry.reaches_the_engine:
                self._listen(f"after {entry}")
        self._listen("at the end")
        return self.failures

    def _listen(self, when: str) -> None:
        if self._song is not None and canary(self._server) != self._song:
            self.failures.append(f"{when}: the canary sings another song")

    def _try(self, entry: Entry) -> None:
        """Memory that grows and an answer that takes long are held against an entry when they do so every time."""
        problems: list[str] = []
        for _ in range(TRIES):
            before, begun_s = self._server.resident_bytes(), time.monotonic()
            try:
                reply = self._server.raw(entry.data)
            except (OSError, ValueError) as error:
                problems = [f"no answer ({type(error).__name__}: {error})"]
                break
            taken_s, grown = time.monotonic() - begun_s, self._server.resident_bytes() - before
            problems = [self._wrong(entry, reply)]
            if problems[0]:
                break
            problems = []
            if taken_s > entry.seconds + self._busy_s:
                problems.append(f"took {taken_s:.2f} s of {entry.seconds + self._busy_s:g}")
            if grown > GROWTH_BYTES:
                problems.append(f"left {grown / 2**20:.0f} MiB behind")
            if not problems:
                return
        self.failures += [f"{entry}: {problem}" for problem in problems]

    def _wrong(self, entry: Entry, reply: Reply) -> str:
        try:
            found = answer_of(reply)
            if not is_one_of(found, (*entry.answers, *self._more)):
                return f"{found} instead of {entry.answers}: {reply.body[:200]!r}"
            # A refusal of a busy server is no answer of the entry's own.
            is_own = is_one_of(found, entry.answers) and found not in self._more
            if is_own and entry.check is not None and not entry.check(reply):
                return f"the answer lacks something ({entry.check.__name__}): {reply.raw[:400]!r}"
            return ""
        except (AssertionError, KeyError, ValueError, TypeError) as error:
            return f"a strange answer ({type(error).__name__} {error}): {reply.raw[:400]!r}"


def log_problems(server: TinyServer) -> list[str]:
    """Lines of the log that say that something of ours went wrong."""
    lines = server.log.splitlines()
    return [line[:1000] for line in lines if "raceback" in line or '"level":"error"' in line]
