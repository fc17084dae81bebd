"""Structures checked and patterns matched beside the event loop, in processes that are killed when they take too long.

A few schemas of a few kilobytes take llguidance minutes, a pattern of a few characters can keep Python's matcher busy
for hours, and no thread that is inside one of them can be stopped. Verdicts are remembered by the bytes that were asked
about, good and bad ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest, QueueFull
from paceline.text.guide.check import FIELD, GrammarVerdict, check_installed, question

# -P: a file in the folder the server was started in must not stand in for a module.
COMMAND = (sys.executable, "-P", "-m", "paceline.text.guide.check")
# It reads what strangers write: it gets no keys and no other secrets of this process.
ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "LANG", "LD_LIBRARY_PATH")
CHECK_S = 1.0
MAX_WORKERS = 2
MAX_REMEMBERED = 1024
START_S = 30.0  # for a process to begin, which a busy machine delays; no part of a check
WAIT_S = 5.0  # for a process to be free
# On a machine that is busy now the same structure may be checked in time later.
REMEMBER_LATE_S = 60.0
LATE = GrammarVerdict(error="it takes too long to check; write a smaller one", too_complex=True)
CRASHED = GrammarVerdict(
    error="its check needs more memory than it may have, or crashed; write a smaller one", too_complex=True
)


class GrammarChecker:
    """Checks structures for one event loop. Processes start with the first question and stay."""

    def __init__(
        self, command: Sequence[str] = COMMAND, *, check_s: float = CHECK_S, max_workers: int = MAX_WORKERS
    ) -> None:
        self._command = command
        self._check_s = check_s
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(max_workers)
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="paceline-check")
        # By digest; a task that is done is a remembered answer, one under way is shared by all that ask the same.
        self._verdicts: OrderedDict[bytes, asyncio.Task[GrammarVerdict]] = OrderedDict()

    async def check(
        self, structure: Structure, field: str = FIELD, *, control_tokens: bool = False
    ) -> tuple[str, ...]:
        """The names of what is ignored. Raises InvalidRequest, GrammarTooComplex or QueueFull.

        `control_tokens`: whether the grammar may name tokens of the model; one that a client wrote may not.
        """
        check_installed(field)
        asked = json.dumps(asdict(question(structure))).encode()
        key = hashlib.blake2b(asked, digest_size=16).digest()
        task = self._verdicts.get(key)
        if task is None:
            task = self._verdicts[key] = asyncio.create_task(self._ask(asked, key))
            while len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        # Shielded: a client that leaves must not take the answer from others that wait for it.
        verdict = await asyncio.shield(task)
        return verdict.approve(field, control_tokens=control_tokens)

    async def find(self, pattern: str, text: str) -> str | None:
        """What a pattern finds in a text: see `last_match`. Raises InvalidRequest where that takes too long."""
        answer = await self._take_turn(json.dumps({"pattern": pattern, "text": text}).encode())
        if isinstance(answer, GrammarVerdict):
            raise InvalidRequest(
                "search: the pattern takes too long to match an answer; write a simpler one", param="search"
            )
        found: str | None = json.loads(answer)
        return found

    def close(self) -> None:
        """End the processes; what is still asked gets no answer."""
        for worker in list(self._workers):
            worker.end()
        while self._idle:
            self._idle.pop().kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, asked: bytes, key: bytes) -> GrammarVerdict:
        try:
            answer = await self._take_turn(asked)
        except BaseException:
            self._verdicts.pop(key, None)
            raise
        verdict = answer if isinstance(answer, GrammarVerdict) else GrammarVerdict.read(answer)
        if verdict is LATE:
            asyncio.get_running_loop().call_later(REMEMBER_LATE_S, self._verdicts.pop, key, None)
        return verdict

    async def _take_turn(self, asked: bytes) -> bytes | GrammarVerdict:
        """The answer, or LATE or CRASHED."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            message = "too many schemas, grammars and patterns wait to be checked; try again in a moment"
            raise QueueFull(message, retry_after_s=1) from None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._reply, asked)
        finally:
            self._free.release()

    def _reply(self, asked: bytes) -> bytes | GrammarVerdict:
        """In a separate thread, which waits for one process."""
        worker = self._worker()
        answer: bytes | GrammarVerdict
        try:
            answer = worker.ask(asked, self._check_s) or CRASHED
        except TimeoutError:
            answer = LATE
        except OSError:
            answer = CRASHED
        if isinstance(answer, GrammarVerdict):
            worker.kill()
            self._workers.discard(worker)
        else:
            self._idle.append(worker)
        return answer

    def _worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.lives:
                return worker
            self._workers.discard(worker)
        worker = _Worker(self._command)
        self._workers.add(worker)
        return worker


class _Worker:
    """One process that checks, and its two ends."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C is for the server, which ends this one in its own time
        )
        try:
            has_started = self._line(START_S) == b"ready"
        except TimeoutError:
            has_started = False
        if not has_started:
            self.kill()
            raise RuntimeError("the process that checks schemas and grammars does not start")

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, asked: bytes, seconds: float) -> bytes:
        """A line for a line; b"" when the process ends. Raises TimeoutError or OSError."""
        assert self._process.stdin is not None
        self._process.stdin.write(asked + b"\n")
        self._process.stdin.flush()
        return self._line(seconds)

    def end(self) -> None:
        """Have it ended; a thread that waits for its answer gets none, and does the rest."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            with contextlib.suppress(OSError):  # what it never read is still in the buffer
                end.close()

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        source, until_s, line = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([source], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(source, 1 << 16)
            if not part:
                return b""
            line += part
        return line.strip()
