"""`paceline bench serve | sweep | compare | throughput | latency` on the command line.

What they do is in files of their own, imported when one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer

from paceline.cli.flags import (
    BUDGET,
    FORMING,
    KV_BLOCKS,
    MODEL,
    POLICY,
    Flag,
    Panel,
    add_command,
    command_group,
    depth_panel,
    seed_panel,
)
from paceline.config.engine import EngineConfig, SchedulerConfig
from paceline.lab.bench.options import (
    DEFAULT_OUTPUT,
    DEFAULT_REQUESTS,
    SWEEP_SECONDS,
    BenchOptions,
    CompareOptions,
    LatencyOptions,
    LoadOptions,
    MoreBounds,
    ServeOptions,
    SweepOptions,
    ThroughputOptions,
)
from paceline.lab.bench.shapes import MAX_MODEL_LEN, MAX_NUM_SEQS

# The command lines of `paceline bench`


HELP = "Measure a server under load, or the engine alone."
THROUGHPUT_HELP = """
Measure the engine with all requests at once.

\b
  paceline bench throughput --shape tiny --workload decode-b1,decode-b8
  paceline bench throughput --shape qwen3-0.6b --workload nano --json out.json
  paceline bench throughput --shape tiny --mode continuous,static

--shape measures a well-known shape with random weights, --model any model. End tokens are ignored: every request
gets exactly its number of tokens, and the clock stops with the last of them.
"""
LATENCY_HELP = """
Measure the engine with requests that arrive over time.

\b
  paceline bench latency --trace azure.csv --workload azure-conv@20
  paceline bench latency --shape tiny --rate 20 --num 100 --output-tokens 16

Arrivals are Poisson. TTFT is the time from a request's arrival to its first token, ITL the time between two deliveries
to one request.
"""


_ENGINE = (
    Panel(
        title="Model",
        config=BenchOptions,
        flags=(Flag(name="shape"),),
    ),
    MODEL,
    seed_panel("0"),
    Panel(
        title="Engine",
        config=SchedulerConfig,
        optional=True,
        flags=(
            Flag(
                name="max_model_len",
                default=f"{MAX_MODEL_LEN} with --shape, else what model and KV cache allow",
            ),
            Flag(name="max_num_seqs", default=f"{MAX_NUM_SEQS} with --shape, else 128"),
            *BUDGET,
            Flag(name="step_target_ms", default="automatic for latency on a GPU, else off"),
            Flag(name="step_stretch"),
            Flag(name="step_patience_s"),
            *POLICY,
        ),
    ),
)
_FORMING = (
    Panel(title="Engine", config=SchedulerConfig, optional=True, flags=FORMING),
    KV_BLOCKS,
    depth_panel("Engine"),
)
_ONE_MODE = Panel(title="Engine", config=SchedulerConfig, optional=True, flags=(Flag(name="mode"),))
_MODES = Panel(
    title="Engine",
    config=ThroughputOptions,
    flags=(Flag(name="modes", metavar="MODE[,MODE...]"),),
)
_RESULTS = (
    Panel(title="Results", config=BenchOptions, flags=(Flag(name="json", metavar="FILE"),)),
    Panel(title="Results", config=EngineConfig, optional=True, flags=(Flag(name="run_log", metavar="FILE"),)),
)
_TEMPERATURE = Flag(name="temperature", default="0.6; decode-b*: 0")

THROUGHPUT_PANELS = (
    Panel(
        title="Workload",
        config=ThroughputOptions,
        flags=(
            Flag(name="workload", metavar="NAME[,NAME...]"),
            Flag(name="trace", metavar="FILE"),
            _TEMPERATURE,
            Flag(name="recheck"),
        ),
    ),
    *_RESULTS,
    *_ENGINE,
    _MODES,
    *_FORMING,
)
LATENCY_PANELS = (
    Panel(
        title="Workload",
        config=LatencyOptions,
        flags=(
            Flag(name="workload", metavar="NAME[,NAME...]"),
            Flag(name="trace", metavar="FILE"),
            Flag(name="rate"),
            Flag(name="num"),
            Flag(name="prompt_tokens"),
            Flag(name="output_tokens"),
            Flag(name="temperature", default="0.6"),
        ),
    ),
    *_RESULTS,
    *_ENGINE,
    _ONE_MODE,
    *_FORMING,
)


# The command lines of `paceline bench serve`, `sweep` and `compare`


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


def add_bench(app: typer.Typer) -> None:
    bench = command_group("bench", HELP)
    add_command(bench, "serve", _later("serve", "serve"), SERVE_PANELS, SERVE_HELP)
    add_command(bench, "sweep", _later("sweep", "sweep"), SWEEP_PANELS, SWEEP_HELP)
    add_command(bench, "compare", _later("compare", "compare"), COMPARE_PANELS, COMPARE_HELP)
    add_command(bench, "throughput", _later("run", "throughput"), THROUGHPUT_PANELS, THROUGHPUT_HELP)
    add_command(bench, "latency", _later("run", "latency"), LATENCY_PANELS, LATENCY_HELP)
    app.add_typer(bench)


def _later(module: str, name: str) -> Callable[[Mapping[str, Any]], None]:
    """A command whose file is imported when it runs."""

    def run(values: Mapping[str, Any]) -> None:
        getattr(import_module(f"paceline.cli.bench.{module}"), name)(values)

    return run
