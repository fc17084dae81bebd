"""How far the simulator is from a server: three kinds of traffic on this machine's CPU, recorded and then repeated.

Starts `paceline serve` with its default model and a run log and sends completions over loopback at times drawn
beforehand. The load is a share of what the server finishes per second when everything is there from the start. Then a
cost model is fitted to each recorded run in turn and one to all of them, and every run is repeated in the simulator
with each: a run that is compared with the model fitted to itself says how good the model can be, any other how good
it is.

    python -m benchmarks.calibration_study record chats,prompts,bursts --folder DIR [--load 0.7] [--seconds 75]
    python -m benchmarks.calibration_study compare --folder DIR [--shape NAME --device NAME]

Each workload is recorded in two to three minutes, and in a separate process if they are named one by one. `compare`
takes every run log in the folder, also those of `paceline bench latency --run-log` on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Benchmark,
    Found,
    Given,
    Server,
    at_once,
    children,
    environment,
    flag,
    row,
    served,
    table,
)
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.bench.load.figures import send_workload
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.report.table import to_json
from paceline.lab.sim.cost_files import Calibration, calibrate, step_errors
from paceline.lab.sim.recorded import Deviation, RecordedRun, read_recorded, sim_config
from paceline.lab.sim.recorded import compare as compare_runs
from paceline.lab.sim.settings import Machine
from paceline.lab.workload import Workload, load_workload
from paceline.runner.machine_load import MachineLoad

bench = Benchmark(__doc__)
SATURATED = 20  # requests that are there from the start, to find what the server finishes per second
COUNTED = 0.8  # of these: the last ones run in a batch that empties
OPTIONS = ("--disable-log-requests", "--no-enable-prefix-caching")
# Lengths as `load_workload` has them, and how requests arrive.
TRAFFIC = {
    "chats": ("uniform:20-120x16-80", "poisson"),
    "prompts": ("uniform:120-360x16-48", "poisson"),
    "bursts": ("uniform:20-200x8-64", "onoff:4,8"),
}
FOLDER = flag("--folder", None, "of run logs", kind=Path, required=True)


# -- recording -----------------------------------------------------------------------------------------------


def send(server: Server, workload: Workload, seed: int) -> RunRecord:
    """The workload, after a few of its requests to warm up."""
    send_workload(server.completions, "smollm2", at_once(workload.head(4)), seed=seed + 1, label="warm")
    return send_workload(server.completions, "smollm2", workload, seed=seed, label="client")


def saturation(lengths: str, seed: int) -> float:
    """Requests per second when all are there from the start."""
    workload = load_workload(lengths, num_requests=SATURATED, seed=seed, arrivals="all-at-once")
    with served(OPTIONS) as server:
        ends = np.sort(send(server, workload, seed).finished_s)
    count = int(COUNTED * len(ends))
    return count / float(ends[count - 1])


def record_one(name: str, given: Given) -> None:
    """One run: its log, and what its client observed."""
    lengths, arrivals = TRAFFIC[name]
    full = saturation(lengths, given.seed) if given.full is None else given.full
    rate = given.load * full
    count = max(20, round(rate * given.seconds))
    workload = load_workload(lengths, num_requests=count, seed=given.seed + 2, rate=rate, arrivals=arrivals)
    log = ("--run-log", str(given.folder / f"{name}.jsonl"), "--run-log-files", "0")
    with served((*OPTIONS, *log)) as server:
        machine = MachineLoad(relatives=(server.pid, *children(server.pid)))
        client = summarize(send(server, workload, given.seed))
        machine.refresh()
    observed = {
        **environment(),
        "cores_used_by_others": None if machine.others is None else round(machine.others, 3),
        "lengths": lengths,
        "arrivals": arrivals,
        "load": given.load,
        "saturation_per_s": full,
        "client": to_json(client),
    }
    (given.folder / f"{name}.json").write_text(json.dumps(observed, indent=1) + "\n")
    print(f"{name}: {full:.2f}/s at most, {client.requests} at {rate:.2f}/s", flush=True)


@bench.part(
    flag("names", ",".join(TRAFFIC), "kinds of traffic", nargs="?"),
    FOLDER,
    flag("--load", 0.7, "share of saturation"),
    flag("--seconds", 75.0, "of requests, in each run"),
    flag("--full", None, "requests per second at most; measured unless given", kind=float),
    flag("--seed", 1),
)
def record(given: Given) -> None:
    """Run logs of a server under three kinds of traffic."""
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names.split(","):
        record_one(name, given)


# -- comparing -----------------------------------------------------------------------------------------------


def compared(
    models: Mapping[str, Calibration], runs: Mapping[str, RecordedRun], machine: Machine, folder: Path
) -> list[Any]:
    """Every run with the model of every run."""
    found = []
    for fitted_to, calibration in models.items():
        for name, recorded in runs.items():
            config = sim_config(recorded, replace(machine, cost=calibration.cost))
            deviations = compare_runs(recorded.record, recorded.workload, config)
            kinds = step_errors(calibration.cost, folder / f"{name}.jsonl", machine.kv_bytes_per_token)
            steps = {kind.kind: kind.bias for kind in kinds}
            biases = ", ".join(f"{kind} {100 * bias:+.1f} %" for kind, bias in steps.items())
            row(fitted_to, name, *map(cell, deviations), biases)
            measures = [{**asdict(each), "error": each.error} for each in deviations]
            found.append({"fitted_to": fitted_to, "run": name, "measures": measures, "step_bias": steps})
    return found


def cell(deviation: Deviation) -> str:
    if deviation.error is None:
        return "-"
    mark = "" if deviation.holds else "**"
    return f"{mark}{100 * deviation.error:+.1f} %{mark}"


@bench.part(
    FOLDER,
    flag("--shape", "smollm2-135m", "of the model that was run"),
    flag("--device", "cpu-2core", "it was run on"),
)
def compare(given: Given) -> Found:
    """Every run log of a folder, repeated in the simulator with the cost model of every other."""
    machine = Machine.of(model_shape(given.shape), device_spec(given.device))
    logs = {log.stem: log for log in sorted(given.folder.glob("*.jsonl"))}
    models = {name: calibrate([log], machine.kv_bytes_per_token) for name, log in logs.items()}
    if len(logs) > 1:
        models["all"] = calibrate(list(logs.values()), machine.kv_bytes_per_token)
    runs = {name: read_recorded(str(log)) for name, log in logs.items()}
    for name, model in models.items():
        for part in (*model.kinds, model.cost.host):
            print(f"{name}: {part}")
    shares = (f"{measure} {share}" for measure in ("TTFT", "ITL", "E2E") for share in ("p50", "p90", "p99"))
    table("fitted to", "run", "throughput", *shares, "steps")
    notes = {name: log.with_suffix(".json") for name, log in logs.items()}
    return {
        "runs": {
            name: json.loads(note.read_text()) if note.exists() else None for name, note in notes.items()
        },
        "models": {name: model.cost.to_json() for name, model in models.items()},
        "kinds": {name: [asdict(kind) for kind in model.kinds] for name, model in models.items()},
        "compared": compared(models, runs, machine, given.folder),
    }


if __name__ == "__main__":
    bench.main()
