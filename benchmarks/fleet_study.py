"""Fleets in the simulator: which router, how many replicas, what moves are worth.

    python -m benchmarks.fleet_study routing [--trace mooncake] [--requests 2000] [--loads 30,60,80,95]
    python -m benchmarks.fleet_study hot [--requests 4000]
    python -m benchmarks.fleet_study scale [--seconds 1800] [--starts 15,180]

An 8B model on modelled H200s. *Load* is a share of the requests per second that the fleet serves when all are there
from the start, with `least-loaded`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import (
    Benchmark,
    Found,
    Given,
    at_once,
    flag,
    h200,
    one_tenant,
    row,
    rows_of,
    simulated,
    table,
)
from paceline.costs.cost_model import CostModel, StepShape
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import Slo, summarize
from paceline.lab.sim.settings import Machine, Scaling
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
ROUTERS = "soonest,round-robin,least-loaded,prefix-aware"
HOT_SHARE, HOT_BLOCKS = 0.6, 64  # of the requests that begin alike, and how long that beginning is
HOT_PROMPT, HOT_ANSWER, HOT_SPAN = 2_048, 200, 16  # tokens; a block of the workload


def figures(record: RunRecord) -> Found:
    """What routers differ in. `load max` is the busiest engine's time in steps over the mean."""
    summary = summarize(record)
    steps_s = record.step_end_s - record.step_start_s
    tokens = record.step_prefill + record.step_decode
    busy, work = (
        np.bincount(record.step_replica, weights=each, minlength=record.num_replicas)
        for each in (steps_s, tokens)
    )
    return {
        "hits": summary.prefix_hit_share or 0.0,
        "TTFT p50 s": summary.ttft_s.p50,
        "TTFT p99 s": summary.ttft_s.p99,
        "ITL p99 ms": 1e3 * (summary.itl_s.p99 or 0.0),
        "busiest / mean": float(busy.max() / busy.mean()),
        "most tokens / mean": float(work.max() / work.mean()),
    }


def at_load(workload: Workload, replicas: int, options: Found) -> tuple[Workload, float]:
    """The workload at the rate that the fleet can just serve, and that rate."""
    record = simulated(at_once(workload), options, num_replicas=replicas, router="least-loaded")
    rate = len(workload) / record.duration_s
    return replace(workload, arrival_s=workload.arrival_s * (workload.rate / rate)), rate


@bench.part(
    flag("--trace", "mooncake"),
    flag("--requests", 2000, "of its first ones"),
    flag("--replicas", 16),
    flag("--loads", "30,60,80,95", "per cent of what the fleet can serve"),
    flag("--routers", ROUTERS),
)
def routing(given: Given) -> Found:
    """Routers at several loads."""
    trace = load_workload(given.trace, num_requests=given.requests, seed=0)
    full, rate = at_load(trace, given.replicas, {})
    runs = (
        {"load %": load, "router": router}
        | figures(
            simulated(
                replace(full, arrival_s=full.arrival_s * (100.0 / load)),
                {},
                num_replicas=given.replicas,
                router=router,
            )
        )
        for load in map(float, given.loads.split(","))
        for router in given.routers.split(",")
    )
    return {"requests": given.requests, "replicas": given.replicas, "full rate": rate, "runs": rows_of(runs)}


@bench.part(
    flag("--requests", 4000), flag("--replicas", 16), flag("--load", 80.0), flag("--routers", ROUTERS)
)
def hot(given: Given) -> Found:
    """One prefix in 60 % of the requests."""
    full, _ = at_load(one_hot_prefix(given.requests), given.replicas, {})
    workload = replace(full, arrival_s=full.arrival_s * (100.0 / given.load))
    runs = (
        {"router": router} | figures(simulated(workload, {}, num_replicas=given.replicas, router=router))
        for router in given.routers.split(",")
    )
    return {"requests": given.requests, "runs": rows_of(runs)}


