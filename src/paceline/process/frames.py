"""The frames between the HTTP process and the engine's process: typed values in msgpack.

Everything is decoded with its types checked; nothing is ever unpickled. What the engine itself makes (`Finished`,
`Forecast`, `LogprobEvent`, `Decision`) is encoded as it is. Columns of numbers travel as little-endian bytes: a token
costs a step no Python object in the engine. Requests are numbered by the HTTP process, a branch by its request's number
and its place (`first + branch`); numbers only go up.

The frames of a streamed answer with n=2, from left to right in time; one Update carries the events of a step for all
requests, so that these share theirs with others:

    HTTP process   Add(first=7, n=2)                                FinishAt(8, 3)
    ------------------|------------------------------------------------^--|------------------------------------->
                      |                                                |  |   stop string found in branch 8
                      v                                                |  v
    engine process    step            step                step            step                 step
    ---------------------|---------------|-------------------|---------------|--------------------|-------------->
                         v               v                   v               v                    v
                   Update          Update              Update          Update               Update
                   forecasts (7)   branches 7 8        branches 7 8    branches 7           branches 7
                                   tokens   a b        tokens   c d    tokens   e           tokens   f
                                                                       endings (8: stop)    endings (7: length)

    rejected:      Add ---> Update(rejections=(7)), and nothing else about 7; the same for Fork
    client left:   Abort((7, 8)); Updates that were on their way are dropped by number
    slow socket:   the Outbox joins the events of several steps into one Update
    idle engine:   an empty Update is a heartbeat
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelShare
from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.core.dial import DialSetting
from paceline.core.events import Finished, Forecast, Held, LogprobEvent
from paceline.core.parameters import Pin
from paceline.core.request import BranchState, Change, ChangeOutcome, TreeLimits
from paceline.core.sampling import PARAMETERS, SamplingParams
from paceline.core.service_class import CLASSES, DEFAULT_CLASS
from paceline.core.standing import Standing
from paceline.core.stretch import MediaPart, ModulePart
from paceline.errors import (
    DeadlineImpossible,
    DeadlineInfeasible,
    InvalidAdapter,
    InvalidRequest,
    InvalidTransition,
    NeverFits,
    PacelineError,
    PinsFull,
    QueueFull,
    SleepRefused,
    TreeFull,
    UnknownAdapter,
    UnknownRequest,
)
from paceline.process.client import EngineInfo, EngineStats, Explanation, PolicyChange, Steering

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
        """`bad_words` and `prediction` must be token ids by now, as the prompt is."""
        texts = (*params.bad_words, params.prediction)
        assert not any(isinstance(each, str) for each in texts), "texts travel as token ids"
        values = {name: getattr(params, name) for name in cls.__struct_fields__}
        return cls(**values | {"logit_bias": dict(params.logit_bias)})

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for values out of range: `SamplingParams` checks itself."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})


if TYPE_CHECKING:

    class Sampling(_Sampling):
        n: int
        prompt_logprobs: int | None

        def __init__(self, **values: Any) -> None: ...

else:
    _WIRE_TYPES = {
        "logit_bias": dict[int, float],
        "bad_words": tuple[tuple[int, ...], ...],
        "prediction": tuple[int, ...],
    }
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


class FurtherModel(msgspec.Struct, array_like=True, frozen=True):
    """A model beside the first one."""

    model: ModelConfig
    given: Given
    share: ModelShare


class KVEventPlaces(msgspec.Struct, array_like=True, frozen=True):
    """Where an engine publishes what it has cached."""

    endpoint: str
    replay: str | None
    rank: Count = 0  # its number in the fleet


class Configure(msgspec.Struct, tag="configure", array_like=True, frozen=True):
    """The first frame: which models to load, and how often to send a heartbeat."""

    model: ModelConfig
    given: Given
    heartbeat_s: float
    stats_interval_s: float
    max_frame_bytes: int
    share: ModelShare = ModelShare()
    further: list[FurtherModel] = []
    memory_bytes: int | None = None  # of models that are awake at a time
    # Names of prefixes are made with it, and told; b"": a single engine, whose names are never told.
    fleet_key: bytes = b""
    kv_events: KVEventPlaces | None = None


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """The first frame to an engine that listens: a server has requests for it. It has its model already."""

    protocol: str
    heartbeat_s: Annotated[float, msgspec.Meta(ge=0.01, le=60.0)]
    stats_interval_s: Annotated[float, msgspec.Meta(ge=0.01, le=60.0)]
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30)]
    fleet_key: bytes = b""  # see `Configure`


class ForModel(msgspec.Struct, tag="model", array_like=True, frozen=True):
    """A frame to or from the engine of another model than the first, whose frames travel as they are."""

    model: Count
    payload: bytes


class Pixels(msgspec.Struct, tag="pixels", array_like=True, frozen=True):
    """Bytes of the pictures of a request that comes next, in order."""

    first: RequestNumber
    data: bytes


class Item(msgspec.Struct, array_like=True, frozen=True):
    """A picture, or a part of one: a `MediaPart` without its bytes, which have come in frames before."""

    start: Count
    content: bytes
    units: Count
    outputs: Count
    grid: tuple[int, int, int]
    shape: tuple[Count, ...]


class Module(msgspec.Struct, array_like=True, frozen=True):
    """A placed text: where it begins, its tokens, and for how long its module is pinned, under what name."""

    start: Count
    num_tokens: Count
    pin_s: Count = 0  # 0: it is not
    pin_name: str = ""

    @classmethod
    def of(cls, part: ModulePart) -> Module:
        pin = part.pin
        return cls(part.start, part.num_tokens, *(() if pin is None else (pin.ttl_s, pin.name)))

    @property
    def part(self) -> ModulePart:
        pin = Pin(ttl_s=self.pin_s, name=self.pin_name) if self.pin_s else None
        return ModulePart(self.start, self.num_tokens, pin=pin)


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request: branches `first` to `first + sampling.n - 1`."""

    first: RequestNumber
    tokens: bytes  # TOKEN
    sampling: Sampling
    tenant: str
    priority: Priority
    # Durations as of when it was sent: clocks of two machines have nothing in common.
    age_s: float  # since it came
    left_s: float | None  # until it ends at the latest
    only_forecast: bool = False  # it is not to be served, only the forecast is wanted
    service_class: ServiceClass = DEFAULT_CLASS
    tree: TreeLimits | None = None
    adapter: Count = NO_ADAPTER  # its number
    media: tuple[Item, ...] = ()
    modules: tuple[Module, ...] = ()
    is_module: bool = False  # it is such a text alone
    # Of a request that another engine had begun: the output of each branch, None for one that has ended.
    outputs: tuple[bytes | None, ...] = ()  # TOKEN
    # When it was sent, where both processes read one machine's monotonic clock: it may have waited to be read.
    sent_s: float | None = None


