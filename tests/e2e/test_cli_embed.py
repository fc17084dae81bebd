"""`paceline embed`: texts by line in, an array of vectors out; what is wrong is told with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.cli import embed
from tests.e2e.model_cli import run, run_process
from tests.model_folder import ENCODER_CONTEXT, write_encoder

TEXTS = [f"text number {number} " * (1 + number % 3) for number in range(11)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Strings and objects in turns."""
    path = tmp_path / "texts.jsonl"
    path.write_text(
        "".join(json.dumps(text if at % 2 else {"text": text}) + "\n" for at, text in enumerate(TEXTS))
    )
    return path


def embedded(model: Path, *arguments: object, process: bool = False, **options: Any) -> Any:
    given = (*map(str, arguments), "--model", str(model), "--load-format", "dummy")
    return (run_process if process else run)("embed", *given, cache=model, **options)


def test_row_i_is_the_vector_of_line_i_over_windows(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "WINDOW", 4)
    done = embedded(model, texts, tmp_path / "vectors.npy")
    assert done.returncode == 0, done.stderr
    assert "11 vectors in " in done.stderr and not done.stdout
    found = np.load(tmp_path / "vectors.npy")
    assert found.dtype == np.float32 and sorted(path.name for path in tmp_path.iterdir()) == [
        "texts.jsonl",
        "vectors.npy",
    ]
    with LLM(str(model), load_format="dummy") as llm:
        wanted = np.stack([output.outputs.data for output in llm.embed(TEXTS, use_tqdm=False)])
    assert np.abs(found - wanted).max() < 1e-6


def test_another_field_and_fewer_numbers(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "articles.jsonl", tmp_path / "vectors.npy"
    source.write_text(json.dumps({"body": "hello " * 200}) + "\n")
    long = embedded(model, source, target, "--field", "body")
    assert long.returncode == 2 and f"{source}, line 1: This model's maximum context" in long.stderr
    assert f"is {ENCODER_CONTEXT} tokens" in long.stderr and not target.exists()
    cut = embedded(model, source, target, "--field", "body", "--truncate", "--dimensions", 8, process=True)
    assert cut.returncode == 0, cut.stderr
    assert np.load(target).shape == (1, 8)


@pytest.mark.parametrize(
    "line, says",
    [
        ("{not json", "line 3 is not JSON"),
        ("5", "line 3 is neither a string nor an object"),
        ('{"body": "x"}', "line 3 has no text in 'text'"),
        ('{"text": null}', "line 3 has no text in 'text'"),
        ('""', "line 3 is empty, and an empty text has no vector"),
        ("", "line 3 is not JSON"),
        ("[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_before_a_model_is_loaded(
    tmp_path: Path, line: str, says: str
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text(f'"one"\n"two"\n{line}\n')
    done = run("embed", str(source), str(tmp_path / "v.npy"), "--model", "/absent", cache=tmp_path)
    assert done.returncode == 2 and says in done.stderr and not (tmp_path / "v.npy").exists()


def test_files_that_cannot_be_used(texts: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((), "give two files"),
        ((texts,), "give two files"),
        ((tmp_path / "absent", tmp_path / "v.npy"), "No such file"),
        ((texts, texts), "would be written over the texts"),
        ((texts, tmp_path / "none" / "v.npy"), "does not exist"),
    ):
        done = run("embed", *map(str, arguments), cache=tmp_path)
        assert done.returncode == 2 and says in done.stderr, done.stderr
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "has no texts" in run("embed", str(empty), str(tmp_path / "v.npy"), cache=tmp_path).stderr
