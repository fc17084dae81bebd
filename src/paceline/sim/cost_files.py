"""Cost models from files: one that was fitted before, or a run log, to which one is fitted now.

Owns which of the two a file is, and how the steps of a log become samples. The fit itself and both formats
belong to `costs` and `audit`, which do not know each other.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.audit.runlog import read_run_log, step_samples
from paceline.costs.fit import FittedCost
from paceline.errors import InputError
from paceline.sim.runner import step_shape

_FIRST_LINE_BYTES = 1 << 20


def load_cost_model(path: str | Path, kv_bytes_per_token: int) -> FittedCost:
    """The cost model in a file, or the one that fits the step times of a run log."""
    if not _is_run_log(Path(path)):
        return FittedCost.load(path)
    log = read_run_log(path)
    block_bytes = log.config.kv.block_size * kv_bytes_per_token
    samples = [(step_shape(work, block_bytes), seconds) for work, seconds in step_samples(log)]
    try:
        return FittedCost.fit(samples)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from problem


def _is_run_log(path: Path) -> bool:
    """Whether the first line is a log's header. Anything unreadable is left to the cost model's own errors."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(_FIRST_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == "header"
