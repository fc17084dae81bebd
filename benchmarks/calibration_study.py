"""How far the simulator is from a server: three kinds of traffic on this machine's CPU, recorded and then repeated.

Starts `paceline serve` with its default model and a run log and sends completions over loopback at times drawn
beforehand. The load is a share of what the server finishes per second when everything is there from the start. Then a
cost model is fitted to each recorded run in turn and one to all of them, and every run is repeated in the simulator
with each: a run that is compared with the model fitted to itself says how good the model can be, any other how good
it is.

    python -m benchmarks.calibration_study record chats,prompts,bursts --folder DIR [--load 0.7] [--seconds 75]
    python -m benchmarks.calibration_study compare --folder DIR [--json FILE] [--shape NAME --device NAME]

Each workload is recorded in two to three minutes, and in a process of its own if they are named one by one. `compare`
takes every run log in the folder, also those of `paceline bench latency --run-log` on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live import environment, served, target
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.bench.load.replayed import send_workload
from paceline.lab.report.record import RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.report.table import to_json
from paceline.lab.sim.compare import Deviation, compare, sim_config
from paceline.lab.sim.cost_files import Calibration, calibrate, step_errors
from paceline.lab.sim.recorded import Recorded, read_recorded
from paceline.lab.sim.settings import Machine
from paceline.lab.workload import Workload, load_workload

MODEL = "smollm2"
SATURATED = 20  # requests that are there from the start, to see what the server finishes per second
COUNTED = 0.8  # of these: the last ones run in a batch that empties
WARM_UP = 4
# Sizes that are measured at the start would differ from run to run on a machine that others use.
OPTIONS = ("--disable-log-requests", "--max-num-batched-tokens", "32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent: lengths as `load_workload` has them, and how requests arrive."""

    lengths: str
    arrivals: str = "poisson"


TRAFFIC = {
    "chats": Traffic(lengths="uniform:20-120x16-80"),
    "prompts": Traffic(lengths="uniform:120-360x16-48"),
    "bursts": Traffic(lengths="uniform:20-200x8-64", arrivals="onoff:4,8"),
}


# -- recording -----------------------------------------------------------------------------------------------


def send(port: int, workload: Workload, seed: int) -> RunRecord:
    return send_workload(target(port), MODEL, workload, seed=seed, label="client")


def warm_up(port: int, workload: Workload, seed: int) -> None:
    few = workload.head(WARM_UP)
    send(port, replace(few, arrival_s=np.zeros(len(few))), seed)


def saturation(kind: Traffic, seed: int) -> float:
    """Requests per second when all are there from the start."""
    workload = load_workload(kind.lengths, num_requests=SATURATED, seed=seed, arrivals="all-at-once")
    with served(OPTIONS) as port:
        warm_up(port, workload, seed + 1)
        ends = np.sort(send(port, workload, seed).finished_s)
    count = int(COUNTED * len(ends))
    return count / float(ends[count - 1])


def record(name: str, folder: Path, load: float, seconds: float, seed: int, full: float | None) -> None:
    """One run: its log, and what its client saw. `full`: requests per second at most, where that is known."""
    kind = TRAFFIC[name]
    full = saturation(kind, seed) if full is None else full
    rate = load * full
    count = max(20, round(rate * seconds))
    workload = load_workload(
        kind.lengths, num_requests=count, seed=seed + 2, rate=rate, arrivals=kind.arrivals
    )
    with served((*OPTIONS, "--run-log", str(folder / f"{name}.jsonl"), "--run-log-files", "0")) as port:
        warm_up(port, workload, seed + 1)
        client = summarize(send(port, workload, seed))
    told = {
        **environment(),
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch chooses"),
        "lengths": kind.lengths,
        "arrivals": kind.arrivals,
        "load": load,
        "saturation_per_s": full,
        "client": to_json(client),
    }
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"{name}: {full:.2f}/s at most, {client.requests} at {rate:.2f}/s", flush=True)


# -- comparing -----------------------------------------------------------------------------------------------


def compared(
    models: Mapping[str, Calibration], runs: Mapping[str, Recorded], machine: Machine, folder: Path
) -> list[Any]:
    """Every run with the model of every run."""
    found = []
    for fitted_to, calibration in models.items():
        for name, recorded in runs.items():
            config = sim_config(recorded, replace(machine, cost=calibration.cost))
            deviations = compare(recorded.record, recorded.workload, config).deviations
            print(line(fitted_to, name, deviations), flush=True)
            measures = [{**asdict(each), "error": each.error} for each in deviations]
            kinds = step_errors(calibration.cost, folder / f"{name}.jsonl", machine.kv_bytes_per_token)
            steps = {kind.kind: kind.bias for kind in kinds}
            print("  steps: " + ", ".join(f"{kind} {100 * bias:+.1f} %" for kind, bias in steps.items()))
            found.append({"fitted_to": fitted_to, "run": name, "measures": measures, "step_bias": steps})
    return found


def line(fitted_to: str, name: str, deviations: tuple[Deviation, ...]) -> str:
    cells = [
        "-"
        if each.error is None
        else f"{'' if each.holds else '**'}{100 * each.error:+.1f} %{'' if each.holds else '**'}"
        for each in deviations
    ]
    return f"| {fitted_to} | {name} | {' | '.join(cells)} |"


def study(folder: Path, machine: Machine, path: Path | None) -> None:
    names = sorted(log.stem for log in folder.glob("*.jsonl"))
    logs = {name: folder / f"{name}.jsonl" for name in names}
    models = {name: calibrate([log], machine.kv_bytes_per_token) for name, log in logs.items()}
    if len(names) > 1:
        models["all"] = calibrate(list(logs.values()), machine.kv_bytes_per_token)
    runs = {name: read_recorded(str(folder / f"{name}.jsonl")) for name in names}
    for name, model in models.items():
        for kind in model.kinds:
            print(f"{name}: {kind}")
        print(f"{name}: {model.cost.host}")
    print(
        "| fitted to | run | throughput | "
        + " | ".join(
            f"{measure} {share}" for measure in ("TTFT", "ITL", "E2E") for share in ("p50", "p90", "p99")
        )
        + " |"
    )
    found = compared(models, runs, machine, folder)
    if path is not None:
        told = {
            "runs": {name: told_of(folder / f"{name}.json") for name in names},
            "models": {name: model.cost.to_json() for name, model in models.items()},
            "kinds": {name: [asdict(kind) for kind in model.kinds] for name, model in models.items()},
            "compared": found,
        }
        path.write_text(json.dumps(told, indent=1) + "\n")


def told_of(path: Path) -> Any:
    """What was written down beside a run log, if anything was."""
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("record", "compare"))
    parser.add_argument("names", nargs="?", default=",".join(TRAFFIC))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=75.0, help="of requests, in each run")
    parser.add_argument("--full", type=float, help="requests per second at most; measured unless given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", default="smollm2-135m", help="of the model that was run, for compare")
    parser.add_argument("--device", default="cpu-2core", help="it was run on, for compare")
    arguments = parser.parse_args()
    if arguments.part == "compare":
        machine = Machine.of(model_shape(arguments.shape), device_spec(arguments.device))
        study(arguments.folder, machine, arguments.json)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names.split(","):
        record(name, arguments.folder, arguments.load, arguments.seconds, arguments.seed, arguments.full)


if __name__ == "__main__":
    main()
