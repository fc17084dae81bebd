"""Everything that is written down about a run, as columns.

Owns the layout only: one set of columns per request, one per step, one flat column of gaps between tokens.
The simulator and the benchmarks fill it; `summary` and `plots` read it. No measure is computed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline.errors import InputError

OUTCOMES = ("finished", "aborted", "refused", "failed", "unfinished")
FINISHED = OUTCOMES.index("finished")

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def _no_ints() -> Ints:
    return np.empty(0, dtype=np.int32)


def _no_floats() -> Floats:
    return np.empty(0, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRecord:
    """One run. Times are seconds since its start; NaN means that it did not happen."""

    label: str
    config: Mapping[str, object]
    max_num_seqs: int  # per replica
    num_replicas: int = 1
    duration_s: float
    kv_total_slots: int = 0  # per replica; 0: not known

    # Per request, all in the same order.
    arrival_s: Floats
    admitted_s: Floats
    first_token_s: Floats
    finished_s: Floats  # the last token was delivered
    prompt_len: Ints
    output_len: Ints  # tokens delivered
    cached_tokens: Ints  # prompt tokens that were found computed
    preemptions: Ints
    tenant: Ints
    outcome: NDArray[np.uint8]  # index into OUTCOMES

    # Per request too, where it is counted; else empty.
    recomputed_tokens: Ints = field(default_factory=_no_ints)  # computed again after a preemption
    kv_block_us: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # As forecast at arrival; empty: no forecasts were made.
    predicted_ttft_s: Floats = field(default_factory=_no_floats)

    # What each request was to the scheduler, where they differ; else empty.
    service_class: Ints = field(default_factory=_no_ints)  # index into `classes`
    classes: tuple[str, ...] = ()
    preempted_by: Mapping[str, int] = field(default_factory=dict)  # how many gave way, by reason:kind

    # Gaps between token deliveries of one request, of all requests.
    itl_s: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    # Per step, of all replicas, in any order. Empty where the steps cannot be seen.
    step_replica: Ints = field(default_factory=_no_ints)
    step_start_s: Floats = field(default_factory=_no_floats)
    step_end_s: Floats = field(default_factory=_no_floats)
    step_rows: Ints = field(default_factory=_no_ints)  # live rows
    step_decode: Ints = field(default_factory=_no_ints)  # tokens
    step_prefill: Ints = field(default_factory=_no_ints)  # tokens
    step_padded: Ints = field(default_factory=_no_ints)  # tokens computed and thrown away
    step_waiting: Ints = field(default_factory=_no_ints)  # requests in the queue
    step_kv_used: Ints = field(default_factory=_no_ints)  # slots allocated
    step_kv_filled: Ints = field(default_factory=_no_ints)  # slots that hold a computed token
    step_preempted: Ints = field(default_factory=_no_ints)

    def __post_init__(self) -> None:
        for names, kind in _COLUMNS:
            self._settle(names, kind)
        if self.outcome.size and int(self.outcome.max()) >= len(OUTCOMES):
            raise InputError(f"run '{self.label}': outcome must be below {len(OUTCOMES)}")
        if self.max_num_seqs < 1 or self.num_replicas < 1:
            raise InputError(f"run '{self.label}': max_num_seqs and num_replicas must be at least 1")
        if not 0.0 <= self.duration_s < np.inf:
            raise InputError(
                f"run '{self.label}': duration_s is {self.duration_s}; it must be finite, not negative"
            )

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def num_steps(self) -> int:
        return len(self.step_start_s)

    def _settle(self, columns: Mapping[str, DTypeLike], kind: str) -> None:
        """Give each column its type, and check that all have the length of the first."""
        expected: int | None = None
        for name, dtype in columns.items():
            column = np.asarray(getattr(self, name), dtype=dtype)
            expected = column.size if expected is None else expected
            if column.shape != (expected,):
                raise InputError(
                    f"run '{self.label}': {name} has shape {column.shape}, not one entry per {kind}"
                )
            object.__setattr__(self, name, column)


_REQUEST_COLUMNS: dict[str, DTypeLike] = {
    "arrival_s": np.float64,
    "admitted_s": np.float64,
    "first_token_s": np.float64,
    "finished_s": np.float64,
    "prompt_len": np.int32,
    "output_len": np.int32,
    "cached_tokens": np.int32,
    "preemptions": np.int32,
    "tenant": np.int32,
    "outcome": np.uint8,
}
_STEP_COLUMNS: dict[str, DTypeLike] = {
    "step_start_s": np.float64,
    "step_end_s": np.float64,
    "step_replica": np.int32,
    "step_rows": np.int32,
    "step_decode": np.int32,
    "step_prefill": np.int32,
    "step_padded": np.int32,
    "step_waiting": np.int32,
    "step_kv_used": np.int32,
    "step_kv_filled": np.int32,
    "step_preempted": np.int32,
}
_COST_COLUMNS: dict[str, DTypeLike] = {"recomputed_tokens": np.int32, "kv_block_us": np.int64}
_COLUMNS: tuple[tuple[dict[str, DTypeLike], str], ...] = (
    (_REQUEST_COLUMNS, "request"),
    (_COST_COLUMNS, "request"),
    (_STEP_COLUMNS, "step"),
    ({"service_class": np.int32}, "request"),
    ({"itl_s": np.float32}, "gap"),
)
