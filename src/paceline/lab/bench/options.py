"""What the commands of `paceline bench` take beside the engine's options, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.options import check_options, option
from paceline.lab.bench.shapes import SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What both commands take beside the engine's options."""

    shape: str | None = option(
        None,
        "measure this shape with random weights, instead of --model",
        choices=tuple(SHAPES),
        kind=str,
        basic=True,
    )
    trace: str | None = option(
        None, "trace file for the azure workloads (Azure 2023 CSV)", kind=str, basic=True
    )
    temperature: float | None = option(
        None, "temperature of all requests; 0: the most likely token", low=0.0, high=2.0, kind=float
    )
    json: str | None = option(
        None, "write all figures, machine, versions and commit to this file", kind=str, basic=True
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """What `paceline bench throughput` takes beside the engine's options."""

    workload: str = option(
        "nano",
        "nano, decode-b1, -b8, -b64, -b256 or -b1024, azure-conv-1000, prefix-2048x256, prefill-64x3500; "
        "several, separated by commas, or all",
        basic=True,
    )
    recheck: int = option(0, "generate N random requests again, one by one, and compare the tokens", low=0)
    modes: str = option(
        "continuous",
        "batching modes to measure one after the other, separated by commas: continuous, dynamic, static",
        flag="--mode",
        basic=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """What `paceline bench latency` takes beside the engine's options."""

    workload: str | None = option(
        None, "azure-conv@8, azure-conv@20, azure-conv@32 (requests per second), or all", kind=str, basic=True
    )
    rate: float | None = option(
        None,
        "requests per second of one size, instead of --workload",
        low=1e-3,
        high=1e6,
        kind=float,
        basic=True,
    )
    num: int = option(100, "number of requests of --rate", low=1, high=1_000_000, basic=True)
    prompt_tokens: int = option(128, "prompt tokens of a request of --rate", low=1, basic=True)
    output_tokens: int = option(64, "output tokens of a request of --rate", low=1, basic=True)


# What `paceline bench serve`, `sweep` and `compare` take, declared once.


APIS = ("chat", "completions")
DEFAULT_REQUESTS, DEFAULT_OUTPUT = 100, 128
SWEEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which server, which requests, and what counts: the same for one run and for several."""

    url: str = option("http://127.0.0.1:8000", "address of the server", basic=True)
    model: str | None = option(None, "name of the model", kind=str, basic=True)
    api: str = option("chat", "API to call", choices=APIS)
    tenant_keys: str | None = option(
        None, 'JSON file with a key for each tenant of the workload: {"alice": "sk-..."}', kind=str
    )
    extra_body: str | None = option(None, 'further fields of every request, as JSON: {"top_k": 1}', kind=str)

    workload: str = option(
        "random",
        "random, a built-in workload (azure-conv, azure-code, mooncake, multi-tenant, fixed:PxO, "
        "uniform:..), a trace file (Azure CSV, multi-tenant CSV, Mooncake JSON lines) or "
        "a file of prompts (text, JSON lines, ShareGPT JSON)",
        basic=True,
    )
    num_prompts: int | None = option(None, "number of requests", low=1, high=10_000_000, kind=int, basic=True)
    duration: float | None = option(
        None, "stop sending after this time, in seconds", low=0.01, high=1e6, kind=float, basic=True
    )
    input_len: int = option(
        256, "random: mean words of a prompt, about a token each", low=1, high=10_000_000, basic=True
    )
    output_len: int | None = option(
        None, "output tokens to ask for; random: the mean", low=1, high=10_000_000, kind=int, basic=True
    )
    spread: float = option(
        0.0,
        "random: spread of lengths around the mean; 0.5: from half to one and a half of it",
        low=0.0,
        high=1.0,
    )
    prefix_share: float = option(0.0, "random: share of a prompt that is a common prefix", low=0.0, high=1.0)
    num_prefixes: int = option(1, "random: number of different common prefixes", low=1, high=1_000_000)
    ignore_eos: bool | None = option(
        None, "ask for exactly the number of tokens; not supported by every server", kind=bool
    )
    temperature: float | None = option(None, "temperature of all requests", low=0.0, high=2.0, kind=float)
    seed: int = option(0, "seed of everything that is random", low=0)

    arrivals: str = option(
        "recorded", "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once"
    )
    speed: float = option(1.0, "divide the recorded times by this; 2: twice as fast", low=1e-6, high=1e6)
    num_warmups: int = option(1, "requests before the measurement; not counted", low=0, high=100_000)
    timeout: float = option(600.0, "longest duration of a request, in seconds", low=0.01, high=1e6)
    retries: int = option(
        0, "retries of a rejected request (429), each after its Retry-After", low=0, high=1000
    )

    percentiles: str = option("99", "percentiles to show and write, separated by commas")
    goodput: str | None = option(
        None, "bounds of a good request, in ms: ttft:1000 tpot:50 itl:50 e2el:30000", kind=str, basic=True
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreBounds:
    """Bounds behind the first one, as other tools take them: --goodput ttft:1000 tpot:50."""

    more_bounds: tuple[str, ...] | None = option(None, "further bounds of --goodput", kind=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(LoadOptions):
    """What `paceline bench serve` takes."""

    rate: float | None = option(
        None,
        "requests per second, sent whether or not earlier ones are answered",
        low=1e-6,
        high=1e6,
        kind=float,
        basic=True,
    )
    ramp: str | None = option(None, "rate that changes linearly and then stays", kind=str, basic=True)
    max_concurrency: int | None = option(
        None,
        "most requests at once; without a rate, N users who send again when they are answered",
        low=1,
        high=100_000,
        kind=int,
        basic=True,
    )
    json: str | None = option(
        None, "write all figures, samples and the environment to this file", kind=str, basic=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(LoadOptions):
    """What `paceline bench sweep` takes."""

    rates: str = option("", "rates to measure, in requests per second: 1,2,4,8", basic=True)
    concurrencies: str = option("", "numbers of users to measure: 1,4,16", basic=True)
    output: str = option("bench-sweep", "folder for the report, its pictures and the JSON", basic=True)
    title: str | None = option(None, "heading of the report", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What `paceline bench compare` takes."""

    before: str = option("", "result file to compare with")
    after: str = option("", "result file to compare")
    fail_if_worse: str | None = option(
        None, "exit with 1 if a measure is worse by more than this, such as 10%", kind=str
    )
    measures: str | None = option(
        None, "compare only these, separated by commas: median_ttft_ms,output_throughput", kind=str
    )
    confidence: float = option(95.0, "confidence of the intervals, in percent", low=50.0, high=99.9)
    json: str | None = option(None, "write the comparison to this file", kind=str)

    def __post_init__(self) -> None:
        check_options(self)
