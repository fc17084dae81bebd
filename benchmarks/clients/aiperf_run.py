"""`aiperf profile` against a server: streamed chats with a fixed number under way, and the server's metrics beside it.

python -m benchmarks.clients.aiperf_run [--url URL] [--requests 200] [--concurrency 8] [--endpoint chat]
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


def main() -> None:
    options = options_of(__doc__, concurrency=8, endpoint="chat")
    programs = environment_for(options.work, "aiperf", ["aiperf"])
    client = f"aiperf {version_of(programs, 'aiperf')}"
    tokenizer = small_folder(options.work)
    flags = [] if options.model else ["--load-format", "dummy"]
    options.model = options.model or str(tokenizer)
    folder = options.work / "aiperf"
    artifacts = folder / "artifacts"
    shutil.rmtree(artifacts, ignore_errors=True)
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
        outcomes.append(_outcome(artifacts))


def _outcome(artifacts: Path) -> Outcome:
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    failed = found.get("error_request_count") or {"avg": 0}
    scraped = list(artifacts.rglob("server_metrics_export.json"))
    return Outcome(
        requests=int(found["request_count"]["avg"]),
        errors=int(failed["avg"]) + len(found.get("error_summary") or []),
        note="server metrics read; " if scraped else "no server metrics; ",
    )


if __name__ == "__main__":
    finish(main)
