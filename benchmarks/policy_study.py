"""What the scheduling policies give, beside first come, first served: an 8B model on a modelled H200.

Five parts: shares of tenants under overload and under a flood, interactive beside batch work, deadlines, and latency
by order. Each prints lines of one table with what is asked for and what came out. Saturation is what first come,
first served finishes when everything is there from the start.

    python -m benchmarks.policy_study [--tenants vtc_arena_multiclient_trace.csv] [--trace azure2023_conv.csv]
                                      [--only fair,flood,priority,deadline,order] [--minutes 20]

Without files the built-in generators are used, which are fitted to the same traces.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Rule
from paceline.core.request import Request
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.record import OUTCOMES, RunRecord
from paceline.lab.report.summary import OUTPUT_COST, largest_gap, service
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload import load_workload
from paceline.lab.workload.model import Workload
from paceline.scheduler.scheduler import Scheduler

MACHINE = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
ENGINE: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
POOL_TOKENS = 10_000  # of the part about shares
FINISHED = OUTCOMES.index("finished")
REFUSED = OUTCOMES.index("refused")
TTFT_S, ITL_S = 1.0, 0.05
PRIORITIES = ("interactive", "batch")  # tenants in the order of their priority

Floats = NDArray[np.float64]


TABLE_HEAD = "| part | policy | what | asked | found | holds |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    part: str
    policy: str
    what: str
    asked: str
    found: str
    holds: bool | None  # None: nothing was asked

    def cells(self) -> str:
        holds = "" if self.holds is None else "yes" if self.holds else "NO"
        return f"| {' | '.join((self.part, self.policy, self.what, self.asked, self.found, holds))} |"


def times_line(part: str, policy: str, what: str, asked: float | None, before: float, after: float) -> Line:
    """How much longer something takes than before, in milliseconds, and how much longer it may."""
    found = f"{after / before:.2f} x ({before:.0f} -> {after:.0f} ms)"
    holds = None if asked is None else after <= asked * before
    return Line(part, policy, what, "" if asked is None else f"<= {asked:g} x", found, holds)


def run(workload: Workload, policy: str, options: dict[str, Any] | None = None, **sim: Any) -> RunRecord:
    engine = engine_config(MACHINE, workload, {**ENGINE, "scheduling_policy": policy, **(options or {})})
    return simulate(SimConfig(machine=MACHINE, engine=engine, **sim), workload, label=policy)


def at_rate(workload: Workload, rate: float) -> Workload:
    """The same arrivals, as dense as to give the rate."""
    start = workload.arrival_s - workload.arrival_s[0]
    return replace(workload, arrival_s=start * (workload.rate / rate))


def saturation(workload: Workload, options: dict[str, Any] | None = None) -> float:
    """Requests per second when nobody has to be waited for."""
    record = run(replace(workload, arrival_s=np.zeros(len(workload))), "fcfs", options)
    return len(workload) / float(np.nanmax(record.finished_s))


def ttft(record: RunRecord) -> Floats:
    found: Floats = record.first_token_s - record.arrival_s
    return found


def served_per_s(record: RunRecord, until_s: float) -> float:
    """Tokens of prompts and outputs per second, up to a moment."""
    tenants = range(int(record.tenant.max()) + 1)
    return sum(float(service(record, tenant, np.array([until_s]))[0]) for tenant in tenants) / until_s


# -- shares of tenants -------------------------------------------------------------------------------------


def fair_part(trace: Workload) -> Iterator[Line]:
    options = {"block_size": 16, "num_blocks": POOL_TOKENS // 16 + 1}
    full = saturation(trace, options)
    load = at_rate(trace, 2 * full)
    until_s = load.duration_s
    gaps, rates = {}, {}
    for policy in ("fcfs", "fair"):
        record = run(load, policy, options)
        gaps[policy], rates[policy] = largest_gap(record, until_s) or 0.0, served_per_s(record, until_s)
    longest = int(load.prompt_len.max())
    bound = 2 * max(longest, OUTPUT_COST * POOL_TOKENS)
    yield Line(
        part="fair",
        policy="fair",
        what=f"service gap, {len(set(load.tenant.tolist()))} tenants, {2 * full:.1f}/s",
        asked=f"<= {bound:,.0f} tokens (VTC)",
        found=f"{gaps['fair']:,.0f}",
        holds=gaps["fair"] <= bound,
    )
    share = gaps["fair"] / gaps["fcfs"]
    found = f"{share:.2f} of {gaps['fcfs']:,.0f}"
    yield Line(
        part="fair", policy="fair", what="of fcfs's gap", asked="<= 0.25", found=found, holds=share <= 0.25
    )
    loss = 1.0 - rates["fair"] / rates["fcfs"]
    yield Line(
        part="fair",
        policy="fair",
        what="loss of throughput",
        asked="<= 5 %",
        found=f"{100 * loss:.1f} %",
        holds=loss <= 0.05,
    )
    loud = a_small_tenant(load)
    flooded = with_flood(load, loud, 10 * full / len(load.tenants), seed=3)
    for policy in ("fcfs", "fair"):
        before, after = (
            1e3 * float(np.nanpercentile(ttft(record)[record.tenant != loud], 95))
            for record in (run(load, policy, options), run(flooded, policy, options))
        )
        what = "others' p95 TTFT beside one of them with ten shares"
        yield times_line("fair", policy, what, 2.0 if policy == "fair" else None, before, after)


def flood_part(trace: Workload) -> Iterator[Line]:
    """Tenants at 0.8 of saturation; then one more with ten times the share that all have alike.

    Once with the requests dealt out evenly, once as recorded: there a few ask for more than their share themselves,
    and only those that do not are looked at.
    """
    options = {"block_size": 16, "num_blocks": POOL_TOKENS // 16 + 1}
    full = saturation(trace, options)
    recorded = at_rate(trace, 0.8 * full)
    tenants = len(recorded.tenants)
    dealt = np.random.default_rng(2).integers(0, tenants, len(recorded)).astype(np.int32)
    modest = np.bincount(recorded.tenant) <= full * recorded.duration_s / (tenants + 1)
    for name, quiet, looked_at in (
        ("alike", replace(recorded, tenant=dealt), np.ones(tenants, np.bool_)),
        (f"recorded, {np.count_nonzero(modest)} within their share", recorded, modest),
    ):
        flooded = with_tenant(quiet, "flood", 10 * full / (tenants + 1), seed=3)
        others = np.append(looked_at, False)
        for policy in ("fcfs", "fair"):
            alone, beside = run(quiet, policy, options), run(flooded, policy, options)
            before = 1e3 * float(np.nanpercentile(ttft(alone)[others[alone.tenant]], 95))
            after = 1e3 * float(np.nanpercentile(ttft(beside)[others[beside.tenant]], 95))
            what = f"others' p95 TTFT beside a flood ({name})"
            yield times_line("flood", policy, what, 2.0 if policy == "fair" else None, before, after)


def a_small_tenant(workload: Workload) -> int:
    """One that asks for little, among those that ask for anything."""
    counts = np.bincount(workload.tenant, minlength=len(workload.tenants))
    asking = np.flatnonzero(counts)
    return int(asking[np.argsort(counts[asking], kind="stable")[len(asking) // 3]])


def with_flood(workload: Workload, tenant: int, rate: float, seed: int) -> Workload:
    """One of the tenants asks at another rate than it did, for requests like everybody's."""
    others = workload.tenant != tenant
    kept = {
        name: getattr(workload, name)[others] for name in ("arrival_s", "prompt_len", "output_len", "tenant")
    }
    flooded = with_tenant(replace(workload, **kept), "flood", rate, seed)
    numbers = np.where(flooded.tenant == len(workload.tenants), tenant, flooded.tenant).astype(np.int32)
    return replace(flooded, tenant=numbers, tenants=workload.tenants)


