"""Cost models from files: one that was fitted before, or run logs, to which one is fitted now.

Owns which of the two a file is, how the steps of logs become samples, and what is said about a fit: its error by
kind of step. The fit itself and both formats belong to `costs` and `audit`, which do not know each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.audit.runlog import read_run_log
from paceline.audit.timed_steps import TimedStep, timed_steps
from paceline.config import EngineConfig
from paceline.costs.fit import FittedCost, HostCosts
from paceline.costs.model import CostModel, StepShape
from paceline.errors import InputError
from paceline.sim.runner import step_shape

_FIRST_LINE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindError:
    """How well steps of one kind are predicted."""

    kind: str
    num_steps: int
    mean_s: float
    mape: float  # mean of |predicted - timed| / timed
    p90: float  # of the same
    bias: float  # seconds predicted for all of them / seconds they took, less 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A model and how well it fits the steps it was fitted to."""

    cost: FittedCost
    kinds: tuple[KindError, ...]


def load_cost_model(path: str | Path, kv_bytes_per_token: int) -> FittedCost:
    """The cost model in a file, or the one that fits the step times of a run log."""
    if not is_run_log(Path(path)):
        return FittedCost.load(path)
    return calibrate([path], kv_bytes_per_token).cost


def calibrate(paths: Sequence[str | Path], kv_bytes_per_token: int) -> Calibration:
    """Fit one cost model to the steps of all these run logs; the first says what sizes the engine has."""
    samples: list[Sample] = []
    steps: list[TimedStep] = []
    sizes: dict[str, int] = {}
    for path in paths:
        log = read_run_log(path, allow_cut=True)  # what a server that was killed left is as good as the rest
        own = timed_steps(log)
        steps.extend(own)
        samples.extend(_samples(own, log.config, kv_bytes_per_token))
        sizes = sizes or _engine_sizes(log.config)
    try:
        cost = FittedCost.fit(samples, host=_host_costs(steps), engine=sizes)
    except InputError as problem:
        raise InputError(f"{', '.join(map(str, paths))}: {problem}") from problem
    return Calibration(cost=cost, kinds=_kind_errors(cost, samples))


def step_errors(cost: CostModel, path: str | Path, kv_bytes_per_token: int) -> tuple[KindError, ...]:
    """How well a model predicts the steps of a run log, whether or not it was fitted to it."""
    log = read_run_log(path, allow_cut=True)
    return _kind_errors(cost, _samples(timed_steps(log), log.config, kv_bytes_per_token))


Sample = tuple[StepShape, float]


def _samples(steps: Sequence[TimedStep], config: EngineConfig, kv_bytes_per_token: int) -> list[Sample]:
    block_bytes = config.kv.block_size * kv_bytes_per_token
    return [(step_shape(step.work, block_bytes), step.seconds) for step in steps]


def _kind_errors(cost: CostModel, samples: Sequence[Sample]) -> tuple[KindError, ...]:
    """The error of a model on timed steps, by kind of step; kinds that do not occur are left out."""
    by_kind: dict[str, list[tuple[float, float]]] = {"decode": [], "mixed": [], "prefill": []}
    for shape, seconds in samples:
        by_kind[_kind(shape)].append((cost.step_seconds(shape), seconds))
    found = []
    for kind, pairs in by_kind.items():
        if pairs:
            predicted, timed = np.array(pairs).T
            errors = np.abs(predicted / timed - 1.0)
            error = KindError(
                kind=kind,
                num_steps=len(pairs),
                mean_s=float(timed.mean()),
                mape=float(errors.mean()),
                p90=float(np.quantile(errors, 0.9)),
                bias=float(predicted.sum() / timed.sum() - 1.0),
            )
            found.append(error)
    return tuple(found)


def is_run_log(path: Path) -> bool:
    """Whether the first line is a log's header. Anything unreadable is left to the cost model's own errors."""
    try:
        with path.open("rb") as file:
            start = file.readline(_FIRST_LINE_BYTES)
        if start.startswith(_GZIP):
            return True  # no cost model is compressed
        first = json.loads(start)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == "header"


def _kind(shape: StepShape) -> str:
    if not shape.prefill_tokens:
        return "decode"
    return "mixed" if shape.decode_rows else "prefill"


def _engine_sizes(config: EngineConfig) -> dict[str, int]:
    """What a simulation of the same engine starts from."""
    return {
        "depth": config.depth,
        "block_size": config.kv.block_size,
        "num_blocks": config.kv.num_blocks,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_prompt_tokens": config.scheduler.max_num_prompt_tokens,
    }


def _host_costs(steps: Sequence[TimedStep]) -> HostCosts:
    """Medians: a pause of the machine is no cost of a step."""
    between = [step.host_s for step in steps if step.host_s is not None]
    woken = [step.wake_s for step in steps if step.wake_s is not None]
    step_s = float(np.median(between)) if between else None
    # Who came to an idle engine waited until it knew of it and then for the planning of a step.
    request_s = max(0.0, float(np.median(woken)) - (step_s or 0.0)) if woken else 0.0
    return HostCosts(step_s=step_s, request_s=request_s)
