"""A command that shows a run on the live page, as a user runs it: a process that serves until it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.model_cli import start


@contextmanager
def shown(folder: Path, *arguments: str, until: str = "") -> Iterator[str]:
    """The origin of the page a command serves; it ends well when it is interrupted, after it has said `until`."""
    process = start(*arguments, "--ui", "--ui-port", "0", cache=folder, stdin=subprocess.DEVNULL)
    try:
        assert process.stderr is not None
        lines = []
        for line in iter(process.stderr.readline, b""):
            lines.append(line.decode())
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/ui", lines[-1]):
                break
        else:
            raise AssertionError("".join(lines))
        yield found[1]
        if until:
            assert any(until in line.decode() for line in iter(process.stderr.readline, b""))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
