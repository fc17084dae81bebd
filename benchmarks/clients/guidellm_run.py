"""`guidellm run` against a server: streamed chats with a fixed number under way, prompts made by guidellm.

python -m benchmarks.clients.guidellm_run [--url URL] [--requests 200] [--concurrency 8] [--endpoint ROUTE]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.clients.common import (
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
from benchmarks.clients.hf_folder import small_folder

# torch by its exact version: the newest one would bring its CUDA libraries along.
PACKAGES = ["torch==2.13.0", "guidellm"]
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


def main() -> None:
    options = options_of(__doc__, concurrency=8, endpoint="/v1/chat/completions")
    programs = environment_for(options.work, "guidellm", PACKAGES)
    client = f"guidellm {version_of(programs, 'guidellm')}"
    tokenizer = small_folder(options.work)
    flags = [] if options.model else ["--load-format", "dummy"]
    options.model = options.model or str(tokenizer)
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
        outcomes.append(_outcome(json.loads(report.read_text())))


def _outcome(report: dict[str, Any]) -> Outcome:
    found = [benchmark["metrics"]["request_totals"] for benchmark in report["benchmarks"]]
    return Outcome(
        requests=sum(totals["successful"] for totals in found),
        errors=sum(totals["errored"] + totals["incomplete"] for totals in found),
    )


if __name__ == "__main__":
    finish(main)