class Fork(msgspec.Struct, tag="fork", array_like=True, frozen=True):
    """Branches `first` to `first + count - 1` of a live one, behind its first `at` output tokens and `append`."""

    first: RequestNumber
    parent: RequestNumber
    count: Count
    at: Count
    append: bytes  # TOKEN
    score: float
    changes: Given  # of sampling parameters


class ExtendBranch(msgspec.Struct, tag="extend", array_like=True, frozen=True):
    """Tokens to put behind the output of a branch. `question` comes back with the answer."""

    question: Count
    branch: RequestNumber
    tokens: bytes  # TOKEN
    max_tokens: Count | None = None
    modules: tuple[Module, ...] = ()  # among these tokens


class Prune(msgspec.Struct, tag="prune", array_like=True, frozen=True):
    """Branches to end; their readers hear of it. `question` comes back with the answer."""

    question: Count
    branches: tuple[RequestNumber, ...]


class ShowTree(msgspec.Struct, tag="show_tree", array_like=True, frozen=True):
    """Asks for the live branches of a branch's tree. `question` comes back with the answer."""

    question: Count
    branch: RequestNumber


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """The reader of these branches is gone."""

    branches: tuple[RequestNumber, ...]


class FinishAt(msgspec.Struct, tag="finish_at", array_like=True, frozen=True):
    """A stop string was found: the branch ends after `num_output` tokens of output."""

    branch: RequestNumber
    num_output: Count


class Explain(msgspec.Struct, tag="explain", array_like=True, frozen=True):
    """Asks what was decided about a branch. `question` comes back with the answer."""

    question: Count
    branch: RequestNumber


