"""`paceline bench drafts` as a user runs it, on a model with random weights."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from paceline.cli.main import run as run_command
from tests.model_folder import write_model

QUESTIONS = [
    {"category": category, "turns": [f"question {number} about {category}", "and more"]}
    for category in ("coding", "writing")
    for number in range(3)
]
LOG = [
    {"timestamp": 2.0, "input": "say it again", "output": "one two three four five six seven eight"},
    {"timestamp": 1.0, "input": "say it", "output": "one two three four five six seven eight"},
    {"timestamp": 3.0, "input": "not this", "output": "nine"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def lines(path: Path, entries: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def engine(model: str) -> tuple[str, ...]:
    return ("--model", model, "--load-format", "dummy", "--num-gpu-blocks-override", "64")


def test_questions_with_and_without_drafts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, target = lines(tmp_path / "questions.jsonl", QUESTIONS), tmp_path / "out.json"  # type: ignore[arg-type]
    flags = ("--clients", "1,2", "--rounds", "2", "--tokens", "24", "--questions", "2", "--json", str(target))
    assert run_command(["bench", "drafts", *engine(model), "--data", str(data), *flags]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{model} on ") and shown[-1] == f"Wrote {target}"
    value = json.loads(target.read_text())
    assert (value["kind"], value["engine"]["speculative_config"]) == ("drafts", "auto")
    found = [(row["clients"], row["category"]) for row in value["results"]]
    names = ("coding", "writing", "all")
    assert found == [(clients, name) for clients in (1, 2) for name in names]
    assert all(row["ratio"] > 0 for row in value["results"])
    assert all(row["tokens_per_step"] >= 1 for row in value["results"] if row["category"] != "all")


@pytest.mark.parametrize("kind", ["file", "folder", "archive"])
def test_a_log_is_said_again(
    model: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "log.jsonl", LOG)
    if kind == "folder":
        path = tmp_path
    elif kind == "archive":
        text, path = path.read_bytes(), tmp_path / "log.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("runs/log.jsonl")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    target = tmp_path / "out.json"
    flags = ("--requests", "2", "--json", str(target))
    assert run_command(["bench", "drafts", *engine(model), "--script", str(path), *flags]) == 0
    capsys.readouterr()
    plain, history = json.loads(target.read_text())["results"]
    assert (plain["method"], history["method"], plain["num_requests"]) == ("ngram", "history", 2)
    assert history["tokens_per_step"] > 1.2 * plain["tokens_per_step"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "give --data with questions, or --script"),
        (("--data", "x", "--script", "y"), "give --data with questions, or --script"),
        (("--data", "nothing.jsonl"), "cannot be read"),
        (("--data", "EMPTY"), "there is no question in it"),
        (("--data", "BAD"), "line 1 is no question with category and turns"),
        (("--script", "BAD"), "line 1 has no timestamp, input and output"),
        (("--data", "GOOD", "--clients", "0"), "--clients '0': give numbers from 1"),
        (("--data", "GOOD", "--categories", "songs"), "there is no 'songs'; there are coding, writing"),
        (("--data", "GOOD", "--speculative-config", "off"), "makes no drafts"),
    ],
)
def test_what_cannot_be_measured(
    flags: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "EMPTY": lines(tmp_path / "empty.jsonl", []),
        "BAD": lines(tmp_path / "bad.jsonl", [{"category": "coding"}]),
        "GOOD": lines(tmp_path / "good.jsonl", QUESTIONS),  # type: ignore[arg-type]
    }
    given = [str(files.get(flag, flag)) for flag in flags]
    assert run_command(["bench", "drafts", *given]) == 2
    assert says in capsys.readouterr().err
