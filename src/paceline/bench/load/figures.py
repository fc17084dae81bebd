"""The measures of a run of requests against a server, each defined once.

Latencies run from the time a request was due, so that a client or a server that falls behind cannot hide it; those from
the time it was sent are kept beside them. An event with text is one piece, however many tokens it holds. Only requests
that finished count, except where it says so. Names are those of vLLM's result files where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.bench.load.generator import LoadRun
from paceline.bench.load.seen import Kind, Seen
from paceline.report.record import OUTCOMES, RunRecord

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot", "itl", "e2el")
OUTCOME_OF = {Kind.FINISHED: "finished", Kind.REFUSED: "refused", Kind.UNFINISHED: "unfinished"}


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
    """What one run came to."""

    duration: float
    completed: int
    failed: int  # refused, rejected, timed out, broken: whatever is no answer
    unfinished: int  # under way when the run was ended
    failures: Mapping[str, int]  # by kind
    retries: int
    total_input_tokens: int
    total_output_tokens: int
    cached_input_tokens: int | None  # of the prompts, found computed; None where the server does not tell
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None  # requests per second within all bounds; None without bounds
    max_output_tokens_per_s: float  # in the best second
    max_concurrent_requests: int
    early_stops: int  # answers shorter than asked for
    spreads: Mapping[str, Spread]  # by METRICS
    ttft_from_sent: Spread
    e2el_from_sent: Spread
    lateness: Spread  # how long after it was due a request was sent


def figures(
    run: LoadRun, *, percentiles: Sequence[float] = (99.0,), bounds: Mapping[str, float] | None = None
) -> ServeFigures:
    """`bounds` in milliseconds, by METRICS: what a good request keeps."""
    finished = [seen for seen in run.seen if seen.is_finished]
    kinds = Counter(seen.kind for seen in run.seen)
    unfinished = kinds.pop(Kind.UNFINISHED, 0)
    kinds.pop(Kind.FINISHED, None)
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
        },
        ttft_from_sent=spread([seen.piece_s[0] - seen.sent_s for seen in finished]),
        e2el_from_sent=spread([seen.piece_s[-1] - seen.sent_s for seen in finished]),
        lateness=spread([seen.sent_s - seen.due_s for seen in run.seen if np.isfinite(seen.sent_s)]),
    )


def ttft_s(seen: Seen) -> float:
    """From when it was due to its first text."""
    return seen.piece_s[0] - seen.due_s


def e2el_s(seen: Seen) -> float:
    """From when it was due to its last text."""
    return seen.piece_s[-1] - seen.due_s


def tpot_s(seen: Seen) -> float | None:
    """Time per token after the first; None with fewer than two tokens."""
    return (seen.piece_s[-1] - seen.piece_s[0]) / (seen.num_output - 1) if seen.num_output > 1 else None


def is_good(seen: Seen, bounds: Mapping[str, float]) -> bool:
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


def most_at_once(seen: Sequence[Seen]) -> int:
    """Most requests that had been sent and had not ended."""
    moments = [
        (time_s, change)
        for each in seen
        if np.isfinite(each.sent_s) and np.isfinite(each.ended_s)
        for time_s, change in ((each.sent_s, 1), (each.ended_s, -1))
    ]
    now = most = 0
    for _, change in sorted(moments):  # at one moment, who leaves goes first
        now += change
        most = max(most, now)
    return most


def _best_second(finished: Sequence[Seen], started_s: float) -> float:
    if not finished:
        return 0.0
    times = np.concatenate([seen.piece_s for seen in finished]) - started_s
    # Of an answer whose pieces hold several tokens, every piece holds the same number.
    weights = np.concatenate(
        [np.full(len(seen.piece_s), seen.num_output / len(seen.piece_s)) for seen in finished]
    )
    return float(np.bincount(np.maximum(times, 0.0).astype(np.int64), weights=weights).max())
