"""Compares what users see of this tree with what they saw at another commit.

`python -m tools.compare_surface REV` checks REV out beside this tree and asks both, from outside: the flags, values and
defaults of every command, the OpenAPI document and the names of all metrics without their descriptions, the answer of a
tiny model, and the run log of a simulation. It prints what differs and exits 1 if anything does, so that a change which
only moves or renames code can show that it moved nothing else.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.model_folder import write_model

ROOT = Path(__file__).resolve().parents[1]
READY_S = 90.0
RECENT_S = 3.0  # figures of the last minute are among the metrics once there is a little of it
SIMULATION = ("sim", "--num-requests", "200", "--rate", "12", "--seed", "7", "--log")
WORDS = frozenset(("description", "summary", "title", "version"))  # of an OpenAPI document
CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 24,
    "seed": 3,
    "temperature": 1.0,
    "logprobs": True,
}


def surface(tree: Path, model: Path, scratch: Path) -> dict[str, str]:
    """What the commands, the server and the simulator of one tree say, by the name of the part."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PACELINE_CACHE": str(scratch)}
    reference = tree / "docs" / "reference"
    return {
        "flags": _table_columns(reference / "options.md", ("flag", "values", "default")),
        **_served(tree, model, environment),
        "run log": _simulated(tree, scratch / "run.jsonl", environment),
    }


def _table_columns(page: Path, wanted: tuple[str, ...]) -> str:
    """The named columns of every table of a page, below their headings. The page is generated and checked by a test."""
    lines: list[str] = []
    columns: list[int] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            lines.append(line)
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not columns:
            columns = [cells.index(name) for name in wanted if name in cells]
        elif not set(line) <= set("|-: "):
            # The order of commands, flags and choices is a matter of help pages.
            lines.append(" | ".join(", ".join(sorted(cells[index].split(", "))) for index in columns))
    return "\n".join(_sorted_below_headings(lines))


def _sorted_below_headings(lines: list[str]) -> Iterator[str]:
    blocks: dict[str, list[str]] = {}
    heading = ""
    for line in lines:
        if line.startswith("## "):
            heading = line
        blocks.setdefault(heading, []).append(line)
    for heading in sorted(blocks):
        yield from sorted(blocks[heading])


def _served(tree: Path, model: Path, environment: Mapping[str, str]) -> dict[str, str]:
    with _server(tree, model, environment) as url:
        document = json.loads(_get(f"{url}/openapi.json"))
        chat = json.loads(_get(f"{url}/v1/chat/completions", {"model": "tiny", **CHAT}))
        time.sleep(RECENT_S)
        metrics = _get(f"{url}/metrics")
    families = sorted(line for line in metrics.splitlines() if line.startswith("# TYPE"))
    return {
        "openapi": json.dumps(_without_words(document), indent=1, sort_keys=True),
        "answer": json.dumps(chat["choices"], indent=1, sort_keys=True),
        "metrics": "\n".join(families),
    }


@contextmanager
def _server(tree: Path, model: Path, environment: Mapping[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--load-format", "dummy", "--port", "0"]
    flags = ["--served-model-name", "tiny", "--log-format", "json", "--disable-log-stats", "--seed", "0"]
    process = subprocess.Popen(
        [*command, *flags],
        cwd=tree,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found is not None:
            _wait_until_ready(found[0])
            return found[0]
    raise SystemExit("the server did not start:\n" + "".join(printed))


def _wait_until_ready(url: str) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            _get(f"{url}/health/ready")
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


def _get(url: str, body: Mapping[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: sorted(entry, key=str) if key == "enum" else _without_words(entry)
            for key, entry in value.items()
            if not (key in WORDS and isinstance(entry, str))
        }
    return [_without_words(entry) for entry in value] if isinstance(value, list) else value


def _simulated(tree: Path, log: Path, environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "paceline", *SIMULATION, str(log)]
    subprocess.run(command, cwd=tree, env=dict(environment), check=True, stdout=subprocess.DEVNULL)
    return log.read_text(encoding="utf-8")


def main(revision: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = write_model(scratch / "tiny")
        before_tree = scratch / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before_tree), revision], check=True)
        try:
            (scratch / "then").mkdir()
            (scratch / "now").mkdir()
            before = surface(before_tree, model, scratch / "then")
            after = surface(ROOT, model, scratch / "now")
        finally:
            subprocess.run([*git, "remove", "--force", str(before_tree)], check=True)
    return _told(before, after, revision)


def _told(before: Mapping[str, str], after: Mapping[str, str], revision: str) -> int:
    num_different = 0
    for part in before:
        old, new = before[part].splitlines(), after[part].splitlines()
        difference = list(
            difflib.unified_diff(old, new, f"{part} at {revision}", f"{part} now", lineterm="", n=0)
        )
        num_different += bool(difference)
        print(f"{part}: {'differs' if difference else 'the same'} ({len(new):,} lines)")
        for line in difference[:200]:
            print(f"  {line[:300]}")
    return 1 if num_different else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.compare_surface REV")
    sys.exit(main(sys.argv[1]))
