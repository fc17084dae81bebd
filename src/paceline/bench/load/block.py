"""The block of figures that people know from `vllm bench serve`, with the same words in the same places.

Lines that other tools do not have stand where they belong and only when there is something to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.bench.load.figures import METRICS, ServeFigures

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """How the load was put on, as far as the block tells it."""

    rate: float | None = None
    max_concurrency: int | None = None


def block_lines(found: ServeFigures, shape: LoadShape, metrics: Sequence[str] = METRICS) -> list[str]:
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    for label, value in _counts(found, shape):
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{label:<40} {shown:<10}".rstrip())
    for name in metrics:
        spread = found.spreads[name]
        lines.append(f"{TITLES[name]:-^{WIDTH}}")
        rows = [("Mean", spread.mean), ("Median", spread.median)]
        rows += [(f"P{percentile:g}", value) for percentile, value in spread.percentiles]
        for label, milliseconds in rows:
            shown = "-" if milliseconds is None else f"{milliseconds:.2f}"
            lines.append(f"{f'{label} {name.upper()} (ms):':<40} {shown:<10}".rstrip())
    return [*lines, "=" * WIDTH]


def _counts(found: ServeFigures, shape: LoadShape) -> Iterator[tuple[str, int | float]]:
    yield "Successful requests:", found.completed
    yield "Failed requests:", found.failed
    for kind, count in found.failures.items():
        yield f"  {kind}:", count
    if found.unfinished:
        yield "Unfinished requests:", found.unfinished
    if found.retries:
        yield "Refusals that were tried again:", found.retries
    if shape.max_concurrency is not None:
        yield "Maximum request concurrency:", shape.max_concurrency
    if shape.rate is not None:
        yield "Request rate configured (RPS):", float(shape.rate)
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
