"""What the engine tells the outside: tokens as columns, endings and decisions as values.

Tokens of a step come as one columnar event, so that a step costs the same whatever the batch. A request gets
exactly one `Finished`, and nothing after it. Endings and decisions are named tuples: one of each is made for every
request that comes or goes inside a step, and a tuple costs less than half of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import value
from paceline.core.plan import RowLogprobs
from paceline.core.request import NO_COST, Cost, FinishReason, RequestId


@value
class TokenEvents:
    """The tokens one step delivered: entry i is token `tokens[i]`, number `index[i]` of request `requests[i]`."""

    seq: int
    time_s: float
    requests: NDArray[np.int64]
    tokens: NDArray[np.int32]
    index: NDArray[np.int64]  # 0 is the first token of the output
    is_injected: bool = False  # they were put into a running output from outside: `Engine.extend`


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
    cost: Cost = NO_COST
    vector: bytes = b""  # of a pooled request that ended well: little-endian float32


class Held(NamedTuple):
    """A branch has come to its end and is kept, for a while, for what its owner does with it next.

    Tokens from number `num_output` on, in the same events or later ones, are of what came next.
    """

    request: RequestId
    reason: FinishReason  # what would have ended it: STOP or LENGTH
    num_output: int
    until_s: float  # when it is pruned, on the engine's clock


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
    held: tuple[Held, ...] = ()


@dataclass(slots=True)
class EventBuffer:
    """Events that have not been taken yet."""

    tokens: list[TokenEvents] = field(default_factory=list)
    logprobs: list[LogprobEvent] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def take(self) -> StepEvents:
        """All of them; the buffer is empty afterwards."""
        events = StepEvents(tuple(self.tokens), tuple(self.logprobs), tuple(self.finished), tuple(self.held))
        self.tokens.clear()
        self.logprobs.clear()
        self.finished.clear()
        self.held.clear()
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When a request is expected to have its first and last token, in seconds from now on."""

    first_token_s: float
    finish_s: float
    ahead: int  # requests that wait and go before it
    waited_s: float  # since its arrival
    soonest_first_s: float  # if it went first
    soonest_finish_s: float
    alone_first_s: float  # if no other request were here
    alone_finish_s: float
    between_s: float  # two of its tokens, if no other request were here
    num_cached: int  # tokens of its prompt that are in the cache now
    num_output: float  # tokens it is expected to generate
    # Block-microseconds that its pins take beyond what is paid for now, and those they take at most.
    pinned_block_us: int = 0
    most_pinned_block_us: int = 0

    def since_arrival(self) -> Forecast:
        """The same, with its first and last token counted from the arrival of the request."""
        first_s, finish_s = self.waited_s + self.first_token_s, self.waited_s + self.finish_s
        return replace(self, first_token_s=first_s, finish_s=finish_s)

    def later(self, seconds: float) -> Forecast:
        """The same for a request that nothing is computed for until then: its model is asleep."""
        names = ("first_token_s", "finish_s", "soonest_first_s", "soonest_finish_s")
        return replace(self, **{name: getattr(self, name) + seconds for name in names}) if seconds else self


class DecisionKind(StrEnum):
    """What was decided. A text, as the rule is: decisions go into logs as they are."""

    ADMIT = "admit"
    DEFER = "defer"
    CHUNK = "chunk"
    PREEMPT = "preempt"
    RESUME = "resume"
    STALL = "stall"
    CHANGE = "change"
    FORK = "fork"
    EXTEND = "extend"
    HOLD = "hold"
    FINISH = "finish"
    REFUSE = "refuse"
    FAIL = "fail"
    DIAL = "dial"  # about no request: the limits of steps were moved
    POLICY = "policy"  # about no request: others go first
    LOAD = "load"  # of what lower levels hold of its prompt: loaded, waited for or computed
    PIN = "pin"  # its prompt stays in the cache
    UNPIN = "unpin"  # not any more
    ENCODE = "encode"  # an item of its prompt has vectors
    PLACE = "place"  # KV of a context is copied to its place in the prompt
    DRAFT = "draft"  # about no request: rows may have more drafts in a step, or fewer
    # Of a front with several engines, not of a scheduler.
    ROUTE = "route"  # an engine was chosen
    FAILOVER = "failover"  # the engine that had it was lost


