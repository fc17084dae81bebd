"""What the two processes say to each other, as typed values in msgpack.

Everything is decoded with its types checked; nothing is ever unpickled. Columns of numbers travel as little-endian
bytes: a token costs a step no Python object on either side of the engine. Requests are numbered by the HTTP process,
a branch by its request's number and its place (`first + branch`); numbers only go up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np

from paceline.config.engine import ModelConfig
from paceline.core.dial import DialKind, DialSetting
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.plan import RowLogprobs
from paceline.core.request import NO_COST, ChangeOutcome, Cost
from paceline.core.sampling import PARAMETERS, SamplingParams
from paceline.core.service_class import CLASSES, DEFAULT_CLASS
from paceline.errors import (
    DeadlineImpossible,
    DeadlineInfeasible,
    InvalidRequest,
    NeverFits,
    PacelineError,
    QueueFull,
)
from paceline.process.client import EngineInfo, EngineStats, PolicyChange, Steering

ID = np.dtype("<i8")
TOKEN = np.dtype("<i4")

RequestNumber = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ServiceClass = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(CLASSES)})$")]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Given = dict[str, bool | int | float | str | None]


class _Sampling(msgspec.Struct):
    """The fields of `SamplingParams` that an engine reads; text stays in the HTTP process."""

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Words in `bad_words` must be token ids by now, as the prompt is."""
        assert not any(isinstance(word, str) for word in params.bad_words), "bad_words travel as token ids"
        values = {name: getattr(params, name) for name in cls.__struct_fields__}
        return cls(**values | {"logit_bias": dict(params.logit_bias)})

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for values out of range: `SamplingParams` checks itself."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})


if TYPE_CHECKING:

    class Sampling(_Sampling):
        n: int

        def __init__(self, **values: Any) -> None: ...

else:
    _WIRE_TYPES = {"logit_bias": dict[int, float], "bad_words": tuple[tuple[int, ...], ...]}
    Sampling = msgspec.defstruct(
        "Sampling",
        [
            (
                spec.name,
                _WIRE_TYPES.get(spec.name, spec.type),
                {} if spec.name == "logit_bias" else spec.default,
            )
            for spec in PARAMETERS.values()
            if not spec.is_text
        ],
        bases=(_Sampling,),
        omit_defaults=True,
        forbid_unknown_fields=True,
        frozen=True,
    )


# -- to the engine -----------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", array_like=True, frozen=True):
    """The first frame: which model to load, and how often to give a sign of life."""

    model: ModelConfig
    given: Given
    heartbeat_s: float
    stats_interval_s: float
    max_frame_bytes: int


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request: branches `first` to `first + sampling.n - 1`."""

    first: RequestNumber
    tokens: bytes  # TOKEN
    sampling: Sampling
    tenant: str
    priority: Priority
    submitted_s: float  # monotonic: the clock of the machine, the same in both processes
    timeout_s: float | None
    asks: bool = False  # only to be told when it would be served
    service_class: ServiceClass = DEFAULT_CLASS


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Nobody reads these branches any more."""

    branches: tuple[RequestNumber, ...]


class FinishAt(msgspec.Struct, tag="finish_at", array_like=True, frozen=True):
    """A stop string was found: the branch ends after so many tokens of output."""

    branch: RequestNumber
    num_output: Count


class Explain(msgspec.Struct, tag="explain", array_like=True, frozen=True):
    """Asks what was decided about a branch. `question` comes back with the answer."""

    question: Count
    branch: RequestNumber


class Steer(msgspec.Struct, tag="steer", array_like=True, frozen=True):
    """Sets the dial, changes the policy, or asks how they stand. `question` comes back with the answer."""

    question: Count
    dial: tuple[DialKind, float] | None = None
    policy: tuple[str, dict[str, float | str]] | None = None

    @classmethod
    def of(cls, question: int, dial: DialSetting | None, policy: PolicyChange | None) -> Steer:
        """What is asked of an engine, or nothing but how it stands."""
        setting = None if dial is None else (dial.kind, dial.value)
        change = None if policy is None else (policy.name, dict(policy.options))
        return cls(question, setting, change)


class Look(msgspec.Struct, tag="look", array_like=True, frozen=True):
    """Asks what happened since the last look. Who stops looking is forgotten after a few seconds."""

    question: Count


