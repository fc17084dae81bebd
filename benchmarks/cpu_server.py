"""Closed-loop load on an OpenAI-compatible server, or on the engine in this process: tokens per second and latencies.

Each of N clients sends a prompt of about 108 tokens of real text, reads 64 tokens as a stream (greedy, end of text
ignored) and sends the next. The same prompts in the same order go to every target, so that two servers measured in
one run on one machine can be compared.

    python benchmarks/cpu_server.py --model MODEL                      the engine in this process
    python benchmarks/cpu_server.py --url http://127.0.0.1:8000        any server
    python benchmarks/cpu_server.py ... --concurrency 1,8,16,32 --requests 4 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

OUTPUT_TOKENS = 64
PROMPT_WORDS = 82  # about 108 tokens of English for a vocabulary of 49k
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"

# Sends one prompt and yields once per token, or piece of text, that arrives.
Send = Callable[[str], AsyncIterator[int]]  # yields how many tokens came


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One request, in seconds."""

    ttft_s: float
    itl_s: tuple[float, ...]
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    concurrency: int
    requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


async def one_request(send: Send, prompt: str) -> Timing:
    started_s = last_s = time.perf_counter()
    first_s, gaps, count = 0.0, [], 0
    async for tokens in send(prompt):
        now_s = time.perf_counter()
        if not count:
            first_s = now_s - started_s
        else:
            gaps += [(now_s - last_s) / tokens] * tokens
        last_s, count = now_s, count + tokens
    return Timing(ttft_s=first_s, itl_s=tuple(gaps), num_output=count)


async def closed_loop(send: Send, prompts: list[str], concurrency: int, prompt_tokens: int) -> Figures:
    """All prompts through `concurrency` clients, each sending its next when the last is done."""
    waiting = prompts[::-1]
    timings: list[Timing] = []

    async def client() -> None:
        while waiting:
            timings.append(await one_request(send, waiting.pop()))

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - started_s
    num_output = sum(timing.num_output for timing in timings)
    gaps = np.array([gap for timing in timings for gap in timing.itl_s]) * 1e3
    return Figures(
        concurrency=concurrency,
        requests=len(timings),
        output_tokens_per_s=round(num_output / seconds, 1),
        total_tokens_per_s=round((num_output + prompt_tokens * len(timings)) / seconds, 1),
        ttft_p50_ms=round(float(np.median([timing.ttft_s for timing in timings])) * 1e3, 1),
        itl_p50_ms=round(float(np.median(gaps)), 2),
        itl_p99_ms=round(float(np.percentile(gaps, 99)), 2),
    )


def make_prompts(text: str, count: int) -> list[str]:
    """Different pieces of a text: none shares a beginning with another."""
    words = text.split()
    return [
        " ".join((words * 2)[start : start + PROMPT_WORDS])
        for start in (index * 37 % len(words) for index in range(count))
    ]


# -- targets -----------------------------------------------------------------------------------------------


def http_target(url: str, model: str) -> Send:
    """`/v1/completions` with streaming, over plain sockets: the client must cost little beside the server."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80

    async def send(prompt: str) -> AsyncIterator[int]:
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"{url} answered {status.decode().strip()}")
            async for line in reader:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    if choices[0].get("text"):
                        yield 1
        finally:
            writer.close()

    return send


def in_process_target(model: str | None, options: dict[str, int]) -> tuple[Send, Callable[[str], int]]:
    from paceline import AsyncLLM, SamplingParams

    engine = AsyncLLM(model, enable_prefix_caching=False, **options)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    tokenizer = engine.get_tokenizer()
    assert tokenizer is not None
    scheduler = engine.loaded.config.scheduler
    print(f"token budget {scheduler.max_num_batched_tokens}, {engine.loaded.config.kv.num_blocks} KV blocks")

    async def send(prompt: str) -> AsyncIterator[int]:
        seen = 0
        async for output in engine.generate(prompt, sampling):
            count = len(output.outputs[0].token_ids)
            if count > seen:
                yield count - seen
            seen = count

    return send, lambda text: len(tokenizer.encode(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", help="an OpenAI-compatible server; without it the engine runs in this process"
    )
    parser.add_argument("--model", help="model in this process, or the name the server knows it by")
    parser.add_argument("--concurrency", default="1,8,16,32")
    parser.add_argument("--requests", type=int, default=4, help="requests per client")
    parser.add_argument("--text", type=Path, default=TEXT, help="file the prompts are cut from")
    parser.add_argument("--prompt-tokens", type=int, default=108, help="tokens of a prompt, for --url")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = {}
    if arguments.max_num_batched_tokens:
        options["max_num_batched_tokens"] = arguments.max_num_batched_tokens
    levels = [int(level) for level in arguments.concurrency.split(",")]
    prompts = make_prompts(arguments.text.read_text(), max(levels) * arguments.requests)
    prompt_tokens = arguments.prompt_tokens
    if arguments.url:
        send = http_target(arguments.url, arguments.model or "default")
    else:
        send, count = in_process_target(arguments.model, options)
        prompt_tokens = round(sum(map(count, prompts)) / len(prompts))
    results = asyncio.run(run(send, prompts, levels, arguments.requests, prompt_tokens))
    if arguments.json:
        target = arguments.url or "in process"
        report = {"target": target, "machine": platform.machine(), "prompt_tokens": prompt_tokens}
        report["results"] = [asdict(figures) for figures in results]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


async def run(
    send: Send, prompts: list[str], levels: list[int], requests: int, prompt_tokens: int
) -> list[Figures]:
    print(f"prompts of {prompt_tokens} tokens, {OUTPUT_TOKENS} out")
    print(
        f"{'clients':>8}{'output tok/s':>14}{'total tok/s':>13}{'TTFT p50 ms':>13}{'ITL p50 ms':>12}{'ITL p99':>10}"
    )
    async for _ in send(prompts[-1]):  # warm up
        pass
    results = []
    for level in levels:
        figures = await closed_loop(send, prompts[: level * requests], level, prompt_tokens)
        results.append(figures)
        print(
            f"{level:>8}{figures.output_tokens_per_s:>14}{figures.total_tokens_per_s:>13}"
            f"{figures.ttft_p50_ms:>13}{figures.itl_p50_ms:>12}{figures.itl_p99_ms:>10}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
