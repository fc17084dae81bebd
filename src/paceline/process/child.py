"""One engine process: starting it with its end of a socket, ending it, and saying what became of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

# -P: a file in the folder the server was started in must not stand in for a module.
COMMAND = (sys.executable, "-P", "-m", "paceline.process.engine_main")
SECRETS = ("PACELINE_API_KEY", "PACELINE_ADMIN_KEY")  # of no use to an engine
DEVICES = "CUDA_VISIBLE_DEVICES"  # names the GPUs that a process may use
STDERR = 2
_POLL_S = 0.01
_DUMP_S = 0.5  # what writing the stacks may take


class Place(NamedTuple):
    """What of a machine an engine gets, where there are several; empty: all of it."""

    cores: frozenset[int] = frozenset()
    environment: Mapping[str, str] = MappingProxyType({})


def deal_out(count: int) -> list[Place]:
    """Parts of this machine for as many engines: cores side by side, and GPUs in turn where there are any."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= count:
        bounds = [len(cores) * number // count for number in range(count + 1)]
        shares = [frozenset(cores[start:end]) for start, end in pairwise(bounds)]
    else:  # they take turns
        shares = [frozenset((cores[number % len(cores)],)) for number in range(count)]
    devices = _devices()
    if not devices:
        return [Place(share) for share in shares]
    named = [{DEVICES: devices[number % len(devices)]} for number in range(count)]
    return [Place(share, each) for share, each in zip(shares, named, strict=True)]


def _devices() -> list[str]:
    """The GPUs that this process may use, as the variable names them."""
    given = os.environ.get(DEVICES)
    if given is not None:
        return [each for each in given.split(",") if each]
    found = [each.name[len("nvidia") :] for each in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)


class EngineChild:
    """A process that was started. `sock` is our end of the channel."""

    def __init__(self, command: Sequence[str] = COMMAND, place: Place | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        self.place = place
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        if place is not None:
            environment |= place.environment
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=STDERR,  # standard output belongs to the HTTP process
                env=environment,
                process_group=0,  # Ctrl-C is for the HTTP process, which ends this one in its own time
            )
        except BaseException:
            self.sock.close()
            raise
        finally:
            theirs.close()
        if place is not None and place.cores:
            with suppress(OSError):  # it has ended, or it may not: then it has all of them
                os.sched_setaffinity(self._process.pid, place.cores)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; a negative number is the signal that ended it."""
        return self._process.poll()

    async def wait(self, seconds: float) -> bool:
        """Wait for its end; False if it still lives then."""
        until_s = time.monotonic() + seconds
        while self.exit_code is None:
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def kill(self) -> None:
        """End it now, whatever it does."""
        if self.exit_code is None:
            self._process.kill()
            await self.wait(10.0)

    def kill_now(self) -> None:
        """The same without an event loop that could wait."""
        self._process.kill()
        self._process.wait()

    async def dump_stacks(self) -> None:
        """Have it write to standard error where each of its threads is."""
        for number in (signal.SIGUSR1, signal.SIGCONT):  # one that was stopped writes nothing
            if self.exit_code is None:
                self._process.send_signal(number)
        await self.wait(_DUMP_S)

    def describe_end(self) -> str:
        """Half a sentence about how it ended."""
        code = self.exit_code
        if code is None:
            return "does not answer"
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code}"
