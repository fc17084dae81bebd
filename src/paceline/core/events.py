"""What the engine tells the outside: tokens as columns, endings and decisions as values.

Tokens of a step come as one columnar event, so that a step costs the same whatever the batch. A request gets
exactly one `Finished`, and nothing after it. Endings and decisions are named tuples: one of each is made for every
request that comes or goes inside a step, and a tuple costs less than half of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import RowLogprobs
from paceline.core.request import FinishReason, RequestId
from paceline.core.values import value


@value
class TokenEvents:
    """The tokens one step delivered: entry i is token `tokens[i]`, number `index[i]` of request `requests[i]`."""

    seq: int
    time_s: float
    requests: NDArray[np.int64]
    tokens: NDArray[np.int32]
    index: NDArray[np.int64]  # 0 is the first token of the output


class Finished(NamedTuple):
    """The one terminal event of a request."""

    request: RequestId
    reason: FinishReason
    detail: str  # "", or what is behind an abort or error: deadline, pruned, numerical_error, ...
    time_s: float
    num_prompt: int
    num_output: int
    num_cached: int
    preemptions: int
    queue_s: float = 0.0  # from arrival to its first admission, or to its end if it never was admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEvent:
    """How likely a token of a request was. Prompt tokens may come more than once: a resumed prompt is read again."""

    request: RequestId
    logprobs: RowLogprobs


class StepEvents(NamedTuple):
    """Everything that became known since the last time events were taken."""

    tokens: tuple[TokenEvents, ...] = ()
    logprobs: tuple[LogprobEvent, ...] = ()
    finished: tuple[Finished, ...] = ()


class DecisionKind(Enum):
    ADMIT = "admit"
    DEFER = "defer"
    CHUNK = "chunk"
    PREEMPT = "preempt"
    RESUME = "resume"
    STALL = "stall"
    FORK = "fork"
    FINISH = "finish"
    REFUSE = "refuse"
    FAIL = "fail"


class Decision(NamedTuple):
    """One scheduling decision and the reason for it. `value` is the number the reason speaks of."""

    kind: DecisionKind
    request: RequestId
    reason: str
    value: int = 0
