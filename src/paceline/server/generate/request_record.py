"""How one generation went, and the interface of its observers.

The log line, the metrics, the bill and the trace of a request are made from its record. A record holds no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_CLASS
from paceline.server.billing.charge import Charge, Consumption, no_charge
from paceline.server.call import Call

if TYPE_CHECKING:
    from paceline.llm.prompts import PreparedRequest
    from paceline.server.api.openai_requests import ParsedBody


class Times(NamedTuple):
    """Longest times a request may take, in ms: in all, to the first token, and between tokens on average."""

    e2e_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None


NO_TIMES = Times()


@dataclass(slots=True, kw_only=True)
class RequestRecord(Consumption):
    """How one generation went: what the log line and the metrics are made of. No text."""

    id: str
    route: str
    tenant: str
    received_s: float  # monotonic, of this process
    model: str = ""  # that answers, also under the names of its adapters
    service_class: str = DEFAULT_CLASS
    longest_output: int = 0  # tokens of the longest branch that has ended
    num_branches: int = 1
    max_tokens: int = 0
    first_token_s: float | None = None  # monotonic
    last_token_s: float | None = None  # on the engine's clock; kept by the observer
    finished_s: float | None = None
    is_stream: bool = False
    charge: Charge = field(default_factory=no_charge)
    shows_receipt: bool = False  # whether its usage carries the receipt
    batch_id: str = ""
    predicted_ttft_s: float | None = None  # what the engine said when it took the request
    objectives: Times = NO_TIMES  # its own
    sampling: SamplingParams | None = None
    tool_calls: dict[str, int] = field(default_factory=dict)  # by outcome, of branches that have ended
    trace_parent: str = ""  # of the trace its client says it belongs to, as it came
    trace_state: str = ""


def record_of(
    call: Call, body: ParsedBody, prepared: Sequence[PreparedRequest], service_class: str
) -> RequestRecord:
    """The record of a request that is about to start."""
    return RequestRecord(
        id=call.id,
        route=call.route,
        tenant=call.caller.tenant,
        received_s=call.received_s,
        service_class=service_class,
        num_prompt=sum(len(prompt.token_ids) for prompt in prepared),
        num_image=sum(prompt.num_image for prompt in prepared),
        num_branches=body.num_branches,
        max_tokens=prepared[0].sampling.max_tokens,
        is_stream=body.is_stream,
        batch_id=call.caller.batch_id,
        objectives=Times(body.sampling.deadline_ms, body.sampling.ttft_slo_ms, body.sampling.itl_slo_ms),
        sampling=prepared[0].sampling,
        trace_parent=call.headers.get("traceparent", ""),
        trace_state=call.headers.get("tracestate", ""),
    )


class Observer(Protocol):
    """Observes generations. Cheap calls that never raise, made once for each update."""

    def started(self, record: RequestRecord) -> None:
        """Tokenised and handed to the engine."""

    def first_token(self, record: RequestRecord) -> None: ...

    def tokens(self, record: RequestRecord, count: int, time_s: float) -> None:
        """`count` more output tokens, over all branches; the newest at `time_s` on the engine's clock."""

    def finished(self, record: RequestRecord) -> None:
        """Called exactly once for every `started`, in whatever way it ended."""

    def call_ended(
        self, call: Call, status: int, code: str, *, line: int | None = None, is_again: bool = False
    ) -> None:
        """A call that was made in the process has ended; `line` of a batch, which may be run again."""

    def call_failed(self, call: Call, error: BaseException) -> None:
        """The same with an error of ours: everything the answer leaves out. `call_ended` follows."""
