"""The lead: the rank in the engine's process. It plans, its followers get every plan.

`Followers` are the other ranks, from their start to their end; `LeadRunner` is the runner that the engine sees.
Whatever a rank would decide by its own clock or memory is decided here and told. A rank that ends takes the others with
it: steps under way cannot be completed without it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from paceline.audit.codec import plain
from paceline.config.engine import EngineConfig, ModelConfig
from paceline.core.counters import CPUWork
from paceline.core.guide import Guide, Mask
from paceline.core.plan import Pending, StepPlan, StepResult
from paceline.core.standing import Pulse
from paceline.errors import ConfigError
from paceline.models.spec import ModelSpec
from paceline.runner.cpu import CPURunner, StepCompute
from paceline.runner.parallel.link import Kind, Link, LinkClosed, watch
from paceline.runner.parallel.shards import shard_spec
from paceline.runner.parallel.wire import encode
from paceline.runner.sizing import default_memory

# -P: a file in the folder the program was started in must not stand in for a module.
COMMAND = (sys.executable, "-P", "-m", "paceline.runner.parallel.follow")
STDERR = 2
LATE_S = 5.0  # after a step that failed here, for the others to say that it failed there too
END_S = 2.0  # for followers to end by themselves
DONE = struct.Struct("<qI")  # of a step: its number and a checksum of its tokens; then tickets


class RankLost(RuntimeError):
    """A rank is gone, or has computed something else: no step can be computed any more."""


class Followers:
    """The other ranks of a model, as processes of this machine."""

    def __init__(self, model: ModelConfig, path: Path, size: int, threads: int, pulse: Pulse) -> None:
        self.size = size
        self._pulse = pulse
        self.lost = ""  # why no step can be computed any more
        self.last_failure = ""
        self._memory = 0
        self._closing = False
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-ranks-"))  # for this user alone
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        about = {
            "model": plain(asdict(model)),
            "path": str(path),
            "size": size,
            "threads": threads,
            "folder": str(self.folder),
            # Of no thread but the first: the system ends a process with the thread that started it.
            "parent": os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        }
        try:
            for rank in range(1, size):
                self._start(threads)
                self._links[-1].send(Kind.SET_UP, json.dumps({**about, "rank": rank}).encode())
        except BaseException:
            self.close()
            raise
        watch(self._links, self._gone)

    def _start(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        self._links.append(Link(ours))
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    COMMAND,
                    stdin=theirs.fileno(),
                    stdout=STDERR,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                    process_group=0,  # Ctrl-C is for the program that computes with us
                )
            )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        """The same to all of them."""
        self._check()
        try:
            for link in self._links:
                link.send(kind, payload)
        except LinkClosed as error:
            raise self._lose(f"a rank is gone: {error}") from error

    def answers(self, timeout_s: float | None = None) -> list[memoryview | None]:
        """What each has to say of the last message; None: it failed there."""
        found: list[memoryview | None] = []
        for rank, link in enumerate(self._links, 1):
            try:
                kind, payload = link.receive(timeout_s)
            except TimeoutError:
                raise self._lose(f"rank {rank} does not answer") from None
            except LinkClosed as error:
                raise self._lose(self._end_of(rank)) from error
            found.append(payload if kind is Kind.DONE else None)
            if kind is not Kind.DONE:
                self.last_failure = f"rank {rank}: {bytes(payload).decode(errors='replace')}"
        return found

    def wait_until_here(self) -> None:
        """Until all have opened the model. Raises ConfigError where one could not."""
        self._loading_answers()

    def wait_until_loaded(self) -> None:
        """Until all have their part. Raises ConfigError where one could not."""
        found = self._loading_answers()
        shutil.rmtree(self.folder, ignore_errors=True)  # they have found each other
        self._memory = min(json.loads(bytes(each))["memory"] for each in found)

    def _loading_answers(self) -> list[memoryview]:
        found = [each for each in self.answers() if each is not None]
        if len(found) < len(self._links):
            raise ConfigError(f"a rank could not load its part of the model: {self.last_failure}")
        return found

    def sizes(self, model: ModelConfig, spec: ModelSpec) -> tuple[ModelConfig, ModelSpec]:
        """What the KV cache is sized by: the least memory that any rank finds, for the heads of all of them."""
        heads = self.size * shard_spec(spec, self.size).num_kv_heads
        memory = model.kv_cache_memory_bytes or int(
            min(self._memory, default_memory()) * model.kv_memory_part
        )
        return replace(model, kv_cache_memory_bytes=memory), replace(spec, num_kv_heads=heads)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, the lead measures steps; the others compute them too."""
        self.tell(Kind.MEASURE)
        yield
        self.answers()

    def diverged(self, reason: str) -> RankLost:
        return self._lose(reason)

    def close(self) -> None:
        """End them, by themselves if they can."""
        self._closing = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self) -> None:
        if self.lost or self._closing:
            raise RankLost(self.lost or "the ranks have been ended")

    def _gone(self, place: int) -> None:
        """From the thread that watches."""
        if not self._closing:
            self._lose(self._end_of(place + 1))

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        code = process.poll()
        how = "does not answer" if code is None else f"was ended by signal {-code}"
        return f"rank {rank} {how if code is None or code < 0 else f'exited with code {code}'}"

    def _lose(self, reason: str) -> RankLost:
        if not self.lost and not self._closing:
            self.lost = reason
            for process in self._processes:
                with suppress(OSError):
                    process.kill()
            if self._pulse.on_lost is not None:
                self._pulse.on_lost(reason)
        return RankLost(self.lost or reason)


