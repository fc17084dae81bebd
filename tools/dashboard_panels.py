"""What the dashboards show: panels and their queries, under headings.

Queries name metrics under the variable `prefix`, so that the same boards show a server that was started with
`--metrics-prefix vllm`. How a board stands in a file is the business of `dashboards`.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "${prefix}:"
MODEL = 'model_name=~"$model"'
MET, MISSED = 'result="met"', 'result="missed"'
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a panel draws; `{}` in a query stands for the label of the model."""

    expr: str
    legend: str = ""
    format: str = "time_series"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    text: str  # what it says and what to look for
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    low: float | None = 0.0
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard: rows of panels under headings."""

    name: str
    title: str
    text: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def percentiles(metric: str) -> tuple[Query, ...]:
    """The usual percentiles of a histogram."""
    return tuple(
        Query(
            expr=f"histogram_quantile({share}, sum by (le) (rate({PREFIX}{metric}_bucket{{{MODEL}}}[{RATE}])))",
            legend=f"p{share * 100:g}",
        )
        for share in (0.5, 0.9, 0.95, 0.99)
    )


def rate(metric: str, by: str = "", where: str = MODEL) -> str:
    grouped = f" by ({by})" if by else ""
    chosen = f"{{{where}}}" if where else ""
    return f"sum{grouped} (rate({PREFIX}{metric}_total{chosen}[{RATE}]))"


def gauge(metric: str, function: str = "sum", where: str = MODEL) -> str:
    chosen = f"{{{where}}}" if where else ""
    return f"{function}({PREFIX}{metric}{chosen})"


def share(part: str, whole: str) -> Query:
    return Query(expr=f"{part} / ({whole} > 0)")


def stat(title: str, text: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title=title, text=text, queries=(Query(expr=expr),), unit=unit, kind="stat", width=4)


def heat(title: str, text: str, metric: str, unit: str) -> Panel:
    expr = f"sum by (le) (increase({PREFIX}{metric}_bucket{{{MODEL}}}[{RATE}]))"
    query = Query(expr=expr, legend="{{le}}", format="heatmap")
    return Panel(title=title, text=text, queries=(query,), unit=unit, kind="heatmap")


OPERATOR = Board(
    name="operator",
    title="Paceline: overview",
    text="What users feel and what it costs. Scheduler internals are on the board beside it.",
    rows=(
        (
            "Now",
            (
                stat("Engine", "1 when the engine takes requests.", gauge("engine_up", "min")),
                stat("Running", "Requests in the batch.", gauge("num_requests_running")),
                stat("Waiting", "Requests without a row.", gauge("num_requests_waiting")),
                stat(
                    "KV cache", "Share of blocks in use.", gauge("kv_cache_usage_perc", "avg"), "percentunit"
                ),
                stat("Output", "Tokens generated a second.", rate("generation_tokens"), "short"),
                stat(
                    "Goodput",
                    "Share of requests that had their times, of those that have any.",
                    share(rate("goodput_requests", where=MET), rate("goodput_requests", where="")).expr,
                    "percentunit",
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel(
                    title="Time to first token",
                    text="From arrival to the first token.",
                    queries=percentiles("time_to_first_token_seconds"),
                    unit="s",
                ),
                Panel(
                    title="Between tokens",
                    text="From one token to the next. Steps of one prompt show in the tail.",
                    queries=percentiles("inter_token_latency_seconds"),
                    unit="s",
                ),
                Panel(
                    title="End to end",
                    text="From arrival to the end.",
                    queries=percentiles("e2e_request_latency_seconds"),
                    unit="s",
                ),
                Panel(
                    title="Queue",
                    text="From arrival to the first step: grows when the server is full.",
                    queries=percentiles("request_queue_time_seconds"),
                    unit="s",
                ),
                Panel(
                    title="Prefill and decode",
                    text="Where the time of a request goes, on average.",
                    queries=tuple(
                        Query(
                            expr=f"sum(rate({PREFIX}request_{part}_time_seconds_sum{{{MODEL}}}[{RATE}])) / "
                            f"(sum(rate({PREFIX}request_{part}_time_seconds_count{{{MODEL}}}[{RATE}])) > 0)",
                            legend=part,
                        )
                        for part in ("queue", "prefill", "decode")
                    ),
                    unit="s",
                    stacked=True,
                ),
                Panel(
                    title="Predicted first token",
                    text="Error of the predicted time to the first token, as a share of the real time: p90.",
                    queries=percentiles("predicted_ttft_error_ratio")[:2],
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    title="Tokens",
                    text="Tokens of prompts and of answers.",
                    queries=(
                        Query(expr=rate("prompt_tokens"), legend="prompt"),
                        Query(expr=rate("prompt_tokens_cached"), legend="of these cached"),
                        Query(expr=rate("generation_tokens"), legend="output"),
                    ),
                ),
                Panel(
                    title="Requests by how they ended",
                    text="Errors are ours, aborts are clients that left or deadlines.",
                    queries=(
                        Query(expr=rate("request_success", "finished_reason"), legend="{{finished_reason}}"),
                    ),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    title="Answers by status",
                    text="429 is a full server or a limit of a key, 503 an engine that is not there.",
                    queries=(Query(expr=rate("http_requests", "status", ""), legend="{{status}}"),),
                    unit="reqps",
                    stacked=True,
                ),
                heat("Prompt lengths", "Tokens of prompts.", "request_prompt_tokens", "short"),
                heat("Answer lengths", "Tokens of answers.", "request_generation_tokens", "short"),
                Panel(
                    title="Requests that missed their times",
                    text="By class of service, own objectives and the server's.",
                    queries=(
                        Query(
                            expr=rate("goodput_requests", "class, slo", MISSED),
                            legend="{{class}} {{slo}}",
                        ),
                    ),
                    unit="reqps",
                ),
            ),
        ),
        (
            "Structured output and tools",
            (
                Panel(
                    title="Structured answers by outcome",
                    text="Unfinished answers ended by their length or otherwise; errors of the grammar should be zero.",
                    queries=(Query(expr=rate("structured_requests", "outcome"), legend="{{outcome}}"),),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    title="Making masks and compiling",
                    text="Seconds a second. Structures are compiled beside the steps, masks inside them.",
                    queries=(
                        Query(expr=rate("structured_mask_seconds"), legend="masks"),
                        Query(expr=rate("structured_mask_wait_seconds"), legend="waiting for masks"),
                        Query(expr=rate("structured_compile_seconds"), legend="compiling"),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Tool calls by outcome",
                    text="Incomplete calls were cut off; text only looked like a call.",
                    queries=(Query(expr=rate("tool_calls", "outcome"), legend="{{outcome}}"),),
                    unit="reqps",
                    stacked=True,
                ),
            ),
        ),
        (
            "Cost and health",
            (
                Panel(
                    title="Cost of a million tokens",
                    text="Needs --cost-per-hour. At the pace of the last minute.",
                    queries=(
                        Query(
                            expr=gauge("cost_per_million_tokens", "avg by (tokens) ", ""), legend="{{tokens}}"
                        ),
                    ),
                    unit="currencyUSD",
                ),
                Panel(
                    title="Share of the device's peak",
                    text="Only for devices whose data sheet is known.",
                    queries=(
                        Query(expr=gauge("compute_share", "avg"), legend="compute"),
                        Query(expr=gauge("memory_share", "avg"), legend="memory bandwidth"),
                        Query(expr=gauge("busy_share", "avg"), legend="busy"),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Things that should be zero",
                    text="Failed steps, broken invariants, wrong messages, lost log lines and spans.",
                    queries=tuple(
                        Query(
                            expr=f"sum(increase({PREFIX}{name}_total[{RATE}]))", legend=name.replace("_", " ")
                        )
                        for name in (
                            "engine_failed_steps",
                            "invariant_violations",
                            "engine_frames_rejected",
                            "log_lines_dropped",
                            "connections_stalled",
                        )
                    ),
                ),
            ),
        ),
    ),
)

SCHEDULER = Board(
    name="scheduler",
    title="Paceline: scheduler",
    text="What continuous batching is judged by: rows, blocks, steps and preemptions.",
    rows=(
        (
            "Batch",
            (
                Panel(
                    title="Rows",
                    text="Requests in the batch and those that wait for a row, beside the rows there are.",
                    queries=(
                        Query(expr=gauge("num_requests_running"), legend="running"),
                        Query(expr=gauge("num_requests_waiting"), legend="waiting"),
                        Query(expr=gauge("engine_max_rows"), legend="rows"),
                    ),
                ),
                Panel(
                    title="Slot occupancy",
                    text="Share of rows in use in the steps that were made. Low with a queue: blocks are short.",
                    queries=(
                        share(
                            rate("engine_occupied_rows"),
                            f"({rate('engine_steps')} * {gauge('engine_max_rows', 'avg')})",
                        ),
                    ),
                    unit="percentunit",
                    high=1.0,
                ),
                Panel(
                    title="Padding",
                    text="Share of computed tokens that was padding: none in continuous mode.",
                    queries=(share(rate("engine_padding_tokens"), rate("engine_computed_tokens")),),
                    unit="percentunit",
                    high=1.0,
                ),
            ),
        ),
        (
            "Steps",
            (
                Panel(
                    title="Tokens of a step",
                    text="How full steps are.",
                    queries=percentiles("iteration_tokens_total"),
                ),
                Panel(
                    title="Length of a step",
                    text="Mean time of a step: what decoding rows wait between two tokens.",
                    queries=(share(rate("engine_busy_seconds"), rate("engine_steps")),),
                    unit="s",
                ),
                Panel(
                    title="Busy share",
                    text="Share of the time the engine spends in steps. Near 1 with a queue: it is the limit.",
                    queries=(Query(expr=rate("engine_busy_seconds")),),
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    title="KV blocks in use",
                    text="Share of blocks.",
                    queries=(Query(expr=gauge("kv_cache_usage_perc", "max")),),
                    unit="percentunit",
                    high=1.0,
                ),
                Panel(
                    title="Prefix cache",
                    text="Share of prompt tokens that were found.",
                    queries=(share(rate("prefix_cache_hits"), rate("prefix_cache_queries")),),
                    unit="percentunit",
                    high=1.0,
                ),
                Panel(
                    title="Preemptions",
                    text="Preemptions per second, by kind and reason.",
                    queries=(
                        Query(expr=rate("preemptions", "kind, reason", ""), legend="{{reason}}: {{kind}}"),
                    ),
                    stacked=True,
                ),
            ),
        ),
        (
            "Order and the dial",
            (
                Panel(
                    title="Queue time by class",
                    text="p90 from arrival to the first step.",
                    queries=(
                        Query(
                            expr="histogram_quantile(0.9, sum by (le, class) "
                            f"(rate({PREFIX}queue_time_by_class_seconds_bucket[{RATE}])))",
                            legend="{{class}}",
                        ),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Dial",
                    text="From 0, least latency, to 1, most throughput; and whether its target is out of reach.",
                    queries=(
                        Query(expr=gauge("dial_position", "max"), legend="position"),
                        Query(expr=gauge("dial_unreachable", "max"), legend="out of reach"),
                    ),
                    high=1.0,
                ),
                Panel(
                    title="Dial: p99 between tokens",
                    text="What it holds and what it sees.",
                    queries=(
                        Query(expr=gauge("dial_target_seconds", "max"), legend="target"),
                        Query(expr=gauge("dial_itl_p99_seconds", "max"), legend="seen"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Work",
                    text="Arithmetic a second, estimated from the model's shape.",
                    queries=(Query(expr=rate("estimated_flops_per_gpu"), legend="FLOP/s"),),
                ),
                Panel(
                    title="Memory traffic",
                    text="Bytes a second, estimated from the model's shape.",
                    queries=(
                        Query(expr=rate("estimated_read_bytes_per_gpu"), legend="read"),
                        Query(expr=rate("estimated_write_bytes_per_gpu"), legend="written"),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="Event loop",
                    text="The latest the HTTP process was: above 0.1 s streams stutter.",
                    queries=(Query(expr=gauge("event_loop_lag_seconds", "max")),),
                    unit="s",
                ),
            ),
        ),
    ),
)
BOARDS = (OPERATOR, SCHEDULER)
