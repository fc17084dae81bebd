"""LangChain's ChatOpenAI and OpenAI against a server: invoke, stream, batch and their async forms.

python -m benchmarks.clients.langchain_run [--url URL] [--requests 200]
"""

from __future__ import annotations

import json
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

SCRIPT = Path(__file__).with_name("langchain_requests.py")


def main() -> None:
    options = options_of(__doc__)
    programs = environment_for(options.work, "langchain", ["langchain-openai"])
    client = f"langchain-openai {version_of(programs, 'langchain-openai')}"
    folder = options.work / "langchain"
    with target(options) as served, judged(client, options, served) as outcomes:
        results = folder / "results.json"
        command = [programs / "python", SCRIPT, served.url, served.model, str(options.requests), results]
        run_client(command, folder / "output.log", offline())
        found = json.loads(results.read_text())
        outcomes.append(Outcome(requests=found["requests"], errors=found["errors"], refusals=1))


if __name__ == "__main__":
    finish(main)