class LeadRunner:
    """A runner on every rank, as one."""

    def __init__(
        self, own: CPURunner, followers: Followers, config: EngineConfig, ends: tuple[int, ...] | None
    ) -> None:
        self._own = own
        self._followers = followers
        followers.tell(Kind.OPEN, json.dumps({"config": plain(config), "ends": plain(ends)}).encode())

    def reset(self, full: StepPlan) -> None:
        self._followers.tell(Kind.RESET, encode(full))
        self._own.reset(full)

    def submit(self, plan: StepPlan) -> Pending:
        self._followers.tell(Kind.SUBMIT, encode(plan))
        return LeadPending(self._own.submit(plan), self._followers, plan.seq)

    # -- what the owner of a runner on a CPU wants of it ---------------------------------------------------

    def copy_out_and_back(self, count: int) -> None:
        self._followers.tell(Kind.COPY, struct.pack("<q", count))
        self._own.copy_out_and_back(count)
        self._followers.answers()

    def work(self) -> CPUWork:
        return self._own.work()

    @property
    def compute(self) -> StepCompute:
        return self._own.compute

    def close(self) -> None:
        with suppress(RankLost):  # then they are gone, with what they held
            self._followers.tell(Kind.CLOSE)
        self._own.close()


class LeadPending:
    """A step on every rank."""

    def __init__(self, own: Pending, followers: Followers, seq: int) -> None:
        self._own = own
        self._followers = followers
        self._seq = seq
        self._rows: list[int] = []

    def supply(self, guides: Mapping[int, Guide]) -> None:
        self._rows = sorted(guides)
        told: Mapping[int, Guide] = {row: ToldGuide(guides[row], self._followers) for row in self._rows}
        self._own.supply(told)

    def wait(self) -> StepResult:
        followers = self._followers
        followers.tell(Kind.RUN, struct.pack(f"<q{len(self._rows)}i", self._seq, *self._rows))
        try:
            result = self._own.wait()
        except Exception as error:
            # One that failed everywhere leaves the ranks together; the engine starts over from a full plan.
            if any(answer is not None for answer in followers.answers(LATE_S)):
                raise followers.diverged(f"a step failed on the lead alone: {error}") from error
            raise
        return self._agreed(result)

    def _agreed(self, result: StepResult) -> StepResult:
        """The result, with the tickets that all ranks have completed."""
        checksum, tickets = checksum_of(result), result.copies_done
        for answer in self._followers.answers():
            if answer is None:
                raise self._followers.diverged(f"a step failed on one rank: {self._followers.last_failure}")
            seq, theirs = DONE.unpack_from(answer)
            if (seq, theirs) != (result.seq, checksum):
                raise self._followers.diverged("ranks have found other tokens")
            tickets = np.intersect1d(tickets, np.frombuffer(answer, np.int32, offset=DONE.size))
        return result if len(tickets) == len(result.copies_done) else result._replace(copies_done=tickets)


def checksum_of(result: StepResult) -> int:
    """Of what all ranks must have found alike."""
    found = zlib.crc32(result.tokens.tobytes())
    return zlib.crc32(result.finished.tobytes(), zlib.crc32(result.count.tobytes(), found))


class ToldGuide:
    """A guide of the lead: whatever it says, the followers are told, who ask the same in the same order."""

    def __init__(self, guide: Guide, followers: Followers) -> None:
        self._guide = guide
        self._followers = followers

    @property
    def is_over(self) -> bool:
        return bool(self._tell([int(self._guide.is_over)])[0])

    @property
    def error(self) -> str:
        return self._guide.error

    def consume(self, tokens: Sequence[int]) -> None:
        self._guide.consume(tokens)

    def mask(self) -> Mask | None:
        mask = self._guide.mask()
        self._followers.tell(Kind.ANSWER, b"" if mask is None else mask.tobytes())
        return mask

    def forced(self) -> list[int]:
        return self._tell(self._guide.forced())

    def accepts(self, tokens: Sequence[int]) -> int:
        return self._tell([self._guide.accepts(tokens)])[0]

    def copy(self) -> Guide:
        return ToldGuide(self._guide.copy(), self._followers)

    def end_reasoning(self) -> bool:
        return self._guide.end_reasoning()

    def _tell(self, numbers: list[int]) -> list[int]:
        self._followers.tell(Kind.ANSWER, struct.pack(f"<{len(numbers)}q", *numbers))
        return numbers
