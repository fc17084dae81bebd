"""What the HTTP side sees of an engine: requests go in, updates of their branches come out.

Values and two protocols; `async_engine` implements them over a socket, tests over a fake. Values that the engine makes
(`Finished`, `Forecast`, `Decision`, `RowLogprobs`) are handed through as they are. Token ids cross this line, text
never does. Everything here belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.core.blend_quality import UNKNOWN, Blending
from paceline.core.counters import AdapterStats, Counters, CPUWork, LevelUse, MediaUse, PinUse, SlabUse
from paceline.core.dial import DialSetting, DialStatus
from paceline.core.events import Decision, Finished, Forecast, Held
from paceline.core.plan import RowLogprobs
from paceline.core.request import BranchState, Change, ChangeOutcome, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import PLAIN, ModulePart, PromptParts
from paceline.costs.cost_model import ModelWork
from paceline.errors import PacelineError
from paceline.routing.view import Gauges


class EngineUnavailable(PacelineError):
    """The engine is starting, lost or shutting down; `code` is the one of the error catalogue."""

    exit_code = 70

    def __init__(self, message: str, *, code: str = "engine_unavailable") -> None:
        super().__init__(message)
        self.code = code


DRAINED = "engine_drained"  # the code of an error that only streams of a fleet see


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    STUCK = "stuck"  # alive, but no heartbeat for too long
    LOST = "lost"  # dead; a restart may be under way
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine turned out to be once its model was loaded."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prompt_tokens: int
    device: str
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
    quantization: str = "auto"  # of weights, as asked for
    notices: tuple[str, ...] = ()
    work: ModelWork | None = None  # what a token and a step cost
    learns_step_sizes: bool = False  # the sizes of steps above are those of the start
    # What computes steps: its name, and more about it.
    runner: dict[str, str | int] = field(default_factory=dict)
    adapters: tuple[AdapterInfo, ...] = ()  # of the start
    makes_text: bool = True  # else it is an encoder
    picture_vectors: int = 0  # that there is room for; 0: it takes text only
    vectors: str = ""  # what a text becomes beside or instead of text, in words
    blending: Blending = UNKNOWN  # what placing texts in prompts keeps
    fingerprint: str = ""  # engines with the same one go on with each other's requests, to the bit

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold; the null block, which padding reads and writes, is left out."""
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's gauges and counters at one moment; sent with steps, a few times a second at most.

    A counter of the scheduler is a field of `Counters` and reaches the metrics in `counters`.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    busy_s: float = 0.0  # time spent inside steps
    counters: Counters = field(default_factory=Counters)
    caches_prefixes: bool = False
    violations: int = 0  # invariants found broken
    fairness_gap: float | None = None  # between tenants that wait, in tokens; None: no accounts are kept
    next_place_s: float | None = None  # until a running request is expected to end; None: not known
    rejected_frames: int = 0  # messages between the processes that were not understood, on either side
    watch_cpu_s: float = 0.0  # of the engine's process, spent on the live page; part of `cpu_s`
    cpu_s: float = 0.0  # of the engine's process, all threads
    dial: DialStatus = field(default_factory=DialStatus)
    draft_width: int = 0  # most drafts of a request in a step, as of the last one
    draft_gain: float = 1.0  # speed over that without drafts, of the last steps
    cpu: CPUWork = field(default_factory=CPUWork)
    standing: Standing = Standing.AWAKE
    sleep_level: int = 0
    wakes: int = 0
    sleeps: int = 0
    last_wake_s: float = 0.0
    adapters: AdapterStats = field(default_factory=AdapterStats)
    below: tuple[LevelUse, ...] = ()  # levels below the device
    slabs: SlabUse = field(default_factory=SlabUse)
    pins: PinUse = field(default_factory=PinUse)
    media: MediaUse = field(default_factory=MediaUse)
    load: Gauges = field(default_factory=Gauges)  # what a router compares engines by

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache."""
        return self.counters.prompt_tokens if self.caches_prefixes else 0

    @property
    def prefix_hits(self) -> int:
        return self.counters.cached_tokens if self.caches_prefixes else 0


@dataclass(slots=True, kw_only=True)
class BranchUpdate:
    """What became known of one branch since the last update; lists are the reader's to keep."""

    branch: int  # its place in the request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)  # of prompt tokens too, by their position
    time_s: float = 0.0  # of the newest token, on the engine's clock
    ending: Finished | None = None
    held: Held | None = None  # behind these tokens
    is_injected: bool = False  # its tokens were put in from outside


