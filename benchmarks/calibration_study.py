"""How far the simulator is from a server: three kinds of traffic on this machine's CPU, recorded and then repeated.

Starts `paceline serve` with its default model and a run log and sends completions over loopback at times drawn
beforehand. The load is a share of what the server finishes per second when everything is there from the start. Then a
cost model is fitted to each recorded run in turn and every run is repeated in the simulator with it: what is on the
diagonal was fitted and compared on the same run, everything else was not.

    python -m benchmarks.calibration_study record chats,prompts,bursts --folder DIR [--load 0.7] [--seconds 75]
    python -m benchmarks.calibration_study compare --folder DIR --json FILE

Each workload is recorded in about two minutes, and in a run of its own if they are named one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live import Answer, at, environment, served, stream
from paceline.workload import load_workload
from paceline.workload.model import Workload

NUM_IDS = 40_000  # token ids that prompts are drawn from: nothing is found in the prefix cache
WITHIN_S = 300.0
SATURATED = 48  # requests that are there from the start, to see what the server finishes per second
WARM_UP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent: lengths as `load_workload` has them, and how requests arrive."""

    lengths: str
    arrivals: str = "poisson"


TRAFFIC = {
    "chats": Traffic(lengths="uniform:20-120x16-80"),
    "prompts": Traffic(lengths="uniform:200-700x8-32"),
    "bursts": Traffic(lengths="uniform:20-300x8-96", arrivals="onoff:4,8"),
}


async def send_all(port: int, workload: Workload, seed: int) -> list[Answer | None]:
    random = np.random.default_rng(seed)
    origin_s = time.perf_counter() + 0.5
    jobs = []
    for index in range(len(workload)):
        body = {
            "model": "smollm2",
            "prompt": random.integers(0, NUM_IDS, int(workload.prompt_len[index])).tolist(),
            "max_tokens": int(workload.output_len[index]),
            "ignore_eos": True,
        }
        sending = stream(port, "/v1/completions", body)
        jobs.append(at(origin_s, float(workload.arrival_s[index]), sending, WITHIN_S))
    return await asyncio.gather(*jobs)


def saturation(kind: Traffic, seed: int) -> float:
    """Requests per second when all are there from the start; the last ones, which run alone, do not count."""
    workload = load_workload(kind.lengths, num_requests=SATURATED, seed=seed, arrivals="all-at-once")
    with served(("--disable-log-requests",)) as port:
        asyncio.run(send_all(port, workload.head(WARM_UP), seed + 1))
        answers = [answer for answer in asyncio.run(send_all(port, workload, seed)) if answer is not None]
    ends = np.sort([answer.ended_s for answer in answers])
    count = int(0.8 * len(ends))
    return count / float(ends[count - 1] - min(answer.sent_s for answer in answers))


def record(name: str, folder: Path, load: float, seconds: float, seed: int) -> dict[str, Any]:
    """One run: its log and the times of its client."""
    kind = TRAFFIC[name]
    full = saturation(kind, seed)
    rate = load * full
    count = max(20, round(rate * seconds))
    workload = load_workload(
        kind.lengths, num_requests=count, seed=seed + 2, rate=rate, arrivals=kind.arrivals
    )
    log = folder / f"{name}.jsonl"
    with served(("--disable-log-requests", "--run-log", str(log))) as port:
        asyncio.run(send_all(port, replace(workload.head(WARM_UP), arrival_s=np.zeros(WARM_UP)), seed + 1))
        answers = asyncio.run(send_all(port, workload, seed))
    seen = [answer for answer in answers if answer is not None and answer.piece_s]
    told = {
        **environment(),
        "workload": kind.lengths,
        "arrivals": kind.arrivals,
        "load": load,
        "saturation_per_s": full,
        "requests": len(workload),
        "answered": len(seen),
        "client_ttft_s": [answer.ttft_s for answer in seen],
        "client_whole_s": [answer.whole_s for answer in seen],
        "client_gaps_s": [round(gap, 6) for answer in seen for gap in np.diff(answer.piece_s).tolist()],
    }
    (folder / f"{name}.json").write_text(json.dumps(told) + "\n")
    print(
        f"{name}: {full:.2f}/s at most, {len(seen)} of {len(workload)} answered at {rate:.2f}/s", flush=True
    )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("record", "compare"))
    parser.add_argument("names", nargs="?", default=",".join(TRAFFIC))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=75.0, help="of requests, in each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for name in arguments.names.split(","):
        record(name, arguments.folder, arguments.load, arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
