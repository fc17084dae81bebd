"""`paceline bench` as a user runs it, on a shape that any machine can compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import LLM
from paceline.cli.main import run as run_command
from paceline.lab.bench.shapes import write_shape
from paceline.lab.bench.throughput import load, run_workload, sampling_of
from paceline.lab.bench.workloads import BenchWorkload, shared_prefix
from paceline.lab.sim.recorded import read_recorded
from tests.e2e.model_cli import TIMEOUT_S, environment, run
from tests.model_folder import write_model

TINY = ("--shape", "tiny", "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", "64M")
# What a machine with a GPU may lack: everything the engine itself does not need.
ABSENT = (
    *("typer", "click", "rich", "tqdm", "pydantic", "msgspec", "uvicorn", "uvloop", "httptools", "yaml"),
    *("prometheus_client", "gguf", "huggingface_hub", "transformers"),
)
FORBIDDING = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from paceline.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def run_plain(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where only what the engine needs is installed."""
    return subprocess.run(
        [sys.executable, "-c", FORBIDDING, "bench", *arguments],
        capture_output=True,
        text=True,
        env=environment(cache),
        timeout=TIMEOUT_S,
        check=False,
    )


def test_throughput_gives_a_table_and_a_file(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    flags = ("--workload", "decode-b8,decode-b1", "--recheck", "2", "--json", str(target))
    done = run("bench", "throughput", *TINY, *flags, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny on ") and "ready after" in lines[0]
    assert "workload" in lines[2] and "ms per step" in lines[2]
    assert [line.split()[0] for line in lines[4:6]] == ["decode-b8", "decode-b1"]
    assert "2 requests, 512 tokens; 2 equal, 0 different" in done.stdout
    assert lines[-1] == f"Wrote {target}"
    value = json.loads(target.read_text())
    assert (value["format"], value["kind"], value["model"]) == ("paceline-bench", "throughput", "tiny")
    assert value["command"].startswith("paceline bench throughput --shape tiny")
    assert value["versions"]["paceline"] == paceline.__version__ and value["versions"]["numba"]
    assert value["hardware"]["cpu"]["name"] and value["hardware"]["memory"]["total_bytes"] > 0
    assert value["engine"]["max_model_len"] == 4096 and value["engine"]["max_num_seqs"] == 1024
    assert value["engine"]["kv_cache_dtype"] == value["engine"]["dtype"]
    assert value["startup_s"] > 0 and "error" not in value
    first, second = value["results"]
    assert (first["num_requests"], first["output_tokens"], first["temperature"]) == (8, 2048, 0.0)
    assert (second["steps"], second["cached_tokens"], second["preemptions"]) == (256, 0, 0)
    assert (value["recheck"]["num_requests"], value["recheck"]["differences"]) == (2, [])


@pytest.mark.campaign
def test_modes_are_measured_one_after_the_other(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    flags = ("--shape", "tiny", "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", str(2**26))
    modes = ("--mode", "continuous,dynamic,static", "--batch-size", "4", "--json", str(target))
    done = run_plain(tmp_path, "throughput", "--workload", "decode-b8", *flags, *modes)
    assert done.returncode == 0, done.stderr
    expected = [("decode-b8", mode) for mode in ("continuous", "dynamic", "static")]
    lines = done.stdout.splitlines()
    assert lines[0].count(" / ") == 2  # each was started
    assert lines[1].split()[:2] == ["workload", "mode"]
    assert [tuple(line.split()[:2]) for line in lines[3:6]] == expected
    value = json.loads(target.read_text())
    assert [(result["workload"], result["mode"]) for result in value["results"]] == expected
    steps = [result["steps"] for result in value["results"]]
    assert steps[0] == 256 < steps[2]  # two batches of four, one after the other
    sizes = [value["engine"], *value["further_engines"]]
    assert [engine["mode"] for engine in sizes] == ["continuous", "dynamic", "static"]
    assert {engine["max_num_batched_tokens"] for engine in sizes} == {512}


def test_a_second_run_of_a_workload_finds_an_empty_cache(tmp_path: Path) -> None:
    """The same prompts twice in one engine: a shared prefix is found within a run, never from the one before."""
    options = write_shape("tiny", tmp_path)
    llm, _ = load(LLM, options | {"max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**26})
    work = BenchWorkload(name="shared", requests=tuple(shared_prefix(4, 64, 16, 3)))
    (one, first), (two, second) = (run_workload(llm, work, sampling_of(work, None, 0)) for _ in range(2))
    assert one.cached_tokens == two.cached_tokens == 192, "three requests took 64 tokens over from the first"
    told = [[output.outputs[0].token_ids for output in outputs] for outputs in (first, second)]
    assert told[0] == told[1]


def test_latency_gives_percentiles(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    flags = ("--rate", "50", "--num", "10", "--prompt-tokens", "8", "--output-tokens", "4")
    log = tmp_path / "run.jsonl.gz"
    files = ("--json", str(target), "--run-log", str(log))
    done = run("bench", "latency", *TINY, *flags, *files, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TTFT p50 / p90 / p99 ms" in done.stdout and "8x4@50" in done.stdout
    recorded = read_recorded(str(log)).workload
    assert sum(not recorded.tenants[tenant].startswith("warm-up") for tenant in recorded.tenant) == 10
    (result,) = json.loads(target.read_text())["results"]
    assert (result["num_requests"], result["output_tokens"]) == (10, 40)
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p99"] <= result["e2e_s"]["p99"]
    assert result["ttft_s"]["count"] == 10
    assert 0 < result["itl_s"]["count"] <= 30  # tokens that come together on a busy machine are one delivery


def test_a_trace_that_is_not_given_is_told(tmp_path: Path) -> None:
    flags = ("--workload", "decode-b1,azure-conv-1000")
    done = run("bench", "throughput", *TINY, *flags, cache=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("azure-conv-1000 is left out: its lengths come from a trace")
    assert "decode-b1 " in done.stdout


def test_a_trace_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:46.{index:06},3,1\n" for index in range(1000))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    target = tmp_path / "result.json"
    flags = ("--workload", "azure-conv-1000", "--trace", str(trace), "--json", str(target))
    done = run("bench", "throughput", *TINY, *flags, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(target.read_text())["results"]
    assert (result["num_requests"], result["prompt_tokens"], result["output_tokens"]) == (1000, 3000, 1000)


@pytest.mark.parametrize(
    ("command", "modes"),
    [
        ("throughput --workload decode-b1 --mode continuous,static", ["continuous", "static"]),
        ("latency --rate 50 --num 3", [None]),
    ],
)
def test_it_runs_where_only_the_engine_can(command: str, modes: list[str | None], tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    flags = (*TINY, "--json", str(target))
    done = run_plain(tmp_path, *command.split(), *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("-----")
    assert [result.get("mode") for result in json.loads(target.read_text())["results"]] == modes


def test_embed_counts_the_texts_alone(tmp_path: Path) -> None:
    flags = ("--pooling", "mean", "--texts", "12", "--clients", "3", "--short", "5", "--long", "40")
    done = run("bench", "embed", *TINY, *flags, "--json", str(tmp_path / "out.json"), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 clients" in done.stdout and "latency p50 / p90 / p99 ms" in done.stdout
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    long = (result["num_tokens"] - 12 * 5) / 35
    assert result["num_texts"] == result["latency_s"]["count"] == 12 and long == int(long) and long > 0
    refused = run("bench", "embed", *TINY, "--long", "100000", "--pooling", "mean", cache=tmp_path)
    assert refused.returncode == 2 and "a text of 100000 tokens is longer" in refused.stderr
    chat = run("bench", "embed", *TINY, "--texts", "1", cache=tmp_path)
    assert chat.returncode == 1 and "--pooling" in chat.stderr


def test_structured_compares_with_free_text_of_the_same_length(tmp_path: Path) -> None:
    schema, target = tmp_path / "digits.json", tmp_path / "result.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}')
    flags = ("--schema", str(schema), "--clients", "4", "--rounds", "1", "--json", str(target))
    done = run("bench", "structured", *TINY, *flags, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (result,) = json.loads(target.read_text())["results"]
    # Compact: three digits, two commas, two brackets; the made-up words have none of them.
    assert (result["workload"], result["output_tokens"], result["cut_off"]) == ("digits", 4 * 7, 0)
    assert result["free_tokens_per_s"] > 0 and result["structured_tokens_per_s"] > 0
    assert result["tokens_per_step"] >= 1 and "digits" in done.stdout and "all" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("throughput --workload nanp", "did you mean nano? (known: nano, decode-b1,"),
        ("throughput --shape gpt", "--shape must be one of qwen3-0.6b,"),
        ("throughput --shape tiny --model x", "--shape and --model name two models"),
        (
            "throughput --shape tiny --max-model-len 100 --workload nano",
            "--max-model-len or leave the workload out",
        ),
        ("throughput --shape tiny --workload azure-conv-1000", "name its file with --trace"),
        ("throughput --shape tiny --recheck -1", "--recheck must be at least 0"),
        ("throughput --shape tiny --temperature 9", "--temperature must be at most 2"),
        ("throughput --shape tiny --json /no/such/folder/x", "the folder /no/such/folder does not exist"),
        ("throughput --shape tiny --mode static,fast", "--mode must be one of continuous, dynamic, static"),
        ("throughput --shape tiny --mode static,", "--mode 'static,' has an empty entry"),
        ("throughput --shape tiny --mode static,dynamic --recheck 2", "give one --mode with it"),
        ("throughput --shape tiny --depth 99", "--depth must be at most 8"),
        (
            "throughput --shape tiny --kv-cache-dtype int4",
            "--kv-cache-dtype must be one of auto, fp8, fp8_e4m3",
        ),
        (
            "latency --shape tiny --rate 3 --device cpu --kv-cache-dtype fp8",
            "--kv-cache-dtype fp8 needs a GPU",
        ),
        ("throughput --shape tiny --workload all --trace /no/trace.csv", "/no/trace.csv: no such file"),
        ("latency --shape tiny", "give --rate R"),
        ("latency --shape tiny --rate 0", "--rate must be at least"),
        ("latency --shape tiny --rate 3 --workload azure-conv@8", "give one of them"),
        ("latency --shape tiny --workload azure-conv@8", "name its file with --trace"),
        ("latency --shape tiny --workload nano --trace x", "known: azure-conv@8"),
        ("structured --shape tiny --schema /no/schema.json", "--schema /no/schema.json: "),
        ("structured --shape tiny --schema pyproject.toml", "--schema pyproject.toml: "),
        ("structured --shape tiny --clients 0", "--clients must be at least 1"),
        ("nonsense", "No such command"),
    ],
)
def test_mistakes_are_one_line(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("paceline: error: ") and printed.err.count("\n") == 1
    assert says in printed.err and printed.out == ""


def test_a_model_without_the_tokens_is_refused(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", max_position_embeddings=4096))
    done = run("bench", "throughput", "--model", model, "--load-format", "dummy", cache=tmp_path)
    assert done.returncode == 2
    assert "the model's vocabulary has 100" in done.stderr
