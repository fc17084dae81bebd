"""One engine process: starting it with its end of a socket, ending it, and saying what became of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

# -P: a file in the folder the server was started in must not stand in for a module.
COMMAND = (sys.executable, "-P", "-m", "paceline.process.engine_main")
SECRETS = ("PACELINE_API_KEY", "PACELINE_ADMIN_KEY")  # of no use to an engine
STDERR = 2
_POLL_S = 0.01
_DUMP_S = 0.5  # what writing the stacks may take


class EngineChild:
    """A process that was started. `sock` is our end of the channel."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.sock, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
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
