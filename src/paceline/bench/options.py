"""What the commands of `paceline bench` take beside the engine's options, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench.shapes import SHAPES
from paceline.config import check_options, option


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
