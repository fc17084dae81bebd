"""How many blocks of prompts are found in the prefix cache, by eviction order.

Requests of a trace come at their recorded times; each takes its blocks, publishes them and lets go of them at once, so
that the cache has all memory. The pool, the cache and the orders are those of the engine.

    python -m benchmarks.eviction_study TRACE                 # Mooncake's JSON lines: timestamp (ms) and hash_ids
    python -m benchmarks.eviction_study TRACE --known 30      # requests wait this many seconds before they run
    python -m benchmarks.eviction_study TRACE --agents        # and logs of agents, in archives beside the trace

Logs of agents (archives of JSON lines with timestamp and input) are laid out in time: each is played 8 times, as a
conversation of its own, at moments of one hour. Their caches hold a share of all different blocks.
"""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Found, Given, flag, rows_of
from paceline.config.engine import EVICTIONS, KVConfig
from paceline.config.sized import Capacity
from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool
from paceline.kv.manager import KVManager
from paceline.kv.wishes import Wishes
from paceline.lab.sim.replica import arrivals_by_name, pools_with

bench = Benchmark(__doc__)
TRACE_BLOCK = 512  # tokens
CHARACTERS = 64  # of an agent's prompt, in a block
COPIES, HOUR_S = 8, 3600.0
STEPS, STEP_S = 8, 0.5  # before arrivals, to look up what waiting requests will hit
SHARES = (0.02, 0.05, 0.10)
BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt as the keys of its blocks."""

    time_s: float
    keys: list[BlockKey]


def of_trace(path: Path) -> list[Arrival]:
    """Equal hash ids are equal beginnings."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        Arrival(line["timestamp"] / 1e3, [_key(b"%d" % number) for number in line["hash_ids"]])
        for line in lines
    ]


def of_agents(archive: Path, seed: int = 0) -> list[Arrival]:
    """Every log of an archive several times, each copy with keys and a moment of its own."""
    rng = random.Random(seed)
    found = []
    for name, lines in _logs(archive):
        start = min(line["timestamp"] for line in lines)
        for copy in range(COPIES):
            offset_s = rng.uniform(0.0, HOUR_S)
            for line in lines:
                keys = list(_chained(line["input"], f"{name}:{copy}"))
                if keys:
                    found.append(Arrival(offset_s + (line["timestamp"] - start) / 1e6, keys))
    return sorted(found, key=lambda arrival: arrival.time_s)


def _logs(archive: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            content = files.extractfile(member) if member.name.endswith(".jsonl") else None
            lines = (
                [] if content is None else [json.loads(line) for line in content.read().splitlines() if line]
            )
            if lines:
                yield member.name, lines


def _chained(text: str, root: str) -> Iterator[BlockKey]:
    name = root.encode()
    for start in range(0, len(text) - CHARACTERS + 1, CHARACTERS):
        name = hashlib.blake2b(name + text[start : start + CHARACTERS].encode(), digest_size=16).digest()
        yield _key(name)


def _key(name: bytes) -> BlockKey:
    return BlockKey(name, name)


def hit_percent(arrivals: Sequence[Arrival], num_blocks: int, eviction: str, known_s: float = 0.0) -> float:
    """Share of all blocks that were found in a cache of `num_blocks`. Longer prompts are cut to what fits."""
    make_pool: Callable[..., BlockPool] = BlockPool
    if eviction == BELADY:
        make_pool = pools_with(arrivals_by_name((each.time_s, each.keys) for each in arrivals))
    kv = KVManager(
        KVConfig(block_size=1, num_blocks=num_blocks + 1, eviction="lru" if eviction == "lru" else "reuse"),
        Capacity(num_rows=1, max_blocks_per_row=num_blocks + 1),
        max_chunk=1,
        make_pool=make_pool,
    )
    wishes = Wishes(kv)
    hits = total = waiting = 0
    now_s = -1.0
    for number, arrival in enumerate(arrivals):
        if arrival.time_s > now_s:  # what is known by then has been looked up, in the steps between
            kv.block_time.set_time(max(now_s, arrival.time_s - STEP_S, 0.0))
            now_s = arrival.time_s
            while known_s and waiting < len(arrivals) and arrivals[waiting].time_s <= now_s + known_s:
                keys = arrivals[waiting].keys
                wishes.comes(waiting, keys, len(keys) + 1)
                waiting += 1
            kv.block_time.set_time(now_s)
            for _ in range(STEPS):
                wishes.settle()
        wishes.settle()
        wishes.leaves(number)  # heard of by the next `settle`, when it has its blocks
        keys = arrival.keys[:num_blocks]
        match = kv.match(keys, len(keys) + 1)
        kv.adopt(0, match)
        kv.extend(0, len(keys))
        kv.publish(0, keys, len(keys))
        kv.release(0)
        kv.settle()
        kv.delta.take()
        hits += match.num_blocks
        total += len(keys)
    return 100.0 * hits / total


@bench.part(
    flag("trace", help="trace of conversations"),
    flag("--sizes", "0.9,1.8,3.6", "caches in millions of tokens"),
    flag("--orders", f"{','.join(reversed(EVICTIONS))},{BELADY}", "eviction orders to compare"),
    flag("--known", 0.0, "seconds that requests wait before they run"),
    flag(
        "--agents", None, "archives of agents' logs; none named: those beside the trace", nargs="*", kind=Path
    ),
)
def hits(given: Given) -> Found:
    """Hits of each order and size, in percent of all blocks."""
    orders = given.orders.split(",")
    arrivals = of_trace(Path(given.trace))
    sizes = [(f"{size} M tokens", int(float(size) * 1e6 / TRACE_BLOCK)) for size in given.sizes.split(",")]
    cases = [(Path(given.trace).name, arrivals, sizes)]
    if given.agents is not None:
        archives = given.agents or sorted(Path(given.trace).parent.glob("*agent*.tar.gz"))
        cases += [(path.name, *_shares_of(of_agents(path))) for path in archives]

    def results() -> Iterator[Found]:
        for name, requests, caches in cases:
            for size, num_blocks in caches:
                shares = {
                    f"{order} %": round(hit_percent(requests, num_blocks, order, given.known), 2)
                    for order in orders
                }
                yield {"trace": name, "cache": size, "blocks": num_blocks, **shares}

    return {"known_s": given.known, "runs": rows_of(results())}


def _shares_of(arrivals: list[Arrival]) -> tuple[list[Arrival], list[tuple[str, int]]]:
    different = len({key.key for arrival in arrivals for key in arrival.keys})
    return arrivals, [(f"{share:.0%} of blocks", int(share * different)) for share in SHARES]


if __name__ == "__main__":
    bench.main()
