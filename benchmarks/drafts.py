"""What drafts bring in the simulator: requests of a trace at several rates, without drafts and with.

An 8B model on a modelled H200. Which drafts are right is drawn: one chance for all, or another for each request.
Figures are throughput and mean time between tokens, over those without drafts. What drafts bring on this machine is
measured by `paceline bench drafts`.

    python -m benchmarks.drafts [--trace azure2023_conv.csv] [--rates 2,8,20,32] [--acceptance 0,0.3,0.7]
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import TRACE_FLAG, Benchmark, Found, Given, flag, h200, rows_of
from paceline.config.speculative import DraftConfig
from paceline.lab.report.summary import summarize
from paceline.lab.sim import SimConfig, engine_config, simulate
from paceline.lab.sim.acceptance import Acceptance
from paceline.lab.workload import Workload, load_workload

bench = Benchmark(__doc__)


@bench.part(
    TRACE_FLAG,
    flag("--rates", "2,8,20,32", "requests per second"),
    flag("--requests", 2000, "the first of the trace"),
    flag("--acceptance", "0,0.1,0.3,0.7", "as of `paceline sim`, several of them"),
    flag("--width", 7, "most drafts of a row in a step"),
)
def drafts(given: Given) -> Found:
    return {"width": given.width, "requests": given.requests, "simulated": rows_of(_measured(given))}


def _measured(given: Given) -> Iterator[Found]:
    for rate in map(float, given.rates.split(",")):
        workload = load_workload(given.trace, num_requests=given.requests, rate=rate)
        plain = _run(workload, 0, None)
        for acceptance in given.acceptance.split(","):
            drafted = _run(workload, given.width, Acceptance.read(acceptance))
            ratios = [on / off for on, off in zip(drafted, plain, strict=True)]
            names = ("throughput", "mean ITL", "mean TTFT")
            yield {
                "requests/s": rate,
                "acceptance": acceptance,
                **dict(zip(names, ratios, strict=True)),
                "ITL without drafts, ms": plain[1] * 1e3,
            }


def _run(workload: Workload, width: int, acceptance: Acceptance | None) -> tuple[float, float, float]:
    chosen = DraftConfig(width=width) if acceptance is not None else None
    engine = engine_config(h200(), workload, {}, chosen)
    found = summarize(simulate(SimConfig(machine=h200(), engine=engine, acceptance=acceptance), workload))
    assert found.output_tokens_per_s and found.itl_s.mean and found.ttft_s.mean
    return found.output_tokens_per_s, found.itl_s.mean, found.ttft_s.mean


if __name__ == "__main__":
    bench.main()