class Steer(msgspec.Struct, tag="steer", array_like=True, frozen=True):
    """Sets the dial, changes the policy, or asks how they stand. `question` comes back with the answer."""

    question: Count
    dial: DialSetting | None = None
    policy: PolicyChange | None = None


class Watch(msgspec.Struct, tag="watch", array_like=True, frozen=True):
    """Asks for a snapshot. The engine stops recording for it a few seconds after the last one."""

    question: Count


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True, frozen=True):
    """Reads an adapter's folder under a number; numbers only go up. `question` comes back with the answer."""

    question: Count
    number: RequestNumber
    name: str
    folder: str
    identity: str = ""  # what it must be, where an engine before this one had it


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", array_like=True, frozen=True):
    """No new request will have the adapter of this number."""

    number: RequestNumber


class EndPin(msgspec.Struct, tag="unpin", array_like=True, frozen=True):
    """A pin of a tenant ends before its time."""

    tenant: str
    name: str


class Rest(msgspec.Struct, tag="rest", array_like=True, frozen=True):
    """Puts the model to sleep (level 1 or 2) or wakes it (0). `question` comes back with the answer."""

    question: Count
    level: Count
    aborts: bool = False  # requests under way are ended; else they are a reason not to sleep


class ChangeBranches(msgspec.Struct, tag="change", array_like=True, frozen=True):
    """Changes live branches. `question` comes back with the answer."""

    question: Count
    branches: tuple[RequestNumber, ...]
    change: Change


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """No request will follow: paused requests continue, and none is paused any more."""


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Asks for the newest gauges."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """End everything and exit."""


Asking = Explain | Steer | Watch | ChangeBranches | ExtendBranch | Prune | ShowTree | LoadAdapter | Rest
ToModel = Pixels | Add | Fork | Abort | FinishAt | Asking | UnloadAdapter | EndPin
ToEngine = Configure | Join | ToModel | ForModel | Drain | Ping | Stop


# -- from the engine ---------------------------------------------------------------------------------------


class StillLoading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """A heartbeat while the model is being loaded, and its progress; 0 of 0 where that is not known."""

    stage: str = ""
    done: Count = 0
    total: Count = 0


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    info: EngineInfo
    next_number: RequestNumber = 1  # of a request: those below were another's


class LoadFailure(msgspec.Struct, tag="load_failed", array_like=True, frozen=True):
    """The model cannot be served, or not to whom has asked; one sentence says why. A process that was started for it
    exits with `exit_code`."""

    message: str
    exit_code: int


class Rejected(msgspec.Struct, array_like=True, frozen=True):
    """A request that the engine did not accept. `kind` is a key of `KINDS`."""

    first: int
    kind: str
    message: str
    param: str | None
    retry_after_s: float | None = None


class Update(msgspec.Struct, tag="update", array_like=True, frozen=True):
    """Everything that became known since the last one; an empty one is a heartbeat.

    Read in this order: logprobs, held, tokens, endings. A token never comes before its logprobs, and a branch is held
    behind what came before this update.
    """

    time_s: float  # of the newest token, on the engine's clock
    branches: bytes = b""  # ID; entry i has token i
    tokens: bytes = b""  # TOKEN
    logprobs: list[LogprobEvent] = []
    endings: list[Finished] = []
    rejections: list[Rejected] = []
    stats: EngineStats | None = None
    forecasts: list[tuple[RequestNumber, Forecast | None]] = []
    held: list[Held] = []
    is_injected: bool = False  # its tokens were put in from outside


class PrefixNews(msgspec.Struct, tag="prefixes", array_like=True, frozen=True):
    """Blocks that can be hit since the last news, and that cannot any more: the first bytes of their names, one behind
    the other."""

    stored: bytes = b""
    evicted: bytes = b""
    key: bytes = b""  # names are made with this one: they outlive the engine, and the fleet's does not


class Explained(msgspec.Struct, tag="explained", array_like=True, frozen=True):
    question: Count
    explanation: Explanation


class Steered(msgspec.Struct, tag="steered", array_like=True, frozen=True):
    """How the engine is steered now, and why it did not take the change, if so."""

    question: int
    steering: Steering
    rejected: Rejected | None


class Changed(msgspec.Struct, tag="changed", array_like=True, frozen=True):
    """What became of a change, for each of its branches."""

    question: int
    outcomes: list[ChangeOutcome]


class Extended(msgspec.Struct, tag="extended", array_like=True, frozen=True):
    """Whether tokens were put into a branch, and why not."""

    question: int
    rejected: Rejected | None


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", array_like=True, frozen=True):
    """The adapter that was read under a number, or why it was not."""

    question: int
    number: int
    info: AdapterInfo | None
    rejected: Rejected | None


class Rested(msgspec.Struct, tag="rested", array_like=True, frozen=True):
    """How the model stands now, and why it did not do what it was told to."""

    question: int
    standing: Standing
    rejected: Rejected | None


class TreeShown(msgspec.Struct, tag="tree_shown", array_like=True, frozen=True):
    """The live branches of a tree; none when the branch that was named has ended."""

    question: int
    branches: list[BranchState]


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine has failed; every request has been answered. The process exits with 70."""

    message: str


