"""The `paceline` command with a resolver of a test, and a listener of it in place of the internet.

The folder PACELINE_TEST_NAMES has `names.json`: the listener's port and, for each name, the addresses of one question
after the other. What was asked and what was dialled is written beside it, a line each. The program has no such switch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from paceline.cli import main
from paceline.server.http import fetch_url

FOLDER = Path(os.environ["PACELINE_TEST_NAMES"])
KNOWN = json.loads((FOLDER / "names.json").read_text())
_resolve = fetch_url._resolve
_questions: Counter[str] = Counter()


def note(name: str, line: str) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(f"{line}\n")


async def resolve(host: str, port: int) -> Sequence[str]:
    note("asked", host)
    answers: list[list[str]] | None = KNOWN["names"].get(host)
    if answers is None:
        return await _resolve(host, port)
    _questions[host] += 1
    return answers[(_questions[host] - 1) % len(answers)]


async def connect(address: str, target: fetch_url.FetchTarget) -> fetch_url.Connection:
    note("dialled", f"{address} {target.host}:{target.port}")
    return await asyncio.open_connection("127.0.0.1", KNOWN["port"])


if __name__ == "__main__":
    with patch.object(fetch_url, "_resolve", resolve), patch.object(fetch_url, "_connect", connect):
        sys.exit(main.run(sys.argv[1:]))
