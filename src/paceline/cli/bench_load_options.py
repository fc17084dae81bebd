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
Send load to a server with the OpenAI API and measure it.

\b
  paceline bench serve --rate 4 --num-prompts 100 --output-len 64
  paceline bench serve --max-concurrency 16 --duration 60 --json run.json
  paceline bench serve --workload azure.csv --goodput ttft:1000 tpot:50
  paceline bench serve --ramp 1:20:60 --duration 90 --arrivals gamma:2

With --rate, --ramp or a trace, requests are sent at their times, whether or not earlier ones are answered. With
--max-concurrency alone, that number of users send again as soon as they are answered. With none of these all requests
are sent at once. The key is read from PACELINE_API_KEY or OPENAI_API_KEY. Ctrl-C shows the figures so far.
"""
SWEEP_HELP = """
Measure a server at several loads and draw the curves.

\b
  paceline bench sweep --rates 1,2,4,8 --duration 30 --goodput ttft:1000
  paceline bench sweep --concurrencies 1,4,16 --num-prompts 200 --output curve

The folder gets report.html (self-contained), its pictures as PNG, and sweep.json.
"""
COMPARE_HELP = """
Compare two result files: better, worse, or noise.

\b
  paceline bench compare before.json after.json
  paceline bench compare before.json after.json --fail-if-worse 10%

Where the files hold samples, each difference has a confidence interval. Results of bench serve, sweep, throughput and
latency can be compared, each with its own kind.
"""

_SERVER = Panel(
    title="Server",
    config=LoadOptions,
    flags=(
        Flag(name="url", also=("--base-url",)),
        Flag(name="model", default="first one of the server"),
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
            default=f"{DEFAULT_REQUESTS}; all of a file; no limit with --duration",
        ),
        Flag(name="input_len", also=("--random-input-len",)),
        Flag(
            name="output_len",
            also=("--random-output-len",),
            default=f"random: {DEFAULT_OUTPUT}; else as recorded, or no limit",
        ),
        Flag(name="spread", also=("--random-range-ratio",)),
        Flag(name="prefix_share"),
        Flag(name="num_prefixes"),
        Flag(name="ignore_eos", default="yes with random and traces"),
        Flag(name="temperature", default="the server's"),
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
