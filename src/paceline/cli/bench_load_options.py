"""The command lines of `paceline bench serve`, `sweep` and `compare`: options in groups, and their help pages.

The options themselves are declared in `bench.serve_options`. Imports nothing heavy.
"""

from __future__ import annotations

from paceline.bench.serve_options import (
    DEFAULT_OUTPUT,
    DEFAULT_REQUESTS,
    SWEEP_SECONDS,
    CompareOptions,
    LoadOptions,
    MoreBounds,
    ServeOptions,
    SweepOptions,
)
from paceline.cli.options import Flag, Panel

SERVE_HELP = """
Put load on a server of the OpenAI API, ours or another, and print what its clients saw.

\b
  paceline bench serve --rate 4 --num-prompts 100 --input-len 256 --output-len 64
  paceline bench serve --max-concurrency 16 --duration 60 --json run.json
  paceline bench serve --workload azure.csv --goodput ttft:1000 tpot:50
  paceline bench serve --ramp 1:20:60 --duration 90 --arrivals gamma:2

With --rate, --ramp or a trace, requests are sent when they are due whatever becomes of others, and their clocks start
then. With --max-concurrency alone, so many users ask again as soon as they are answered. With none of these all are
sent at once. The key is read from PACELINE_API_KEY or OPENAI_API_KEY. Ctrl-C ends with what there is.
"""
SWEEP_HELP = """
Measure several loads one after the other and draw throughput, latency and goodput over them.

\b
  paceline bench sweep --rates 1,2,4,8 --duration 30 --goodput ttft:1000 tpot:100
  paceline bench sweep --concurrencies 1,4,16,64 --num-prompts 200 --output curve

The folder gets report.html, which needs nothing beside it, its pictures as PNG, and sweep.json.
"""
COMPARE_HELP = """
Compare two result files: what is better, what is worse, and what is only noise.

\b
  paceline bench compare before.json after.json
  paceline bench compare before.json after.json --fail-if-worse 10% --measures median_ttft_ms,output_throughput

Where the files hold samples, an interval says how far the difference may lie from what was measured. Files of bench
serve, sweep, throughput and latency can be compared, each with its kind.
"""

_SERVER = Panel(
    title="Server",
    config=LoadOptions,
    flags=(
        Flag(name="url", also=("--base-url",)),
        Flag(name="model", default="the first that the server names"),
        Flag(name="api"),
        Flag(name="tenant_keys", metavar="FILE", default="one key for all"),
        Flag(name="extra_body", metavar="JSON"),
    ),
)
_WORKLOAD = Panel(
    title="Workload",
    config=LoadOptions,
    flags=(
        Flag(name="workload", metavar="NAME|FILE"),
        Flag(
            name="num_prompts",
            default=f"{DEFAULT_REQUESTS} of random and built-in workloads, all of a file; any number with --duration",
        ),
        Flag(name="input_len", also=("--random-input-len",)),
        Flag(
            name="output_len",
            also=("--random-output-len",),
            default=f"{DEFAULT_OUTPUT} of random; as recorded, or the server's limit, of others",
        ),
        Flag(name="spread", also=("--random-range-ratio",)),
        Flag(name="prefix_share"),
        Flag(name="num_prefixes"),
        Flag(name="ignore_eos", default="yes with random and traces, no with prompts"),
        Flag(name="temperature", default="the server's own"),
        Flag(name="seed"),
    ),
)
_DURATION = Panel(title="Load", config=LoadOptions, flags=(Flag(name="duration", metavar="SECONDS"),))
_SWEEP_DURATION = Panel(
    title="Load",
    config=LoadOptions,
    flags=(
        Flag(
            name="duration",
            metavar="SECONDS",
            default=f"{SWEEP_SECONDS:g} for each point, unless --num-prompts is given",
        ),
    ),
)
_LOAD = Panel(
    title="Load",
    config=LoadOptions,
    flags=(
        Flag(name="arrivals", default="recorded; poisson with a rate"),
        Flag(name="speed"),
        Flag(name="num_warmups"),
        Flag(name="timeout", metavar="SECONDS"),
        Flag(name="retries"),
    ),
)
_MEASURES = (
    Panel(
        title="Results",
        config=LoadOptions,
        flags=(
            Flag(name="percentiles", also=("--metric-percentiles",), metavar="P[,P...]"),
            Flag(name="goodput", metavar="NAME:MS"),
        ),
    ),
    Panel(
        title="Results",
        config=MoreBounds,
        flags=(Flag(name="more_bounds", is_argument=True, metavar="NAME:MS"),),
    ),
)

SERVE_PANELS = (
    _SERVER,
    _WORKLOAD,
    Panel(
        title="Load",
        config=ServeOptions,
        flags=(
            Flag(name="rate", also=("--request-rate",), default="all at once, or as recorded"),
            Flag(name="ramp", metavar="FROM:TO:SECONDS"),
            Flag(name="max_concurrency", default="no limit"),
        ),
    ),
    _DURATION,
    _LOAD,
    *_MEASURES,
    Panel(title="Results", config=ServeOptions, flags=(Flag(name="json", metavar="FILE"),)),
)
SWEEP_PANELS = (
    _SERVER,
    _WORKLOAD,
    Panel(
        title="Load",
        config=SweepOptions,
        flags=(Flag(name="rates", metavar="R[,R...]"), Flag(name="concurrencies", metavar="N[,N...]")),
    ),
    _SWEEP_DURATION,
    _LOAD,
    *_MEASURES,
    Panel(
        title="Results",
        config=SweepOptions,
        flags=(Flag(name="output", metavar="FOLDER"), Flag(name="title", default="model and server")),
    ),
)
COMPARE_PANELS = (
    Panel(
        title="Results",
        config=CompareOptions,
        flags=(
            Flag(name="before", is_argument=True, metavar="BEFORE.json"),
            Flag(name="after", is_argument=True, metavar="AFTER.json"),
            Flag(name="measures", metavar="NAME[,NAME...]", default="all"),
            Flag(name="confidence", metavar="PERCENT"),
            Flag(name="fail_if_worse", metavar="PERCENT"),
            Flag(name="json", metavar="FILE"),
        ),
    ),
)
