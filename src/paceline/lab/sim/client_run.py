"""A run as a client measured it: the result file of `paceline bench serve`, or of any tool with vLLM's field names.

Owns reading such a file into a workload and a record. A client sees nothing of the engine, so that the engine it is
compared with is the one the caller describes. It compares nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.workload.workload import DEFAULT_TENANTS, Workload

ARRIVALS = ("due_times", "start_times")  # the first that is there
NEEDED = ("input_lens", "output_lens", "ttfts", "itls")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientRun:
    """What was sent and what came back, of the requests that were answered."""

    workload: Workload
    record: RunRecord
    num_left_out: int  # requests that failed


def read_client_run(path: str | Path) -> ClientRun:
    fields = _fields(Path(path))
    name = next((name for name in ARRIVALS if name in fields), None)
    missing = [each for each in NEEDED if each not in fields]
    if name is None or missing:
        raise InputError(
            f"{path} is no run log, and no result with a sample of each request "
            f"({', '.join(missing or ARRIVALS[:1])} missing): save it with all samples"
        )
    arrival_s, prompt, output = (_column(fields, each, path) for each in (name, "input_lens", "output_lens"))
    ttft_s = _column(fields, "ttfts", path)
    gaps = fields["itls"]
    if len({len(arrival_s), len(prompt), len(output), len(ttft_s), len(gaps)}) != 1:
        raise InputError(f"{path}: the lists of its requests differ in length; save it again")
    answered = np.isfinite(arrival_s) & np.isfinite(ttft_s) & (output >= 1) & (prompt >= 1)
    order = [int(i) for i in np.argsort(arrival_s, kind="stable") if answered[i]]
    if not order:
        raise InputError(f"{path}: none of its requests was answered")
    origin_s = float(arrival_s[order[0]])
    workload = _workload(Path(path).name, arrival_s[order] - origin_s, prompt[order], output[order])
    first_s = workload.arrival_s + ttft_s[order]
    last_s = first_s + np.array([math.fsum(gaps[i]) for i in order])
    return ClientRun(
        workload=workload,
        record=_record(workload, first_s, last_s, [gap for i in order for gap in gaps[i]]),
        num_left_out=len(arrival_s) - len(order),
    )


def _workload(
    name: str, arrival_s: NDArray[np.float64], prompt: NDArray[np.float64], output: NDArray[np.float64]
) -> Workload:
    return Workload(
        name=name,
        arrival_s=arrival_s,
        prompt_len=prompt.astype(np.int32),
        output_len=output.astype(np.int32),
        tenant=np.zeros(len(arrival_s), np.int32),
        tenants=DEFAULT_TENANTS,
        prefix_ids=None,
        prefix_block=0,
    )


def _record(
    workload: Workload, first_s: NDArray[np.float64], last_s: NDArray[np.float64], gaps: list[float]
) -> RunRecord:
    zeros = np.zeros(len(workload), np.int32)
    return RunRecord(
        label="client",
        config={},
        max_num_seqs=1,
        duration_s=float(last_s.max()),
        arrival_s=workload.arrival_s,
        admitted_s=first_s,  # a client cannot see it
        first_token_s=first_s,
        finished_s=last_s,
        prompt_len=workload.prompt_len,
        output_len=workload.output_len,
        cached_tokens=zeros,
        preemptions=zeros,
        tenant=workload.tenant,
        outcome=np.full(len(workload), OUTCOMES.index("finished"), np.uint8),
        itl_s=np.array(gaps, np.float32),
    )


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from problem
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path} is neither a run log nor JSON") from problem
    if not isinstance(value, dict) or "ttfts" not in value:
        raise InputError(f"{path} holds no times of requests: give a run log, or a result with all samples")
    return value


def _column(fields: Mapping[str, Any], name: str, path: str | Path) -> NDArray[np.float64]:
    values = fields[name]
    if not isinstance(values, list) or not all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    ):
        raise InputError(f"{path}: '{name}' is not a list of numbers; save it again")
    return np.array([math.nan if value is None else value for value in values], np.float64)
