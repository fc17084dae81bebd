"""What the HTTP side sees of an engine: requests go in, news of their branches come out.

Values and protocols only; `async_engine` implements them over a socket, tests over a fake. Token ids cross this
line, text never does. Everything here belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from paceline.core.dial import DialSetting, DialStatus
from paceline.core.events import Decision
from paceline.core.plan import RowLogprobs
from paceline.core.request import NO_COST, Change, ChangeOutcome, Cost
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import PLAIN, Urgency
from paceline.costs.model import ModelWork
from paceline.errors import PacelineError


class EngineUnavailable(PacelineError):
    """The engine is starting, lost or shutting down; `code` is the one of the error catalogue."""

    exit_code = 70

    def __init__(self, message: str, *, code: str = "engine_unavailable") -> None:
        super().__init__(message)
        self.code = code


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
    notices: tuple[str, ...] = ()
    work: ModelWork | None = None  # what a token and a step cost
    learns_step_sizes: bool = False  # the sizes of steps above are those of the start

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold; the null block, which padding reads and writes, is nobody's."""
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's gauges and counters at one moment; sent with steps, a few times a second at most."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    busy_s: float = 0.0  # time spent inside steps
    steps_by_tokens: tuple[int, ...] = ()  # steps by how many tokens they carried; bounds are the scheduler's
    computed_tokens: int = 0  # in steps, padding included
    padding_tokens: int = 0
    occupied_rows: int = 0  # rows in use, summed over steps
    decode_context: int = 0  # tokens of KV that decoding rows read
    context_products: int = 0  # tokens of context that tokens attended to
    logit_rows: int = 0  # rows whose next token was drawn
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, and found there
    prefix_hits: int = 0
    violations: int = 0  # invariants found broken
    failed_steps: int = 0
    preempted_by: dict[str, int] = field(default_factory=dict)  # by the rule of the decision, reason:kind
    fairness_gap: float | None = None  # between tenants that wait, in tokens; None: nobody keeps accounts
    next_place_s: float | None = None  # until a running request is thought to end; None: nobody knows
    rejected_frames: int = 0  # messages between the processes that were not understood, on either side
    watch_cpu_s: float = 0.0  # of the engine's process, spent on showing it to a page; part of `cpu_s`
    cpu_s: float = 0.0  # of the engine's process, all threads
    dial: DialStatus = field(default_factory=DialStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """When a request would have its first and last token, in seconds from its arrival; None: nobody knows yet."""

    first_token_s: float | None
    finish_s: float | None
    ahead: int  # requests that wait and go before it
    num_cached: int = 0  # tokens of its prompt that are in the cache now
    num_output: float | None = None  # tokens it is thought to generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The one end of a branch."""

    reason: str  # stop, length, abort or error
    detail: str  # "", or what is behind an abort or an error: deadline, numerical_error, internal_error, ...
    num_prompt: int
    num_output: int
    num_cached: int
    preemptions: int
    queue_s: float  # from arrival to its first step
    time_s: float  # on the engine's clock, as the times of news
    cost: Cost = NO_COST


@dataclass(slots=True, kw_only=True)
class BranchNews:
    """What became known of one branch since the last look; lists are the reader's to keep."""

    branch: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)  # of prompt tokens too, told by their position
    time_s: float = 0.0  # of the newest token, on the engine's clock
    ending: Ending | None = None


class EngineStream(Protocol):
    """One request under way. Its owner must `close` it, in whatever way it ends."""

    @property
    def prospect(self) -> Prospect | None:
        """What the engine said when it took the request; None before that. There when the first news are."""

    async def take(self) -> list[BranchNews]:
        """Wait until there is news; a slow reader finds everything since its last look in one piece.

        Raises what the engine refused the request with (InvalidRequest, NeverFits, QueueFull), or
        EngineUnavailable when the engine is lost. Not to be called once every branch has ended.
        """

    def finish_at(self, branch: int, num_output: int) -> None:
        """A stop string was found: this branch ends after so many output tokens."""

    def close(self) -> None:
        """Abort what still runs; does nothing for branches that have ended. May be called twice."""


# Takes news at once, from whoever found them; False when its reader has to wake up.
OnNews = Callable[[list[BranchNews]], bool]


@runtime_checkable
class DirectStream(Protocol):
    """A stream that can hand its news on without waking its reader, which costs more than the news themselves."""

    def divert(self, on_news: OnNews) -> None:
        """From now on, news that find the reader waiting in `take` go to `on_news`.

        When that says no, the reader's `take` returns, with nothing; what it was given counts as taken.
        """


@runtime_checkable
class NumberedStream(Protocol):
    """A stream whose request the engine knows by numbers: `first`, and one more for each further branch."""

    first: int


class Told(NamedTuple):
    """What an engine knows about a branch."""

    # The newest, oldest first; none when nothing was decided yet, or is known any more.
    decisions: list[Decision]
    is_live: bool  # it has not ended


@runtime_checkable
class ExplainingClient(Protocol):
    """An engine that remembers why it did what it did."""

    async def explain(self, number: int) -> Told:
        """What was decided about a branch.

        Raises EngineUnavailable when the engine does not answer, QueueFull when too many ask at once.
        """


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


@runtime_checkable
class SteeringClient(Protocol):
    """An engine whose dial and policy can be changed while it serves."""

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        """Change what is given, and hear how it stands. What was changed also holds for an engine started anew.

        Raises InvalidRequest for what the engine does not take, EngineUnavailable when it does not answer.
        """


@runtime_checkable
class WatchedClient(Protocol):
    """An engine that can be looked at while it works."""

    async def look(self) -> bytes:
        """What happened since the last look and how things stand, as one JSON object; see `live_view`.

        Raises EngineUnavailable when the engine does not answer, QueueFull when too many ask at once.
        """


@runtime_checkable
class ChangingClient(Protocol):
    """An engine whose live requests can be changed."""

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        """Change branches by their numbers; what became of each. Raises like `ExplainingClient.explain`."""


@runtime_checkable
class DrainingClient(Protocol):
    """An engine that is told before its server stops."""

    def let_all_go_on(self) -> None:
        """Whoever is paused goes on, and nobody is paused any more."""


class EngineClient(Protocol):
    """One engine. Cheap properties are always current."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before the model is loaded for the first time."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def heartbeat_age_s(self) -> float: ...

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        urgency: Urgency = PLAIN,
        timeout_s: float | None = None,
    ) -> EngineStream:
        """Hand a request to the engine; never blocks. `timeout_s` from now, after which the engine ends it."""

    async def ask(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        urgency: Urgency = PLAIN,
    ) -> Prospect:
        """When a request would be served if it came now. Raises what it would be refused with."""
