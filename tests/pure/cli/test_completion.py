"""Words for the Tab key: what may stand at a place, and the scripts of the shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.completion import FILES, SCRIPTS, complete
from paceline.cli.main import PACELINE, run
from paceline.config.engine import POLICIES


def words(line: str) -> list[str]:
    """The words offered at the end of a command line."""
    return [offered.partition("\t")[0] for offered in complete(PACELINE, line.split(" "))]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ser", ["serve"]),
        ("serve --sched", ["--scheduling-policy"]),
        ("serve --max_num_s", ["--max-num-seqs"]),
        ("serve --port 1 --devi", ["--device"]),
        ("serve --scheduling-policy ", list(POLICIES)),
        ("serve --device=c", ["--device=cpu", "--device=cuda"]),
        ("serve --device = c", ["cpu", "cuda"]),  # as bash cuts it
        ("serve --device =", ["auto", "cpu", "cuda"]),
        ("serve --no-enable-p", ["--no-enable-prefix-caching"]),
        ("serve --help", ["--help-all", "--help"]),
        ("serve --port ", []),
        ("serve --port 8000 --api-keys-file ", [FILES]),
        ("keys ", ["add", "ls", "revoke"]),
        ("keys add --class s", ["standard", "spot"]),
        ("bench lat", ["latency"]),
        ("policy sh", ["shortest"]),
        ("completion ", list(SCRIPTS)),
        ("run-batch ", [FILES]),
        ("run-batch in.jsonl out.jsonl ", []),
        ("run -- --x", [FILES]),
        ("--vers", ["--version"]),
        ("nothing like this ", []),
    ],
)
def test_words_at_a_place(line: str, offered: list[str]) -> None:
    assert words(line) == offered


def test_models_on_this_machine_are_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert words("rm ") == [FILES]


def test_words_have_descriptions() -> None:
    assert complete(PACELINE, ["serv"]) == ["serve\tServe a model over HTTP with the OpenAI API."]


def test_words_are_found_without_anything_heavy() -> None:
    code = (
        "import sys; from paceline.cli.main import run; run(['__complete', 'serve', '--sched']); "
        "sys.exit(bool({'torch', 'numpy', 'rich', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_is_valid(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert run(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0


def test_the_shell_is_known_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run(["completion"]) == 0
    assert "complete -c paceline" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert run(["completion"]) == 2
    assert "there is no completion for csh; give bash, zsh, fish" in capsys.readouterr().err


ASKED = {  # how a shell is asked for the words at the end of $LINE
    "bash": 'source "$SCRIPT"; read -ra COMP_WORDS <<< "$LINE"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
    '_paceline paceline; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": "source $SCRIPT; complete -C $LINE",
}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_completes_commands_and_flags(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command, script = tmp_path / "paceline", tmp_path / "script"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    command.chmod(0o755)
    script.write_text(SCRIPTS[shell])
    for line, word in (("paceline ser", "serve"), ("paceline serve --sched", "--scheduling-policy")):
        more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LINE": line, "SCRIPT": str(script)}
        done = subprocess.run(
            [shell, "-c", ASKED[shell]], env=os.environ | more, capture_output=True, text=True, check=False
        )
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [word], done.stderr
