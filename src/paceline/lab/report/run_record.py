"""Everything that is written down about a run, as columns.

Owns the layout only: one set of columns per request, one per step, one flat column of gaps between tokens.
The simulator and the benchmarks fill it; `summary` and `plots` read it. No measure is computed here.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError

OUTCOMES = ("finished", "aborted", "refused", "failed", "unfinished")
FINISHED = OUTCOMES.index("finished")

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def _empty() -> Any:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRecord:
    """One run. Times are seconds since its start; NaN means that it did not happen."""

    label: str
    config: Mapping[str, object]
    max_num_seqs: int  # per replica
    num_replicas: int = 1
    replica_s: float | None = None  # seconds of all that were started and stopped; None: all the time
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
    recomputed_tokens: Ints = field(default_factory=_empty)  # computed again after a preemption
    kv_block_us: NDArray[np.int64] = field(default_factory=_empty)
    # As forecast at arrival; empty: no forecasts were made.
    predicted_ttft_s: Floats = field(default_factory=_empty)

    # What each request was to the scheduler, where they differ; else empty.
    service_class: Ints = field(default_factory=_empty)  # index into `classes`
    classes: tuple[str, ...] = ()
    preempted_by: Mapping[str, int] = field(default_factory=dict)  # preemptions by reason:kind

    # Gaps between token deliveries of one request, of all requests.
    itl_s: NDArray[np.float32] = field(default_factory=_empty)

    # Per step, of all replicas, in any order. Empty where the steps cannot be seen.
    step_replica: Ints = field(default_factory=_empty)
    step_start_s: Floats = field(default_factory=_empty)
    step_end_s: Floats = field(default_factory=_empty)
    step_rows: Ints = field(default_factory=_empty)  # live rows
    step_decode: Ints = field(default_factory=_empty)  # tokens
    step_prefill: Ints = field(default_factory=_empty)  # tokens
    step_padded: Ints = field(default_factory=_empty)  # tokens computed and thrown away
    step_waiting: Ints = field(default_factory=_empty)  # requests in the queue
    step_kv_used: Ints = field(default_factory=_empty)  # slots allocated
    step_kv_filled: Ints = field(default_factory=_empty)  # slots that hold a computed token
    step_preempted: Ints = field(default_factory=_empty)

    def __post_init__(self) -> None:
        self._settle_columns()
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

    def _settle_columns(self) -> None:
        """Give each column its type, and check that all of a kind have the length of the first."""
        lengths: dict[str, int] = {}
        for spec in fields(self):
            if get_origin(spec.type) is not np.ndarray:
                continue
            dtype = get_args(get_args(spec.type)[1])[0]
            column = np.asarray(getattr(self, spec.name), dtype=dtype)
            per = "step" if spec.name.startswith("step_") else "gap" if spec.name == "itl_s" else "request"
            expected = lengths.setdefault(per, column.size)
            is_left_out = per == "request" and spec.default_factory is not MISSING and not column.size
            if column.shape != (expected,) and not is_left_out:
                raise InputError(
                    f"run '{self.label}': {spec.name} has shape {column.shape}, not one entry per {per}"
                )
            object.__setattr__(self, spec.name, column)
