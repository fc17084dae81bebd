"""What a prompt of 131,072 tokens does to others, and what others do to it.

Streams decode all the time, short prompts come at an even rate, and one long prompt comes between two of them; the same
without it is what figures are compared with. *sim*: an 8B model on a modelled H200, whose steps keep the pace of a
server; *constant* there is a step of a fixed number of tokens, as of `paceline sim` without `--step-target-ms`.
*server*: `paceline serve` with made-up weights on this machine, started here on a free port, and prompts of token ids.

    python -m benchmarks.long_prompts sim [--tokens 131064] [--streams 64] [--rate 4] [--target-ms 32]
    python -m benchmarks.long_prompts server FOLDER [--tokens 131064] [--streams 64] [--rate 4] [--seconds 30]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, one_tenant, rows_of, served, simulated, streamed
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
LONG_AT_S = 10.05
SHORT, STREAM = (400, 20), (200, 4000)  # prompt and output
CONSTANT = {"max_num_batched_tokens": 2048}


@bench.part(
    flag("--tokens", 131_064, "of the long prompt"),
    flag("--streams", 64, "rows that decode all the time"),
    flag("--rate", 4.0, "short prompts per second"),
    flag("--seconds", 60.0, "in which they come"),
    flag("--target-ms", 32.0, "target of a step"),
)
def sim(given: Given) -> Found:
    paced = {"step_target_ms": given.target_ms, "max_num_batched_tokens": 8192}
    return {"tokens": given.tokens, "streams": given.streams, "rows": rows_of(_measured(given, paced))}


def _measured(given: Given, paced: Mapping[str, Any]) -> Any:
    alone = one_tenant("alone", [0.0], [given.tokens], [8])
    yield _figures("alone", "pace", alone, paced)
    yield _figures("alone", "constant", alone, CONSTANT)
    for name, options in (("pace", paced), ("constant", CONSTANT)):
        for tokens in (0, given.tokens):
            workload = _traffic(given, tokens)
            yield _figures("beside it" if tokens else "without it", name, workload, options)


def _traffic(given: Given, tokens: int) -> Workload:
    times = np.arange(1.0, given.seconds, 1 / given.rate)
    requests = [(0.0, *STREAM)] * given.streams + [(float(at), *SHORT) for at in times]
    requests += [(LONG_AT_S, tokens, 8)] if tokens else []
    arrival_s, prompt, output = zip(*sorted(requests), strict=True)
    return one_tenant("traffic", arrival_s, prompt, output)


def _figures(case: str, steps: str, workload: Workload, options: Mapping[str, Any]) -> Found:
    record = simulated(workload, {"max_num_seqs": 256, **options})
    first_s, length = record.first_token_s - record.arrival_s, workload.prompt_len
    short, long = first_s[length == SHORT[0]], first_s[length > 10_000]
    gaps = record.itl_s[np.isfinite(record.itl_s)]
    return {
        "case": case,
        "steps": steps,
        "TTFT of the long one, s": float(long[0]) if len(long) else None,
        "ITL p50, ms": 1e3 * float(np.quantile(gaps, 0.5)),
        "ITL p99, ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "short TTFT p50, ms": 1e3 * float(np.quantile(short, 0.5)) if len(short) else None,
        "short TTFT p99, ms": 1e3 * float(np.quantile(short, 0.99)) if len(short) else None,
    }


# -- a server ----------------------------------------------------------------------------------------------------


@bench.part(
    flag("folder", help="of a model, with its tokenizer; it needs no weights"),
    flag("--tokens", 131_064, "of the long prompt"),
    flag("--streams", 64, "rows that decode all the time"),
    flag("--rate", 4.0, "short prompts per second"),
    flag("--seconds", 30.0, "before the long prompt"),
    flag("--options", "", "of `paceline serve`"),
)
def server(given: Given) -> Found:
    load = Load(given.tokens, given.streams, given.rate, given.seconds)
    return {"tokens": given.tokens, "rows": rows_of(on_a_server(given.folder, load, given.options.split()))}


class Load(NamedTuple):
    """What is sent."""

    tokens: int = 131_064
    streams: int = 64
    rate: float = 4.0  # of short prompts, per second
    seconds: float = 30.0  # before the long prompt


@dataclass(slots=True)
class Seen:
    """What clients saw, in moments and seconds."""

    gaps: list[tuple[float, float]] = field(default_factory=list)  # between tokens of streams
    firsts: list[tuple[float, float]] = field(default_factory=list)  # of short prompts

    def row(self, case: str, start_s: float, end_s: float, long_s: float | None = None) -> Found:
        gaps, firsts = (
            [1e3 * took_s for at_s, took_s in seen if start_s <= at_s < end_s] or [0.0]
            for seen in (self.gaps, self.firsts)
        )
        return {
            "case": case,
            "TTFT of the long one, s": long_s,
            "ITL p50, ms": float(np.quantile(gaps, 0.5)),
            "ITL p99, ms": float(np.quantile(gaps, 0.99)),
            "ITL most, ms": max(gaps),
            "short TTFT p50, ms": float(np.quantile(firsts, 0.5)),
            "short TTFT p99, ms": float(np.quantile(firsts, 0.99)),
        }


def on_a_server(folder: str, load: Load, options: Sequence[str] = ()) -> Iterator[Found]:
    """The long prompt alone, then with streams and short prompts beside it, and these without it."""
    own = ["--model", folder, "--load-format", "dummy", "--served-model-name", "m"]
    own += ["--queue-timeout", "3600", "--request-timeout", "3600"]  # on a CPU it takes minutes
    with served([*own, "--max-model-len", str(load.tokens + 8), *options]) as running:
        yield from asyncio.run(_offered(running.port, load))


async def _offered(port: int, load: Load) -> list[Found]:
    draw, seen = np.random.default_rng(0), Seen()

    def body(tokens: int, output: int) -> Found:
        ids = draw.integers(5, 90, tokens).tolist()
        return {"model": "m", "prompt": ids, "max_tokens": output, "ignore_eos": True, "stream": True}

    async def arrivals(tokens: int, output: int) -> list[float]:
        """Seconds to the first chunk, and between chunks."""
        found, last_s = [], time.perf_counter()
        async with streamed(port, "/v1/completions", body(tokens, output)) as answer:
            assert answer.status == 200, f"a prompt of {tokens} tokens: {answer.status}"
            async for event in answer.events:
                assert not event.startswith(b'{"error"'), f"a prompt of {tokens} tokens: {event.decode()}"
                now_s = time.perf_counter()
                found.append(now_s - last_s)
                if output == STREAM[1] and len(found) > 1:
                    seen.gaps.append((now_s, found[-1]))
                last_s = now_s
        return found

    async def stream() -> None:
        while True:
            await arrivals(STREAM[0], STREAM[1])

    async def short() -> None:
        first_s = (await arrivals(*SHORT))[0]
        seen.firsts.append((time.perf_counter(), first_s))

    async def shorts(group: asyncio.TaskGroup) -> None:
        while True:
            group.create_task(short())
            await asyncio.sleep(1 / load.rate)

    alone_s = (await arrivals(load.tokens, 8))[0]
    async with asyncio.TaskGroup() as group:  # one request that is not answered ends all
        others = [group.create_task(stream()) for _ in range(load.streams)]
        others.append(group.create_task(shorts(group)))
        await asyncio.sleep(load.seconds / 3)
        started_s = time.perf_counter()
        await asyncio.sleep(load.seconds)
        sent_s = time.perf_counter()
        beside_s = (await arrivals(load.tokens, 8))[0]
        for task in others:
            task.cancel()
    return [
        {**dict.fromkeys(seen.row("", 0, 0)), "case": "alone", "TTFT of the long one, s": alone_s},
        seen.row("without it", started_s, sent_s),
        seen.row("beside it", sent_s, sent_s + beside_s, beside_s),
    ]


if __name__ == "__main__":
    bench.main()
