"""What choosing an engine costs: `routing.route` with `soonest`, the choice counted and its blocks entered.

Engines hold a million different blocks together: half are conversations at one engine each, half beginnings that four
engines have. Prompts have 64 blocks, of which 0, 32 or 62 are known somewhere, in turns. CPU time of the thread, the
fastest of the rounds; reports and news arrive between rounds.

    python -m benchmarks.router_cost [--engines 64,1000] [--blocks 1000000] [--rounds 200]
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, no_garbage_collection, row, table
from paceline.routing.routers import ROUTERS, route
from paceline.routing.view import Ask, FleetView, Gauges

bench = Benchmark(__doc__)
PROMPT, BLOCK = 64, 64  # blocks of a prompt, tokens of a block
KNOWN = (0, 32, 62)  # blocks of a prompt that are known
CHOICES = 60  # of a round
BUSY = Gauges(5_000, 100_000, 64, 10_000, 40_000.0, 0.007, 3e-5)


def key(chain: int, block: int) -> bytes:
    return (chain << 20 | block).to_bytes(8, "little")


def filled(num_engines: int, num_blocks: int) -> tuple[FleetView, int]:
    """A view whose engines hold so many blocks, in chains of `PROMPT`, and the number of chains."""
    view = FleetView(BLOCK)
    for _ in range(num_engines):
        view.attach(gauges=BUSY)
    chains = num_blocks // PROMPT
    draw = np.random.default_rng(1)
    for chain in range(chains):
        keys = [key(chain, block) for block in range(PROMPT)]
        for engine in draw.choice(num_engines, 4 if chain % 2 else 1, replace=False).tolist():
            view.prefixes.stored(engine, keys)
    return view, chains


def asks(chains: int, count: int, draw: np.random.Generator, now_s: float) -> list[Ask]:
    made = []
    for index, chain in enumerate(draw.integers(0, chains, count).tolist()):
        known, fresh = KNOWN[index % len(KNOWN)], int(draw.integers(1 << 30, 1 << 40))
        keys = [key(chain, block) for block in range(known)] + [
            key(fresh, block) for block in range(known, PROMPT)
        ]
        made.append(Ask(now_s + index * 1e-3, PROMPT * BLOCK + 7, max_tokens=1000, keys=tuple(keys)))
    return made


@bench.part(
    flag("--engines", "64,1000", "how many"),
    flag("--blocks", 1_000_000, "that they hold"),
    flag("--rounds", 200, f"of {CHOICES} choices"),
)
def router_cost(given: Given) -> Found:
    found: Found = {}
    table("engines", "blocks known", "us a choice")
    for num_engines in map(int, given.engines.split(",")):
        view, chains = filled(num_engines, given.blocks)
        router, draw, taken = ROUTERS["soonest"](), np.random.default_rng(2), []
        with no_garbage_collection():
            for turn in range(given.rounds):
                given_asks = asks(chains, CHOICES, draw, now_s=5.0 * turn)
                view.prefixes.pass_time(given_asks[0].now_s)
                for engine, tokens in enumerate(draw.integers(1_000, 9_000, num_engines).tolist()):
                    view.report(engine, BUSY._replace(waiting_tokens=tokens), known=view.num_sent[engine])
                started_s = time.thread_time()
                for ask in given_asks:
                    route(view, router, ask)
                taken.append(1e6 * (time.thread_time() - started_s) / CHOICES)
        found[str(num_engines)] = {"blocks": len(view.prefixes), "us": min(taken)}
        row(num_engines, len(view.prefixes), min(taken))
    return found


if __name__ == "__main__":
    bench.main()
