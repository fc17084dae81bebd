"""A request and its life cycle.

The life cycle is a table of allowed moves; `Request.move` is the only way to change state. A request is an
object at admission, preemption and finish. While it runs, its counters live in the columns of its row (see
`scheduler.rows`), and the copies here are what was true when it last left a row. A request and everything forked from
it is a tree (`TreeLimits`, `RequestTree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import IdentityEnum
from paceline.core.parameters import Pin
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, SPOT, ServiceLevel
from paceline.core.stretch import RECOMPUTED, MediaItem, MediaPart, ModulePart, Stretch, StretchKind
from paceline.errors import InvalidRequest

MAX_TREE_BRANCHES = 256


RequestId = NewType("RequestId", int)
DEFAULT_TENANT = "default"
SALT = "\x1f"  # between a tenant and what keeps some of its cached prefixes apart
NO_ROW = -1
# Ids from here on are of requests that an engine makes itself; no client hears of them.
OWN_REQUESTS = RequestId(1 << 40)


class RequestState(IdentityEnum):
    NEW = "new"
    WAITING = "waiting"  # in the queue, owns nothing
    RUNNING = "running"  # owns a row and blocks
    BLOCKED = "blocked"  # waits for something outside the scheduler, see Blocked
    SWAPPED = "swapped"  # owns host places, waits to come back
    PAUSED = "paused"  # put aside by its owner; owns at most host places
    HELD = "held"  # has come to its end and waits for what its owner does with it; owns nothing
    FINISHED = "finished"
    REJECTED = "rejected"


_S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _S.NEW: frozenset({_S.WAITING, _S.REJECTED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.BLOCKED, _S.PAUSED, _S.HELD, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.SWAPPED, _S.PAUSED, _S.HELD, _S.FINISHED}),
    _S.BLOCKED: frozenset({_S.WAITING, _S.RUNNING, _S.SWAPPED, _S.PAUSED, _S.HELD, _S.FINISHED}),
    _S.SWAPPED: frozenset({_S.BLOCKED, _S.WAITING, _S.PAUSED, _S.HELD, _S.FINISHED}),
    _S.PAUSED: frozenset({_S.WAITING, _S.SWAPPED, _S.HELD, _S.FINISHED}),
    _S.HELD: frozenset({_S.WAITING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
    _S.REJECTED: frozenset(),
}


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class BlockReason(Enum):
    """What a BLOCKED request waits for."""

    SWAP_IN = "swap_in"
    GRAMMAR = "grammar"
    ADAPTER = "adapter"
    ENCODER = "encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Why a request is blocked, and when it ends if it still is."""

    reason: BlockReason
    deadline_s: float | None
    ticket: int = 0  # of the copy it waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What would have ended a held request, and when it is pruned."""

    reason: FinishReason
    until_s: float


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Opaque identity of one full block of tokens and everything before it.

    `key` finds a cached block; `payload` must be equal too before the block is used, so that a collision of
    keys can make a hit slow but never wrong. What an earlier run has left on a disk has no payload: its `check`, more
    bytes of the digest that the key is from, must be equal.
    """

    key: bytes
    payload: bytes
    check: bytes = b""
    parent: bytes = b""  # key of the block before it; b"": it is the first, or that is not known

    def is_same(self, other: BlockKey) -> bool:
        """Whether two keys that are equal stand for the same tokens. This one is of a cached block."""
        if self.payload or not self.check:
            return self.payload == other.payload
        return self.check == other.check


def named_keys(names: Iterable[bytes], before: Sequence[BlockKey] = ()) -> list[BlockKey]:
    """Keys without what they were made from, of blocks that stand behind one another, behind those of `before`."""
    parent = before[-1].key if before else b""
    made = []
    for name in names:
        made.append(BlockKey(name, b"", parent=parent))
        parent = name
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRef:
    """Where the KV of a placed text comes from; see `core.stretch`."""

    keys: tuple[BlockKey, ...]  # of the module's full blocks, under the root of modules
    num_tokens: int  # of the text; what is behind its full blocks is not placed
    recompute: int = RECOMPUTED
    pin: Pin | None = None  # that its blocks get where they are placed, if they do not have it


class PlacedStretches(NamedTuple):
    """Texts of a sequence that are placed."""

    modules: tuple[ModuleRef, ...] = ()  # where their KV comes from
    stretches: tuple[Stretch, ...] = ()  # where they stand; each names its place among the request's modules


NOTHING_PLACED = PlacedStretches()


class Cost(NamedTuple):
    """What a request took beyond its tokens; times of blocks are in block-microseconds, whole numbers."""

    block_us: int = 0  # KV blocks held, each for as long as it was
    redone_block_us: int = 0  # of these, while it computed again what it had to give up
    redone: int = 0  # tokens computed again
    swaps: int = 0  # of its preemptions, those that kept its KV on the host
    # Drafts from its prediction that were verified: those that were right, and the others.
    accepted_predictions: int = 0
    rejected_predictions: int = 0
    injected: int = 0  # of its output, tokens that were put in from outside
    dropped: int = 0  # tokens whose KV it let go of (`kv_keep`): from then on its answer is another one
    # Of its cached tokens: loaded from host memory, and from a disk.
    from_host: int = 0
    from_disk: int = 0
    # Blocks of its prompt that are pinned behind its end, and the time of them that it paid for.
    pinned: int = 0
    pinned_block_us: int = 0
    # Of its pictures: patches that were encoded for it, and pictures whose vectors were there or are another's too.
    encoded_units: int = 0
    encodings_reused: int = 0
    # Of its placed texts: tokens whose KV was copied to their place, and those at beginnings that were computed again.
    reused: int = 0
    recomputed: int = 0


NO_COST = Cost()


def account_of(tenant: str) -> str:
    """The tenant that is charged: what follows `SALT` only keeps cached prefixes of one tenant apart."""
    return tenant.partition(SALT)[0]


def cut_stretches(request: Request, kept: int, block_size: int) -> int:
    """Leave a request with the stretches of its first `kept` tokens, its prompt among them.

    What is left of a placed text that is cut is placed as a text of its own: its full blocks, short of the request's
    last token, which is always computed. Returns how many tokens are what they were, under the keys that they had.
    """
    end = min(kept, request.num_tokens - 1)
    whole = tuple([each for each in request.stretches if each.end <= end or each.kind is StretchKind.MEDIA])
    if len(whole) == len(request.stretches):
        return kept
    cut = request.stretches[len(whole)]
    modules = request.modules[: sum([stretch.kind is StretchKind.PLACED for stretch in whole])]
    if cut.start < kept:
        module, num_tokens = request.modules[cut.item], kept - cut.start
        keys = module.keys[: num_tokens // block_size]
        end = min(end, cut.start + len(keys) * block_size)
        if end > cut.start + module.recompute:
            whole = (*whole, cut._replace(end=end))
            modules = (*modules, replace(module, keys=keys, num_tokens=num_tokens, pin=None))
    request.stretches, request.modules = whole, modules
    request.placed_to = min(request.placed_to, kept)
    return min(kept, cut.start)


def sooner(deadline_s: float | None, arrival_s: float, deadline_ms: int | None) -> float | None:
    """A deadline on the clock, or what a request wants counted from its arrival, whichever comes first."""
    if deadline_ms is None:
        return deadline_s
    wanted_s = arrival_s + deadline_ms / 1e3
    return wanted_s if deadline_s is None else min(deadline_s, wanted_s)


class Request:
    """One sequence to generate. See the module's docstring for which counters are true when."""

    __slots__ = (
        "adapter",
        "admitted_s",
        "arrival_s",
        "blocked",
        "branch",
        "branches",
        "cost",
        "deadline_s",
        "displaced_at",
        "fail_detail",
        "failed_at",
        "finished_s",
        "first_token_s",
        "held",
        "host_places",
        "id",
        "is_module",
        "joined_at",
        "keys",
        "media",
        "model",
        "modules",
        "num_cached",
        "num_computed",
        "num_prompt",
        "parent",
        "peak_computed",
        "placed_to",
        "preemptions",
        "reserved",
        "row",
        "sampling",
        "score",
        "service_level",
        "shares",
        "state",
        "step_failures",
        "stretches",
        "tenant",
        "tokens",
        "tree",
        "tree_limits",
        "vector",
    )

    def __init__(
        self,
        request_id: RequestId,
        tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        arrival_s: float = 0.0,
        tenant: str = DEFAULT_TENANT,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        deadline_s: float | None = None,
        keys: Sequence[BlockKey] = (),
    ) -> None:
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.id = request_id
        self.tokens = tokens  # prompt and, once it has left a row, its output so far
        self.num_prompt = len(tokens)
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.tenant = tenant
        self.service_level = service_level
        self.deadline_s = deadline_s
        self.keys = list(keys)  # one per full block of tokens, as far as known
        self.model = 0
        self.adapter = 0
        self.media: tuple[MediaItem, ...] = ()
        self.modules: tuple[ModuleRef, ...] = ()
        self.stretches: tuple[Stretch, ...] = ()  # of its prompt and of what was put behind it, in order
        # It computes a module: its keys are under their root, and it ends with its prompt.
        self.is_module = False
        self.placed_to = 0  # what was placed of its first tokens is counted as reused
        self.parent: RequestId | None = None
        self.branch = 0  # which branch of its parent it is; 0 for a request without one
        self.branches = 0  # how many branches were made of it
        self.shares = len(tokens)  # of its tokens, those it has in common with its parent
        self.score = 0.0  # among the branches of its tree, the higher goes first
        self.tree_limits: TreeLimits | None = None  # of the first request of a tree, where there are any
        self.tree: RequestTree | None = None
        self.state = RequestState.NEW
        self.blocked: Blocked | None = None
        self.held: Hold | None = None
        self.row = NO_ROW
        self.num_computed = 0  # tokens whose KV lies in host_places, or was brought along from outside
        self.peak_computed = 0  # most tokens it ever had computed, as of when it last left a row
        self.host_places: tuple[NDArray[np.int64], ...] = ()
        self.reserved = False  # its full length is reserved: never preempted
        self.preemptions = 0
        self.displaced_at = -1  # most tokens it had computed when another took its place the last time
        self.step_failures = 0  # steps that failed under it since it last got on
        self.failed_at = -1  # tokens it had then
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.joined_at = 0  # tokens it had computed when it last got a row
        self.cost = NO_COST  # of the rows it has left
        self.fail_detail = ""
        self.vector = b""  # what a pooled request ends with; see Finished
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def has_output(self) -> bool:
        """It came with output, or has left a row with some."""
        return len(self.tokens) > self.num_prompt

    @property
    def max_total(self) -> int:
        """Prompt and output together, at most."""
        if self.sampling.pooling is not None:
            return self.num_prompt
        return self.num_prompt + self.sampling.max_tokens

    @property
    def ends_with_prompt(self) -> bool:
        """It is there for what it leaves in the cache, and generates nothing."""
        return self.is_module or (self.sampling.pin is not None and self.sampling.pin.computes)

    @property
    def num_source_blocks(self) -> int:
        """Blocks of the modules that it places."""
        return sum([len(module.keys) for module in self.modules])

    def num_sharable(self, block_size: int) -> int:
        """Of its tokens, those whose KV may come from other requests, and the last one, which is always computed."""
        kept, pooled = self.sampling.kv_keep, self.sampling.pooling
        if pooled is not None and not pooled.reads_last:
            return 1
        if kept is None:
            return self.num_tokens
        return min(self.num_tokens, kept.sees_all(self.num_prompt, block_size) + 1)

    @property
    def most_generated(self) -> int:
        """Tokens it may come to generate; what is put in from outside is not counted."""
        if self.sampling.pooling is not None:
            return 0
        return self.sampling.max_tokens - self.cost.injected

    @property
    def priority(self) -> int:
        """What it is compared by, its class counted in; the lower goes first."""
        return self.service_level.effective_priority

    @property
    def is_spot(self) -> bool:
        """Is preempted before requests that are not."""
        return self.service_level.service_class == SPOT

    @property
    def due_s(self) -> float:
        """Its deadline; infinity for none."""
        return math.inf if self.deadline_s is None else self.deadline_s

    @property
    def first_due_s(self) -> float:
        """When its first token is wanted; infinity for whenever."""
        objective_ms = self.sampling.ttft_slo_ms
        return math.inf if objective_ms is None else self.arrival_s + objective_ms / 1e3

    @property
    def itl_s(self) -> float:
        """How long the wait between two of its tokens may be; infinity for any."""
        objective_ms = self.sampling.itl_slo_ms
        return math.inf if objective_ms is None else objective_ms / 1e3

    @property
    def started(self) -> bool:
        """Whether its tenant is not charged with its prompt any more: it has been admitted, though it may wait again,
        or the engine made it for another request, with whose prompt the tenant is charged."""
        return self.admitted_s is not None or self.id >= OWN_REQUESTS

    @property
    def is_terminal(self) -> bool:
        return self.state in (RequestState.FINISHED, RequestState.REJECTED)

    def move(self, state: RequestState) -> None:
        """Change state; a move that is not in the table is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"request {self.id}: {self.state.value} -> {state.value}"
        self.state = state

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.value}, row={self.row}, tokens={self.num_tokens})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchState:
    """A live branch of a tree."""

    request: RequestId
    parent: RequestId | None
    state: RequestState
    score: float
    num_prompt: int
    num_output: int
    shares: int  # tokens it has in common with its parent


# A change of a live request by its owner, and what became of it.


class ChangeOutcome(Enum):
    CHANGED = "changed"
    ENDED = "ended"  # there is no live request of that number
    BUSY = "busy"  # it cannot be paused at this moment
    NOT_REASONING = "not_reasoning"  # it has no reasoning to end, or no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be different from now on; None leaves it as it is."""

    priority: int | None = None
    # When it ends at the latest, on the engine's clock; infinity for no deadline.
    until_s: float | None = None
    paused: bool | None = None
    end_reasoning: bool | None = None  # True: the answer begins now
    score: float | None = None  # among the branches of its tree


