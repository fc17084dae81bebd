"""The measures of a run of requests against a server, each defined once.

Latencies run from the time a request was due, so that a client or a server that falls behind cannot hide it; those from
the time it was sent are kept beside them. An event with text is one piece, however many tokens it holds. Only requests
that finished count, except where it says so. Names are those of vLLM's result files where there is one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.lab.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.lab.bench.load.pool import Pool, Target
from paceline.lab.bench.load.prompt_source import COMPLETIONS, BodyForm, LoadRequest
from paceline.lab.bench.load.reader import EventKind, ObservedAnswer
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.workload.workload import Workload

Floats = NDArray[np.float64]
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
METRICS = tuple(TITLES)
OUTCOME_OF = {
    EventKind.FINISHED: "finished",
    EventKind.REFUSED: "refused",
    EventKind.UNFINISHED: "unfinished",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of values in milliseconds; None where there is none."""

    count: int
    mean: float | None
    median: float | None
    std: float | None
    percentiles: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFigures:
    """What one run came to, in the order of a result file."""

    duration: float
    completed: int
    failed: int  # refused, rejected, timed out, broken: whatever is no answer
    unfinished: int  # under way when the run was ended
    failures: Mapping[str, int]  # by kind
    retries: int
    total_input_tokens: int
    total_output_tokens: int
    cached_input_tokens: int | None  # of the prompts, found computed; None where the server does not tell
    early_stops: int  # answers shorter than asked for
    request_throughput: float
    request_goodput: float | None  # requests per second within all bounds; None without bounds
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float  # in the best second
    max_concurrent_requests: int
    spreads: Mapping[str, Spread]  # by METRICS; from when it was sent; lateness: how long after it was due


def figures(
    run: LoadRun, *, percentiles: Sequence[float] = (99.0,), bounds: Mapping[str, float] | None = None
) -> ServeFigures:
    """`bounds` in milliseconds, by METRICS: what a good request keeps."""
    finished = [seen for seen in run.seen if seen.is_finished]
    kinds = Counter(seen.kind for seen in run.seen)
    unfinished = kinds.pop(EventKind.UNFINISHED, 0)
    kinds.pop(EventKind.FINISHED, None)
    num_input = sum(seen.prompt_tokens or 0 for seen in finished)
    num_output = sum(seen.num_output for seen in finished)
    cached = [seen.cached_tokens for seen in finished if seen.cached_tokens is not None]
    seconds = max(run.seconds, 1e-9)

    def spread(values: Sequence[float]) -> Spread:
        return spread_of(np.array(values, dtype=np.float64) * 1e3, percentiles)

    return ServeFigures(
        duration=run.seconds,
        completed=len(finished),
        failed=sum(kinds.values()),
        unfinished=unfinished,
        failures={str(kind): count for kind, count in kinds.most_common()},
        retries=sum(seen.retries for seen in run.seen),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        cached_input_tokens=sum(cached) if cached else None,
        request_throughput=len(finished) / seconds,
        output_throughput=num_output / seconds,
        total_token_throughput=(num_input + num_output) / seconds,
        request_goodput=sum(is_good(seen, bounds) for seen in finished) / seconds if bounds else None,
        max_output_tokens_per_s=_best_second(finished, run.started_s),
        max_concurrent_requests=most_at_once(run.seen),
        early_stops=sum(
            seen.wanted_tokens is not None and seen.num_output < seen.wanted_tokens for seen in finished
        ),
        spreads={
            "ttft": spread([ttft_s(seen) for seen in finished]),
            "tpot": spread([value for seen in finished if (value := tpot_s(seen)) is not None]),
            "itl": spread([gap for seen in finished for gap in np.diff(seen.piece_s)]),
            "e2el": spread([e2el_s(seen) for seen in finished]),
            "ttft_from_sent": spread([seen.piece_s[0] - seen.sent_s for seen in finished]),
            "e2el_from_sent": spread([seen.piece_s[-1] - seen.sent_s for seen in finished]),
            "lateness": spread([seen.sent_s - seen.due_s for seen in run.seen if np.isfinite(seen.sent_s)]),
        },
    )


def ttft_s(seen: ObservedAnswer) -> float:
    """From when it was due to its first text."""
    return seen.piece_s[0] - seen.due_s


def e2el_s(seen: ObservedAnswer) -> float:
    """From when it was due to its last text."""
    return seen.piece_s[-1] - seen.due_s


def tpot_s(seen: ObservedAnswer) -> float | None:
    """Time per token after the first; None with fewer than two tokens."""
    return (seen.piece_s[-1] - seen.piece_s[0]) / (seen.num_output - 1) if seen.num_output > 1 else None


