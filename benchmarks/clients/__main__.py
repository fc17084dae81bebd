"""Clients of other projects against a server; each fails on any error the client reports and on any the server counts.

*langchain*: ChatOpenAI and OpenAI: invoke, stream, batch and their async forms. *guidellm*, *aiperf*: streamed chats
with a fixed number under way. *lm-eval*: local-completions, a hundred questions of a local file with four answers each,
so 400 requests for log-likelihoods. The server computes in float32 without quantised products, on the folder that
lm-eval's own `hf` backend reads afterwards. Both must take the same decision on every question.

    python -m benchmarks.clients langchain|guidellm|aiperf|lm-eval [--url URL] [--requests 200] [--concurrency N]
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.clients.driver import (
    FLAGS,
    Failed,
    Outcome,
    hf_folder,
    judged,
    offline,
    prepared,
    run_client,
    small_model,
    target,
)
from benchmarks.harness import Benchmark, Given, flag

bench = Benchmark(__doc__)
HERE = Path(__file__).parent
TORCH = "torch==2.13.0"  # by its exact version: the newest one would bring its CUDA libraries along
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


@bench.part(*FLAGS)
def langchain(options: Given) -> None:
    """LangChain's ChatOpenAI and OpenAI: invoke, stream, batch and their async forms."""
    programs, client = prepared(options, "langchain", "langchain-openai")
    folder = options.work / "langchain"
    with target(options) as served, judged(client, options, served) as outcomes:
        results, script = folder / "results.json", HERE / "langchain_requests.py"
        command = [programs / "python", script, served.url, served.model, str(options.requests), results]
        run_client(command, folder / "output.log", offline())
        found = json.loads(results.read_text())
        outcomes.append(Outcome(requests=found["requests"], errors=found["errors"], refusals=1))


# -- clients that make load ----------------------------------------------------------------------------------


