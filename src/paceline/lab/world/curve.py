"""What one replica can do, measured by the exact simulator for a model, a device and a mix of requests.

Owns the probes and what is kept of them: how long a token takes by the rows that decode, what a prompt takes of the
device, how many rows there can be, and how long first tokens take by the rate of requests. Kept in a file under a key
that names all it depends on. Knows nothing of regions or time of day.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, host_costs, simulate
from paceline.lab.workload import Workload, load_workload
from paceline.version import __version__

Floats = NDArray[np.float64]

LOADS = (0.15, 0.35, 0.55, 0.7, 0.8, 0.88, 0.95)  # of what a replica serves at most
PROBES = 4  # replicas behind one router, for each load
# Of the requests of the full run: before, all rows are young, and behind, the queue is empty.
FULL = (0.25, 0.7)
POINTS = 200  # of a distribution, each as likely
ROW_POINTS = 24
LEAST_PROBE_S = 30.0
LIFETIMES = 3.0  # of a request at this load: how long a probe takes
FORMAT = "paceline-curve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMix:
    """What is asked, of which machine, with which engine."""

    machine: Machine
    trace: str
    engine: Mapping[str, Any]
    seed: int = 0

    def load(self, num_requests: int, rate: float | None) -> Workload:
        """So many requests at this rate, or all at once."""
        arrivals = "all-at-once" if rate is None else "poisson"
        return load_workload(
            self.trace, num_requests=num_requests, seed=self.seed, rate=rate, arrivals=arrivals
        )

    def config(self, workload: Workload, num_replicas: int) -> SimConfig:
        return SimConfig(
            machine=self.machine,
            engine=engine_config(self.machine, workload, dict(self.engine)),
            num_replicas=num_replicas,
            seed=self.seed,
            **host_costs(self.machine.cost),
        )

    @property
    def key(self) -> str:
        """Names everything the curve depends on."""
        machine = self.machine
        parts = {
            "version": __version__,
            "model": asdict(machine.model),
            "device": asdict(machine.device),
            "cost": type(machine.cost).__name__,
            "ranks": machine.ranks,
            "link": asdict(machine.link),
            "trace": self.trace,
            "engine": dict(self.engine),
            "seed": self.seed,
            "probes": [LOADS, PROBES, POINTS, LIFETIMES],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCurve:
    """One replica, as numbers."""

    prompt_tokens: float  # mean of a request
    output_tokens: float
    output_variation: float  # standard deviation over mean
    rate: float  # requests/s at most
    max_rows: float  # that run together at most
    prompt_s: float  # of the device, for a mean prompt
    chunk_s: float  # of the device, for the prompts of a full step
    rows: tuple[float, ...]  # ascending
    token_s: tuple[float, ...]  # between two tokens where so many rows decode and no prompt is read
    rates: tuple[float, ...]  # requests/s, ascending
    ttft_s: tuple[tuple[float, ...], ...]  # `POINTS` of the distribution at each of these rates

    def rows_at(self, rate: float) -> float:
        """How many rows run where so many requests come every second for long."""
        low, high = 0.0, self.max_rows
        for _ in range(60):
            middle = (low + high) / 2.0
            token_s = float(np.interp(middle, self.rows, self.token_s))
            ends = middle * max(0.0, 1.0 - rate * self.prompt_s) / token_s / self.output_tokens
            low, high = (middle, high) if ends < rate else (low, middle)
        return high


def read_curve(path: Path, mix: ReplicaMix) -> tuple[ReplicaCurve, dict[str, Any]] | None:
    """What a file knows of this mix: the curve, and what was found out with it; None where it knows nothing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.get("format") != FORMAT:
            raise InputError(f"{path} is not a file of curves; name another, or remove it")
        entry = value["curves"].get(mix.key)
        if entry is None:
            return None
        fields = {**entry["curve"], "ttft_s": tuple(map(tuple, entry["curve"]["ttft_s"]))}
        for name in ("rows", "token_s", "rates"):
            fields[name] = tuple(fields[name])
        return ReplicaCurve(**fields), entry["error"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{path} cannot be read as a file of curves: {problem}") from problem


def write_curve(path: Path, mix: ReplicaMix, curve: ReplicaCurve, error: Mapping[str, Any]) -> None:
    """Beside what the file has of other mixes."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["curves"] if path.exists() else {}
        known[mix.key] = {"mix": _described(mix), "curve": asdict(curve), "error": dict(error)}
        path.write_text(json.dumps({"format": FORMAT, "curves": known}) + "\n", encoding="utf-8")
    except OSError as problem:
        raise InputError(f"{path} cannot be written: {problem.strerror}") from problem


def _described(mix: ReplicaMix) -> dict[str, object]:
    machine = mix.machine
    return {
        "model": machine.model.name,
        "device": machine.device.name,
        "ranks": machine.ranks,
        "trace": mix.trace,
        "engine": dict(mix.engine),
        "version": __version__,
    }


def measure_curve(mix: ReplicaMix, say: Callable[[str], None] = lambda line: None) -> ReplicaCurve:
    """Runs the exact simulator: once with more requests than fit, and once at each of `LOADS`."""
    say("what a replica serves at most")
    full = _saturated(mix)
    from_s, until_s = (float(np.quantile(full.finished_s, share)) for share in FULL)
    rate, max_rows = _most(full, from_s, until_s)
    steps = [_steps(full, from_s, until_s)]
    ttft: list[Floats] = []
    rates = [load * rate for load in LOADS]
    life_s = float(np.nanmean(full.finished_s - full.admitted_s))
    for each in rates:
        say(f"a replica at {each:.3g} requests/s")
        # Where few rows run, requests live shorter, about in proportion to them.
        record = _steady(mix, each, max(LEAST_PROBE_S, LIFETIMES * life_s * (each / rate) ** 2))
        last_s = float(record.arrival_s[-1])
        steps.append(_steps(record, last_s / 2.0, last_s))
        ttft.append(_first_tokens(record))
    prompt_mean = float(full.prompt_len.mean())
    rows, token_s, prompt_token_s, chunk = _step_times(np.concatenate(steps, axis=1))
    outputs = full.output_len.astype(np.float64)
    return ReplicaCurve(
        prompt_tokens=prompt_mean,
        output_tokens=float(outputs.mean()),
        output_variation=float(outputs.std() / outputs.mean()),
        rate=rate,
        max_rows=max_rows,
        prompt_s=prompt_token_s * prompt_mean,
        chunk_s=prompt_token_s * chunk,
        rows=tuple(rows.tolist()),
        token_s=tuple(token_s.tolist()),
        rates=tuple(rates),
        ttft_s=tuple(tuple(each.tolist()) for each in _rising(ttft)),
    )


def _saturated(mix: ReplicaMix) -> RunRecord:
    """One replica with four times as many requests as run at once."""
    probe = mix.load(64, None)
    config = mix.config(probe, 1)
    kv = config.engine.kv
    tokens = float((probe.prompt_len + probe.output_len).mean())
    rows = min(config.engine.scheduler.max_num_seqs, int((kv.num_blocks - 1) * kv.block_size / tokens))
    workload = mix.load(4 * max(8, rows), None)
    return simulate(mix.config(workload, 1), workload)


def _most(record: RunRecord, from_s: float, until_s: float) -> tuple[float, float]:
    """Requests/s and rows while the queue is long."""
    ended = ((record.finished_s > from_s) & (record.finished_s <= until_s)).sum()
    within = (record.step_start_s >= from_s) & (record.step_end_s <= until_s)
    return float(ended) / (until_s - from_s), float(record.step_rows[within].mean())


def _steady(mix: ReplicaMix, rate: float, seconds: float) -> RunRecord:
    """`PROBES` replicas, each with this rate."""
    num_requests = max(50, math.ceil(PROBES * rate * seconds))
    workload = mix.load(num_requests, PROBES * rate)
    return simulate(mix.config(workload, PROBES), workload)


def _first_tokens(record: RunRecord) -> Floats:
    """Points of the distribution, of requests that came when rows were as many as they stay."""
    later = record.arrival_s >= record.arrival_s[-1] / 2.0
    seen = (record.first_token_s - record.arrival_s)[later]
    found: Floats = np.quantile(seen, (np.arange(POINTS) + 0.5) / POINTS)
    return found


def _rising(ttft: list[Floats]) -> list[Floats]:
    """A higher rate never brings a sooner token: what looks so is chance."""
    return list(np.maximum.accumulate(np.array(ttft), axis=0))


def _steps(record: RunRecord, from_s: float, until_s: float) -> Floats:
    """Seconds, rows that decode and tokens of prompts of steps while rows are of all ages, as they stay."""
    within = (record.step_start_s >= from_s) & (record.step_end_s <= until_s)
    took_s = record.step_end_s - record.step_start_s
    found: Floats = np.array((took_s, record.step_decode, record.step_prefill), np.float64)[:, within]
    return found


def _step_times(steps: Floats) -> tuple[Floats, Floats, float, int]:
    """Seconds between two tokens by the rows that decode, seconds of the device for a token of a prompt, and the most
    tokens of prompts in a step. Each of the first two is found with what is known of the other, twice."""
    took_s, decode, prompt = steps
    alone, both = (prompt == 0) & (decode > 0), (prompt > 0) & (decode > 0)
    rows, token_s = _by_rows(decode[alone], took_s[alone])
    within = both & (decode <= rows[-1])
    for _ in range(2):
        extra_s = took_s[within] - np.interp(decode[within], rows, token_s)
        prompt_token_s = max(float(extra_s.sum()), 0.0) / float(prompt[within].sum())
        rows, token_s = _by_rows(decode[decode > 0], (took_s - prompt_token_s * prompt)[decode > 0])
        within = both
    return rows, token_s, prompt_token_s, int(prompt.max())


def _by_rows(decode: Floats, took_s: Floats) -> tuple[Floats, Floats]:
    """Means over equal ranges of rows; more rows never take less."""
    edges = np.linspace(0.0, float(decode.max()), ROW_POINTS + 1)
    group = np.clip(np.searchsorted(edges, decode, side="left") - 1, 0, ROW_POINTS - 1)
    counts = np.bincount(group, minlength=ROW_POINTS)
    seen = counts > 0
    rows = np.bincount(group, decode, ROW_POINTS)[seen] / counts[seen]
    means = np.bincount(group, took_s, ROW_POINTS)[seen] / counts[seen]
    return rows, np.maximum.accumulate(means)
