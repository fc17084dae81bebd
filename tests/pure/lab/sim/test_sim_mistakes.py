"""What `paceline sim` says to wrong flags and files: one clear line and exit code 2, before anything runs."""

from pathlib import Path

import pytest

from paceline.cli.main import run

BAD_FLAGS = [
    ["--mode", "contiguous"],
    ["--mode", "continuous,,static"],
    ["--mode", ""],
    ["--rate", "fast"],
    ["--rate", "0"],
    ["--rate", "-3"],
    ["--rate", "5,x"],
    ["--rate", "5", "--speed", "2"],
    ["--speed", "0"],
    ["--speed", "nan"],
    ["--arrivals", "weekly"],
    ["--arrivals", "gamma:x"],
    ["--arrivals", "all-at-once", "--rate", "3"],
    ["--priorities", "high"],
    ["--num-requests", "0"],
    ["--num-requests", "many"],
    ["--trace", "no-such-file.csv"],
    ["--trace", "azure-cnv"],
    ["--trace", "fixed:10"],
    ["--trace", "."],
    ["--model", "gpt-9"],
    ["--model", "llama-3.1-70b", "--device", "h100"],
    ["--device", "abacus"],
    ["--cost-model", "no-such-model.json"],
    ["--replicas", "0"],
    ["--tensor-parallel-size", "3"],
    ["--tensor-parallel-size", "1,two"],
    ["--link", "string"],
    ["--replicas", "1.5"],
    ["--replicas", "100000"],
    ["--router", "random"],
    ["--host-step-s", "-1"],
    ["--scheduling-policy", "lifo"],
    ["--max-num-seqs", "0"],
    ["--max-num-seqs", "70000"],
    ["--max-num-batched-tokens", "0"],
    ["--max-model-len", "1"],
    ["--max-model-len", "9000000000000"],
    ["--block-size", "0"],
    ["--block-size", "2048"],
    ["--num-blocks", "1"],
    ["--host-blocks", "-1"],
    ["--batch-size", "0"],
    ["--batch-timeout", "-0.1"],
    ["--batch-timeout", "inf"],
    ["--static-order", "random"],
    ["--preemption", "kill"],
    ["--depth", "9"],
    ["--depth", "-1"],
    ["--seed", "-1"],
    ["--faults", "aborts"],
    ["--faults", "aborts=2"],
    ["--faults", "gremlins=0.1"],
    ["--slo", "ttft=soon"],
    ["--slo", "latency=1"],
    ["--device-hour-price", "-1"],
    ["--json", "no/such/folder/out.json"],
    ["--json", "."],
    ["--plot", "out.jpg"],
    ["--plot", "no/such/folder/out.png"],
    ["--plot", "out.png", "--trace", "fixed:10x10"],
    ["--log", "a.jsonl", "--replicas", "2"],
    ["--log", "a.jsonl", "--mode", "continuous,static"],
    ["--log", "a.jsonl", "--rate", "1,2"],
    ["--no-such-flag"],
    ["--rate"],
    ["stray"],
]

BAD_FILES = {
    "empty": "",
    "prose": "It was a dark and stormy night.\n",
    "header only": "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "missing column": "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6,3\n",
    "unknown columns": "when,how_long\n1,2\n",
    "not a number": "req_id,client,arrival_s,prompt_len,output_len\n1,a,0.0,many,3\n",
    "negative": "req_id,client,arrival_s,prompt_len,output_len\n1,a,0.0,-5,3\n",
    "short row": "req_id,client,arrival_s,prompt_len,output_len\n1,a,0.0\n",
    "broken JSON": '{"timestamp": 0, "input_length": 5,\n',
    "missing field": '{"timestamp": 0, "input_length": 5}\n',
    "bad ids": '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": "x"}\n',
}

BAD_COST_MODELS = (
    "",
    "[]",
    '{"format": "paceline-costs", "version": 99}',
    '{"format": "paceline-costs", "version": 1}',
    '{"v": 1, "kind": "header"}\n',  # a run log without a config
    '{"v": 99, "kind": "header"}\n',
    "\x00\xff",
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line a command line is answered with."""
    assert run(["sim", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1 and errors.startswith("paceline: error: ") and len(errors) < 400, errors
    return errors


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=" ".join)
def test_bad_flags(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(["--num-requests", "5", *flags], capsys)
    said = {flag.removeprefix("--") for flag in flags if flag.startswith("--")} | {flags[-1]}
    known_as = {"num-blocks": "num-gpu-blocks-override", "host-blocks": "num-host-blocks", "log": "--log"}
    assert any(word in line or known_as.get(word, word) in line for word in said), "it says what is wrong"
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_files_are_named(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("trace.data").write_text(BAD_FILES[what])
    assert "trace.data" in complaint(["--trace", "trace.data"], capsys)


@pytest.mark.parametrize("text", BAD_COST_MODELS)
def test_bad_cost_models_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("costs.json").write_text(text)
    assert "costs.json" in complaint(["--cost-model", "costs.json"], capsys)


def test_a_folder_without_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    if (tmp_path / "locked").owner() == "root":
        pytest.skip("nothing is locked for root")
    assert "locked/out.json" in complaint(["--json", "locked/out.json"], capsys)