def is_good(seen: ObservedAnswer, bounds: Mapping[str, float]) -> bool:
    """Whether a finished request keeps every bound, in milliseconds. Its ITL is the mean of its gaps; a request of
    one piece has none and keeps any bound on them."""
    gaps = len(seen.piece_s) - 1
    values = {
        "ttft": ttft_s(seen),
        "tpot": tpot_s(seen) or 0.0,
        "itl": (seen.piece_s[-1] - seen.piece_s[0]) / gaps if gaps else 0.0,
        "e2el": e2el_s(seen),
    }
    return all(values[name] * 1e3 <= bound for name, bound in bounds.items())


def spread_of(values: Floats, percentiles: Sequence[float]) -> Spread:
    if not values.size:
        absent = tuple((percentile, None) for percentile in percentiles)
        return Spread(count=0, mean=None, median=None, std=None, percentiles=absent)
    found = np.percentile(values, list(percentiles))
    return Spread(
        count=values.size,
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles=tuple(zip(percentiles, map(float, found), strict=True)),
    )


def run_record(run: LoadRun, *, label: str) -> RunRecord:
    """The same as columns, for tables and pictures. A client does not see when a request was admitted."""
    seen = run.seen
    origin_s = run.started_s
    outcomes = [OUTCOMES.index(OUTCOME_OF.get(each.kind, "failed")) for each in seen]
    gaps = [np.diff(each.piece_s) for each in seen]
    tenants = {name: number for number, name in enumerate(sorted({each.tenant for each in seen}))}
    return RunRecord(
        label=label,
        config={},
        max_num_seqs=max(1, most_at_once(seen)),
        duration_s=run.seconds,
        arrival_s=np.array([each.due_s - origin_s for each in seen]),
        admitted_s=np.full(len(seen), np.nan),
        first_token_s=np.array([each.piece_s[0] - origin_s if each.piece_s else np.nan for each in seen]),
        finished_s=np.array(
            [each.piece_s[-1] - origin_s if each.is_finished else np.nan for each in seen], dtype=np.float64
        ),
        prompt_len=np.array([each.prompt_tokens or 0 for each in seen]),
        output_len=np.array([each.num_output for each in seen]),
        cached_tokens=np.array([each.cached_tokens or 0 for each in seen]),
        preemptions=np.zeros(len(seen), dtype=np.int32),
        tenant=np.array([tenants[each.tenant] for each in seen]),
        outcome=np.array(outcomes),
        itl_s=np.concatenate([np.empty(0), *gaps]).astype(np.float32),
    )


def most_at_once(seen: Sequence[ObservedAnswer]) -> int:
    """Most requests that had been sent and had not ended."""
    moments = [
        (time_s, change)
        for each in seen
        if np.isfinite(each.sent_s) and np.isfinite(each.ended_s)
        for time_s, change in ((each.sent_s, 1), (each.ended_s, -1))
    ]
    now = most = 0
    for _, change in sorted(moments):  # at one moment, requests that leave go first
        now += change
        most = max(most, now)
    return most


def _best_second(finished: Sequence[ObservedAnswer], started_s: float) -> float:
    if not finished:
        return 0.0
    times = np.concatenate([seen.piece_s for seen in finished]) - started_s
    # Of an answer whose pieces hold several tokens, every piece holds the same number.
    weights = np.concatenate(
        [np.full(len(seen.piece_s), seen.num_output / len(seen.piece_s)) for seen in finished]
    )
    return float(np.bincount(np.maximum(times, 0.0).astype(np.int64), weights=weights).max())


# A run as plain values for programs, with the names of vLLM's result files where there is one.
#
# Owns the layout of one result and of its samples: one entry for each request, in the order of sending, so that two
# results can be compared request by request. Times of samples are seconds, figures milliseconds.


def result_json(found: ServeFigures, run: LoadRun) -> dict[str, Any]:
    """Figures, then samples."""
    value = {spec.name: getattr(found, spec.name) for spec in fields(found) if spec.name != "spreads"}
    value["is_interrupted"] = run.is_interrupted
    for name, spread in found.spreads.items():
        value |= spread_json(spread, name)
    return value | samples_json(run)


def spread_json(spread: Spread, name: str) -> dict[str, Any]:
    return {
        f"mean_{name}_ms": spread.mean,
        f"median_{name}_ms": spread.median,
        f"std_{name}_ms": spread.std,
        **{f"p{percentile:g}_{name}_ms": value for percentile, value in spread.percentiles},
    }


def samples_json(run: LoadRun) -> dict[str, Any]:
    seen = run.seen
    origin_s = run.started_s
    value: dict[str, Any] = {
        "input_lens": [each.prompt_tokens for each in seen],
        "output_lens": [each.num_output if each.is_finished else 0 for each in seen],
        "ttfts": [ttft_s(each) if each.is_finished else None for each in seen],
        "itls": [np.diff(each.piece_s).tolist() if each.is_finished else [] for each in seen],
        "e2els": [e2el_s(each) if each.is_finished else None for each in seen],
        "due_times": [each.due_s - origin_s for each in seen],
        "start_times": [None if math.isnan(each.sent_s) else each.sent_s - origin_s for each in seen],
        "errors": [
            "" if each.is_finished else ": ".join(filter(None, (each.kind, each.message))) for each in seen
        ],
    }
    if any(each.tenant for each in seen):
        value["tenants"] = [each.tenant for each in seen]
    return rounded_times(value)