# The message to a user for `numerical_error`.
NOT_FINITE = (
    "the model's output is not finite (NaN or infinity): its weights are damaged, or too large for the type they are "
    "computed in; download the model again, or choose another --dtype"
)


class Rule(StrEnum):
    """Why a decision was made: the whole set, so that a reader of decisions knows every reason there is."""

    # admit, resume, fork, extend
    FITS = "fits"
    RECOMPUTE = "recompute"
    SWAP = "swap"  # resume: its KV comes back from the host; defer: its KV is still being copied out
    SHARES = "shares its parent's blocks"
    BRANCHED = "branches off"  # fork, before it is admitted: value is what it has in common with its parent
    INJECTED = "tokens were put behind its own"
    # defer, stall, chunk
    ROWS = "rows"
    BUDGET = "budget"
    PREFIX = "prefix"  # another request is computing what it can share
    BLOCKS = "blocks"
    # Deferred: its tenant is over its share; the rest is kept for tenants within theirs, which may pass.
    SPARE = "spare"
    RESERVE = "reserve"  # its full length is not free beside the lengths that were promised
    TREE_ROWS = "rows of its tree"  # its tree has as many rows as it may; others may pass
    ADAPTER = "adapter"  # its adapter is not in memory, or is about to leave it; others may pass
    ASLEEP = "asleep"  # its model slept; seconds: from its arrival to the first step after the wake
    LOADING = "loading"  # load too: part of its prompt comes from the disk; others may pass
    MAKING_ROOM = "making room"  # load too: what it would evict is on its way to host memory; others may pass
    MODULE = "module"  # a context that it places is not computed yet; others may pass
    # The same, once more: it was evicted while it waited, and no request passes.
    MODULE_EVICTED = "module evicted"
    SHARE = "share"  # others wait: one prompt takes no more of a step
    GROUP = "group"  # chunk: its next item is not encoded yet
    PAGES = "pages"  # chunk: there is no room yet for the vectors of its next item
    # encode
    ENCODED = "encoded"
    FOUND_ENCODED = "found encoded"  # it was encoded before, or for another request
    # place: value is how many tokens are copied, blocks_needed out of how many blocks
    PLACED = "placed"
    # pin, and finish of a request that came for that alone
    PROMPT = "prompt"  # until the time it asked for
    CONTEXT = "context"  # of which its prompt is a part
    # unpin
    OVER = "over"  # its time
    DELETED = "deleted"
    LOST = "lost"  # its blocks can not be hit any more
    # load
    LOADS = "sooner than computing"
    COMPUTES = "computing is sooner"
    LOAD_FAILED = "copy failed"
    # preempt: for what, and what becomes of its KV
    BLOCKS_RECOMPUTE = "blocks:recompute"
    BLOCKS_SWAP = "blocks:swap"
    PLACE_RECOMPUTE = "place:recompute"  # a waiting request that outranks it took its place
    PLACE_SWAP = "place:swap"
    PAGES_RECOMPUTE = "pages:recompute"  # the first in order needs the pages of vectors that it holds
    PAGES_SWAP = "pages:swap"
    FORCED_RECOMPUTE = "forced:recompute"
    FORCED_SWAP = "forced:swap"
    PAUSED_RECOMPUTE = "paused:recompute"
    PAUSED_SWAP = "paused:swap"
    STEP_FAILED = "step_failed:recompute"
    SLEEP = "sleep:recompute"  # its model was put to sleep
    SLAB = "slab:recompute"  # another model needed the memory
    # change: of a live request, by its owner
    PRIORITY = "priority"  # value: the new one
    PAUSED = "paused"
    RESUMED = "resumed"
    SCORE = "score"  # detail: the new one
    # finish; what is not named here stands under abort or error, with its detail
    STOP = "stop"
    LENGTH = "length"
    VECTOR = "vector"  # its prompt is computed, and it ends with that vector
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"  # change too: it was given one, or none
    PRUNED = "pruned"
    HOLD_OVER = "hold_over"  # it was held and nothing came of it
    NUMERICAL_ERROR = "numerical_error"
    GRAMMAR_ERROR = "grammar_error"  # its answer cannot follow its structure
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
    INTERNAL_ERROR = "internal_error"
    ENGINE_FAILED = "engine_failed"
    # refuse
    QUEUE_FULL = "queue_full"
    CONTEXT_LENGTH = "context_length_exceeded"
    KV_CAPACITY = "kv_capacity"
    KV_KEEP = "kv_keep"  # it wants to drop KV, and this engine cannot
    MEDIA = "media"  # it has items that this engine cannot encode
    MODULES = "modules"  # it has texts that this engine cannot place
    POOLING = "pooling"  # it wants a vector, and this engine makes none of that kind
    PIN_LIMIT = "pin_limit"  # there is no room for the pin that it came for
    TREE_LIMIT = "tree_limit"  # its tree has as many branches or tokens as it may
    DEADLINE_INFEASIBLE = "deadline_infeasible"  # its times cannot be kept as things stand
    DEADLINE_IMPOSSIBLE = "deadline_impossible"  # not even if it were alone
    # fail: code that was asked about this request alone raised
    REQUEST_FAILED = "request_failed"
    FINISH_HOOK = "finish_hook"
    # dial, policy
    OPERATOR = "operator"  # it was set
    OVER_TARGET = "over target"
    UNDER_TARGET = "under target"
    OUT_OF_REACH = "out of reach"  # the target is not held although the dial is at its end
    WITHIN_REACH = "within reach"
    # draft
    MORE_DRAFTS = "more are worth their time"
    FEWER_DRAFTS = "fewer are worth their time"
    # route, failover
    CHOSEN = "chosen"  # detail: the engine, by which of the router's rules, and what the runner-up would have taken
    ENGINE_LOST = "engine lost"  # value: tokens that were known; detail: the engine


