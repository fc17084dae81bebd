"""`paceline run-batch` as a user runs it: every line gets one result, whatever happens."""

from __future__ import annotations

import fcntl
import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.catalogue.structures import schema_format
from tests.e2e.model_cli import TIMEOUT_S, run, start
from tests.model_folder import CONTEXT, write_model
from tests.waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def line(custom_id: object, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Iterable[object]) -> Path:
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def flags_of(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--load-format", "dummy", "--max-num-batched-tokens", "64")


def batch(model: Path, source: Path, target: Path, *more: str, failed: int = 0) -> str:
    done = run("run-batch", source, target, *flags_of(model), *more, cache=source.parent)
    assert done.returncode == (1 if failed else 0), done.stderr
    assert (f"{failed} request" in done.stderr and f"see the errors in {target}" in done.stderr) == bool(
        failed
    )
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def interrupted(model: Path, *arguments: str, target: Path, num_lines: int, number: int) -> tuple[int, str]:
    """The exit code and errors of a process that gets a signal once it has written some results."""
    process = start("run-batch", *arguments, *flags_of(model), cache=target.parent)
    wait_until(lambda: process.poll() is not None or target.read_bytes().count(b"\n") >= num_lines, TIMEOUT_S)
    assert process.poll() is None
    process.send_signal(number)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, stderr.decode()


# ---------------------------------------------------------------- requests that work

GOOD = [
    line("chat", CHAT, model="tiny", messages=HELLO, max_completion_tokens=7, temperature=0),
    line("text", COMPLETIONS, prompt="hello", max_tokens=7, temperature=0, ignore_eos=True),
    line("ids", COMPLETIONS, prompt=[77, 74, 81, 81, 84], max_tokens=7, temperature=0, ignore_eos=True),
    line("default", COMPLETIONS, prompt="hello", temperature=0, ignore_eos=True, user="me", stream=False),
    line(
        *("several", COMPLETIONS),
        prompt=["one", "another"],
        n=2,
        max_tokens=4,
        seed=5,
        ignore_eos=True,
        top_k=50,
    ),
    line(
        *("chat logprobs", CHAT),
        messages=HELLO,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    ),
    line(
        *("text logprobs", COMPLETIONS),
        prompt="hello",
        max_tokens=3,
        temperature=0,
        logprobs=2,
        ignore_eos=True,
    ),
    line("biased", COMPLETIONS, prompt="x", max_tokens=3, temperature=0, logit_bias={"50": 100}, top_p=None),
    line(
        "stopped", COMPLETIONS, prompt="x", max_tokens=9, temperature=0, logit_bias={"50": 100}, stop=["MM"]
    ),
    line("schema", CHAT, messages=HELLO, response_format=schema_format({"enum": [1234]})),
    line("choice", COMPLETIONS, prompt="x", guided_choice=["left", "right"], seed=1),
]


def test_good_requests(model: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    summary = batch(model, source, target)
    assert summary.startswith("11 answered, 0 failed; ") and "tokens/s out" in summary
    found = {result["custom_id"]: result for result in results(target)}
    assert set(found) == {entry["custom_id"] for entry in GOOD}
    for result in found.values():
        assert set(result) == {"id", "custom_id", "response", "error"} and result["error"] is None
        assert result["response"]["status_code"] == 200 and result["response"]["request_id"]
    bodies = {name: result["response"]["body"] for name, result in found.items()}

    chat = bodies["chat"]
    assert (chat["object"], chat["model"], len(chat["choices"])) == ("chat.completion", "tiny", 1)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["logprobs"] is None
    assert chat["usage"]["prompt_tokens"] == len("<user\nhello>\n<assistant\n")
    usage = chat["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    text = bodies["text"]
    assert text["object"] == "text_completion" and text["choices"][0]["finish_reason"] == "length"
    assert len(text["choices"][0]["text"]) == 7
    assert bodies["ids"]["choices"][0]["text"] == text["choices"][0]["text"]
    assert len(bodies["default"]["choices"][0]["text"]) == 16, "what OpenAI does without max_tokens"

    several = bodies["several"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 10 and several["usage"]["completion_tokens"] == 16

    entries = bodies["chat logprobs"]["choices"][0]["logprobs"]["content"]
    assert len(entries) == bodies["chat logprobs"]["usage"]["completion_tokens"]
    for entry in entries:
        assert entry["top_logprobs"][0]["token"] == entry["token"] and len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode() == entry["token"] and entry["logprob"] < 0
    logprobs = bodies["text logprobs"]["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == bodies["text logprobs"]["choices"][0]["text"]
    assert logprobs["text_offset"] == [0, 1, 2] and len(logprobs["top_logprobs"][0]) == 2

    assert bodies["biased"]["choices"][0]["text"] == "MMM"
    assert bodies["schema"]["choices"][0]["message"]["content"] == "1234"
    assert bodies["choice"]["choices"][0]["text"] in ("left", "right")
    assert {bodies[name]["choices"][0]["finish_reason"] for name in ("schema", "choice")} == {"stop"}
    stopped = bodies["stopped"]["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", "MM")
    assert bodies["stopped"]["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------------- requests that do not

BAD: list[tuple[object, int, str | None, str]] = [
    ("not json", 400, None, "it is not JSON"),
    ("[1]", 400, None, "not a JSON object"),
    ("[" * 100_000, 400, None, "it is not JSON"),
    (line(5, CHAT, messages=HELLO), 400, "custom_id", "custom_id must be a text"),
    ({**line("m", CHAT), "method": "GET"}, 400, "method", "must be POST"),
    (line("u", "/v1/responses", input="x"), 400, "url", "url must be one of"),
    (line("v", "/v1/embeddings", input="x"), 404, None, "/v1/embeddings is not offered"),
    ({**line("b", CHAT), "body": [1]}, 400, "body", "body must be an object"),
    (line("model", CHAT, model="gpt-4", messages=HELLO), 404, "model", "is not loaded"),
    (line("none", CHAT), 400, "messages", "messages must be a list"),
    (line("role", CHAT, messages=[{"role": "x", "content": "y"}]), 400, "messages", "messages[0].role"),
    (line("tools", CHAT, messages=HELLO, tools=[{}]), 400, "tools", "the name of tools[0] must be"),
    (
        line("format", CHAT, messages=HELLO, response_format=schema_format({"type": "strin"})),
        *(400, "response_format", "response_format: Invalid type"),
    ),
    (line("stream", CHAT, messages=HELLO, stream=True), 400, "stream", "stream is not supported"),
    (line("echo", COMPLETIONS, prompt="x", echo="yes"), 400, "echo", "echo must be true or false"),
    (line("typo", COMPLETIONS, prompt="x", max_token=5), 400, "max_token", "did you mean max_tokens"),
    (line("hot", COMPLETIONS, prompt="x", temperature=9), 400, "temperature", "between 0 and 2"),
    (line("kind", COMPLETIONS, prompt="x", max_tokens="5"), 400, "max_tokens", "whole number"),
    (line("stop", COMPLETIONS, prompt="x", stop=5), 400, "stop", "a text or a list"),
    (line("bias", COMPLETIONS, prompt="x", logit_bias={"a": 1}), 400, "logit_bias", "maps token ids"),
    (line("bias id", COMPLETIONS, prompt="x", logit_bias={"9999": 1}), 400, "logit_bias", "is not in"),
    (line("top", CHAT, messages=HELLO, top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (line("prompt", COMPLETIONS, prompt=[]), 400, "prompt", "prompt must be"),
    (line("mixed", COMPLETIONS, prompt=["a", 1]), 400, "prompt", "prompt must be"),
    (line("id", COMPLETIONS, prompt=[10_000]), 400, "prompt", "is not in"),
    (line("long", COMPLETIONS, prompt="x" * CONTEXT), 400, "prompt", "maximum context length"),
    (line("one bad", COMPLETIONS, prompt=["fine", ""]), 400, "prompt", "empty"),
]


def test_vectors_and_scores(model: Path, tmp_path: Path) -> None:
    texts = ["hello", "you", "hello there"]
    lines = [
        line("embed", "/v1/embeddings", input=texts, encoding_format="float"),
        line("rerank", "/v1/rerank", query="hello", documents=texts),
        line("score", "/v1/score", text_1="hello", text_2=texts),
        line("empty", "/v1/embeddings", input=["a", ""]),
        line("none", "/v1/rerank", query="hello", documents=texts, top_n=0),
    ]
    path = write(tmp_path / "in.jsonl", lines)
    batch(model, path, tmp_path / "out.jsonl", "--pooling", "mean", failed=2)
    found = {each["custom_id"]: each["response"] for each in results(tmp_path / "out.jsonl")}
    vectors = np.array([each["embedding"] for each in found["embed"]["body"]["data"]])
    cosines = vectors @ vectors[0]
    scores = [each["score"] for each in found["score"]["body"]["data"]]
    assert np.abs(cosines - scores).max() < 1e-6 and scores[0] > 0.999999
    ranked = found["rerank"]["body"]["results"]
    assert [each["index"] for each in ranked] == np.argsort(-cosines).tolist()
    assert found["rerank"]["body"]["usage"]["prompt_tokens"] == 5 + sum(map(len, texts))
    for name, param in (("empty", "input[1]"), ("none", "top_n")):
        assert (found[name]["status_code"], found[name]["body"]["error"]["param"]) == (400, param)


def test_what_is_known_of_the_prompt_and_the_tokens(model: Path, tmp_path: Path) -> None:
    more = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2, "ignore_eos": True}
    turns = [*HELLO, {"role": "assistant", "content": "well"}]
    lines = [
        line("text", COMPLETIONS, prompt=[77, 74], **more),
        line("chat", CHAT, messages=turns, continue_final_message=True, **more),
    ]
    batch(model, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    found = {result["custom_id"]: result["response"]["body"] for result in results(tmp_path / "out.jsonl")}
    (choice,) = found["text"]["choices"]
    assert choice["prompt_token_ids"] == [77, 74] and len(choice["token_ids"]) == 2
    assert choice["prompt_logprobs"][0] is None and "74" in choice["prompt_logprobs"][1]
    chat = found["chat"]
    assert (
        len(chat["prompt_token_ids"])
        == len("<user\nhello>\n<assistant\nwell")
        == chat["usage"]["prompt_tokens"]
    )
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])


def test_a_completion_can_begin_with_its_prompt(model: Path, tmp_path: Path) -> None:
    asked = {"prompt": [77, 74, 81], "temperature": 0, "ignore_eos": True, "logprobs": 2}
    lines = [
        line("plain", COMPLETIONS, max_tokens=2, **asked),
        line("echo", COMPLETIONS, max_tokens=2, echo=True, **asked),
        line("only", COMPLETIONS, max_tokens=0, echo=True, **asked),
    ]
    batch(model, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    plain, echo, only = (
        next(found for found in results(tmp_path / "out.jsonl") if found["custom_id"] == name)["response"][
            "body"
        ]["choices"][0]
        for name in ("plain", "echo", "only")
    )
    assert echo["text"] == only["text"] + plain["text"] and only["text"]
    logprobs = echo["logprobs"]
    assert logprobs["tokens"] == only["logprobs"]["tokens"] + plain["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert len(only["logprobs"]["tokens"]) == 3 and len(logprobs["token_logprobs"]) == 5
    assert logprobs["token_logprobs"][3:] == plain["logprobs"]["token_logprobs"]
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert only["finish_reason"] == "length"


def test_a_bad_line_gives_an_error_and_stops_nothing(model: Path, tmp_path: Path) -> None:
    good = [line(f"good {index}", COMPLETIONS, prompt="x", max_tokens=2) for index in range(3)]
    duplicate = line("good 0", COMPLETIONS, prompt="y", max_tokens=2)
    lines = [good[0], *(entry for entry, *_ in BAD), "", good[1], duplicate, good[2]]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    said = batch(model, source, target, failed=len(BAD) + 1)
    assert said.startswith(f"3 answered, {len(BAD) + 1} failed; ")
    assert "requests failed (input lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 18 more)" in said
    found = {result["id"]: result for result in results(target)}
    assert len(found) == len(BAD) + 4
    for number, (entry, status, param, says) in enumerate(BAD, 2):
        result = found[f"batch_req_{number}"]
        custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
        assert result["custom_id"] == (custom_id if isinstance(custom_id, str) else None)
        error = result["response"]["body"]["error"]
        assert (result["response"]["status_code"], error["param"]) == (status, param), says
        assert says in error["message"], error
        assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    repeated = found[f"batch_req_{len(BAD) + 4}"]
    assert repeated["custom_id"] == "good 0"
    assert repeated["response"]["body"]["error"]["code"] == "duplicate_custom_id"

    before = target.read_text()
    # With nothing left to do no model is loaded: this one does not exist. The failures are still told.
    said = batch(tmp_path / "no model", source, target, failed=len(BAD) + 1)
    assert said.startswith(f"Nothing to do: all {len(lines) - 1} requests have a result")
    assert target.read_text() == before, "everything had its result"


# ---------------------------------------------------------------- going on


def test_a_killed_run_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    lines = [
        line(
            f"r{index}", COMPLETIONS, prompt=f"prompt {index}", max_tokens=100, temperature=0, ignore_eos=True
        )
        for index in range(32)
    ]
    source = write(tmp_path / "in.jsonl", [*lines, lines[3], "bad"])
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    flags = ("--max-num-seqs", "4")
    batch(model, source, whole, *flags, failed=2)
    files = ("-i", str(source), "-o", str(target))
    interrupted(model, *files, *flags, target=target, num_lines=9, number=signal.SIGKILL)
    done = target.read_bytes().count(b"\n")
    assert done < 34
    with target.open("ab") as file:  # what a crash in the middle of a line leaves
        file.write(b'{"id": "batch_req_31", "custom_id": "r3')
    assert f"{done} done before" in batch(model, source, target, *flags, failed=2)

    def texts(path: Path) -> list[tuple[str, object]]:
        bodies = [(result["id"], result["response"]["body"]) for result in results(path)]
        return sorted((name, body.get("error") or body["choices"][0]["text"]) for name, body in bodies)

    assert texts(target) == texts(whole)


def test_ctrl_c_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    lines = [
        line(f"r{index}", COMPLETIONS, prompt="x", max_tokens=200, ignore_eos=True) for index in range(200)
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    asked = (str(source), str(target), "--max-num-seqs", "2")
    code, stderr = interrupted(model, *asked, target=target, num_lines=2, number=signal.SIGINT)
    assert code == 130 and "Traceback" not in stderr
    assert "run the same command again to continue" in stderr
    assert 2 <= len(results(target)) < 200, "whole lines only"


def test_mistakes_with_files(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", COMPLETIONS, prompt="x")])
    foreign = write(tmp_path / "foreign.jsonl", [{"some": "thing"}])
    held = tmp_path / "held.jsonl"
    with held.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for arguments, says in (
            ((str(source),), "the output file is given nowhere"),
            ((str(source), "out", "-o", "out"), "the output file is given twice"),
            ((str(source), str(source)), "would be written into the file of the requests"),
            ((str(tmp_path / "absent"), str(tmp_path / "out")), "No such file"),
            ((str(source), str(tmp_path)), "Is a directory"),
            ((str(source), str(foreign)), "line 1 is not a result of a batch"),
            ((str(source), str(held)), "another process is writing"),
        ):
            done = run("run-batch", *arguments, cache=tmp_path)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert done.stderr.startswith("paceline: error: ") and says in done.stderr
    assert results(foreign) == [{"some": "thing"}], "a file that is not ours is left as it is"