# Per-request hooks: the work the engine does for one request inside the step loop, behind one seam.
#
# Anything here may raise; the scheduler then fails that request and no other. The default does nothing, which is
# what a simulation without token ids wants.


class RequestHooks(Protocol):
    """What the engine adds to a request's life."""

    def admit(self, request: Request) -> None:
        """The request is about to be given a row."""
        ...

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        """Keys of the full blocks of `request.tokens` that `request.keys` does not cover yet."""
        ...

    def finish(self, request: Request) -> None:
        """The request has ended; its terminal event follows."""
        ...


class NoHooks:
    """Hooks that do nothing."""

    def admit(self, request: Request) -> None:
        return None

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        return ()

    def finish(self, request: Request) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What all branches of a tree may have together; None: as much as any request.

    Places in a tree are exchanged inside it only: between trees and tenants the policy decides as it does without them.
    Decision: docs/decisions/0041-trees.md.
    """

    max_rows: int | None = None  # branches that compute at the same time
    max_tokens: int | None = None  # that were generated, or may still be by live branches
    max_branches: int = MAX_TREE_BRANCHES  # that are alive, the first one counted

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_branches"):
            limit = getattr(self, name)
            if limit is None and name != "max_branches":
                continue
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise InvalidRequest(
                    f"tree.{name} must be a whole number from 1 on, not {limit!r}", param="tree"
                )
        if self.max_branches > MAX_TREE_BRANCHES:
            raise InvalidRequest(
                f"tree.max_branches must be at most {MAX_TREE_BRANCHES}, not {self.max_branches}",
                param="tree",
            )


class RequestTree:
    """The live branches of a tree, and what they have used."""

    __slots__ = ("is_scored", "limits", "members", "num_rows", "num_spent")

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits
        self.members: dict[int, int] = {}  # requests, and how many tokens each may come to generate
        self.num_rows = 0
        self.is_scored = False  # a branch was given a score
        self.num_spent = 0  # tokens that branches have generated which have ended

    @property
    def has_rows(self) -> bool:
        """Whether one more of its branches may compute."""
        return self.limits.max_rows is None or self.num_rows < self.limits.max_rows

    def objection(self, num_branches: int, num_tokens: int) -> str:
        """Why it cannot have so many more branches, which may generate so many more tokens; "": it can."""
        limits = self.limits
        left = limits.max_branches - len(self.members)
        if num_branches > left:
            return f"the tree may have {limits.max_branches} branches: {left} are left, {num_branches} are asked for"
        if limits.max_tokens is None:
            return ""
        left = limits.max_tokens - self.num_spent - sum(self.members.values())
        if num_tokens <= left:
            return ""
        return (
            f"the tree may generate {limits.max_tokens} tokens: {max(0, left)} are left, {num_tokens} are asked for; "
            "prune branches, or give max_tokens"
        )


class Given(NamedTuple):
    """What the branches of a request have in common, beside their prompt."""

    tenant: str
    service_level: ServiceLevel
    arrival_s: float
    adapter: int
    media: Sequence[MediaPart] = ()
    modules: Sequence[ModulePart] = ()
    is_module: bool = False
    keys: Sequence[BlockKey] | None = None  # of the prompt, where they are made
