"""A run as plain values for programs, with the names of vLLM's result files where there is one.

Owns the layout of one result and of its samples: one entry for each request, in the order of sending, so that two
results can be compared request by request. Times of samples are seconds, figures milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.bench.load.figures import ServeFigures, Spread, e2el_s, ttft_s
from paceline.bench.load.generator import LoadRun

_COUNTS = (
    *("duration", "completed", "failed", "unfinished", "failures", "retries"),
    *("total_input_tokens", "total_output_tokens", "cached_input_tokens", "early_stops"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
)
SAMPLES = ("input_lens", "output_lens", "ttfts", "itls", "e2els", "due_times", "start_times", "errors")


def result_json(found: ServeFigures, run: LoadRun) -> dict[str, Any]:
    """Figures, then samples."""
    value: dict[str, Any] = {name: getattr(found, name) for name in _COUNTS}
    value["is_interrupted"] = run.is_interrupted
    for name, spread in found.spreads.items():
        value |= spread_json(spread, name)
    value |= spread_json(found.ttft_from_sent, "ttft_from_sent")
    value |= spread_json(found.e2el_from_sent, "e2el_from_sent")
    value |= spread_json(found.lateness, "lateness")
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
        "itls": [_gaps(each.piece_s) if each.is_finished else [] for each in seen],
        "e2els": [e2el_s(each) if each.is_finished else None for each in seen],
        "due_times": [each.due_s - origin_s for each in seen],
        "start_times": [None if math.isnan(each.sent_s) else each.sent_s - origin_s for each in seen],
        "errors": [_error(each.kind, each.message) if not each.is_finished else "" for each in seen],
    }
    if any(each.tenant for each in seen):
        value["tenants"] = [each.tenant for each in seen]
    return rounded_times(value)


def _error(kind: str, message: str) -> str:
    return f"{kind}: {message}" if message else str(kind)


def _gaps(times: Sequence[float]) -> list[float]:
    return [float(gap) for gap in np.diff(times)]


def rounded_times(value: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to a microsecond, which is less than a clock of this kind can tell."""

    def plain(entry: Any) -> Any:
        if isinstance(entry, float):
            return round(entry, 6)
        return [plain(each) for each in entry] if isinstance(entry, list) else entry

    return {name: plain(entry) for name, entry in value.items()}