NO_NUMBER = -1  # a figure that does not bear on a decision
NO_REQUEST = RequestId(-1)  # no request has this number


class Decision(NamedTuple):
    """One scheduling decision and what explains it. A figure that does not bear on it is `NO_NUMBER`.

    What three of the fields hold depends on the kind:

    | kind           | value                          | against, another request           | seconds             |
    |----------------|--------------------------------|------------------------------------|---------------------|
    | admit, resume  | tokens found computed          | the one admitted before it         | waited (admit)      |
    | fork           | tokens in common; found        | its parent                         |                     |
    |                | computed (when it is admitted) |                                    |                     |
    | extend         | tokens that were put in        |                                    |                     |
    | hold           | tokens generated               |                                    | kept for            |
    | defer          | blocks kept back for others    | the one admitted last (rows,       |                     |
    |                |                                | blocks), that took the last tokens |                     |
    |                |                                | (budget), that computes what it    |                     |
    |                |                                | can share (prefix)                 | waited (asleep)     |
    | chunk, stall   | tokens scheduled               | the one that got a block (stall)   |                     |
    | preempt        | tokens computed so far         | the one that got its place         | expected cost       |
    | load           | tokens                         |                                    | expected, of loading|
    | finish, refuse | tokens generated; requested    |                                    |                     |
    | dial           | thousandths of the dial        |                                    | the p99 observed    |
    | pin, unpin     | tokens                         |                                    | pinned for (pin)    |
    | encode         | vectors                        |                                    |                     |
    | draft          | most drafts of a row           |                                    |                     |
    """

    kind: DecisionKind
    request: RequestId
    reason: Rule
    value: int = 0
    step: int = 0  # number of the plan it belongs to, or that comes after it
    time_s: float = 0.0
    budget_left: int = NO_NUMBER  # tokens
    blocks_free: int = NO_NUMBER  # that it might have, in the layer group that is shortest
    blocks_needed: int = NO_NUMBER
    against: RequestId = NO_REQUEST
    seconds: float = 0.0
    # What the rule leaves open: the name of an error, the word of an abort, what each way costs.
    detail: str = ""