def with_tenant(workload: Workload, name: str, rate: float, seed: int) -> Workload:
    """One more tenant, with requests like everybody's."""
    random = np.random.default_rng(seed)
    count = max(1, int(rate * workload.duration_s))
    like = random.integers(0, len(workload), count)
    arrival_s = np.concatenate([workload.arrival_s, np.sort(random.uniform(0, workload.duration_s, count))])
    by = np.argsort(arrival_s, kind="stable")
    tenant = np.concatenate([workload.tenant, np.full(count, len(workload.tenants), np.int32)])
    return replace(
        workload,
        arrival_s=arrival_s[by],
        prompt_len=np.concatenate([workload.prompt_len, workload.prompt_len[like]])[by],
        output_len=np.concatenate([workload.output_len, workload.output_len[like]])[by],
        tenant=tenant[by].astype(np.int32),
        tenants=(*workload.tenants, name),
    )


# -- priority, deadline, order -----------------------------------------------------------------------------


def priority_part(trace: Workload, minutes: float) -> Iterator[Line]:
    """Interactive work at 0.3 of saturation; then batch work at twice saturation beside it. Steps of 20 ms."""
    paced = {"step_target_ms": 20.0, "step_stretch": 1.0, "long_prefill_share": 1.0, "max_num_seqs": 1024}
    full = saturation(trace.head(2000), paced)
    quiet = lasting(at_rate(trace, 0.3 * full), 60.0 * min(minutes, 3.0))
    quiet = replace(quiet, tenant=np.zeros(len(quiet), np.int32), tenants=("interactive",))
    both = with_tenant(quiet, "batch", 2.0 * full, seed=4)
    ageing = {**paced, "ageing_s": 600.0}
    before = 1e3 * float(np.nanpercentile(ttft(run(quiet, "priority", ageing)), 99))
    for policy in ("fcfs", "priority"):
        record = run(both, policy, ageing, priorities="tenant")
        after = 1e3 * float(np.nanpercentile(ttft(record)[record.tenant == 0], 99))
        what = "interactive p99 TTFT beside batch"
        yield times_line("priority", policy, what, 1.3 if policy == "priority" else None, before, after)
    yield ageing_line(quiet, full)