class Change(msgspec.Struct, tag="change", array_like=True, frozen=True):
    """Changes live branches; what is None stays as it is. `question` comes back with the answer."""

    question: Count
    branches: tuple[RequestNumber, ...]
    priority: Priority | None
    until_s: float | None  # monotonic; infinity for no deadline
    paused: bool | None


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Nobody new will come: whoever is paused goes on, and nobody is paused any more."""


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Asks for the newest gauges."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """End everything and exit."""


ToEngine = Configure | Add | Abort | FinishAt | Explain | Steer | Look | Change | Drain | Ping | Stop


# -- from the engine ---------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """A sign of life while the model is being loaded, and how far it is; 0 of 0 where that is not known."""

    stage: str = ""
    done: Count = 0
    total: Count = 0


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    info: EngineInfo


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True, frozen=True):
    """The model cannot be served; one sentence says why. The process exits with `exit_code`."""

    message: str
    exit_code: int


class BranchLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """`RowLogprobs` of a branch instead of a row."""

    branch: int
    position: int
    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def of_row(self, row: int) -> RowLogprobs:
        return RowLogprobs(
            row=row,
            position=self.position,
            token=self.token,
            logprob=self.logprob,
            rank=self.rank,
            top_tokens=self.top_tokens,
            top_logprobs=self.top_logprobs,
        )


class BranchEnding(msgspec.Struct, array_like=True, frozen=True):
    branch: int
    reason: str
    detail: str
    time_s: float
    num_prompt: int
    num_output: int
    num_cached: int
    preemptions: int
    queue_s: float
    cost: Cost = NO_COST


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request the engine did not take. `kind` is a key of `refusals.KINDS`."""

    first: int
    kind: str
    message: str
    param: str | None
    retry_after_s: float | None = None


class Told(msgspec.Struct, array_like=True, frozen=True):
    """When a request will have its first and last token as things stood when it came; None: nobody knows yet."""

    first: int
    first_token_s: float | None
    finish_s: float | None
    ahead: int
    num_cached: int = 0
    num_output: float | None = None


class News(msgspec.Struct, tag="news", array_like=True, frozen=True):
    """Everything that became known since the last one; an empty one is a sign of life.

    Read in this order: logprobs, tokens, endings. A token never comes before its logprobs.
    """

    time_s: float  # of the newest token, on the engine's clock
    branches: bytes = b""  # ID; entry i has token i
    tokens: bytes = b""  # TOKEN
    logprobs: list[BranchLogprobs] = []
    endings: list[BranchEnding] = []
    refusals: list[Refusal] = []
    stats: EngineStats | None = None
    told: list[Told] = []


class ToldDecision(msgspec.Struct, array_like=True, frozen=True):
    """A `Decision`, field by field."""

    kind: DecisionKind
    request: int
    reason: Rule
    value: int
    step: int
    time_s: float
    budget_left: int
    blocks_free: int
    blocks_needed: int
    against: int
    seconds: float
    detail: str

    @classmethod
    def of(cls, decision: Decision) -> ToldDecision:
        return cls(*decision)

    def decision(self) -> Decision:
        return Decision(*(getattr(self, name) for name in self.__struct_fields__))


class Explained(msgspec.Struct, tag="explained", array_like=True, frozen=True):
    """The newest decisions about a branch, oldest first; none when nothing is known any more."""

    question: int
    decisions: list[ToldDecision]
    is_live: bool = False  # it has not ended


class Steered(msgspec.Struct, tag="steered", array_like=True, frozen=True):
    """How the engine is steered now, and why it did not take what was asked for, if so."""

    question: int
    steering: Steering
    refusal: Refusal | None


class Changed(msgspec.Struct, tag="changed", array_like=True, frozen=True):
    """What became of a change, for each of its branches."""

    question: int
    outcomes: list[ChangeOutcome]


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine gives up; every request has been answered. The process exits with 70."""

    message: str


class Log(msgspec.Struct, tag="log", array_like=True, frozen=True):
    """A log record of the engine's process."""

    level: int  # of the logging module
    message: str
    traceback: str = ""


class Seen(msgspec.Struct, tag="seen", array_like=True, frozen=True):
    """What happened since the last look and how things stand: JSON that nobody on the way has to understand."""

    question: int
    body: bytes


Answer = Explained | Steered | Seen | Changed  # to a question, whose number it bears
FromEngine = Loading | Ready | LoadFailed | News | Explained | Steered | Seen | Changed | Failed | Log

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
# What decoding raises for bytes that are no frame of ours.
BadFrame = (msgspec.DecodeError, ValueError, TypeError)


# Errors a request may be refused with, as they cross from the engine's process to the other.


MAX_MESSAGE_CHARS = 512
# The first that fits an error is its kind; what fits none is invalid.
KINDS: dict[str, type[PacelineError]] = {
    "never_fits": NeverFits,
    "deadline_impossible": DeadlineImpossible,
    "deadline_infeasible": DeadlineInfeasible,
    "queue_full": QueueFull,
}


def refusal_of(first: int, error: PacelineError, place_s: float | None = None) -> Refusal:
    """`place_s`: until there is a place again, where that is what is missing."""
    kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "invalid")
    message, param = str(error)[:MAX_MESSAGE_CHARS], getattr(error, "param", None)
    return Refusal(first, kind, message, param, getattr(error, "retry_after_s", place_s))


def error_of(refusal: Refusal) -> PacelineError:
    if refusal.kind == "never_fits":
        return NeverFits(refusal.message, param=refusal.param)
    if refusal.kind == "deadline_impossible":
        return DeadlineImpossible(refusal.message, param=refusal.param)
    if refusal.kind == "deadline_infeasible":
        retry_after_s = refusal.retry_after_s or 0.0
        return DeadlineInfeasible(refusal.message, param=refusal.param, retry_after_s=retry_after_s)
    if refusal.kind == "queue_full":
        return QueueFull(refusal.message, retry_after_s=refusal.retry_after_s)
    return InvalidRequest(refusal.message, param=refusal.param)