class Leaving(msgspec.Struct, tag="leaving", array_like=True, frozen=True):
    """The engine was told to end: what it has goes on elsewhere."""


class Log(msgspec.Struct, tag="log", array_like=True, frozen=True):
    """A log record of the engine's process."""

    level: int  # of the logging module
    message: str
    traceback: str = ""


class Watched(msgspec.Struct, tag="watched", array_like=True, frozen=True):
    """What happened since the last snapshot and how things stand: JSON that is passed on unread."""

    question: Count
    body: bytes


# To a question, whose number it bears.
Answer = Explained | Steered | Watched | Changed | Extended | TreeShown | AdapterLoaded | Rested
FromEngine = (
    StillLoading | Ready | LoadFailure | Update | PrefixNews | Answer | ForModel | Failed | Leaving | Log
)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
FOR_MODEL_BYTES = 32  # what a frame for another model than the first has around it, at most


def for_model(model: int, payload: bytes) -> bytes:
    """A frame for a model, or of it."""
    return encode(ForModel(model, payload)) if model else payload


def column_of(tokens: Sequence[int], name: str = "prompt") -> bytes:
    """Token ids as they travel. Raises InvalidRequest for what are none."""
    try:
        return np.array(tokens, dtype=TOKEN).tobytes()
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{name} is a list of token ids", param=name) from error


def item_of(part: MediaPart) -> Item:
    given = part.given
    return Item(part.start, given.content, given.units, given.outputs, given.grid, given.pixels.shape)


# What decoding raises for bytes that are no frame of ours.
BadFrame = (msgspec.DecodeError, ValueError, TypeError, InvalidRequest)


# Errors that a request is rejected with, as they cross from the engine's process to the other.


MAX_MESSAGE_CHARS = 512
# The first that fits an error is its kind; what fits none is invalid.
KINDS: dict[str, type[PacelineError]] = {
    "never_fits": NeverFits,
    "invalid_adapter": InvalidAdapter,
    "unknown_adapter": UnknownAdapter,
    "deadline_impossible": DeadlineImpossible,
    "deadline_infeasible": DeadlineInfeasible,
    "tree_full": TreeFull,
    "pins_full": PinsFull,
    "sleep_refused": SleepRefused,
    "queue_full": QueueFull,
    "unknown": UnknownRequest,
    "transition": InvalidTransition,
}


def rejected_with(error: PacelineError, first: int = 0, *, place_s: float | None = None) -> Rejected:
    """`place_s`: until there is a place again, where that is what is missing."""
    kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "invalid")
    return Rejected(
        first=first,
        kind=kind,
        message=str(error)[:MAX_MESSAGE_CHARS],
        param=getattr(error, "param", None),
        retry_after_s=getattr(error, "retry_after_s", place_s),
    )


def error_of(rejected: Rejected) -> PacelineError:
    kind, retry_after_s = KINDS.get(rejected.kind, InvalidRequest), rejected.retry_after_s
    if kind is QueueFull:
        return QueueFull(rejected.message, retry_after_s=retry_after_s)
    if kind is DeadlineInfeasible:
        return DeadlineInfeasible(rejected.message, param=rejected.param, retry_after_s=retry_after_s or 0.0)
    if not issubclass(kind, InvalidRequest):
        return kind(rejected.message)
    return kind(rejected.message, param=rejected.param)
