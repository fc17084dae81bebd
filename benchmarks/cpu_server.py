"""A server on this machine's CPU: throughput and latency, memory, a busy machine, a batch in the background.

*load*: a closed loop on any OpenAI-compatible server, or on the engine in this process. Each of N clients sends a
prompt of about 108 tokens of real text, reads 64 tokens as a stream (greedy, end of text ignored) and sends the next.
The same prompts in the same order go to every target, so that two servers on one machine can be compared. *memory*:
anonymous bytes after loading and with a filled KV cache. *busy*: the server while one busy loop runs on each core (they
end with this program), beside the quiet machine: a prompt of 200 tokens with 40 tokens of output; the size of steps,
and how soon it returns; what the card and the log say; and a prompt of 801 tokens in steps of 256, of which no answer
may be a 503. Run it on a machine that does nothing else. *batch*: streamed requests at a fixed rate to a server with
`--batch-dir`, alone and with a batch under way.

    python -m benchmarks.cpu_server load [--url http://127.0.0.1:8000] [--concurrency 1,8,16,32] [--requests 4]
    python -m benchmarks.cpu_server memory [--model MODEL] [--tokens 4096]
    python -m benchmarks.cpu_server busy [--model MODEL] [--runs 5]
    python -m benchmarks.cpu_server batch [--url http://127.0.0.1:8000] [--rate 1] [--seconds 60] [--lines 400]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness import (
    TEXT,
    Benchmark,
    Found,
    Given,
    Server,
    flag,
    row,
    served,
    spread,
    streamed,
    table,
)

bench = Benchmark(__doc__)
MODEL_FLAG = flag("--model", None, "model to serve; default: SmolLM2-135M-Instruct")
URL = "http://127.0.0.1:8000"


# -- load ----------------------------------------------------------------------------------------------------

OUTPUT_TOKENS = 64
PROMPT_WORDS = 82  # about 108 tokens of English for a vocabulary of 49k
Send = Callable[[str], AsyncIterator[int]]  # sends a prompt and yields how many tokens came


async def closed_loop(send: Send, prompts: list[str], concurrency: int, prompt_tokens: int) -> Found:
    """All prompts through `concurrency` clients, each sending its next when the last is done."""
    waiting = prompts[::-1]
    first_ms, gaps_ms, num_output = list[float](), list[float](), 0

    async def client() -> None:
        nonlocal num_output
        while waiting:
            last_s, is_first = time.perf_counter(), True
            async for tokens in send(waiting.pop()):
                gap_ms, last_s = (time.perf_counter() - last_s) * 1e3, time.perf_counter()
                if is_first:
                    first_ms.append(gap_ms)
                else:
                    gaps_ms.extend([gap_ms / tokens] * tokens)
                is_first, num_output = False, num_output + tokens

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - started_s
    return {
        "concurrency": concurrency,
        "requests": len(prompts),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + prompt_tokens * len(prompts)) / seconds, 1),
        "ttft_p50_ms": round(float(np.median(first_ms)), 1),
        "itl_p50_ms": round(float(np.median(gaps_ms)), 2),
        "itl_p99_ms": round(float(np.percentile(gaps_ms, 99)), 2),
    }


def make_prompts(text: str, count: int) -> list[str]:
    """Different pieces of a text: none shares a beginning with another."""
    words = text.split()
    starts = (index * 37 % len(words) for index in range(count))
    return [" ".join((words * 2)[start : start + PROMPT_WORDS]) for start in starts]


def http_target(url: str, model: str) -> Send:
    parts = urlsplit(url)
    options = {
        "model": model,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    path, host = f"{parts.path.rstrip('/')}/v1/completions", parts.hostname or "127.0.0.1"

    async def send(prompt: str) -> AsyncIterator[int]:
        async with streamed(parts.port or 80, path, {**options, "prompt": prompt}, host) as answer:
            if answer.status != 200:
                raise SystemExit(f"{url} answered {answer.status}")
            async for event in answer.events:
                choices = json.loads(event).get("choices") or [{}]
                if choices[0].get("text"):
                    yield 1

    return send


def in_process_target(model: str | None, budget: int | None) -> tuple[Send, Callable[[str], int]]:
    from paceline import AsyncLLM, SamplingParams

    options = {"max_num_batched_tokens": budget} if budget else {}
    engine = AsyncLLM(model, enable_prefix_caching=False, **options)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    tokenizer = engine.get_tokenizer()
    assert tokenizer is not None
    config = engine.loaded.config
    print(f"token budget {config.scheduler.max_num_batched_tokens}, {config.kv.num_blocks} KV blocks")

    async def send(prompt: str) -> AsyncIterator[int]:
        seen = 0
        async for output in engine.generate(prompt, sampling):
            count = len(output.outputs[0].token_ids)
            if count > seen:
                yield count - seen
            seen = count

    return send, lambda text: len(tokenizer.encode(text))


@bench.part(
    flag("--url", None, "an OpenAI-compatible server; without it the engine runs in this process"),
    flag("--model", None, "model in this process, or the name the server knows it by"),
    flag("--concurrency", "1,8,16,32", "numbers of clients"),
    flag("--requests", 4, "requests per client"),
    flag("--text", TEXT, "file the prompts are cut from", kind=Path),
    flag("--prompt-tokens", 108, "tokens of a prompt, for --url"),
    flag("--max-num-batched-tokens", None, "of the engine in this process", kind=int),
)
def load(given: Given) -> Found:
    """Tokens per second and latencies in a closed loop."""
    levels = [int(level) for level in given.concurrency.split(",")]
    prompts = make_prompts(given.text.read_text(), max(levels) * given.requests)
    prompt_tokens = given.prompt_tokens
    if given.url:
        send = http_target(given.url, given.model or "default")
    else:
        send, count = in_process_target(given.model, given.max_num_batched_tokens)
        prompt_tokens = round(sum(map(count, prompts)) / len(prompts))

    async def run() -> list[Found]:
        async for _ in send(prompts[-1]):  # warm up
            pass
        table("clients", "requests", "output tok/s", "total tok/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99")
        results = []
        for level in levels:
            results.append(await closed_loop(send, prompts[: level * given.requests], level, prompt_tokens))
            row(*results[-1].values())
        return results

    print(f"prompts of {prompt_tokens} tokens, {OUTPUT_TOKENS} out")
    target = given.url or "in process"
    return {"target": target, "prompt_tokens": prompt_tokens, "results": asyncio.run(run())}


# -- memory --------------------------------------------------------------------------------------------------


@bench.part(MODEL_FLAG, flag("--tokens", 4096, "to cache, in prompts of 1,024"))
def memory(given: Given) -> Found:
    """Anonymous bytes after loading and with tokens in the prefix cache."""
    from paceline import LLM, SamplingParams

    llm = LLM(given.model, max_num_batched_tokens=64, max_model_len=2048)
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = {0: _anonymous_mb()}
    for number in range(given.tokens // 1024):
        prompt = [(7 * place + 31 * number + 1) % vocabulary for place in range(1020)]
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found[(number + 1) * 1024] = _anonymous_mb()
    table("tokens cached", "anonymous MB")
    for tokens, megabytes in found.items():
        row(tokens, megabytes)
    return {"anonymous_mb_by_tokens": found}


def _anonymous_mb() -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


# -- a busy machine ------------------------------------------------------------------------------------------

PROMPT, OUTPUT, LONG_PROMPT, LARGE_STEP = 200, 40, 801, 256
SETTLE_S, MOST_S = 3.0, 60.0
NEARLY = 0.75  # of the sizes on the quiet machine: two starts there differ by a tenth
BUSY = "the machine is busy"
# Ends with the program that started it, however that ends.
LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_loops() -> Iterator[Callable[[], None]]:
    """One busy loop for each core, until the block ends or the function it gives is called."""
    cores = sorted(os.sched_getaffinity(0))
    running = [subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) for core in cores]

    def stop() -> None:
        for one in running:
            one.kill()
            one.wait()
        running.clear()

    try:
        time.sleep(SETTLE_S)
        yield stop
    finally:
        stop()


class Client:
    """Sends prompts of made-up tokens, none like another."""

    def __init__(self, server: Server) -> None:
        self._server, self._rng = server, random.Random(0)
        self._model = json.loads(server.call("/v1/models")[1])["data"][0]["id"]

    def complete(self, prompt: int, output: int) -> tuple[int, float]:
        """Status and seconds of one request."""
        ids = [self._rng.randrange(100, 4000) for _ in range(prompt)]
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        started_s = time.perf_counter()
        status, answer = self._server.call("/v1/completions", body)
        if status not in (200, 503):
            raise SystemExit(f"the server answered {status}: {answer[:500].decode(errors='replace')}")
        return status, time.perf_counter() - started_s

    def budget(self) -> tuple[int, int]:
        """Tokens of a step beside decoding rows, and of one without any."""
        limits = json.loads(self._server.call("/v1/admin/dial")[1])["limits"]
        return limits["max_step_tokens"], limits["max_prompt_tokens"]

    def several(self, runs: int, prompt: int = PROMPT, output: int = OUTPUT) -> Found:
        """Seconds of some requests one after the other, and the size of steps after them."""
        answers = [self.complete(prompt, output) for _ in range(runs)]
        return {
            "median_s": round(statistics.median(took_s for _, took_s in answers), 3),
            "all_s": [round(took_s, 3) for _, took_s in answers],
            "answers_503": sum(status == 503 for status, _ in answers),
            "budget": self.budget(),
        }

    def back_after(self, wanted: tuple[int, int]) -> float | None:
        """Seconds until steps are about this large again, with a small request now and then; None: over a minute."""
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < MOST_S:
            self.complete(64, 2)
            if all(size >= NEARLY * before for size, before in zip(self.budget(), wanted, strict=True)):
                return round(time.perf_counter() - started_s, 1)
            time.sleep(0.5)
        return None


@bench.part(MODEL_FLAG, flag("--runs", 5, "requests of each kind"))
def busy(given: Given) -> Found:
    """A server whose cores other processes use, beside the same server on the quiet machine."""
    options = [*([given.model] if given.model else []), "--device", "cpu", "--no-enable-prefix-caching"]
    runs, found = given.runs, Found()
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with served(options, log) as server:
            client = Client(server)
            client.complete(PROMPT, OUTPUT)  # the first one pays for memory and threads
            quiet = found["quiet"] = client.several(runs)
            with busy_loops():
                found["busy"] = client.several(runs)
            found["budget_back_s"] = client.back_after(quiet["budget"])
            found["quiet_again"] = client.several(runs)
        found["log_says_busy"] = BUSY in log.read_text()
        with busy_loops() as stop, served(options, log) as server:
            client = Client(server)
            found["card_says_busy"] = BUSY in log.read_text()
            found["started_busy"] = client.several(runs)
            stop()
            found["started_busy_budget_back_s"] = client.back_after(quiet["budget"])
            found["started_busy_budget"] = client.budget()
        with busy_loops(), served([*options, "--max-num-batched-tokens", str(LARGE_STEP)]) as server:
            long = found["long_prompt"] = Client(server).several(runs, LONG_PROMPT, 1)
    table("", "median s", "of quiet", "503", "tokens of a step")
    for kind in ("quiet", "busy", "started_busy", "quiet_again"):
        own = found[kind]
        slowdown = round(own["median_s"] / quiet["median_s"], 2)
        row(kind, own["median_s"], slowdown, own["answers_503"], own["budget"])
        found[f"slowdown_{kind}"] = slowdown
    row(f"{LONG_PROMPT} tokens, busy", long["median_s"], "", long["answers_503"], long["budget"])
    found["slowdown"] = found["slowdown_busy"]
    return found


# -- a batch in the background -------------------------------------------------------------------------------

WORDS = ("river", "stone", "cloud", "apple", "engine", "winter", "paper", "music")
OVER = ("completed", "failed", "expired", "cancelled")


def chat(model: str, rng: random.Random) -> dict[str, Any]:
    text = "Tell me about " + " ".join(rng.choices(WORDS, k=12)) + "."
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 32}


def foreground(client: Any, model: str, rate: float, seconds: float) -> Found:
    """Requests at random moments, the same ones each time: first tokens and gaps in milliseconds."""
    rng, first_ms, gaps_ms, failed = random.Random(1), list[float](), list[float](), [0]

    def ask(body: dict[str, Any]) -> None:
        last_s, is_first = time.monotonic(), True
        try:
            for _ in client.chat.completions.create(**body, stream=True):
                gap_ms, last_s = (time.monotonic() - last_s) * 1e3, time.monotonic()
                (first_ms if is_first else gaps_ms).append(gap_ms)
                is_first = False
        except Exception:
            failed[0] += 1

    until_s, threads = time.monotonic() + seconds, []
    while time.monotonic() < until_s:
        threads.append(threading.Thread(target=ask, args=(chat(model, rng),)))
        threads[-1].start()
        time.sleep(rng.expovariate(rate))
    for thread in threads:
        thread.join()
    return {"failed": failed[0], "ttft_ms": spread(first_ms, 1), "itl_ms": spread(gaps_ms, 1)}


def begin_batch(client: Any, model: str, lines: int) -> str:
    rng, url = random.Random(2), "/v1/chat/completions"
    calls = (
        {"custom_id": str(n), "method": "POST", "url": url, "body": chat(model, rng)} for n in range(lines)
    )
    data = "".join(json.dumps(call) + "\n" for call in calls)
    file = client.files.create(file=("lines.jsonl", data.encode()), purpose="batch")
    return str(client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id)


@bench.part(
    flag("--url", URL, "of a server with --batch-dir and --scheduling-policy priority"),
    flag("--model", "smollm2", "its name"),
    flag("--key", "none", "API key"),
    flag("--rate", 1.0, "requests a second in the foreground"),
    flag("--seconds", 60.0, "of the foreground, alone and with the batch"),
    flag("--lines", 400, "of the batch"),
)
def batch(given: Given) -> Found:
    """What a batch in the background costs the requests in the foreground, against a running server."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.key, max_retries=0)
    foreground(client, given.model, 1e9, 1e-9)  # one request: what is compiled or cached at first is there
    found: Found = {"alone": foreground(client, given.model, given.rate, given.seconds)}
    batch_id = begin_batch(client, given.model, given.lines)
    found["with a batch"] = foreground(client, given.model, given.rate, given.seconds)

    def completed() -> tuple[str, int]:
        now = client.batches.retrieve(batch_id)
        return now.status, 0 if now.request_counts is None else now.request_counts.completed

    status, meanwhile = completed()
    begun_s = time.monotonic()
    while status not in OVER:
        time.sleep(0.2)
        status, _ = completed()
    found["lines_meanwhile"] = meanwhile
    if meanwhile < given.lines:
        found["lines_per_s_alone"] = round((given.lines - meanwhile) / (time.monotonic() - begun_s), 2)
    return found


if __name__ == "__main__":
    bench.main()
