"""What a flood of trees does to other tenants, in virtual time.

An 8B model on a modelled H200 under `fair`: eight tenants send plain requests, a ninth sends as many trees as the
machine could not compute alone. Each tree is a prompt whose answer is forked several times while it runs; branches get
scores, and the worse half is pruned. The same load without trees: the tenant sends plain requests of its own in the
place of forks, each with the tokens that the fork begins with, and aborts those that would have been pruned. First
tokens of the eight other tenants are compared; a run without the ninth is shown beside.

    python -m benchmarks.tree_flood [--seconds 30] [--flood-rate 40] [--policies fair,fcfs]
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.harness import ENGINE, Benchmark, Found, Given, flag, h200, one_tenant, rows_of
from paceline.config.sized import Capacity
from paceline.core.clock import ManualClock
from paceline.core.events import StepEvents
from paceline.core.request import NoHooks, RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.factory import build_engine
from paceline.lab.sim import SimConfig, engine_config
from paceline.lab.sim.simulated_runner import TimedRunner
from paceline.scheduler.invariants import InvariantChecker

bench = Benchmark(__doc__)
OTHERS, FLOOD = [f"tenant-{number}" for number in range(8)], "flood"
TREES, PLAIN, NONE = "trees", "plain requests", "none"
MOST_PROMPT, MOST_OUTPUT = 1024, 256
FORK_AT, PRUNE_AT, WIDTH = 24, 48, 8  # tokens of the answer, branches
RETRY_S = 1e-3


class Arrival(NamedTuple):
    at_s: float
    tenant: str
    num_prompt: int
    num_output: int


def arrivals(seconds: float, rate: float, flood_rate: float, seed: int) -> list[Arrival]:
    """Poisson, of all tenants, by time."""
    draw, found = random.Random(seed), []
    for tenant in [*OTHERS, FLOOD]:
        per_second, now_s = (flood_rate if tenant == FLOOD else rate / len(OTHERS)), 0.0
        while per_second and (now_s := now_s + draw.expovariate(per_second)) < seconds:
            lengths = draw.randrange(64, MOST_PROMPT), draw.randrange(PRUNE_AT + 16, MOST_OUTPUT)
            found.append(Arrival(now_s, tenant, *lengths))
    return sorted(found)


@dataclass
class Flood:
    """One run: the engine, and what the owners of requests do."""

    policy: str
    kind: str  # of what the ninth tenant sends
    check: bool = False
    firsts_s: list[float] = field(default_factory=list)  # of the other tenants, from their arrival
    forks: int = 0
    refused: int = 0
    flood_tokens: int = 0
    seconds: float = 0.0  # until all was done

    def __post_init__(self) -> None:
        machine, self._clock = h200(), ManualClock()
        sizes = one_tenant("sizes", [0.0], [MOST_PROMPT], [MOST_OUTPUT])
        options = {
            **ENGINE,
            "scheduling_policy": self.policy,
            "enable_prefix_caching": True,
            "max_queue": 100_000,
            "max_queue_tokens": 1 << 30,
        }
        config = SimConfig(machine=machine, engine=engine_config(machine, sizes, options))
        self._runner = TimedRunner(
            machine.cost,
            self._clock,
            Capacity.of(config.engine).num_rows,
            block_bytes=config.block_bytes,
            host_step_s=config.host_step_s,
        )
        self._engine = build_engine(
            config.engine,
            self._runner,
            clock=self._clock,
            hooks=NoHooks(),
            make_checker=InvariantChecker if self.check else None,
        )
        self._arrived_s: dict[RequestId, float] = {}  # others' requests without a token yet
        self._others: set[int] = set()
        self._roots: dict[RequestId, int] = {}  # the flood's, with their number of output tokens
        self._branches: dict[RequestId, list[RequestId]] = {}  # by root

    def run(self, load: list[Arrival]) -> Flood:
        waiting, clock, engine, runner = deque(load), self._clock, self._engine, self._runner
        step = engine.step_overlapped if engine.depth else engine.step
        draw = np.random.default_rng(1)
        while waiting or engine.has_requests:
            if not engine.has_requests:
                clock.advance_to(max(clock.now(), waiting[0].at_s))
            while waiting and waiting[0].at_s <= clock.now():
                self._arrive(waiting.popleft(), draw)
            before = runner.num_submitted + runner.num_completed
            self._collect(step())
            if runner.num_submitted + runner.num_completed == before:  # nothing can be done now
                wakeup_s = engine.scheduler.next_wakeup_s() or 0.0
                next_s = min(waiting[0].at_s if waiting else np.inf, wakeup_s if wakeup_s else np.inf)
                clock.advance_to(next_s if clock.now() < next_s < np.inf else clock.now() + RETRY_S)
        self.seconds = clock.now()
        engine.close()
        return self

    def _arrive(self, arrival: Arrival, draw: np.random.Generator) -> None:
        # Drawn for all of them, so that prompts are the same in every run.
        tokens = draw.integers(1, 1 << 20, arrival.num_prompt, dtype=np.int32)
        if arrival.tenant == FLOOD and self.kind == NONE:
            return
        sampling = SamplingParams(max_tokens=arrival.num_output, temperature=0.0, ignore_eos=True)
        (made,) = self._engine.add(tokens, sampling, tenant=arrival.tenant, arrival_s=arrival.at_s)
        if arrival.tenant == FLOOD:
            self._roots[made] = arrival.num_output
        else:
            self._arrived_s[made] = arrival.at_s
            self._others.add(made)

    def _collect(self, events: StepEvents) -> None:
        for tokens in events.tokens:
            for request, index in zip(tokens.requests.tolist(), tokens.index.tolist(), strict=True):
                if request in self._arrived_s:
                    self.firsts_s.append(tokens.time_s - self._arrived_s.pop(request))
                elif request in self._roots and index in (FORK_AT, PRUNE_AT):
                    (self._fork if index == FORK_AT else self._prune)(RequestId(request))
                self.flood_tokens += request not in self._others

    def _fork(self, root: RequestId) -> None:
        engine = self._engine
        if root not in engine.scheduler.state.requests:
            return
        made: list[RequestId] = []
        for number in range(WIDTH):
            try:
                if self.kind == TREES:
                    made += engine.fork(root, 1, score=float(number % 3), append=(number + 1,))
                else:
                    known = engine.scheduler.tokens_of(root)
                    tokens = np.append(known, np.int32(number + 1))
                    sampling = SamplingParams(
                        max_tokens=self._roots[root] - FORK_AT - 2, temperature=0.0, ignore_eos=True
                    )
                    made += engine.add(tokens, sampling, tenant=FLOOD)
            except PacelineError:
                self.refused += 1
        self.forks += len(made)
        self._branches[root] = made

    def _prune(self, root: RequestId) -> None:
        """The worse half ends."""
        for branch in self._branches.pop(root, [])[: WIDTH // 2]:
            self._engine.prune(branch) if self.kind == TREES else self._engine.abort(branch)


def compared(policy: str, load: list[Arrival], *, check: bool = False) -> list[Found]:
    """The first tokens of other tenants beside trees, beside plain requests, and alone."""
    found: list[Found] = []
    for kind in (TREES, PLAIN, NONE):
        run = Flood(policy, kind, check).run(load)
        p50, p95 = (1e3 * float(np.percentile(run.firsts_s, share)) for share in (50, 95))
        found.append(
            {
                "policy": policy,
                "flood": kind,
                "requests of others": len(run.firsts_s),
                "forks": run.forks,
                "refused": run.refused,
                "tokens of the flood": run.flood_tokens,
                "seconds": run.seconds,
                "TTFT p50 ms": p50,
                "TTFT p95 ms": p95,
            }
        )
    return found


@bench.part(
    flag("--seconds", 30.0, "of arrivals"),
    flag("--rate", 12.0, "requests of the eight tenants together, each second"),
    flag("--flood-rate", 40.0, "trees, each second"),
    flag("--policies", "fair,fcfs"),
    flag("--seed", 1),
)
def tree_flood(given: Given) -> Found:
    """First tokens of other tenants."""
    load = arrivals(given.seconds, given.rate, given.flood_rate, given.seed)
    rows = rows_of(row for policy in given.policies.split(",") for row in compared(policy, load))
    ratios = {
        trees["policy"]: trees["TTFT p95 ms"] / plain["TTFT p95 ms"]
        for trees, plain in zip(rows[::3], rows[1::3], strict=True)
    }
    print({policy: f"{ratio:.3f} times the p95 beside plain requests" for policy, ratio in ratios.items()})
    return {"ratios": ratios, "rows": rows}


if __name__ == "__main__":
    bench.main()