def one_hot_prefix(count: int) -> Workload:
    draw = np.random.default_rng(3)
    shared = tuple(range(HOT_BLOCKS))
    ids = [
        shared if draw.random() < HOT_SHARE else tuple(range(1000 * (n + 1), 1000 * (n + 1) + HOT_BLOCKS))
        for n in range(count)
    ]
    return Workload(
        name="one hot prefix",
        arrival_s=np.cumsum(draw.exponential(0.01, count)),
        prompt_len=draw.integers(HOT_BLOCKS * HOT_SPAN + 1, HOT_PROMPT, count).astype(np.int32),
        output_len=draw.integers(1, 2 * HOT_ANSWER, count).astype(np.int32),
        tenant=np.zeros(count, np.int32),
        tenants=("one",),
        prefix_ids=tuple(ids),
        prefix_block=HOT_SPAN,
    )


@bench.part(
    flag("--seconds", 1800, "of a day"),
    flag("--replicas", 10, "at most"),
    flag("--starts", "15,180", "seconds that a replica takes to start"),
    flag("--rules", "wanted,keda"),
)
def scale(given: Given) -> Found:
    """Who says how many replicas there are, over a day with bursts."""
    workload = day(given.seconds)
    slo = Slo(ttft_s=DAY_TTFT_S, itl_s=DAY_ITL_S)
    runs: list[Found] = []
    table("start s", "rule", "missed", "replica-hours", "TTFT p99 s", "changes")
    for start_s in map(float, given.starts.split(",")):
        for rule in given.rules.split(","):
            scaling = Scaling(rule=rule, start_s=start_s, ttft_s=DAY_TTFT_S, itl_s=DAY_ITL_S)
            record = simulated(
                workload, DAY_ENGINE, machine=slow_machine(), num_replicas=given.replicas, scaling=scaling
            )
            met = summarize(record, slo=slo).goodput_per_s or 0.0
            runs.append(
                {
                    "start s": start_s,
                    "rule": rule,
                    "missed": 1.0 - met * record.duration_s / len(workload),
                    "replica-hours": (record.replica_s or 0.0) / 3600.0,
                    "TTFT p99 s": summarize(record).ttft_s.p99,
                    "changes": len(record.config["changes"]),  # type: ignore[arg-type]
                }
            )
            row(*runs[-1].values())
    return {"requests": len(workload), "seconds": given.seconds, "runs": runs}


DAY_TTFT_S, DAY_ITL_S = 2.0, 0.25
DAY_ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
SLOWER = 6.0  # than an H200, so that a day has few steps
NIGHT, NOON = 0.6, 5.0  # requests a second
BURSTS, BURST_S, BURST = 6, 90.0, 3.0


@dataclass(frozen=True)
class Slower:
    """An H200 whose steps take longer."""

    cost: CostModel

    def step_seconds(self, shape: StepShape) -> float:
        return SLOWER * self.cost.step_seconds(shape)


def slow_machine() -> Machine:
    return replace(h200(), cost=Slower(h200().cost))


def day(seconds: float, seed: int = 5) -> Workload:
    """A night and a noon, with bursts of three times as much that begin within ten seconds."""
    draw = np.random.default_rng(seed)
    starts = np.sort(draw.uniform(0.1 * seconds, 0.9 * seconds, BURSTS))

    def rate(at_s: float) -> float:
        usual = NIGHT + (NOON - NIGHT) * 0.5 * (1.0 - math.cos(2.0 * math.pi * at_s / seconds))
        rise = max(
            (min(at_s - start, 10.0) / 10.0 for start in starts if start <= at_s < start + BURST_S),
            default=0.0,
        )
        return usual * (1.0 + (BURST - 1.0) * rise)

    arrival_s, now_s, most = [], 0.0, NOON * BURST
    while (now_s := now_s + draw.exponential(1.0 / most)) < seconds:
        if draw.random() < rate(now_s) / most:
            arrival_s.append(now_s)
    count = len(arrival_s)
    prompts = np.minimum(draw.lognormal(6.6, 0.7, count), 8_000)
    answers = np.minimum(draw.lognormal(4.9, 0.6, count) + 1, 1_000)
    return one_tenant("a day", arrival_s, prompts.astype(np.int32), answers.astype(np.int32))


if __name__ == "__main__":
    bench.main()
