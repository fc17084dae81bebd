"""What `paceline bench serve`, `sweep` and `compare` take, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import check_options, option

APIS = ("chat", "completions")
DEFAULT_REQUESTS, DEFAULT_OUTPUT = 100, 128
SWEEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which server, which requests, and what counts: the same for one run and for several."""

    url: str = option("http://127.0.0.1:8000", "address of the server")
    model: str | None = option(None, "name of the model", kind=str)
    api: str = option("chat", "which API is called", choices=APIS)
    tenant_keys: str | None = option(
        None, 'JSON file with a key for each tenant of the workload: {"alice": "sk-..."}', kind=str
    )
    extra_body: str | None = option(None, 'more fields of every request, as JSON: {"top_k": 1}', kind=str)

    workload: str = option(
        "random",
        "random; a built-in workload of paceline sim (azure-conv, azure-code, mooncake, multi-tenant, fixed:PxO, "
        "uniform:..); a trace file (Azure CSV, multi-tenant CSV, Mooncake JSON lines); or a file of prompts (text, "
        "JSON lines, ShareGPT JSON)",
    )
    num_prompts: int | None = option(
        None, "send so many requests, and no more", low=1, high=10_000_000, kind=int
    )
    duration: float | None = option(
        None, "seconds after which nothing more is sent", low=0.01, high=1e6, kind=float
    )
    input_len: int = option(256, "mean words in a random prompt, about a token each", low=1, high=10_000_000)
    output_len: int | None = option(
        None, "tokens to ask for; mean of random ones, exact for others", low=1, high=10_000_000, kind=int
    )
    spread: float = option(
        0.0, "how far random lengths lie around their mean: 0.5 is half to one and a half", low=0.0, high=1.0
    )
    prefix_share: float = option(0.0, "share of a random prompt that many have in common", low=0.0, high=1.0)
    num_prefixes: int = option(1, "how many such beginnings there are", low=1, high=1_000_000)
    ignore_eos: bool | None = option(
        None, "ask for exactly the number of tokens; not every server can", kind=bool
    )
    temperature: float | None = option(None, "of every request", low=0.0, high=2.0, kind=float)
    seed: int = option(0, "decides everything that is drawn", low=0)

    arrivals: str = option(
        "recorded", "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once"
    )
    speed: float = option(1.0, "divide recorded times; 2 is twice as fast", low=1e-6, high=1e6)
    num_warmups: int = option(1, "requests before the clock starts; not counted", low=0, high=100_000)
    timeout: float = option(600.0, "seconds after which a request is given up", low=0.01, high=1e6)
    retries: int = option(
        0, "how often a request that is refused (429) is sent again, after its Retry-After", low=0, high=1000
    )

    percentiles: str = option("99", "percentiles to show and write, separated by commas")
    goodput: str | None = option(
        None, "bounds in ms that a good request keeps: ttft:1000 tpot:50 itl:50 e2el:30000", kind=str
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreBounds:
    """Bounds behind the first one, as other tools take them: --goodput ttft:1000 tpot:50."""

    more_bounds: tuple[str, ...] | None = option(None, "more bounds of --goodput", kind=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(LoadOptions):
    """What `paceline bench serve` takes."""

    rate: float | None = option(
        None, "requests per second, whether or not others are answered", low=1e-6, high=1e6, kind=float
    )
    ramp: str | None = option(None, "FROM:TO:SECONDS: a rate that moves in a line and then stays", kind=str)
    max_concurrency: int | None = option(
        None,
        "most requests at once; without a rate, so many users who ask again when they are answered",
        low=1,
        high=100_000,
        kind=int,
    )
    json: str | None = option(None, "write every figure, sample and the environment to this file", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(LoadOptions):
    """What `paceline bench sweep` takes."""

    rates: str = option("", "requests per second, separated by commas: 1,2,4,8")
    concurrencies: str = option("", "users who ask in turn, separated by commas: 1,4,16")
    output: str = option("bench-sweep", "folder for the page, the pictures and the JSON")
    title: str | None = option(None, "heading of the page", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What `paceline bench compare` takes."""

    before: str = option("", "result file to compare with")
    after: str = option("", "result file that is compared")
    fail_if_worse: str | None = option(
        None, "exit with 1 if a measure is worse by more than this, such as 10%", kind=str
    )
    measures: str | None = option(
        None, "only these, separated by commas: median_ttft_ms,output_throughput", kind=str
    )
    confidence: float = option(95.0, "percent; of the intervals", low=50.0, high=99.9)
    json: str | None = option(None, "write the comparison to this file", kind=str)

    def __post_init__(self) -> None:
        check_options(self)
