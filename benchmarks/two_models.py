"""Two models in one server on this CPU: what sharing costs, whether turns follow shares, and what waking takes.

Both are the same file under two names, so that nothing but sharing makes a difference. *together*: closed loops of
--clients on one of them and on both, in turns; the tokens of both against those of one. *shares*: for --seconds, one
model has four times as many clients as the other; the part of the device's time that each got, against its share of
--share. *first*: times to the first token of single requests to the second model, alone and beside the flood; with a
share of a half, a device of its own share would take twice as long as the whole one. *wake*: from a request for a model
that sleeps to its first token, and what of that was the wake. Run it on a machine that does nothing else.

    python -m benchmarks.two_models [--model MODEL] [--clients 4] [--seconds 60] [--share 0.5] [--rounds 3]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np

from benchmarks.cpu_server import make_prompts
from benchmarks.harness import (
    GREEDY,
    Benchmark,
    Found,
    Given,
    Server,
    flag,
    in_turns,
    row,
    served,
    streamed,
    table,
)

NAMES = ("first", "second")
OUTPUT_TOKENS = 64
FLOOD = 4  # times as many clients as the other model has
WAKES = 5
bench = Benchmark(__doc__)


async def answer(port: int, model: str, prompt: str, max_tokens: int = OUTPUT_TOKENS) -> AsyncIterator[None]:
    """One item for each token."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, **GREEDY}
    async with streamed(port, "/v1/completions", body) as reply:
        if reply.status != 200:
            raise SystemExit(f"the server answered {reply.status}")
        async for event in reply.events:
            if (json.loads(event).get("choices") or [{}])[0].get("text"):
                yield


async def client(port: int, model: str, prompts: list[str], until_s: float) -> int:
    """Sends one prompt after the other until then; returns the tokens it got in this time."""
    count = 0
    for prompt in prompts:
        async for _ in answer(port, model, prompt):
            count += 1
            if time.perf_counter() >= until_s:
                return count
    return count


async def loads(port: int, clients: dict[str, int], seconds: float) -> dict[str, int]:
    """Tokens of each model in a closed loop of so many clients."""
    prompts, until_s = make_prompts(4096), time.perf_counter() + seconds
    tasks = {
        name: [
            asyncio.create_task(client(port, name, prompts[place * 64 : place * 64 + 64], until_s))
            for place in range(start, start + count)
        ]
        for start, (name, count) in zip((0, 32), clients.items(), strict=False)
    }
    return {name: sum(await asyncio.gather(*running)) for name, running in tasks.items()}


def device_s(server: Server) -> dict[str, float]:
    """The device's time that each model has had so far."""
    page = server.call("/metrics")[1].decode()
    found = re.findall(r'engine_busy_seconds_total\{engine="0",model_name="(\w+)"\} (\S+)', page)
    return {name: float(value) for name, value in found}


