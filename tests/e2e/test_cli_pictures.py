"""`paceline run --image` and `paceline chat --image`: files in messages, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.model_cli import run
from tests.model_folder import write_model
from tests.pictures import encoded, picture
from tests.vision_folder import write_tile_model

ASK = ("--load-format", "dummy", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tile_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = tmp_path_factory.mktemp("pictures")
    paths = [made / "a.png", made / "b.jpg"]
    paths[0].write_bytes(encoded(picture(64, 32)))
    paths[1].write_bytes(encoded(picture(100, 100), "JPEG"))
    return paths


def test_both_commands_answer_as_the_library(folder: Path, files: list[Path]) -> None:
    content = [*({"type": "image", "image": path} for path in files), {"type": "text", "text": "Hi"}]
    with LLM(str(folder), load_format="dummy", num_blocks=600) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    named = ("--image", ",".join(map(str, files)))
    found = run("run", "--model", folder, *ASK, *named, "Hi")
    assert found.returncode == 0, found.stderr
    assert found.stdout.removesuffix("\n") == output.outputs[0].text
    chatted = run("chat", "--model", folder, *ASK, *named, "-q", "Hi")
    assert chatted.stdout == found.stdout


def test_files_that_are_wrong_are_named(folder: Path, files: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    for path, words in ((tmp_path / "none.png", "No such file"), (text, "no known format")):
        found = run("run", "--model", folder, *ASK, "--image", path, "Hi")
        assert found.returncode == 2 and words in found.stderr and str(path) in found.stderr
    found = run("run", "--model", folder, *ASK, "--raw", "--image", files[0], "Hi")
    assert found.returncode == 2 and "--raw" in found.stderr


def test_a_model_of_text_says_so(files: list[Path], tmp_path: Path) -> None:
    plain = write_model(tmp_path / "text")
    found = run("run", "--model", plain, *ASK, "--image", files[0], "Hi")
    assert found.returncode == 1 and 'must be a part of type "text"' in found.stderr
