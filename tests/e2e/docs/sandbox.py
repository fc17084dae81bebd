"""Where documented commands run: a folder with a tiny model in the place of the default one, and one server.

`paceline` and `python3` come first on the path. `paceline serve` of a page reads and checks all its options and ends
before it would listen: one server, started for real, answers the commands that talk to one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.request import Request, urlopen

from tests.documented import ROOT, Command
from tests.e2e.client_server import PATIENCE_S, ClientServer
from tests.e2e.model_cli import environment
from tests.model_folder import write_model, write_weights

CONTEXT = 256
TIMEOUT_S = 300
DEFAULT_URL = re.compile(r"http://(127\.0\.0\.1|localhost):8000")
_END = "\x1e"
# Runs before anything else in every interpreter of the sandbox.
SITE = """
import os
import pathlib
from paceline.models.files import fetch
fetch.fetch_packaged = lambda *arguments, **options: pathlib.Path(os.environ["DOCUMENTED_MODEL"])
"""
PACELINE = """
import sys
from paceline.cli import main
from paceline.cli.serve import run
run.run_server = lambda *configs: 0
main.main()
"""


class OpenServer(ClientServer):
    """Without keys, as on a newcomer's machine; the model is the default one, which is the sandbox's."""

    def _model_flags(self) -> list[str]:
        return ["--pooling", "mean"]

    def reset(self) -> None:
        """Undo what a page may have turned while the server runs."""
        for path, body in {"dial": b'{"off": true}', "policy": b'{"policy": "fcfs"}'}.items():
            address, headers = f"{self.url}/v1/admin/{path}", {"Content-Type": "application/json"}
            urlopen(Request(address, data=body, headers=headers, method="PUT"), timeout=PATIENCE_S).close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one command."""

    code: int
    output: str


class Sandbox:
    """A folder to run commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_weights(write_model(folder / "model", max_position_embeddings=CONTEXT))
        for name, text in {"site/sitecustomize.py": SITE, "site/documented_paceline.py": PACELINE}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self._script("paceline", "-m documented_paceline")
        self._script("python3", "")
        self._script("python", "")

    @cached_property
    def run_log(self) -> bytes:
        """A recorded run."""
        self._run("sim", "--rate", "8", "--num-requests", "60", "--log", "run.jsonl.gz")
        return (self.folder / "run.jsonl.gz").read_bytes()

    @cached_property
    def cost_model(self) -> bytes:
        """What was fitted to it."""
        assert self.run_log
        self._run("sim", "--calibrate", "run.jsonl.gz")
        return (self.folder / "run.costs.json").read_bytes()

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            [self.folder / "bin" / "paceline", *arguments],
            cwd=self.folder,
            env=environment(self.folder, **self.variables),
            check=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )

    @property
    def variables(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": self._modules, "DOCUMENTED_MODEL": str(self.model)}

    @property
    def _modules(self) -> str:
        return f"{self.folder / 'site'}:{ROOT / 'src'}:{ROOT}"

    def run(self, commands: list[Command], folder: Path, url: str) -> tuple[list[Outcome], str]:
        """Run the commands of a page in one shell; gives what each printed, and what all of them complained of."""
        lines = [f"{self._adapted(command, url)}\nprintf '{_END}%s{_END}' $?" for command in commands]
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", "\n".join(lines)],
            cwd=folder,
            env=environment(self.folder, **self.variables, PYTHONWARNINGS="ignore"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        parts = done.stdout.split(_END)
        found = [
            Outcome(code=int(code), output=output)
            for output, code in zip(parts[::2], parts[1::2], strict=False)
        ]
        return found, done.stderr

    def _adapted(self, command: Command, url: str) -> str:
        """The server of the test in place of the one on the page, and little work where a page leaves it open."""
        text = DEFAULT_URL.sub(url, command.text)
        if command.is_program:
            return f"python3 - <<'PROGRAM'\n{text}PROGRAM"
        text = re.sub(r"\bpaceline (dial|policy|top|bench serve)\b", rf"paceline \1 --url {url}", text)
        if "--num-requests" not in text and not re.search("--calibrate|--compare", text):
            text = text.replace("paceline sim ", "paceline sim --num-requests 12 ")
        if "paceline top" in text and "--once" not in text:  # it would go on until it is ended
            text = text.replace("paceline top", "paceline top --once")
        text = text.replace(" --ui", "")  # the same: the page itself is looked at in a browser
        text = text.replace("paceline tune", "paceline tune --num-requests 20 --max-trials 6 --seconds 20")
        if (
            "--input-len" not in text
        ):  # the words of the default prompts are more tokens than the tiny model takes
            text = text.replace("paceline bench serve", "paceline bench serve --input-len 8 --output-len 8")
        text = text.replace("--verify ", "--verify-seconds 2 --verify ")
        return text.replace("sleep 1;", "sleep 0.1;")

    def _script(self, name: str, arguments: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        # A page may set PYTHONPATH for its own modules; ours stay behind them.
        modules = f"export PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}{self._modules}"
        path.write_text(f'#!/bin/sh\n{modules}\nexec {sys.executable} {arguments} "$@"\n')
        path.chmod(0o755)
