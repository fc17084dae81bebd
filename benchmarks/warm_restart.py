"""Prefixes on a disk: the first token after a restart, and what moving blocks costs beside.

Without flags: a server with `--kv-disk-dir` reads prompts of 1,536 tokens, each another, ends, starts again on the same
folder and reads them once more; the first token of the warm ones against that of the cold ones. Every answer is
compared. With `--beside`: blocks of SmolLM2's size through the threads of the disk against the same bytes written and
read one behind the other by one thread (both with every page out of the page cache before it is read); then four
clients in a closed loop, whose prompts are all written, on a server with the disk and on one without, in turns: the
time between tokens. Run it on a machine that does nothing else.

    python -m benchmarks.warm_restart [--prompts 5] [--folder FOLDER]
    python -m benchmarks.warm_restart --beside [--rounds 3]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from benchmarks.cpu_server import closed_loop
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
from paceline.core.plan import Moves, StepPlan
from paceline.core.request import BlockKey
from paceline.runner.stores.disk_store import HEADER, RECORD, DiskStore
from paceline.runner.stores.store_threads import Bytes, StoreThreads

bench = Benchmark(__doc__)
PROMPT_TOKENS, NUM_NEW = 1536, 8
BLOCK_BYTES = 737_280  # 16 tokens of SmolLM2-135M in float32
NUM_BLOCKS = 512
CLIENTS, REQUESTS, LENGTH = 4, 4, 192  # of the loop
LONGEST_WRITE_S = 60.0


def make_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Token ids that no other prompt begins with."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


async def first_token(server: Server, prompt: list[int]) -> tuple[float, str]:
    """Milliseconds until the first token of a prompt, and the answer."""
    body = {"prompt": prompt, "max_tokens": NUM_NEW, "stream": True, **GREEDY}
    started_s, first_s, text = time.perf_counter(), 0.0, ""
    async with streamed(server.port, "/v1/completions", body) as answer:
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}")
        async for event in answer.events:
            choices = json.loads(event).get("choices") or [{}]
            if choices[0].get("text"):
                first_s = first_s or time.perf_counter()
                text += choices[0]["text"]
    return (first_s - started_s) * 1e3, text


def wait_until_written(folder: Path, num_blocks: int) -> None:
    """A server that has nothing to do writes what it has."""
    until_s = time.monotonic() + LONGEST_WRITE_S
    while (folder / "index").stat().st_size < HEADER.size + num_blocks * RECORD.size:
        if time.monotonic() > until_s:
            raise SystemExit("the disk did not take the prompts in a minute")
        time.sleep(0.05)


@bench.part(
    flag("--prompts", 5, "prompts, each another"),
    flag("--model", None, "model to serve; default: SmolLM2-135M-Instruct"),
    flag("--folder", None, "folder on the disk to measure; default: one for temporary files"),
    flag("--beside", False, "what moving blocks costs, instead", action="store_true"),
    flag("--rounds", 3, "runs of each, in turns; with --beside"),
)
def warm_restart(given: Given) -> Found:
    """First token after a restart against cold."""
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        return beside(given, Path(scratch)) if given.beside else restart(given, Path(scratch) / "kv")


def restart(given: Given, folder: Path) -> Found:
    options = [] if given.model is None else [given.model]
    options += ["--kv-disk-dir", str(folder), "--kv-disk-size", "8G"]
    prompts = make_prompts(given.prompts, PROMPT_TOKENS)
    runs = []
    for is_warm in (False, True):
        with served(options) as server:
            # The first pays for memory.
            asyncio.run(first_token(server, make_prompts(1, 64, seed=1 + is_warm)[0]))
            runs.append([asyncio.run(first_token(server, prompt)) for prompt in prompts])
            wait_until_written(folder, given.prompts * (PROMPT_TOKENS // 16))
    if [text for _, text in runs[0]] != [text for _, text in runs[1]]:
        raise SystemExit("an answer is another after the restart")
    cold, warm = ([round(ms, 1) for ms, _ in run] for run in runs)
    table("first token", "cold ms", "warm ms", "times sooner")
    row(
        "median",
        *(found := (statistics.median(cold), statistics.median(warm))),
        round(found[0] / found[1], 1),
    )
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "cold_ms": cold,
        "warm_ms": warm,
        "times_sooner": round(found[0] / found[1], 1),
    }


# -- beside --------------------------------------------------------------------------------------------------


class Places:
    """Host places of blocks."""

    def __init__(self, count: int) -> None:
        self.rows = np.random.default_rng(0).integers(0, 256, (count, BLOCK_BYTES), np.uint8)

    def pack(self, place: int, into: Bytes) -> None:
        into[:] = self.rows[place]

    def unpack(self, place: int, source: Bytes) -> None:
        self.rows[place] = source


def beside(given: Given, folder: Path) -> Found:
    rates = in_turns(
        {"threads": lambda: through_threads(folder / "store"), "plain": lambda: plainly(folder / "plain")},
        given.rounds,
    )
    table("disk", "write MB/s", "read MB/s")
    medians = {}
    for name, runs in rates.items():
        medians[name] = [round(statistics.median(part)) for part in zip(*runs, strict=True)]
        row(name, *medians[name])
    model = [] if given.model is None else [given.model]
    disk = ["--kv-disk-dir", str(folder / "kv"), "--kv-disk-size", "4G"]
    gaps = in_turns(
        {"with": lambda: in_a_loop(model + disk), "without": lambda: in_a_loop(model)}, given.rounds
    )
    itl = {name: [round(run["itl_p99_ms"], 1) for run in runs] for name, runs in gaps.items()}
    speed = {name: [run["output_tokens_per_s"] for run in runs] for name, runs in gaps.items()}
    ratio = round(statistics.median(itl["with"]) / statistics.median(itl["without"]), 3)
    table("four clients", "ITL p99 with", "without", "times")
    row("median", statistics.median(itl["with"]), statistics.median(itl["without"]), ratio)
    threads, plain = medians["threads"], medians["plain"]
    return {
        "write_mb_s": {"threads": threads[0], "plain": plain[0]},
        "read_mb_s": {"threads": threads[1], "plain": plain[1]},
        "write_share": round(threads[0] / plain[0], 2),
        "read_share": round(threads[1] / plain[1], 2),
        "itl_p99_ms": itl,
        "output_tokens_per_s": speed,
        "itl_p99_times": ratio,
    }


def through_threads(folder: Path) -> tuple[float, float]:
    """Megabytes a second that tickets of 16 blocks are written and read at."""
    store = DiskStore(folder, size=(NUM_BLOCKS + 8) * BLOCK_BYTES, place_bytes=BLOCK_BYTES, fingerprint=b"")
    threads, found = StoreThreads(store, Places(64), BLOCK_BYTES), []
    for name in ("store", "fetch"):
        started_s, seq = time.perf_counter(), 0
        left = list(range(0, NUM_BLOCKS, 16))
        under_way = 0
        while left or under_way:
            while left and under_way < 4:  # as many as the places allow
                seq, under_way = seq + 1, under_way + 1
                moved = moves(seq, left.pop(0), seq % 4 * 16)
                plan = StepPlan(seq=seq, store=moved) if name == "store" else StepPlan(seq=seq, fetch=moved)
                threads.submit(plan)
            reported = threads.completed(wait=True)
            if len(reported.failed):
                raise SystemExit("a ticket failed")
            under_way -= len(reported.done)
        os.fdatasync(store._data)
        found.append(NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - started_s) / 1e6)
        os.posix_fadvise(store._data, 0, 0, os.POSIX_FADV_DONTNEED)
    threads.close()
    store.close()
    return found[0], found[1]


def moves(ticket: int, first: int, host: int) -> Moves:
    keys = tuple(
        BlockKey(key=number.to_bytes(32, "big"), payload=b"", check=bytes(16))
        for number in range(first, first + 16)
    )
    return Moves(
        ticket=np.full(16, ticket, np.int32),
        group=np.zeros(16, np.int32),
        host=np.arange(host, host + 16, dtype=np.int32),
        disk=np.arange(first, first + 16, dtype=np.int32),
        contents=keys,
        uses_left=(0,) * 16,
    )


def plainly(path: Path) -> tuple[float, float]:
    """The same by one thread, in pieces of a block, with nothing looked at."""
    piece, found = bytearray(os.urandom(BLOCK_BYTES)), []
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(handle, 0, NUM_BLOCKS * BLOCK_BYTES)
    for move in (os.pwritev, os.preadv):
        started_s = time.perf_counter()
        for number in range(NUM_BLOCKS):
            move(handle, [piece], number * BLOCK_BYTES)
        os.fdatasync(handle)
        found.append(NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - started_s) / 1e6)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return found[0], found[1]


def in_a_loop(options: list[str]) -> Found:
    """Four clients whose prompts no one has sent before."""
    prompts = [json.dumps(prompt) for prompt in make_prompts(CLIENTS * REQUESTS, LENGTH)]
    with served(options) as server:

        async def send(prompt: str) -> AsyncIterator[int]:
            body = {"prompt": json.loads(prompt), "max_tokens": 64, "stream": True, **GREEDY}
            async with streamed(server.port, "/v1/completions", body) as answer:
                async for event in answer.events:
                    choices = json.loads(event).get("choices") or [{}]
                    if choices[0].get("text"):
                        yield 1

        asyncio.run(first_token(server, make_prompts(1, 64, seed=1)[0]))
        return asyncio.run(closed_loop(send, prompts, CLIENTS, LENGTH, lambda: 0.0))


if __name__ == "__main__":
    bench.main()
