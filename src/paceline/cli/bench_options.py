"""The command lines of `paceline bench`: which options they take, in which groups, and their help pages.

The options themselves are declared in `bench.options` and `config`. Imports nothing heavy: help and mistakes are
answered before torch is loaded.
"""

from __future__ import annotations

from paceline.bench.options import BenchOptions, LatencyOptions, ThroughputOptions
from paceline.bench.shapes import MAX_MODEL_LEN, MAX_NUM_SEQS
from paceline.cli.model_options import MODEL, seed_panel
from paceline.cli.options import Flag, Panel
from paceline.cli.shared_flags import BUDGET, FORMING, KV_BLOCKS, POLICY, depth_panel
from paceline.config import EngineConfig, SchedulerConfig

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
