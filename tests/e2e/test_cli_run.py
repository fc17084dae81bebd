"""`paceline run` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.model_cli import TIMEOUT_S, TINY, run, start
from tests.model_folder import write_model

LLM_CODE = """
import sys
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", max_num_batched_tokens=64)
sampling = SamplingParams(temperature=0, max_tokens=20)
(chat,) = llm.chat([{"role": "user", "content": "hello"}], sampling, use_tqdm=False)
(raw,) = llm.generate("hello", sampling, use_tqdm=False)
sys.stdout.write(chat.outputs[0].text + "\\0" + raw.outputs[0].text)
"""


def test_the_answer_alone_is_on_standard_output(model: str, tmp_path: Path) -> None:
    expected = subprocess.run(
        [sys.executable, "-c", LLM_CODE, model], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    chat, raw = expected.stdout.split("\0")
    assert chat != raw
    flags = ("--model", model, *TINY, "--max-tokens", "20")
    answered = run("run", *flags, "hello", cache=tmp_path)
    assert (answered.returncode, answered.stdout, answered.stderr) == (0, chat.rstrip("\n") + "\n", "")
    continued = run("run", *flags, "--raw", "--stats", cache=tmp_path, stdin="hello\n")
    assert (continued.returncode, continued.stdout) == (0, raw.rstrip("\n") + "\n")
    assert re.fullmatch(
        r"prompt 5 tokens, first token after [\d.]+ s, 20 tokens at [\d.]+ tokens/s\n", continued.stderr
    )
    stop = raw[7:9]
    stopped = run(
        "run", *flags, "--raw", "--stop", "no such", "--stop", stop, "-", cache=tmp_path, stdin="hello"
    )
    assert stopped.stdout == raw[: raw.index(stop)] + "\n"


def test_ctrl_c_keeps_what_there_is(endless: str, tmp_path: Path) -> None:
    process = start(
        "run", "--model", endless, *TINY, "--max-tokens", "90000", "--stats", "go", cache=tmp_path
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=TIMEOUT_S)
    text = (first + rest).decode()
    assert process.returncode == 130
    assert text.endswith("\n") and 1 < len(text) < 80_000
    assert f"{len(text) - 1} tokens at" in stderr.decode()
    assert "Traceback" not in stderr.decode()


def test_a_reader_that_goes_away_is_no_error(endless: str, tmp_path: Path) -> None:
    process = start("run", "--model", endless, *TINY, "--max-tokens", "90000", "go", cache=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(timeout=TIMEOUT_S) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_model_without_a_template_continues_the_prompt(tmp_path: Path) -> None:
    plain = str(write_model(tmp_path / "plain", template=None))
    flags = ("--model", plain, *TINY, "--max-tokens", "8", "hello")
    answered = run("run", *flags, cache=tmp_path)
    assert answered.returncode == 0 and answered.stdout
    assert answered.stdout == run("run", "--raw", *flags, cache=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (("",), "", "the prompt is empty"),
        (("-",), "\n", "the prompt is empty"),
        ((), b"\xff\xfe", "not UTF-8"),
        (("--temperature", "9", "hi"), "", "--temperature must be between 0 and 2, not 9.0"),
        (("--max-tokens", "0", "hi"), "", "--max-tokens must be between 1"),
        (("--block-size", "0", "hi"), "", "--block-size must be at least 1"),
        (("--load-format", "zip", "hi"), "", "--load-format must be one of"),
        (("--raw", "--system-prompt", "x", "hi"), "", "--raw has none"),
        (("--model", "/no/such/model", "hi"), "", "there is no such file or folder"),
        (("--model", "nonsense", "hi"), "", "is not a model"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], stdin: str | bytes, says: str, tmp_path: Path
) -> None:
    done = run("run", *arguments, cache=tmp_path, stdin=stdin)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("paceline: error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr and done.stdout == ""
