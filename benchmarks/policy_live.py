"""What the policies give on a server that runs: shares of tenants, a tenant that floods, interactive beside batch work.

Starts `paceline serve` with its default model on this machine, once for each policy, with a key for each tenant, and
sends completions over loopback at times drawn beforehand, whether or not answers come. Every prompt is of random
token ids, so that nothing is found in the prefix cache. Saturation is what the server finishes per second when
everything is there from the start. Times are the client's.

    python -m benchmarks.policy_live [--only fair,flood,priority] [--seconds 60] [--json FILE]
                                     [--tenants vtc_arena_multiclient_trace.csv]

Without a file the tenants come from the built-in generator, which is fitted to the same trace. Lengths are an eighth
of the trace's, of the conversations a 32nd: what a small model on a CPU answers in the time there is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.live import environment, served, target, write_keys
from benchmarks.policy_study import (
    REFUSED,
    TABLE_HEAD,
    Line,
    a_small_tenant,
    at_rate,
    served_per_s,
    times_line,
    with_flood,
    with_tenant,
)
from paceline.lab.bench.load.replayed import send_workload
from paceline.lab.report.record import RunRecord
from paceline.lab.report.summary import largest_gap
from paceline.lab.workload import load_workload
from paceline.lab.workload.model import Workload

ROWS, BLOCK, POOL_TOKENS = 32, 16, 1280
SMALL_POOL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_TOKENS // BLOCK))
SHRINK, SHRINK_CHATS = 8, 32
OPTIONS = (
    *("--max-num-seqs", str(ROWS), "--max-waiting-requests", "8192", "--disable-log-requests"),
    *(
        "--flood-tokens",
        str(8192 // SHRINK),
    ),  # a flood is told by what it was served: lengths are smaller here
)
# An urgent prompt may take all of a step, and steps are shorter than by default: who is urgent has to wait for the end
# of the step under way. (While others wait long, as batch work does here, steps stretch to 1.6 times that.)
URGENT = ("--max-num-seqs", "8", "--long-prefill-share", "1", "--step-target-ms", "100")
FLOOD_LIMIT = 2  # answers under way at once, of every key in the part with limits: about what fits, by seven


def shrunk(workload: Workload, by: int) -> Workload:
    return replace(
        workload,
        prompt_len=np.maximum(workload.prompt_len // by, 2).astype(np.int32),
        output_len=np.maximum(workload.output_len // by, 2).astype(np.int32),
    )


# -- a run ---------------------------------------------------------------------------------------------------


def run(port: int, workload: Workload, label: str, seed: int = 1) -> RunRecord:
    """Send the requests at their times."""
    keys = {name: f"sk-{name}" for name in workload.tenants}
    return send_workload(target(port), "smollm2", workload, seed=seed, label=label, keys=keys)


class Server:
    """Servers one after the other, each with the keys of the tenants of a load."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options

    def run(
        self, load: Workload, policy: str, keys: Mapping[str, Mapping[str, Any]] | None = None, *options: str
    ) -> RunRecord:
        path = self._folder / "keys.jsonl"
        write_keys(path, {name: (keys or {}).get(name, {}) for name in load.tenants})
        flags = (
            "--scheduling-policy",
            policy,
            "--api-keys-file",
            str(path),
            *OPTIONS,
            *self._options,
            *options,
        )
        with served(flags) as port:
            warm = replace(load.head(min(8, len(load))), arrival_s=np.zeros(min(8, len(load))))
            run(port, warm, "warm", seed=9)
            return run(port, load, policy)

    def saturation(self, load: Workload) -> float:
        """Requests per second when nobody has to be waited for."""
        record = self.run(replace(load, arrival_s=np.zeros(len(load))), "fcfs")
        return len(load) / record.duration_s


def p(record: RunRecord, share: float, of: NDArray[np.bool_]) -> float:
    """Percentile of the time to the first token in milliseconds."""
    return 1e3 * float(np.nanpercentile((record.first_token_s - record.arrival_s)[of], share))


# -- the parts -----------------------------------------------------------------------------------------------


