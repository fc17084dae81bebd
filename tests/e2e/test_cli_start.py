"""What a command loads before it has work to do: help, mistakes and talking to a server need no heavy library."""

import subprocess
import sys

import pytest

LIGHT = """
import sys
from paceline.cli.main import run
assert run(["sim", "--help"]) == 0
assert not {"numpy", "matplotlib"} & set(sys.modules)
helped = ["", "chat", "run", "run-batch", "doctor", "pull", "bench serve", "bench sweep", "bench compare"]
assert all(run([*command.split(), "--help"]) == 0 for command in helped)
assert all(run(["bench", name, "--help-all"]) == 0 for name in ("throughput", "latency"))
mistakes = [
    "run --temperature 9 hi",
    "chat --url ftp://localhost",
    "bench serve --rate 0",
    "bench throughput --shape tiny --workload nanp",
]
assert all(run(command.split()) == 2 for command in mistakes)
import paceline.cli.remote, paceline.cli.chat.conversation
"""


@pytest.mark.parametrize("code", [LIGHT, "import sys, paceline; paceline.SamplingParams"], ids=["cli", "api"])
def test_what_needs_no_model_loads_no_torch(code: str) -> None:
    command = [sys.executable, "-c", f"{code}\nassert 'torch' not in sys.modules"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for flag in ("--recheck", "--prompt-tokens", "--max-concurrency", "--fail-if-worse"):
        assert (flag in done.stdout) == (code == LIGHT)
