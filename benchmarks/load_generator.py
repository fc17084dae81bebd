"""How many streamed tokens the load generator of `paceline bench serve` takes in on one core, and how late it is.

    python -m benchmarks.load_generator [--json FILE]

The client is held to one core, the mock server has a process of its own. A piece is late by the time between the
server's handing it to its socket and the client's noting it; both read the same clock.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.live import environment
from paceline.lab.bench.load.figures import figures
from paceline.lab.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.lab.bench.load.pool import Pool, Target
from paceline.lab.bench.load.source import BodyForm, RandomSource
from tests.mock_openai import RunningMock, running_mock

# Streams at once, and milliseconds between the tokens of each: what is offered is their ratio.
LOADS = ((64, 10.0), (128, 10.0), (256, 20.0), (256, 12.0), (512, 20.0))
TOKENS = 200


async def put_load(mock: RunningMock, streams: int) -> tuple[LoadRun, float]:
    pool = Pool(Target(host="127.0.0.1", port=mock.port))
    form = BodyForm(api="chat", model="mock", ignore_eos=True)
    plan = LoadPlan(max_concurrency=streams, num_requests=2 * streams)
    generator = LoadGenerator(pool, RandomSource(input_len=64, output_len=TOKENS), form, plan)
    await generator.warm_up(4)
    before_s = time.process_time()
    run = await generator.run()
    used_s = time.process_time() - before_s
    pool.close()
    return run, used_s


def measure(mock: RunningMock, streams: int, gap_ms: float) -> dict[str, Any]:
    run, used_s = uvloop.run(put_load(mock, streams))
    known = {entry["index"]: entry["piece_s"] for entry in mock.entries()}
    found = figures(run)
    late_ms = np.concatenate([np.subtract(seen.piece_s, known[seen.index]) for seen in run.seen]) * 1e3
    return {
        "streams": streams,
        "offered_tokens_per_s": streams / gap_ms * 1e3,
        "tokens_per_s": found.output_throughput,
        "client_cpu_share": used_s / run.seconds,
        "tokens_per_cpu_s": found.total_output_tokens / used_s,
        "late_p50_ms": float(np.percentile(late_ms, 50)),
        "late_p99_ms": float(np.percentile(late_ms, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    target: Path | None = parser.parse_args().json
    everywhere = os.sched_getaffinity(0)
    results = []
    for streams, gap_ms in LOADS:
        own, *others = sorted(everywhere)
        os.sched_setaffinity(0, others or {own})  # where the server will run
        with running_mock(ttft_ms=50, gap_ms=gap_ms) as mock:
            os.sched_setaffinity(0, {own})
            results.append(measure(mock, streams, gap_ms))
        print(json.dumps(results[-1]), flush=True)
    os.sched_setaffinity(0, everywhere)
    if target is not None:
        target.write_text(json.dumps({**environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