def fair_part(server: Server, trace: Workload, seconds: float) -> Iterator[Line]:
    """Twice saturation; then the same with one of the tenants asking for ten shares."""
    full = server.saturation(trace.head(80))
    load = at_rate(trace.head(int(2 * full * seconds)), 2 * full)
    loud = a_small_tenant(load)
    flooded = with_flood(load, loud, 10 * full / len(load.tenants), seed=3)
    until_s = load.duration_s
    alone = {policy: server.run(load, policy) for policy in ("fcfs", "fair")}
    beside = {policy: server.run(flooded, policy) for policy in ("fcfs", "fair")}
    gaps = {policy: largest_gap(record, until_s) or 0.0 for policy, record in alone.items()}
    rates = {policy: served_per_s(record, until_s) for policy, record in alone.items()}
    bound = 2 * max(float(load.prompt_len.max()), 2.0 * POOL_TOKENS)
    share, loss = gaps["fair"] / gaps["fcfs"], 1.0 - rates["fair"] / rates["fcfs"]
    what = f"service gap, {len(set(load.tenant.tolist()))} tenants, {2 * full:.1f}/s, {len(load)} requests"
    yield Line(
        "fair", "fair", what, f"<= {bound:,.0f} tokens (VTC)", f"{gaps['fair']:,.0f}", gaps["fair"] <= bound
    )
    yield Line(
        "fair", "fair", "of fcfs's gap", "<= 0.25", f"{share:.2f} of {gaps['fcfs']:,.0f}", share <= 0.25
    )
    yield Line("fair", "fair", "loss of throughput", "<= 5 %", f"{100 * loss:.1f} %", loss <= 0.05)
    for policy in ("fcfs", "fair"):
        before, after = (p(record, 95, record.tenant != loud) for record in (alone[policy], beside[policy]))
        asked = 2.0 if policy == "fair" else None
        yield times_line(
            "fair", policy, "others' p95 TTFT beside one of them with ten shares", asked, before, after
        )


def flood_part(server: Server, trace: Workload, seconds: float) -> Iterator[Line]:
    """Six tenants alike at half of saturation; then one more with ten times their share, without and with limits."""
    full = server.saturation(trace.head(80))
    quiet = at_rate(trace.head(int(0.5 * full * seconds)), 0.5 * full)
    dealt = np.random.default_rng(2).integers(0, 6, len(quiet)).astype(np.int32)
    quiet = replace(quiet, tenant=dealt, tenants=tuple("abcdef"))
    flooded = with_tenant(quiet, "flood", 10 * full / 7, seed=3)
    limits = {name: {"max_concurrency": FLOOD_LIMIT} for name in flooded.tenants}
    for policy, keys in (("fcfs", None), ("fair", None), ("fair", limits)):
        alone, beside = server.run(quiet, policy, keys), server.run(flooded, policy, keys)
        before, after = (p(record, 95, record.tenant < 6) for record in (alone, beside))
        refused = f", {FLOOD_LIMIT} at once, {int((beside.outcome == REFUSED).sum())} refused" if keys else ""
        asked = 2.0 if policy == "fair" else None
        yield times_line("flood", policy, f"others' p95 TTFT beside a flood{refused}", asked, before, after)


def priority_part(server: Server, trace: Workload, seconds: float) -> Iterator[Line]:
    """Interactive work at 0.3 of saturation; then batch work at twice saturation beside it."""
    full = server.saturation(trace.head(60))
    count = int(0.3 * full * seconds)
    quiet = at_rate(trace.head(count), 0.3 * full)
    quiet = replace(quiet, tenant=np.zeros(count, np.int32), tenants=("interactive",))
    both = with_tenant(quiet, "batch", 2.0 * full, seed=4)
    keys = {name: {"class": name} for name in both.tenants}
    for policy in ("fcfs", "priority"):
        alone = server.run(quiet, policy, keys)
        beside = server.run(both, policy, keys)
        before, after = (p(record, 99, record.tenant == 0) for record in (alone, beside))
        what = f"interactive p99 TTFT beside batch, {count} and {len(both) - count} requests"
        asked = 1.3 if policy == "priority" else None
        yield times_line("priority", policy, what, asked, before, after)
        late = (beside.first_token_s - beside.arrival_s)[beside.tenant == 1]
        found = f"{np.nanmax(late):.1f} s; {np.count_nonzero(np.isnan(late))} never"
        yield Line("priority", policy, "batch work: longest to its first token", "", found, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tenants", default="multi-tenant", help="trace of many clients, or a built-in's name"
    )
    parser.add_argument("--trace", default="azure-conv", help="trace of conversations, or a built-in's name")
    parser.add_argument("--only", default="fair,flood,priority")
    parser.add_argument("--seconds", type=float, default=60.0, help="of requests, in each run")
    parser.add_argument("--options", default="", help="more options of the server, as in a shell")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tenants = shrunk(load_workload(arguments.tenants), SHRINK)
    trace = shrunk(load_workload(arguments.trace), SHRINK_CHATS)
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder, more = Path(name), shlex.split(arguments.options)
        parts = {
            "fair": lambda: fair_part(Server(folder, *SMALL_POOL, *more), tenants, arguments.seconds),
            "flood": lambda: flood_part(Server(folder, *SMALL_POOL, *more), tenants, arguments.seconds),
            "priority": lambda: priority_part(Server(folder, *URGENT, *more), trace, arguments.seconds),
        }
        print(TABLE_HEAD, flush=True)
        for part in arguments.only.split(","):
            for line in parts[part]():
                print(line.cells(), flush=True)
                lines.append(line)
    if arguments.json:
        found = {**environment(), "lines": [asdict(line) for line in lines]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
