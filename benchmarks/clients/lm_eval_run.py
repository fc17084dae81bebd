"""lm-eval (local-completions) against a server, and its score against that of transformers on the same weights.

A hundred questions of a local file with four answers each, so 400 requests for log-likelihoods. The server computes
in float32 without quantised products, on the folder that lm-eval's own `hf` backend reads afterwards. Both must take
the same decision on every question; how far the log-likelihoods are apart is told.

    python -m benchmarks.clients.lm_eval_run [--concurrency 4] [--batch-size 1]
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.clients.common import (
    Failed,
    Outcome,
    environment_for,
    finish,
    judged,
    offline,
    options_of,
    run_client,
    target,
    version_of,
)
from benchmarks.clients.hf_folder import hf_folder

# torch by its exact version: the newest one would bring its CUDA libraries along.
PACKAGES = ["torch==2.13.0", "lm-eval[api,hf]"]
TASK = "paceline_common_sense"
SOURCE = Path(__file__).with_name("lm_eval_task")
# Sums of float32 logarithms over a few tokens, computed in two orders.
LARGEST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one backend found for one question."""

    log_likelihoods: tuple[float, ...]
    is_greedy: tuple[bool, ...]
    accuracy: float

    @property
    def choice(self) -> int:
        return max(range(len(self.log_likelihoods)), key=self.log_likelihoods.__getitem__)


def main() -> None:
    options = options_of(__doc__, concurrency=4, batch_size=1)
    programs = environment_for(options.work, "lm-eval", PACKAGES)
    options.model = options.model or str(hf_folder(options.work / "smollm2-float32"))
    evaluate = partial(_evaluate, programs, options.work / "lm-eval")
    client = f"lm-eval {version_of(programs, 'lm_eval')}"
    own = ("--quantization", "none", "--dtype", "float32")
    with target(options, *own) as served, judged(client, options, served) as outcomes:
        arguments = (
            f"model={served.model},base_url={served.url}/v1/completions,tokenized_requests=True,"
            f"num_concurrent={options.concurrency},max_retries=1,max_length=512"
        )
        ours = evaluate("local-completions", arguments, "--batch_size", str(options.batch_size))
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
    """The task with the full path of its questions, in a folder of its own."""
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
    found = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        answers = [(float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]]
        found.append(
            Judgement(
                log_likelihoods=tuple(value for value, _ in answers),
                is_greedy=tuple(greedy for _, greedy in answers),
                accuracy=sample["acc"],
            )
        )
    return found


def _compare(ours: list[Judgement], theirs: list[Judgement]) -> None:
    pairs = list(zip(ours, theirs, strict=True))
    apart = max(
        abs(mine - other)
        for one, two in pairs
        for mine, other in zip(one.log_likelihoods, two.log_likelihoods, strict=True)
    )
    equal = sum(
        (one.choice, one.is_greedy, one.accuracy) == (two.choice, two.is_greedy, two.accuracy)
        for one, two in pairs
    )
    scores = [sum(judgement.accuracy for judgement in found) / len(found) for found in (ours, theirs)]
    line = (
        f"lm-eval: {len(pairs)} questions, accuracy {scores[0]:.4f} here and {scores[1]:.4f} by transformers, "
        f"{equal} decided alike, log-likelihoods at most {apart:.1e} apart"
    )
    if equal != len(pairs) or apart > LARGEST_DIFFERENCE:
        raise Failed(line)
    print(f"OK {line}")


if __name__ == "__main__":
    finish(main)
