"""What the drivers of foreign clients share: a virtual environment per client, a server to talk to, and a verdict.

Everything that is made lies under --work (out/clients by default, which git ignores). A server is started on a free
port unless --url names one. The verdict counts requests on the server's side too: what a client hides, /metrics shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
START_S = 300.0
_COUNT = re.compile(r':http_requests_total\{handler="([^"]*)",method="[A-Za-z]+",status="(\d+)"\} (\S+)')


class Failed(Exception):
    """The run did not show what it has to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that answers."""

    url: str
    model: str

    def counts(self) -> dict[tuple[str, int], int]:
        """Requests so far by route and status."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            found = _COUNT.findall(page.read().decode())
        return {(route, int(status)): int(float(value)) for route, status, value in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a client says of its own run."""

    requests: int
    errors: int
    refusals: int = 0  # requests that were wrong on purpose
    note: str = ""


def options_of(description: str | None, **more: Any) -> argparse.Namespace:
    """The options of every driver; `more` are options of its own with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model to serve (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "clients", help="folder for everything made"
    )
    parser.add_argument("--requests", type=int, default=200, help="requests to make")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    return options


# ---------------------------------------------------------------- environments


def environment_for(work: Path, name: str, packages: Sequence[str]) -> Path:
    """The folder of the client's programs; installs the packages the first time."""
    folder = work / name / "venv"
    mark = folder / ".installed"
    if not mark.exists() or mark.read_text() != " ".join(packages):
        print(f"installing {' '.join(packages)} into {folder}, once ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, *packages], check=True)
        mark.write_text(" ".join(packages))
    return folder / "bin"


def version_of(programs: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [str(programs / "python"), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def offline(**more: str) -> dict[str, str]:
    """The environment of a client: no hub, one thread, no colours."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
    return {**os.environ, **own, **more}


def run_client(command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> None:
    """Run to the end; what the client writes goes into a file, whose end is shown when it fails."""
    with log.open("wb") as output:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    if done.returncode != 0:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise Failed(f"{command[0]} ended with {done.returncode}; {log} has its output")


# ---------------------------------------------------------------- the server


@contextmanager
def target(options: argparse.Namespace, *flags: str) -> Iterator[Target]:
    """The server named by --url, or one of our own that ends with this block."""
    if options.url:
        yield _described(options.url.rstrip("/"))
        return
    log = options.work / f"{Path(sys.argv[0]).stem}-server.log"
    # A step may take long on a machine that does other work beside; that is no error of client or server.
    patient = ("--stuck-after-s", "50")
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *patient, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *([options.model] if options.model else [])], stdout=subprocess.PIPE, stderr=output
        )
    try:
        yield _described(_printed_url(process, log))
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _printed_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The start card is printed when the server is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        label, _, value = line.decode().strip().partition(": ")
        if label == "API":
            return value.removesuffix("/v1")
    raise Failed(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _described(url: str) -> Target:
    until_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
                return Target(url=url, model=json.load(answer)["data"][0]["id"])
        except urllib.error.URLError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


# ---------------------------------------------------------------- verdicts


@contextmanager
def judged(client: str, options: argparse.Namespace, served: Target) -> Iterator[list[Outcome]]:
    """Take the outcome that the block appends, hold it against the server's count, and print one line."""
    before, began_s = served.counts(), time.monotonic()
    outcomes: list[Outcome] = []
    yield outcomes
    seconds = time.monotonic() - began_s
    counts = {key: value - before.get(key, 0) for key, value in served.counts().items()}
    answered = sum(n for (route, status), n in counts.items() if route in GENERATING and status == 200)
    refused = {f"{route} {status}": n for (route, status), n in counts.items() if status >= 400 and n > 0}
    (outcome,) = outcomes
    line = (
        f"{client}: {outcome.requests} requests, {outcome.errors} errors, {seconds:.0f} s; the server answered "
        f"{answered} and refused {sum(refused.values())}{f' {refused}' if refused else ''}; {outcome.note}"
        f"commit {_commit()}"
    )
    if (
        outcome.errors
        or sum(refused.values()) != outcome.refusals
        or min(outcome.requests, answered) < options.requests
    ):
        raise Failed(line)
    print(f"OK {line}")


def finish(main: Any) -> None:
    """Run a driver; one line and status 1 where it failed."""
    try:
        main()
    except (Failed, subprocess.CalledProcessError) as error:
        print(f"FAILED {error}")
        sys.exit(1)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