@bench.part(*FLAGS, flag("--concurrency", 8), flag("--endpoint", "/v1/chat/completions", "route"))
def guidellm(options: Given) -> None:
    """`guidellm run`: streamed chats, prompts made by guidellm."""
    programs, client = prepared(options, "guidellm", TORCH, "guidellm")
    tokenizer, flags = small_model(options)
    folder = options.work / "guidellm"
    backend = f"kind=openai_http,request_format={options.endpoint}"
    with target(options, *flags) as served, judged(client, options, served) as outcomes:
        report = folder / "report.json"
        command: list[str | Path] = [
            programs / "guidellm",
            *("run", "--backend", f"{backend},target={served.url},model={served.model}"),
            *("--profile", f"kind=concurrent,streams={options.concurrency}"),
            *("--constraint", f"kind=max_requests,count={options.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
        ]
        run_client(command, folder / "output.log", offline())
        outcomes.append(_of_guidellm(json.loads(report.read_text())))


def _of_guidellm(report: dict[str, Any]) -> Outcome:
    found = [benchmark["metrics"]["request_totals"] for benchmark in report["benchmarks"]]
    return Outcome(
        requests=sum(totals["successful"] for totals in found),
        errors=sum(totals["errored"] + totals["incomplete"] for totals in found),
    )


@bench.part(*FLAGS, flag("--concurrency", 8), flag("--endpoint", "chat", "kind of endpoint"))
def aiperf(options: Given) -> None:
    """`aiperf profile`: streamed chats, and the server's metrics."""
    programs, client = prepared(options, "aiperf", "aiperf")
    tokenizer, flags = small_model(options)
    folder = options.work / "aiperf"
    artifacts = _emptied(folder / "artifacts")
    environment = offline()
    del environment["HF_HUB_OFFLINE"]  # aiperf then takes a folder for a name on the hub
    with target(options, *flags) as served, judged(client, options, served) as outcomes:
        command: list[str | Path] = [
            programs / "aiperf",
            *("profile", "--model", served.model, "--url", served.url, "--tokenizer", tokenizer),
            *("--endpoint-type", options.endpoint, "--streaming", "--ui", "none", "--workers-max", "2"),
            *("--concurrency", str(options.concurrency), "--request-count", str(options.requests)),
            *("--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS)),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", artifacts),
        ]
        run_client(command, folder / "output.log", environment)
        outcomes.append(_of_aiperf(artifacts))


def _of_aiperf(artifacts: Path) -> Outcome:
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    failed = found.get("error_request_count") or {"avg": 0}
    scraped = list(artifacts.rglob("server_metrics_export.json"))
    return Outcome(
        requests=int(found["request_count"]["avg"]),
        errors=int(failed["avg"]) + len(found.get("error_summary") or []),
        note="server metrics read; " if scraped else "no server metrics; ",
    )


# -- lm-eval -------------------------------------------------------------------------------------------------

TASK = "paceline_common_sense"
SOURCE = HERE / "lm_eval_task"
# Sums of float32 logarithms over a few tokens, computed in two orders.
LARGEST_DIFFERENCE = 1e-3


class Judgement(NamedTuple):
    """What one backend found for one question."""

    log_likelihoods: list[float]
    is_greedy: list[bool]
    accuracy: float

    @property
    def decision(self) -> tuple[int, list[bool], float]:
        """The answer it chooses, and whether each would be its greedy text."""
        return int(np.argmax(self.log_likelihoods)), self.is_greedy, self.accuracy


@bench.part(*FLAGS, flag("--concurrency", 4))
def lm_eval(options: Given) -> None:
    """lm-eval (local-completions), and its score against that of transformers on the same weights."""
    programs, client = prepared(options, "lm-eval", TORCH, "lm-eval[api,hf]")
    options.model = options.model or str(hf_folder(options.work / "smollm2-float32"))
    evaluate = partial(_evaluate, programs, options.work / "lm-eval")
    own = ("--quantization", "none", "--dtype", "float32")
    with target(options, *own) as served, judged(client, options, served) as outcomes:
        arguments = (
            f"model={served.model},base_url={served.url}/v1/completions,tokenized_requests=True,"
            f"num_concurrent={options.concurrency},max_retries=1,max_length=512"
        )
        ours = evaluate("local-completions", arguments)
        count = sum(len(judgement.log_likelihoods) for judgement in ours)
        outcomes.append(Outcome(requests=count, errors=0))
    theirs = evaluate("hf", f"pretrained={options.model},dtype=float32", "--device", "cpu")
    _compare(ours, theirs)


def _evaluate(programs: Path, folder: Path, backend: str, arguments: str, *more: str) -> list[Judgement]:
    results = _emptied(folder / backend)
    command: list[str | Path] = [
        programs / "lm-eval",
        *("run", "--tasks", TASK, "--include_path", str(_task(folder)), "--log_samples"),
        *("--model", backend, "--model_args", arguments, "--output_path", str(results), *more),
    ]
    run_client(command, folder / f"{backend}.log", offline(HF_DATASETS_CACHE=str(folder / "datasets")))
    return _judgements(results)


def _task(folder: Path) -> Path:
    """The task with the full path of its questions, in a separate folder."""
    made = _emptied(folder / "task")
    text = (SOURCE / "common_sense.yaml").read_text()
    path = json.dumps(str(SOURCE / "questions.jsonl"))
    (made / "common_sense.yaml").write_text(text.replace("questions.jsonl", path))
    return made


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _judgements(folder: Path) -> list[Judgement]:
    (file,) = folder.rglob(f"samples_{TASK}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        Judgement(
            [float(value) for value, _ in sample["filtered_resps"]],
            [str(greedy) == "True" for _, greedy in sample["filtered_resps"]],
            sample["acc"],
        )
        for sample in sorted(samples, key=lambda sample: sample["doc_id"])
    ]


def _compare(ours: list[Judgement], theirs: list[Judgement]) -> None:
    pairs = list(zip(ours, theirs, strict=True))
    apart = max(np.abs(np.subtract(one.log_likelihoods, two.log_likelihoods)).max() for one, two in pairs)
    equal = sum(one.decision == two.decision for one, two in pairs)
    scores = [np.mean([judgement.accuracy for judgement in found]) for found in (ours, theirs)]
    line = (
        f"lm-eval: {len(pairs)} questions, accuracy {scores[0]:.4f} here and {scores[1]:.4f} by transformers, "
        f"{equal} decided alike, log-likelihoods at most {apart:.1e} apart"
    )
    if equal != len(pairs) or apart > LARGEST_DIFFERENCE:
        raise Failed(line)
    print(f"OK {line}")


if __name__ == "__main__":
    try:
        bench.main()
    except (Failed, subprocess.CalledProcessError) as error:
        raise SystemExit(f"FAILED {error}") from None