def ageing_line(quiet: Workload, full: float) -> Line:
    """Interactive work alone above saturation: batch work is admitted once it is as old as its level is worth."""
    crowd = lasting(at_rate(quiet, 1.2 * full), 90.0)
    record = run(
        with_tenant(crowd, "batch", 0.05 * full, seed=5), "priority", {"ageing_s": 10.0}, priorities="tenant"
    )
    waited = (record.admitted_s - record.arrival_s)[record.tenant == 1]
    others = (record.admitted_s - record.arrival_s)[record.tenant == 0]
    bound_s = 10.0 + float(np.nanmax(others))
    worst_s = float(np.max(np.nan_to_num(waited, nan=np.inf)))
    return Line(
        part="priority",
        policy="priority",
        what="longest wait of batch work, ageing 10 s",
        asked=f"<= {bound_s:.1f} s (10 s and the longest other)",
        found=f"{worst_s:.1f} s",
        holds=worst_s <= bound_s,
    )


def lasting(workload: Workload, seconds: float) -> Workload:
    return workload.head(int(np.searchsorted(workload.arrival_s, seconds)))


def repeated(workload: Workload, count: int) -> Workload:
    """As many requests as asked for, the same again and again, at the same rate."""
    times = -(-count // len(workload))
    period = workload.duration_s + 1.0 / workload.rate
    tiled = {
        name: np.tile(getattr(workload, name), times)[:count]
        for name in ("prompt_len", "output_len", "tenant")
    }
    arrival_s = np.concatenate([workload.arrival_s + period * number for number in range(times)])[:count]
    return replace(workload, arrival_s=arrival_s, **tiled)  # type: ignore[arg-type]


def good(record: RunRecord) -> NDArray[np.bool_]:
    """Finished, with its first token and its mean time between tokens in time."""
    gaps = np.maximum(record.output_len - 1, 1)
    itl_s = (record.finished_s - record.first_token_s) / gaps
    with np.errstate(invalid="ignore"):
        found: NDArray[np.bool_] = (record.outcome == FINISHED) & (ttft(record) <= TTFT_S) & (itl_s <= ITL_S)
    return found


@contextmanager
def refusals() -> Iterator[list[float]]:
    """Of each request that is refused, the seconds from its arrival to the refusal."""
    found: list[float] = []
    reject = Scheduler._reject

    def counted(self: Scheduler, requests: Sequence[Request], reason: Rule) -> None:
        found.extend(self.state.now_s - request.arrival_s for request in requests)
        reject(self, requests, reason)

    Scheduler._reject = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Scheduler._reject = reject  # type: ignore[method-assign]


def deadline_part(trace: Workload, minutes: float) -> Iterator[Line]:
    """One and a half times saturation, a queue of 256, steps of 40 ms; who has a deadline ends at it.

    Each request says what it wants of its first token and between tokens; its deadline is what follows from both.
    """
    paced: dict[str, Any] = {"step_target_ms": 40.0, "step_stretch": 1.0}
    full = saturation(trace.head(2000), paced)
    paced["max_queue"] = 256
    rate = 1.5 * full
    load = at_rate(repeated(trace, int(rate * 60.0 * minutes)), rate)
    best_fcfs = 0.0
    wishes = {"ttft_slo_ms": int(1e3 * TTFT_S), "itl_slo_ms": int(1e3 * ITL_S)}
    ends = {"deadline_s": (TTFT_S, ITL_S)}
    runs: list[tuple[str, str, dict[str, Any]]] = [
        ("fcfs", "", {}),
        ("fcfs", ", requests end at their deadline", ends),
        ("deadline", ", requests end at their deadline", {**ends, **wishes}),
        ("deadline", ", who cannot make it is refused", {**ends, **wishes, "on_infeasible": "refuse"}),
    ]
    for policy, how, sim in runs:
        with refusals() as late_by:
            record = run(load, policy, paced, **sim)
        goodput = float(np.count_nonzero(good(record))) / record.duration_s
        refused = int(np.count_nonzero(record.outcome == REFUSED))
        in_time = int(np.count_nonzero(record.outcome == FINISHED))
        judged = policy == "deadline"
        best_fcfs = best_fcfs if judged else max(best_fcfs, goodput)
        ratio = goodput / best_fcfs
        yield Line(
            part="deadline",
            policy=policy,
            what=f"goodput at {rate:.0f}/s{how}",
            asked=">= 1.3 x the best fcfs" if judged else "",
            found=f"{goodput:.1f}/s ({ratio:.2f} x; {in_time:,} finished, {refused:,} refused)",
            holds=ratio >= 1.3 if judged else None,
        )
        if "on_infeasible" in sim:
            latest_s, step_s = (
                max(late_by, default=0.0),
                float((record.step_end_s - record.step_start_s).max()),
            )
            yield Line(
                part="deadline",
                policy=policy,
                what=f"longest from arrival to refusal, of {len(late_by):,}",
                asked=f"<= a step ({1e3 * step_s:.0f} ms)",
                found=f"{1e3 * latest_s:.1f} ms",
                holds=latest_s <= step_s and len(late_by) == refused,
            )


def order_part(trace: Workload, minutes: float) -> Iterator[Line]:
    """Mean and p99 from arrival to the last token, twice saturation, nobody refused."""
    full = saturation(trace.head(2000))
    load = lasting(at_rate(repeated(trace, 60_000), 2.0 * full), 60.0 * min(minutes, 5.0))
    means: dict[str, float] = {}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "fcfs": ("fcfs", {}),
        "shortest": ("shortest", {}),
        "shortest, 200 and 600 ms, bound 600 s": (
            "shortest",
            {"ageing_s": 600.0, "prompt_handicap_ms": 200.0, "output_handicap_ms": 600.0},
        ),
        "tail": ("tail", {}),
    }
    for name, (policy, options) in settings.items():
        record = run(load, policy, options)
        whole = (record.finished_s - record.arrival_s)[record.outcome == FINISHED]
        means[name] = float(whole.mean())
        rate = len(whole) / record.duration_s
        p99 = float(np.percentile(whole, 99))
        yield Line(
            part="order",
            policy=name,
            what="end to end: mean, p99; finished/s; p99 TTFT",
            asked="",
            found=f"{means[name]:.1f} s, {p99:.1f} s; {rate:.1f}/s; {np.nanpercentile(ttft(record), 99):.1f} s",
            holds=None,
        )
    best = min(means, key=lambda name: means[name])
    share = means[best] / means["fcfs"]
    yield Line(
        part="order",
        policy=best,
        what="mean against fcfs",
        asked="<= 0.5",
        found=f"{share:.2f}",
        holds=share <= 0.5,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tenants", default="multi-tenant", help="trace of many clients, or a built-in's name"
    )
    parser.add_argument("--trace", default="azure-conv", help="trace of conversations, or a built-in's name")
    parser.add_argument("--only", default="fair,flood,priority,deadline,order")
    parser.add_argument("--minutes", type=float, default=20.0, help="simulated, of the part about deadlines")
    arguments = parser.parse_args()
    tenants = load_workload(arguments.tenants)
    trace = load_workload(arguments.trace)
    parts = {
        "fair": lambda: fair_part(tenants),
        "flood": lambda: flood_part(tenants),
        "priority": lambda: priority_part(trace, arguments.minutes),
        "deadline": lambda: deadline_part(trace, arguments.minutes),
        "order": lambda: order_part(trace, arguments.minutes),
    }
    print(TABLE_HEAD)
    for name in arguments.only.split(","):
        for line in parts[name]():
            print(line.cells(), flush=True)


if __name__ == "__main__":
    main()
