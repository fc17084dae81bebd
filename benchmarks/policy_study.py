"""What the scheduling policies give, compared with first come, first served.

*sim*: an 8B model on a modelled H200. Five topics: shares of tenants under overload (fair) and under a flood,
interactive work beside batch work (priority), deadlines, and latency by order. *server*: the first three on `paceline
serve` with its default model on this machine, started once for each policy, with a key for each tenant. Completions go
over loopback at times drawn beforehand, whether or not answers come; every prompt is of random token ids, so that
nothing is found in the prefix cache. Times are the client's. Each line of the table has what is required and what came
out. Saturation is what first come, first served finishes when everything is there from the start.

    python -m benchmarks.policy_study sim [--only fair,flood,priority,deadline,order] [--minutes 20]
    python -m benchmarks.policy_study server [--only fair,flood,priority] [--seconds 60] [--options "..."]

Both take --tenants vtc_arena_multiclient_trace.csv and --trace azure2023_conv.csv; without them the built-in generators
are used, which are fitted to the same traces. On the server lengths are an eighth of the trace's, of the conversations
a 32nd: what a small model on a CPU answers in the time there is.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import (
    ENGINE,
    TENANTS_FLAG,
    TRACE_FLAG,
    Benchmark,
    Found,
    Given,
    Server,
    at_once,
    flag,
    row,
    served,
    simulated,
    table,
    write_keys,
)
from paceline.core.events import Rule
from paceline.core.request import Request
from paceline.lab.bench.load.figures import send_workload
from paceline.lab.report.run_record import FINISHED, OUTCOMES, Ints, RunRecord
from paceline.lab.report.summary import OUTPUT_COST, largest_gap, service
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload
from paceline.scheduler.scheduler import Scheduler

bench = Benchmark(__doc__)
BLOCK = 16
REFUSED = OUTCOMES.index("refused")
TTFT_S, ITL_S = 1.0, 0.05
Keys = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    topic: str
    policy: str
    what: str
    required: str
    found: str
    holds: bool | None = None  # None: nothing is required


def shown(topics: Mapping[str, Callable[[], Iterator[Line]]], only: str) -> Found:
    table("topic", "policy", "what", "required", "found", "holds")
    lines = []
    for name in only.split(","):
        for line in topics[name]():
            row(*(asdict(line) | {"holds": {None: "", True: "yes", False: "NO"}[line.holds]}).values())
            lines.append(asdict(line))
    return {"lines": lines}


# -- where requests run --------------------------------------------------------------------------------------


class Simulator:
    def __init__(self, pool_tokens: int = 0, **options: Any) -> None:
        self.pool_tokens = pool_tokens
        pool = {"block_size": BLOCK, "num_blocks": pool_tokens // BLOCK + 1} if pool_tokens else {}
        self._options = {**ENGINE, **pool, **options}

    def run(self, load: Workload, policy: str, options: Found | None = None, **sim: Any) -> RunRecord:
        own = {**self._options, "scheduling_policy": policy, **(options or {})}
        return simulated(load, own, label=policy, **sim)


class LiveServer:
    """Servers one after the other, each with the keys of the tenants of a load."""

    def __init__(self, folder: Path, pool_tokens: int, *options: str) -> None:
        self.pool_tokens = pool_tokens
        self._path, self._options = folder / "keys.jsonl", options

    def run(self, load: Workload, policy: str, keys: Keys | None = None) -> RunRecord:
        write_keys(self._path, {name: (keys or {}).get(name, {}) for name in load.tenants})
        flags = ("--scheduling-policy", policy, "--api-keys-file", str(self._path), *SERVER, *self._options)
        with served(flags) as server:
            self._send(server, at_once(load.head(8)), "warm", seed=9)
            return self._send(server, load, policy, seed=1)

    def _send(self, server: Server, load: Workload, label: str, seed: int) -> RunRecord:
        keys = {name: f"sk-{name}" for name in load.tenants}
        return send_workload(server.completions, "smollm2", load, seed=seed, label=label, keys=keys)


Place = Simulator | LiveServer


def saturation(place: Place, load: Workload) -> float:
    """Requests per second when all of them are there from the start."""
    return len(load) / float(np.nanmax(place.run(at_once(load), "fcfs").finished_s))


def ttft(record: RunRecord) -> NDArray[np.float64]:
    found: NDArray[np.float64] = record.first_token_s - record.arrival_s
    return found


MOST = {"fair": 2.0, "priority": 1.3}  # times as long as before; others are not judged


def slowdown(
    topic: str, policy: str, what: str, share: int, runs: Iterable[RunRecord], of: Callable[[Ints], Any]
) -> Line:
    """This percentile of the first tokens of some tenants, in milliseconds, in a run and then in another."""
    before, after = (1e3 * float(np.nanpercentile(ttft(record)[of(record.tenant)], share)) for record in runs)
    found = f"{after / before:.2f} x ({before:.0f} -> {after:.0f} ms)"
    if policy not in MOST:
        return Line(topic, policy, what, "", found)
    return Line(topic, policy, what, f"<= {MOST[policy]:g} x", found, after <= MOST[policy] * before)


def served_per_s(record: RunRecord, until_s: float) -> float:
    """Tokens of prompts and outputs per second, up to a moment."""
    tenants = range(int(record.tenant.max()) + 1)
    return sum(float(service(record, tenant, np.array([until_s]))[0]) for tenant in tenants) / until_s


# -- loads ---------------------------------------------------------------------------------------------------


def at_rate(workload: Workload, rate: float) -> Workload:
    """The same arrivals, as dense as to give the rate."""
    start = workload.arrival_s - workload.arrival_s[0]
    return replace(workload, arrival_s=start * (workload.rate / rate))


def lasting(workload: Workload, seconds: float) -> Workload:
    return workload.head(int(np.searchsorted(workload.arrival_s, seconds)))


def by_one(workload: Workload, name: str) -> Workload:
    return replace(workload, tenant=np.zeros(len(workload), np.int32), tenants=(name,))


def shrunk(workload: Workload, by: int) -> Workload:
    prompt, output = (np.maximum(column // by, 2) for column in (workload.prompt_len, workload.output_len))
    return replace(workload, prompt_len=prompt.astype(np.int32), output_len=output.astype(np.int32))


def repeated(workload: Workload, count: int) -> Workload:
    """This many requests, the same again and again, at the same rate."""
    period = workload.duration_s + 1.0 / workload.rate
    turn, index = np.divmod(np.arange(count), len(workload))
    return workload.take(index, workload.arrival_s[index] + period * turn)


def a_small_tenant(workload: Workload) -> int:
    """One with few requests, among those that have any."""
    counts = np.bincount(workload.tenant, minlength=len(workload.tenants))
    present = np.flatnonzero(counts)
    return int(present[np.argsort(counts[present], kind="stable")[len(present) // 3]])


def with_flood(workload: Workload, tenant: int, rate: float, seed: int) -> Workload:
    """One of the tenants at another rate, with requests like those of the others."""
    others = workload.take(np.flatnonzero(workload.tenant != tenant))
    flooded = with_tenant(others, "flood", rate, seed)
    numbers = np.where(flooded.tenant == len(workload.tenants), tenant, flooded.tenant).astype(np.int32)
    return replace(flooded, tenant=numbers, tenants=workload.tenants)


def with_tenant(workload: Workload, name: str, rate: float, seed: int) -> Workload:
    """One more tenant, with requests like those of the others."""
    random = np.random.default_rng(seed)
    count = max(1, int(rate * workload.duration_s))
    like = random.integers(0, len(workload), count)
    arrival_s = np.concatenate([workload.arrival_s, np.sort(random.uniform(0, workload.duration_s, count))])
    by = np.argsort(arrival_s, kind="stable")
    both = workload.take(np.concatenate([np.arange(len(workload)), like])[by], arrival_s[by])
    tenant = np.concatenate([workload.tenant, np.full(count, len(workload.tenants), np.int32)])
    return replace(both, tenant=tenant[by], tenants=(*workload.tenants, name))


# -- shares of tenants ---------------------------------------------------------------------------------------


def fair_lines(place: Place, load: Workload, full: float) -> Iterator[Line]:
    """Twice saturation; then the same with one of the tenants at ten shares."""
    loud = a_small_tenant(load)
    flooded = with_flood(load, loud, 10 * full / len(load.tenants), seed=3)
    until_s = load.duration_s
    alone = {policy: place.run(load, policy) for policy in ("fcfs", "fair")}
    flood = {policy: place.run(flooded, policy) for policy in ("fcfs", "fair")}
    gaps = {policy: largest_gap(record, until_s) or 0.0 for policy, record in alone.items()}
    rates = {policy: served_per_s(record, until_s) for policy, record in alone.items()}
    bound = 2 * max(int(load.prompt_len.max()), OUTPUT_COST * place.pool_tokens)
    what = f"service gap, {len(set(load.tenant.tolist()))} tenants, {2 * full:.1f}/s, {len(load)} requests"
    share, loss = gaps["fair"] / gaps["fcfs"], 1.0 - rates["fair"] / rates["fcfs"]
    is_bound, gap = gaps["fair"] <= bound, f"{gaps['fair']:,.0f}"
    yield Line("fair", "fair", what, f"<= {bound:,.0f} tokens (VTC)", gap, is_bound)
    of_fcfs = f"{share:.2f} of {gaps['fcfs']:,.0f}"
    yield Line("fair", "fair", "of fcfs's gap", "<= 0.25", of_fcfs, share <= 0.25)
    yield Line("fair", "fair", "loss of throughput", "<= 5 %", f"{100 * loss:.1f} %", loss <= 0.05)
    for policy in ("fcfs", "fair"):
        what, runs = "others' p95 TTFT beside one of them with ten shares", (alone[policy], flood[policy])
        yield slowdown("fair", policy, what, 95, runs, lambda tenant: tenant != loud)


def simulated_fair(trace: Workload) -> Iterator[Line]:
    place = Simulator(10_000)
    full = saturation(place, trace)
    yield from fair_lines(place, at_rate(trace, 2 * full), full)


def simulated_flood(trace: Workload) -> Iterator[Line]:
    """Tenants at 0.8 of saturation; then one more with ten times the share that all have alike.

    Once with the requests dealt out evenly, once as recorded: there a few tenants exceed their share themselves, and
    only those that do not are looked at.
    """
    place = Simulator(10_000)
    full = saturation(place, trace)
    recorded = at_rate(trace, 0.8 * full)
    tenants = len(recorded.tenants)
    dealt = np.random.default_rng(2).integers(0, tenants, len(recorded)).astype(np.int32)
    modest = np.bincount(recorded.tenant, minlength=tenants) <= full * recorded.duration_s / (tenants + 1)
    for name, quiet, looked_at in (
        ("alike", replace(recorded, tenant=dealt), np.ones(tenants, np.bool_)),
        (f"recorded, {np.count_nonzero(modest)} within their share", recorded, modest),
    ):
        flooded = with_tenant(quiet, "flood", 10 * full / (tenants + 1), seed=3)
        others = np.append(looked_at, False)
        for policy in ("fcfs", "fair"):
            runs = (place.run(load, policy) for load in (quiet, flooded))
            what = f"others' p95 TTFT beside a flood ({name})"
            yield slowdown("flood", policy, what, 95, runs, others.__getitem__)


# -- priority, deadline, order: simulated --------------------------------------------------------------------


def simulated_priority(trace: Workload, minutes: float) -> Iterator[Line]:
    """Interactive work at 0.3 of saturation; then batch work at twice saturation beside it. Steps of 20 ms."""
    paced: Found = {
        "step_target_ms": 20.0,
        "step_stretch": 1.0,
        "long_prefill_share": 1.0,
        "max_num_seqs": 1024,
    }
    full = saturation(Simulator(**paced), trace.head(2000))
    place = Simulator(**paced, ageing_s=600.0)
    quiet = by_one(lasting(at_rate(trace, 0.3 * full), 60.0 * min(minutes, 3.0)), "interactive")
    both = with_tenant(quiet, "batch", 2.0 * full, seed=4)
    alone = place.run(quiet, "priority")
    for policy in ("fcfs", "priority"):
        runs = alone, place.run(both, policy, priorities="tenant")
        what = "interactive p99 TTFT beside batch"
        yield slowdown("priority", policy, what, 99, runs, lambda tenant: tenant == 0)
    yield ageing_line(quiet, full)


def ageing_line(quiet: Workload, full: float) -> Line:
    """Interactive work alone above saturation: batch work is admitted once it is as old as its level is worth."""
    crowd = with_tenant(lasting(at_rate(quiet, 1.2 * full), 90.0), "batch", 0.05 * full, seed=5)
    record = Simulator().run(crowd, "priority", {"ageing_s": 10.0}, priorities="tenant")
    waited = record.admitted_s - record.arrival_s
    bound_s = 10.0 + float(np.nanmax(waited[record.tenant == 0]))
    worst_s = float(np.max(np.nan_to_num(waited[record.tenant == 1], nan=np.inf)))
    required = f"<= {bound_s:.1f} s (10 s and the longest other)"
    what = "longest wait of batch work, ageing 10 s"
    return Line("priority", "priority", what, required, f"{worst_s:.1f} s", worst_s <= bound_s)


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

    with patch.object(Scheduler, "_reject", counted):
        yield found


def simulated_deadline(trace: Workload, minutes: float) -> Iterator[Line]:
    """One and a half times saturation, a queue of 256, steps of 40 ms.

    Each request has limits for its first token and between tokens; its deadline follows from both.
    """
    paced: Found = {"step_target_ms": 40.0, "step_stretch": 1.0}
    rate = 1.5 * saturation(Simulator(**paced), trace.head(2000))
    place = Simulator(**paced, max_queue=256)
    load = at_rate(repeated(trace, int(rate * 60.0 * minutes)), rate)
    best_fcfs = 0.0
    limits = {"ttft_slo_ms": int(1e3 * TTFT_S), "itl_slo_ms": int(1e3 * ITL_S)}
    ends = {"deadline_s": (TTFT_S, ITL_S)}
    runs: list[tuple[str, str, dict[str, Any]]] = [
        ("fcfs", "", {}),
        ("fcfs", ", requests end at their deadline", ends),
        ("deadline", ", requests end at their deadline", {**ends, **limits}),
        ("deadline", ", those that cannot be met are refused", {**ends, **limits, "on_infeasible": "refuse"}),
    ]
    for policy, how, sim in runs:
        with refusals() as late_by:
            record = place.run(load, policy, **sim)
        goodput = float(np.count_nonzero(good(record))) / record.duration_s
        refused = int(np.count_nonzero(record.outcome == REFUSED))
        in_time = int(np.count_nonzero(record.outcome == FINISHED))
        judged = policy == "deadline"
        best_fcfs = best_fcfs if judged else max(best_fcfs, goodput)
        ratio = goodput / best_fcfs
        found = f"{goodput:.1f}/s ({ratio:.2f} x; {in_time:,} finished, {refused:,} refused)"
        required, holds = (">= 1.3 x the best fcfs", ratio >= 1.3) if judged else ("", None)
        yield Line("deadline", policy, f"goodput at {rate:.0f}/s{how}", required, found, holds)
        if "on_infeasible" in sim:
            latest_s = max(late_by, default=0.0)
            step_s = float((record.step_end_s - record.step_start_s).max())
            what, found = f"longest from arrival to refusal, of {len(late_by):,}", f"{1e3 * latest_s:.1f} ms"
            holds = latest_s <= step_s and len(late_by) == refused
            yield Line("deadline", policy, what, f"<= a step ({1e3 * step_s:.0f} ms)", found, holds)


def simulated_order(trace: Workload, minutes: float) -> Iterator[Line]:
    """Mean and p99 from arrival to the last token, twice saturation, no request refused."""
    place = Simulator()
    full = saturation(place, trace.head(2000))
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
        record = place.run(load, policy, options)
        whole = (record.finished_s - record.arrival_s)[record.outcome == FINISHED]
        means[name] = float(whole.mean())
        rate = len(whole) / record.duration_s
        p99 = float(np.percentile(whole, 99))
        found = f"{means[name]:.1f} s, {p99:.1f} s; {rate:.1f}/s; {np.nanpercentile(ttft(record), 99):.1f} s"
        yield Line("order", name, "end to end: mean, p99; finished/s; p99 TTFT", "", found)
    best = min(means, key=lambda name: means[name])
    share = means[best] / means["fcfs"]
    yield Line("order", best, "mean against fcfs", "<= 0.5", f"{share:.2f}", share <= 0.5)


@bench.part(
    TENANTS_FLAG,
    TRACE_FLAG,
    flag("--only", "fair,flood,priority,deadline,order", "topics"),
    flag("--minutes", 20.0, "simulated, of the topic deadline"),
)
def sim(given: Given) -> Found:
    """An 8B model on a modelled H200."""
    tenants, trace = load_workload(given.tenants), load_workload(given.trace)
    topics = {
        "fair": lambda: simulated_fair(tenants),
        "flood": lambda: simulated_flood(tenants),
        "priority": lambda: simulated_priority(trace, given.minutes),
        "deadline": lambda: simulated_deadline(trace, given.minutes),
        "order": lambda: simulated_order(trace, given.minutes),
    }
    return shown(topics, given.only)


# -- on a server ---------------------------------------------------------------------------------------------

POOL_TOKENS, SHRINK, SHRINK_CHATS = 1280, 8, 32
SMALL_POOL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_TOKENS // BLOCK))
# A flood is recognised by the tokens it was served, and lengths are smaller here.
SERVER = (
    *("--max-num-seqs", "32", "--max-waiting-requests", "8192", "--disable-log-requests"),
    *("--flood-tokens", str(8192 // SHRINK)),
)
# An urgent prompt may take all of a step, and steps are shorter than by default, because it has to wait for the end of
# the step under way. (While other requests wait long, as batch work does here, steps stretch to 1.6 times that.)
URGENT = ("--max-num-seqs", "8", "--long-prefill-share", "1", "--step-target-ms", "100")
FLOOD_LIMIT = 2  # answers under way at once, of every key in the part with limits: about what fits, by seven


def live_fair(place: LiveServer, trace: Workload, seconds: float) -> Iterator[Line]:
    full = saturation(place, trace.head(80))
    yield from fair_lines(place, at_rate(trace.head(int(2 * full * seconds)), 2 * full), full)


def live_flood(place: LiveServer, trace: Workload, seconds: float) -> Iterator[Line]:
    """Six tenants alike at half of saturation; then one more with ten times their share, without and with limits."""
    full = saturation(place, trace.head(80))
    quiet = at_rate(trace.head(int(0.5 * full * seconds)), 0.5 * full)
    dealt = np.random.default_rng(2).integers(0, 6, len(quiet)).astype(np.int32)
    quiet = replace(quiet, tenant=dealt, tenants=tuple("abcdef"))
    flooded = with_tenant(quiet, "flood", 10 * full / 7, seed=3)
    limits = {name: {"max_concurrency": FLOOD_LIMIT} for name in flooded.tenants}
    for policy, keys in (("fcfs", None), ("fair", None), ("fair", limits)):
        runs = [place.run(load, policy, keys) for load in (quiet, flooded)]
        refused = int((runs[1].outcome == REFUSED).sum())
        limited = f", {FLOOD_LIMIT} at once, {refused} refused" if keys else ""
        what = f"others' p95 TTFT beside a flood{limited}"
        yield slowdown("flood", policy, what, 95, runs, lambda tenant: tenant < 6)


def live_priority(place: LiveServer, trace: Workload, seconds: float) -> Iterator[Line]:
    """Interactive work at 0.3 of saturation; then batch work at twice saturation beside it."""
    full = saturation(place, trace.head(60))
    count = int(0.3 * full * seconds)
    quiet = by_one(at_rate(trace.head(count), 0.3 * full), "interactive")
    both = with_tenant(quiet, "batch", 2.0 * full, seed=4)
    keys = {name: {"class": name} for name in both.tenants}
    for policy in ("fcfs", "priority"):
        alone, mixed = place.run(quiet, policy, keys), place.run(both, policy, keys)
        what = f"interactive p99 TTFT beside batch, {count} and {len(both) - count} requests"
        yield slowdown("priority", policy, what, 99, (alone, mixed), lambda tenant: tenant == 0)
        late = ttft(mixed)[mixed.tenant == 1]
        found = f"{np.nanmax(late):.1f} s; {np.count_nonzero(np.isnan(late))} never"
        yield Line("priority", policy, "batch work: longest to its first token", "", found)


@bench.part(
    TENANTS_FLAG,
    TRACE_FLAG,
    flag("--only", "fair,flood,priority", "topics"),
    flag("--seconds", 60.0, "of requests, in each run"),
    flag("--options", "", "more options of the server, as in a shell"),
)
def server(given: Given) -> Found:
    """`paceline serve` with its default model on this machine."""
    tenants = shrunk(load_workload(given.tenants), SHRINK)
    trace = shrunk(load_workload(given.trace), SHRINK_CHATS)
    more = shlex.split(given.options)
    with tempfile.TemporaryDirectory() as name:
        small = LiveServer(Path(name), POOL_TOKENS, *SMALL_POOL, *more)
        topics = {
            "fair": lambda: live_fair(small, tenants, given.seconds),
            "flood": lambda: live_flood(small, tenants, given.seconds),
            "priority": lambda: live_priority(
                LiveServer(Path(name), 0, *URGENT, *more), trace, given.seconds
            ),
        }
        return shown(topics, given.only)


if __name__ == "__main__":
    bench.main()