@contextlib.contextmanager
def two_models(model: str | None, share: float) -> Iterator[Server]:
    entries = [
        {"model": model or "smollm2", "name": name, "share": part}
        for name, part in zip(NAMES, (1 - share, share), strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "models.yaml"
        listed.write_text(json.dumps({"models": entries}))  # JSON is YAML
        with served(["--models", str(listed)]) as server:
            asyncio.run(loads(server.port, dict.fromkeys(NAMES, 1), 3.0))  # warm
            yield server


def together(server: Server, clients: int, rounds: int) -> Found:
    seconds = 10.0

    def measure(*names: str) -> float:
        found = asyncio.run(loads(server.port, dict.fromkeys(names, clients), seconds))
        return sum(found.values()) / seconds

    got = in_turns({"one": lambda: measure(NAMES[0]), "two": lambda: measure(*NAMES)}, rounds)
    one, two = (float(np.median(got[name])) for name in ("one", "two"))
    row("together", f"{one:.1f} tok/s one, {two:.1f} both", f"{two / one:.3f}")
    return {"one_tokens_per_s": got["one"], "two_tokens_per_s": got["two"], "ratio": round(two / one, 3)}


def shares(server: Server, clients: int, seconds: float, share: float) -> Found:
    before = device_s(server)
    asyncio.run(loads(server.port, {NAMES[0]: FLOOD * clients, NAMES[1]: clients}, seconds))
    spent = {name: after - before[name] for name, after in device_s(server).items()}
    part = spent[NAMES[1]] / sum(spent.values())
    wrong = max(abs(part - share) / share, abs(part - share) / (1 - share))
    row("shares", f"{part:.3f} of the device's time, share {share:g}", f"{wrong:.1%} off")
    return {"seconds": spent, "part": round(part, 4), "share": share, "off": round(wrong, 4)}


async def first_tokens(port: int, count: int, pause_s: float) -> list[float]:
    """Times to the first token of single requests to the second model."""
    found = []
    for prompt in make_prompts(8192)[-count:]:
        started_s = time.perf_counter()
        async for _ in answer(port, NAMES[1], prompt, 8):
            found.append(time.perf_counter() - started_s)
            break
        await asyncio.sleep(pause_s)
    return found


async def beside_flood(port: int, clients: int, count: int) -> list[float]:
    flood = asyncio.create_task(loads(port, {NAMES[0]: FLOOD * clients}, 600.0))
    await asyncio.sleep(2.0)
    try:
        return await first_tokens(port, count, 0.3)
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)


def first(server: Server, clients: int, share: float) -> Found:
    alone = asyncio.run(first_tokens(server.port, 30, 0.1))
    beside = asyncio.run(beside_flood(server.port, clients, 30))
    p95 = [float(np.percentile(times, 95)) for times in (alone, beside)]
    ratio = p95[1] / (p95[0] / share)
    row(
        "first token p95",
        f"{p95[0] * 1e3:.0f} ms alone, {p95[1] * 1e3:.0f} beside the flood",
        f"{ratio:.2f} times",
    )
    return {"alone_p95_s": p95[0], "beside_p95_s": p95[1], "against_its_share": round(ratio, 3)}


def wake(server: Server) -> Found:
    found: Found = {}
    for level in (1, 2):
        firsts, wakes = [], []
        for prompt in make_prompts(WAKES):
            status, body = server.call(f"/v1/models/{NAMES[1]}/sleep?level={level}", {})
            if status != 200:
                raise SystemExit(f"sleep was answered {status}: {body.decode()}")
            times = asyncio.run(_first(server.port, prompt))
            page = server.call("/metrics")[1].decode()
            firsts.append(times)
            wakes.append(
                float(re.findall(rf'model_wake_seconds{{engine="0",model_name="{NAMES[1]}"}} (\S+)', page)[0])
            )
        row(
            f"wake, level {level}",
            f"first token after {np.median(firsts):.3f} s",
            f"longest {max(firsts):.3f} s",
        )
        found[f"level_{level}"] = {"first_token_s": firsts, "wake_s": wakes}
    return found


async def _first(port: int, prompt: str) -> float:
    started_s = time.perf_counter()
    async for _ in answer(port, NAMES[1], prompt, 2):
        return time.perf_counter() - started_s
    raise SystemExit("no token came")


@bench.part(
    flag("--model", None, "model to serve twice; default: SmolLM2-135M-Instruct"),
    flag("--clients", 4, "clients of each model"),
    flag("--seconds", 60.0, "how long shares are measured"),
    flag("--share", 0.5, "of the second model"),
    flag("--rounds", 3, "measurements of one and of both"),
)
def two(given: Given) -> Found:
    table("what", "found", "against")
    with two_models(given.model, given.share) as server:
        return {
            "together": together(server, given.clients, given.rounds),
            "shares": shares(server, given.clients, given.seconds, given.share),
            "first": first(server, given.clients, given.share),
            "wake": wake(server),
        }


if __name__ == "__main__":
    bench.main()