# Takes updates at once, called by the dispatcher; False when the reader has to wake up.
OnUpdates = Callable[[list[BranchUpdate]], bool]


class EngineStream(Protocol):
    """One request under way. Its owner must `close` it, in whatever way it ends."""

    first: int  # the engine's number of the first branch; each further branch has the next one

    @property
    def failovers(self) -> int:
        """Times that it went on in another engine."""

    @property
    def forecast(self) -> Forecast | None:
        """Counted from arrival; known when the first update comes, None where the engine has no forecast."""

    async def take(self) -> list[BranchUpdate]:
        """Wait for updates; a slow reader gets everything since its last call in one piece.

        Raises what the engine rejected the request with (InvalidRequest, NeverFits, QueueFull), or
        EngineUnavailable when the engine is lost. Not to be called once every branch has ended.
        """

    def divert(self, on_updates: OnUpdates) -> None:
        """From now on, updates that arrive while the reader waits in `take` go to `on_updates`.

        That does not wake the reader, which costs more than the update itself. When it returns False, the reader's
        `take` returns, with nothing; the updates it was given count as taken.
        """

    def finish_at(self, branch: int, num_output: int) -> None:
        """A stop string was found: this branch ends after `num_output` output tokens."""

    def close(self) -> None:
        """Abort what still runs; does nothing for branches that have ended. May be called twice."""


class Begun(NamedTuple):
    """How far a request is that another engine had begun."""

    outputs: tuple[Sequence[int] | None, ...]  # of its branches; None: that one has ended
    age_s: float  # since it came


class Explanation(NamedTuple):
    """What an engine knows about a branch."""

    # The newest, oldest first; none when nothing was decided yet, or is known any more.
    decisions: list[Decision]
    is_live: bool  # it has not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """Another policy, with those of its options that are to change too. Without a name, options of the present one."""

    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """How an engine is steered."""

    dial: DialStatus
    policy: str
    policy_options: dict[str, float | str | None]


class EngineClient(Protocol):
    """One engine. Cheap properties are always current.

    Every coroutine raises EngineUnavailable when the engine does not answer, QueueFull when too many wait for an
    answer at once.
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before the model is loaded for the first time."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def heartbeat_age_s(self) -> float: ...

    @property
    def waits_for_engine(self) -> bool:
        """Whether requests may come while it is not ready, and wait until it is."""

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        timeout_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
    ) -> EngineStream:
        """Hand a request to the engine; never blocks. `timeout_s` from now, after which the engine ends it."""

    def fork(
        self,
        number: int,
        count: int,
        *,
        at: int,
        append: Sequence[int] = (),
        score: float = 0.0,
        changes: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> EngineStream:
        """Branches of a live branch, as a stream of their own; see `Engine.fork`. Never blocks.

        Its `take` raises UnknownRequest, InvalidTransition or TreeFull where `submit` raises what a request is rejected
        with.
        """

    async def extend(
        self,
        number: int,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        """Put tokens behind the output of a live branch; its stream tells them. See `Engine.extend`."""

    async def prune(self, numbers: Sequence[int]) -> list[ChangeOutcome]:
        """End branches; their streams hear of it."""

    async def tree(self, number: int) -> list[BranchState]:
        """The live branches of a branch's tree; none when it has ended."""

    async def forecast(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
    ) -> Forecast | None:
        """When a request would be served if it came now; None: not known. Raises what it would be rejected with."""

    async def explain(self, number: int) -> Explanation:
        """What was decided about a branch."""

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        """Change live branches by their numbers; what became of each."""

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        """Change what is given; how it stands now. What was changed also holds for an engine started anew.

        Raises InvalidRequest for what the engine does not take.
        """

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests may have, by name. Also those of an engine started anew."""

    async def load_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Read a folder, which gets the name when it has been read; requests under way keep what they have.

        Raises InvalidAdapter.
        """

    def unload_adapter(self, name: str) -> None:
        """No new request may have it. Raises UnknownAdapter."""

    async def rest(self, level: int, *, aborts: bool = False) -> Standing:
        """Put the model to sleep (1, 2) or begin to wake it (0); how it stands now. Raises SleepRefused."""

    async def snapshot(self) -> bytes:
        """What happened since the last snapshot and how things stand, as one JSON object; see `live_view`."""

    def unpin(self, tenant: str, name: str) -> None:
        """A pin ends before its time; there may be none of that name."""

    def resume_all(self) -> None:
        """Paused requests continue, and none is paused any more: the server is about to stop."""
