"""`paceline chat` on a terminal, with a program in place of the hands."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.model_cli import COMMAND, TIMEOUT_S, environment


class Terminal:
    """A chat on a separate terminal: a dumb one, unless the environment says otherwise."""

    def __init__(self, *arguments: str, cache: Path, **more: str) -> None:
        self._master, slave = pty.openpty()
        env = environment(cache, **{"TERM": "dumb", **more})
        self.process = subprocess.Popen(
            [*COMMAND, "chat", *arguments],
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Read until `text` appears; returns everything up to and with it."""
        self._read_until(lambda: text in self.shown)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_length(self, count: int) -> None:
        self._read_until(lambda: len(self.shown) >= count)

    def _read_until(self, is_there: Callable[[], bool]) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not is_there():
            assert time.monotonic() < end_s, f"waited in vain: {self.shown[-500:]!r}"
            if select.select([self._master], [], [], 0.5)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` appears: Python's readline does not look at a signal that comes between the
        prompt's last character and its wait for a key, and a program can hit that moment where a hand cannot."""
        end_s = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            assert time.monotonic() < end_s, f"waited in vain: {self.shown[-500:]!r}"
            self.interrupt()
            self._read_for(1.0, text)
        self.wait_for(text)

    def _read_for(self, seconds: float, text: str) -> None:
        until_s = time.monotonic() + seconds
        self._read_until(lambda: text in self.shown or time.monotonic() > until_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._master)
