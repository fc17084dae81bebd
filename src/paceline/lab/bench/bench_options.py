"""What the commands of `paceline bench` take beside the engine's options, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.config.options import CheckedOptions, option
from paceline.config.speculative import MOST_DRAFTS
from paceline.lab.bench.shapes import SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions(CheckedOptions):
    """What all commands that measure an engine take beside its options."""

    PANEL: ClassVar = "Workload"

    shape: str | None = option(
        None,
        "measure this shape with random weights, instead of --model",
        choices=tuple(SHAPES),
        basic=True,
        panel="Model",
    )
    json: str | None = option(
        None,
        "write all figures, machine, versions and commit to this file",
        basic=True,
        panel="Results",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBenchOptions(EngineBenchOptions):
    """What `paceline bench embed` takes beside the engine's options."""

    clients: int = option(64, "clients that ask for one vector after the other", low=1, high=4096, basic=True)
    texts: int = option(1000, "number of texts", low=1, high=1_000_000, basic=True)
    short: int = option(25, "tokens of a short text", low=1, basic=True)
    long: int = option(256, "tokens of a long text", low=1, basic=True)
    long_share: float = option(0.2, "share of long texts", low=0.0, high=1.0, basic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledOptions(EngineBenchOptions):
    """What commands take that make tokens."""

    temperature: float | None = option(
        None, "temperature of all requests; 0: the most likely token", low=0.0, high=2.0, default_text="0.6"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(SampledOptions):
    """What `throughput` and `latency` take."""

    trace: str | None = option(
        None, "trace file for the azure workloads (Azure 2023 CSV)", basic=True, metavar="FILE"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions(SampledOptions):
    """What `paceline bench structured` takes beside the engine's options."""

    clients: int = option(8, "requests at a time", low=1, high=4096, basic=True, also=("--rows",))
    schema: str | None = option(
        None, "JSON schema to measure", basic=True, metavar="FILE", default_text="four small ones"
    )
    whitespace: bool = option(False, "let the JSON have whitespace between its parts")
    output_tokens: int = option(200, "most tokens of an answer", low=1)
    rounds: int = option(3, "pairs of runs, of which the median counts", low=1, high=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """What `paceline bench throughput` takes beside the engine's options."""

    workload: str = option(
        "nano",
        "nano, decode-b1, -b8, -b64, -b256 or -b1024, azure-conv-1000, prefix-2048x256, prefill-64x3500, 1000x1000; "
        "several, separated by commas, or all",
        basic=True,
        metavar="NAME[,NAME...]",
    )
    recheck: int = option(0, "generate N random requests again, one by one, and compare the tokens", low=0)
    modes: str = option(
        "continuous",
        "batching modes to measure one after the other, separated by commas: continuous, dynamic, static",
        flag="--mode",
        basic=True,
        panel="Batching",
        metavar="MODE[,MODE...]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """What `paceline bench latency` takes beside the engine's options."""

    workload: str | None = option(
        None,
        "azure-conv@8, azure-conv@20, azure-conv@32 (requests per second), or all",
        basic=True,
        metavar="NAME[,NAME...]",
    )
    rate: float | None = option(
        None, "requests per second of one size, instead of --workload", low=1e-3, high=1e6, basic=True
    )
    num: int = option(100, "number of requests of --rate", low=1, high=1_000_000, basic=True)
    prompt_tokens: int = option(128, "prompt tokens of a request of --rate", low=1, basic=True)
    output_tokens: int = option(64, "output tokens of a request of --rate", low=1, basic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsOptions(CheckedOptions):
    """What `paceline bench drafts` takes beside the engine's options."""

    PANEL: ClassVar = "Workload"

    data: str | None = option(
        None,
        "questions: a JSON object a line with category and turns, as Spec-Bench has them",
        basic=True,
        metavar="FILE",
    )
    script: str | None = option(
        None,
        "log of requests: a JSON object a line with timestamp, input and output; a file, a folder or a tar archive",
        basic=True,
        metavar="FILE",
    )
    drafter: str | None = option(
        None,
        "oracle: random tokens on a GPU, drafted from the answer itself; needs --shape",
        choices=("oracle",),
    )
    shape: str | None = option(None, "shape with random weights, for --drafter", choices=tuple(SHAPES))
    acceptance: float = option(0.8, "share of the drafts of --drafter that are right", low=0.0, high=1.0)
    rows: str = option(
        "1,8,64,256", "requests at a time with --drafter, separated by commas", metavar="N[,N...]"
    )
    drafts: int = option(4, "most drafts of a row with --drafter", low=1, high=MOST_DRAFTS)
    clients: str = option(
        "1,4,8,16", "requests at a time, separated by commas", basic=True, metavar="N[,N...]"
    )
    categories: str = option(
        "", "categories of questions, separated by commas", metavar="NAME[,NAME...]", default_text="all"
    )
    questions: int = option(4, "questions of each category, at least one for each client", low=1)
    tokens: int = option(128, "most tokens of an answer", low=1)
    temperature: float = option(
        0.0, "temperature of all requests; 0: the most likely token", low=0.0, high=2.0
    )
    rounds: int = option(5, "pairs of runs, of which the median counts", low=1)
    requests: int = option(134, "requests of --script, the first in time", low=1)
    json: str | None = option(
        None,
        "write all figures, machine, versions and commit to this file",
        basic=True,
        panel="Results",
        metavar="FILE",
    )


# What `paceline bench serve`, `sweep` and `compare` take, declared once.


APIS = ("chat", "completions")
DEFAULT_REQUESTS, DEFAULT_OUTPUT = 100, 128
SWEEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(CheckedOptions):
    """Which server, which requests, and what counts: the same for one run and for several."""

    PANEL: ClassVar = "Workload"

    url: str = option(
        "http://127.0.0.1:8000", "address of the server", basic=True, panel="Server", also=("--base-url",)
    )
    model: str | None = option(
        None, "name of the model", basic=True, panel="Server", default_text="first one of the server"
    )
    api: str = option("chat", "API to call", choices=APIS, panel="Server")
    tenant_keys: str | None = option(
        None,
        'JSON file with a key for each tenant of the workload: {"alice": "sk-..."}',
        panel="Server",
        metavar="FILE",
        default_text="one key for all",
    )
    extra_body: str | None = option(
        None, 'further fields of every request, as JSON: {"top_k": 1}', panel="Server", metavar="JSON"
    )

    workload: str = option(
        "random",
        "random, a built-in workload (azure-conv, azure-code, mooncake, multi-tenant, mm-image, fixed:PxO, "
        "uniform:..), a trace file (Azure CSV, multi-tenant CSV, Mooncake JSON lines) or "
        "a file of prompts (text, JSON lines, ShareGPT JSON)",
        basic=True,
        metavar="NAME|FILE",
    )
    num_prompts: int | None = option(
        None,
        "number of requests",
        low=1,
        high=10_000_000,
        basic=True,
        default_text=f"{DEFAULT_REQUESTS}; all of a file; no limit with --duration",
    )
    duration: float | None = option(
        None,
        "stop sending after this time, in seconds",
        low=0.01,
        high=1e6,
        basic=True,
        panel="Load",
        metavar="SECONDS",
    )
    input_len: int = option(
        256,
        "random: mean words of a prompt, about a token each",
        low=1,
        high=10_000_000,
        basic=True,
        also=("--random-input-len",),
    )
    output_len: int | None = option(
        None,
        "output tokens to ask for; random: the mean",
        low=1,
        high=10_000_000,
        basic=True,
        also=("--random-output-len",),
        default_text=f"random: {DEFAULT_OUTPUT}; else as recorded, or no limit",
    )
    spread: float = option(
        0.0,
        "random: spread of lengths around the mean; 0.5: from half to one and a half of it",
        low=0.0,
        high=1.0,
        also=("--random-range-ratio",),
    )
    prefix_share: float = option(0.0, "random: share of a prompt that is a common prefix", low=0.0, high=1.0)
    num_prefixes: int = option(1, "random: number of different common prefixes", low=1, high=1_000_000)
    images: int = option(0, "made-up pictures before the text of each prompt", low=0, high=1000)
    image_size: str = option("512x512", "width and height of each of these pictures", metavar="WxH")
    image_reuse: float = option(
        0.0, "share of these pictures that are one of eight; the others are sent once", low=0.0, high=1.0
    )
    ignore_eos: bool | None = option(
        None,
        "ask for exactly the number of tokens; not supported by every server",
        kind=bool,
        default_text="yes with random and traces",
    )
    temperature: float | None = option(
        None, "temperature of all requests", low=0.0, high=2.0, default_text="the server's"
    )
    seed: int = option(0, "seed of everything that is random", low=0)

    arrivals: str = option(
        "recorded",
        "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once",
        panel="Load",
        default_text="recorded; poisson with a rate",
    )
    speed: float = option(
        1.0, "divide the recorded times by this; 2: twice as fast", low=1e-6, high=1e6, panel="Load"
    )
    num_warmups: int = option(
        1, "requests before the measurement; not counted", low=0, high=100_000, panel="Load"
    )
    timeout: float = option(
        600.0,
        "longest duration of a request, in seconds",
        low=0.01,
        high=1e6,
        panel="Load",
        metavar="SECONDS",
    )
    retries: int = option(
        0, "retries of a rejected request (429), each after its Retry-After", low=0, high=1000, panel="Load"
    )

    percentiles: str = option(
        "99",
        "percentiles to show and write, separated by commas",
        panel="Results",
        also=("--metric-percentiles",),
        metavar="P[,P...]",
    )
    goodput: str | None = option(
        None,
        "bounds of a good request, in ms: ttft:1000 tpot:50 itl:50 e2el:30000",
        basic=True,
        panel="Results",
        metavar="NAME:MS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreBounds:
    """Bounds behind the first one, as other tools take them: --goodput ttft:1000 tpot:50."""

    more_bounds: tuple[str, ...] | None = option(
        None, "further bounds of --goodput", kind=tuple, panel="Results", argument=True, metavar="NAME:MS"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRunOptions(LoadOptions):
    """What `paceline bench serve` takes."""

    rate: float | None = option(
        None,
        "requests per second, sent whether or not earlier ones are answered",
        low=1e-6,
        high=1e6,
        basic=True,
        panel="Load",
        also=("--request-rate",),
        default_text="all at once, or as recorded",
    )
    ramp: str | None = option(
        None, "rate that changes linearly and then stays", basic=True, panel="Load", metavar="FROM:TO:SECONDS"
    )
    max_concurrency: int | None = option(
        None,
        "most requests at once; without a rate, N users that each send again when answered",
        low=1,
        high=100_000,
        basic=True,
        panel="Load",
        default_text="no limit",
    )
    json: str | None = option(
        None,
        "write all figures, samples and the environment to this file",
        basic=True,
        panel="Results",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(LoadOptions):
    """What `paceline bench sweep` takes."""

    rates: str = option(
        "", "rates to measure, in requests per second: 1,2,4,8", basic=True, panel="Load", metavar="R[,R...]"
    )
    concurrencies: str = option(
        "", "numbers of users to measure: 1,4,16", basic=True, panel="Load", metavar="N[,N...]"
    )
    output: str = option(
        "bench-sweep",
        "folder for the report, its pictures and the JSON",
        basic=True,
        panel="Results",
        metavar="FOLDER",
    )
    title: str | None = option(
        None, "heading of the report", panel="Results", default_text="model and server"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(CheckedOptions):
    """What `paceline bench compare` takes."""

    before: str = option("", "result file to compare with", argument=True, metavar="BEFORE.json")
    after: str = option("", "result file to compare", argument=True, metavar="AFTER.json")
    fail_if_worse: str | None = option(
        None, "exit with 1 if a measure is worse by more than this, such as 10%", metavar="PERCENT"
    )
    measures: str | None = option(
        None,
        "compare only these, separated by commas: median_ttft_ms,output_throughput",
        metavar="NAME[,NAME...]",
        default_text="all",
    )
    confidence: float = option(
        95.0, "confidence of the intervals, in percent", low=50.0, high=99.9, metavar="PERCENT"
    )
    json: str | None = option(None, "write the comparison to this file", metavar="FILE")
