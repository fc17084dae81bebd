"""What a batch in the background costs those in the foreground, against a server that runs.

    paceline serve --batch-dir ./batches --scheduling-policy priority &
    python benchmarks/batches_live.py --url http://127.0.0.1:8000 --model smollm2 --rate 1 --seconds 60 --lines 400

Sends streaming requests at a fixed rate twice: alone, and with a batch under way. Prints times to the first token,
gaps between tokens and the lines of the batch that were answered meanwhile, and how fast the batch is alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

TOKENS = 32
WORDS = ("river", "stone", "cloud", "apple", "engine", "winter", "paper", "music")
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass
class Seen:
    """What the foreground saw."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failed: int = 0

    def row(self) -> dict[str, float]:
        return {
            "requests": len(self.first_s),
            "failed": self.failed,
            "ttft_p50_ms": quantile(self.first_s, 0.5),
            "ttft_p99_ms": quantile(self.first_s, 0.99),
            "itl_p50_ms": quantile(self.gaps_s, 0.5),
            "itl_p99_ms": quantile(self.gaps_s, 0.99),
        }


def quantile(values: list[float], part: float) -> float:
    if len(values) < 2:
        return round(1e3 * sum(values), 1)
    return round(1e3 * statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1], 1)


def prompt(rng: random.Random) -> str:
    return "Tell me about " + " ".join(rng.choices(WORDS, k=12)) + "."


def ask(client: OpenAI, model: str, text: str, seen: Seen) -> None:
    begun_s = last_s = time.monotonic()
    is_first = True
    try:
        stream: Any = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], max_tokens=TOKENS, stream=True
        )
        for _ in stream:
            now_s = time.monotonic()
            if is_first:
                seen.first_s.append(now_s - begun_s)
            else:
                seen.gaps_s.append(now_s - last_s)
            is_first, last_s = False, now_s
    except Exception:
        seen.failed += 1


def foreground(client: OpenAI, model: str, rate: float, seconds: float) -> Seen:
    """Requests at random moments, the same ones each time."""
    rng, seen, threads = random.Random(1), Seen(), []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        thread = threading.Thread(target=ask, args=(client, model, prompt(rng), seen))
        thread.start()
        threads.append(thread)
        time.sleep(rng.expovariate(rate))
    for thread in threads:
        thread.join()
    return seen


def begin_batch(client: OpenAI, model: str, lines: int) -> str:
    rng = random.Random(2)
    data = "".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": prompt(rng)}],
                    "max_tokens": TOKENS,
                },
            }
        )
        + "\n"
        for number in range(lines)
    )
    file = client.files.create(file=("lines.jsonl", data.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return str(batch.id)


def completed(client: OpenAI, batch_id: str) -> tuple[str, int]:
    batch = client.batches.retrieve(batch_id)
    return batch.status, 0 if batch.request_counts is None else batch.request_counts.completed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--key", default="none")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second in the foreground")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lines", type=int, default=400)
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.key, max_retries=0)
    ask(client, given.model, "Hello!", Seen())  # what is compiled or cached at first is there
    alone = foreground(client, given.model, given.rate, given.seconds)
    batch_id = begin_batch(client, given.model, given.lines)
    beside = foreground(client, given.model, given.rate, given.seconds)
    status, meanwhile = completed(client, batch_id)
    begun_s, before = time.monotonic(), meanwhile
    while status not in OVER:
        time.sleep(0.2)
        status, done = completed(client, batch_id)
        before = min(before, done)
    rest_s = time.monotonic() - begun_s
    print(json.dumps({"foreground alone": alone.row(), "foreground beside a batch": beside.row()}, indent=2))
    print(f"lines answered beside the foreground: {meanwhile} of {given.lines} in {given.seconds:g} s")
    if meanwhile < given.lines:
        print(f"lines a second alone: {(given.lines - before) / rest_s:.2f}")


if __name__ == "__main__":
    main()