def rounded_times(value: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to a microsecond, which is less than a clock of this kind can tell."""

    def plain(entry: Any) -> Any:
        if isinstance(entry, float):
            return round(entry, 6)
        return [plain(each) for each in entry] if isinstance(entry, list) else entry

    return {name: plain(entry) for name, entry in value.items()}


# The block of figures that people know from `vllm bench serve`, with the same words in the same places.
#
# Lines that other tools do not have stand where they belong and only when there is something to say.


WIDTH = 50


def block_lines(
    found: ServeFigures, *, rate: float | None = None, max_concurrency: int | None = None
) -> list[str]:
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    for label, value in _counts(found, rate, max_concurrency):
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{label:<40} {shown:<10}".rstrip())
    for name, title in TITLES.items():
        spread = found.spreads[name]
        lines.append(f"{title:-^{WIDTH}}")
        rows = [("Mean", spread.mean), ("Median", spread.median)]
        rows += [(f"P{percentile:g}", value) for percentile, value in spread.percentiles]
        for label, milliseconds in rows:
            shown = "-" if milliseconds is None else f"{milliseconds:.2f}"
            lines.append(f"{f'{label} {name.upper()} (ms):':<40} {shown:<10}".rstrip())
    return [*lines, "=" * WIDTH]


def _counts(
    found: ServeFigures, rate: float | None, max_concurrency: int | None
) -> Iterator[tuple[str, int | float]]:
    yield "Successful requests:", found.completed
    yield "Failed requests:", found.failed
    for kind, count in found.failures.items():
        yield f"  {kind}:", count
    if found.unfinished:
        yield "Unfinished requests:", found.unfinished
    if found.retries:
        yield "Refusals that were tried again:", found.retries
    if max_concurrency is not None:
        yield "Maximum request concurrency:", max_concurrency
    if rate is not None:
        yield "Request rate configured (RPS):", float(rate)
    yield "Benchmark duration (s):", float(found.duration)
    yield "Total input tokens:", found.total_input_tokens
    if found.cached_input_tokens:
        yield "  found in the prefix cache:", found.cached_input_tokens
    yield "Total generated tokens:", found.total_output_tokens
    yield "Request throughput (req/s):", float(found.request_throughput)
    if found.request_goodput is not None:
        yield "Request goodput (req/s):", float(found.request_goodput)
    yield "Output token throughput (tok/s):", float(found.output_throughput)
    yield "Peak output token throughput (tok/s):", float(found.max_output_tokens_per_s)
    yield "Peak concurrent requests:", found.max_concurrent_requests
    yield "Total token throughput (tok/s):", float(found.total_token_throughput)


# A workload sent as it is: prompts of random token ids of exactly its lengths, at its times, by its tenants.
#
# For comparing what a server does with what the simulator says of the same requests. Prompts share nothing, so that
# no cache makes them shorter than the workload has them.


NUM_IDS = 90  # token ids that prompts are drawn from: every model has them, and no two prompts begin alike


class TokenSource:
    """Prompts of token ids, by a workload's lengths."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self.name = workload.name
        self._workload = workload
        self._seed = seed

    def make(self, index: int) -> LoadRequest:
        work = self._workload
        ids = np.random.default_rng([self._seed, index]).integers(0, NUM_IDS, int(work.prompt_len[index]))
        return LoadRequest(
            prompt="",
            num_output=int(work.output_len[index]),
            tenant=work.tenants[int(work.tenant[index])],
            fields={"prompt": ids.tolist()},
        )


def send_workload(
    target: Target,
    model: str,
    workload: Workload,
    *,
    seed: int,
    label: str,
    keys: Mapping[str, str] | None = None,
) -> RunRecord:
    """Send completions at the workload's times. What a client cannot see, admission, is taken to be the first token."""
    run = asyncio.run(_send(target, model, workload, seed, keys or {}))
    seen = run_record(run, label=label)
    return replace(
        seen, admitted_s=seen.first_token_s, tenant=workload.tenant, prompt_len=workload.prompt_len
    )


async def _send(
    target: Target, model: str, workload: Workload, seed: int, keys: Mapping[str, str]
) -> LoadRun:
    form = BodyForm(api=COMPLETIONS, model=model, ignore_eos=True, temperature=0.0)
    plan = LoadPlan(due_s=workload.arrival_s.tolist(), keys=keys)
    pool = Pool(target)
    try:
        return await LoadGenerator(pool, TokenSource(workload, seed=seed), form, plan).run()
    finally:
        pool.close()
