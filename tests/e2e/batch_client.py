"""What tests of batches share: lines of input, and waiting for what becomes of them with the `openai` client."""

from __future__ import annotations

import json
import time
from typing import Any

from openai import OpenAI

from tests.e2e.client_server import MODEL, PATIENCE_S

CHAT: Any = "/v1/chat/completions"  # the client's types know endpoints as literals
COMPLETIONS: Any = "/v1/completions"
RESPONSES: Any = "/v1/responses"
OVER = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        own: dict[str, Any] = {"messages": [{"role": "user", "content": custom_id}]}
    else:
        own = {"input" if url == RESPONSES else "prompt": custom_id}
    most = "max_output_tokens" if url == RESPONSES else "max_tokens"
    given = {"model": MODEL, most: 3, "ignore_eos": True, **own, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def begin(client: OpenAI, data: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait(client: OpenAI, batch_id: str, *states: str) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        batch = client.batches.retrieve(batch_id)
        if batch.status in (states or OVER):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch is {batch.status}")


def results(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a request has two results"
    return found


def num_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return int(counts.completed)
