"""The boundary between deciding and computing: `StepPlan` goes down, `StepResult` comes back.

Both are frozen and plain: numpy arrays of integers, no request, no text. A plan is a delta against the plan
before it; one with `full=True` rebuilds every row. The order inside a plan is fixed: leaves, joins, row copies,
drops, block appends, swap-outs, block copies, placements, swap-ins, encodes, then the computation. Moves between host
and disk touch nothing that these do: a place is taken or given back only with a ticket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import value
from paceline.core.guide import Guide
from paceline.core.request import BlockKey
from paceline.core.sampling import SamplingParams
from paceline.core.store import BlockHead
from paceline.core.stretch import MediaInput

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]

RUNNING_ON, STOPPED, AT_LENGTH = 0, 1, 2  # values of StepResult.finished


def i32(values: Iterable[int] = ()) -> I32:
    return np.fromiter(values, dtype=np.int32)


EMPTY = i32()
EMPTY.flags.writeable = False


NO_TEXTS = np.zeros(0, np.int64)
NO_TEXTS.flags.writeable = False


def _empty() -> I32:
    return EMPTY


def _empty_wide() -> I64:
    return NO_TEXTS


@value
class RowJoins:
    """Rows that start. Every column of a joined row is written anew; nothing of its former owner survives."""

    row: I32 = field(default_factory=_empty)
    generation: I32 = field(default_factory=_empty)  # tells this owner of the row from the ones before it
    num_prompt: I32 = field(default_factory=_empty)  # of its tokens, those of the prompt: the rest is output
    num_tokens: I32 = field(default_factory=_empty)  # tokens known at the start
    num_computed: I32 = field(default_factory=_empty)  # of these, already in the KV blocks
    limit: I32 = field(default_factory=_empty)  # the row ends when it has this many tokens
    # Tokens of left padding computed before the prompt (static and dynamic modes).
    pad: I32 = field(default_factory=_empty)
    model: I32 = field(default_factory=_empty)
    adapter: I32 = field(default_factory=_empty)
    # Rows of one number may draft from each other's texts; empty where no drafts are made.
    texts: I64 = field(default_factory=_empty_wide)
    # Of each row, where its items begin and end and their numbers; empty where no row has any.
    media: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    sampling: tuple[SamplingParams, ...] = ()
    tokens: tuple[I32, ...] = ()  # empty for a row that is copied from another (see RowCopies)


def whole_rows(
    rows: Iterable[int],
    texts: Sequence[Iterable[int]],
    limits: Iterable[int],
    sampling: SamplingParams,
    *,
    num_computed: int = 0,
    generation: int = 1,
) -> RowJoins:
    """Rows that join with these tokens, all of them prompt; for plans that no scheduler makes."""
    tokens = tuple(map(i32, texts))
    lengths, none = i32(map(len, tokens)), i32([0] * len(tokens))
    return RowJoins(
        row=i32(rows),
        generation=none + np.int32(generation),
        num_prompt=lengths,
        num_tokens=lengths,
        num_computed=none + np.int32(num_computed),
        limit=i32(limits),
        pad=none,
        model=none,
        adapter=none,
        sampling=(sampling,) * len(tokens),
        tokens=tokens,
    )


@value
class RowSpans:
    """Rows that compute `num_scheduled` known tokens: prompts, chunks of them, and what is recomputed.

    In a plan with placements, `start` says at which token each entry begins; in any other it is empty, and each entry
    begins where its row stands. A row with placements may have several entries, in the order of its tokens: what lies
    between two of them is placed by this plan, and the later one attends to all of it. A plan has at most
    `MORE_SPANS` entries more than it has rows with spans. Columns of a runner that add to what a row has computed must
    not count a row once for several entries (`a[rows] += n` does): a row has computed up to the end of its last entry,
    or of its last placement where that is further.
    """

    row: I32 = field(default_factory=_empty)
    num_scheduled: I32 = field(default_factory=_empty)
    start: I32 = field(default_factory=_empty)


@value
class RowDrops:
    """Rows that have dropped tokens between their beginning and the recent ones: `num_tokens` of them so far.

    Their block tables have no entries for these: position p of such a row stands at place p - num_tokens. Entries that
    move up are among the plan's new blocks. A row that joins has dropped nothing unless it is listed.
    """

    row: I32 = field(default_factory=_empty)
    num_tokens: I32 = field(default_factory=_empty)


@value
class RowSet:
    """The rows in plain decode, as a change against the step before."""

    added: I32 = field(default_factory=_empty)
    removed: I32 = field(default_factory=_empty)


@value
class BlockAppends:
    """`block` becomes entry `index` of the block table of (`group`, `row`)."""

    row: I32 = field(default_factory=_empty)
    group: I32 = field(default_factory=_empty)
    index: I32 = field(default_factory=_empty)
    block: I32 = field(default_factory=_empty)


@value
class BlockCopies:
    """Copy-on-write: entry `index` of a row's table moves from `source` to its copy `target`."""

    row: I32 = field(default_factory=_empty)
    group: I32 = field(default_factory=_empty)
    index: I32 = field(default_factory=_empty)
    source: I32 = field(default_factory=_empty)
    target: I32 = field(default_factory=_empty)


@value
class RowCopies:
    """Forks: the first `num_tokens` tokens of `source` become those of `target`, which joins in this plan."""

    source: I32 = field(default_factory=_empty)
    target: I32 = field(default_factory=_empty)
    num_tokens: I32 = field(default_factory=_empty)


MORE_SPANS = 64  # runs of placed tokens in a plan, at most, and so entries of spans beyond one for each row


@value
class Placements:
    """Runs of tokens whose KV is copied out of the blocks of a module, one entry for each run and layer group.

    The tokens `start` to `start + count` of `row` get the KV of as many tokens of the module, which lie in its blocks
    one behind the other: `blocks` has those of all runs, those of a run begin at its `offset`, and `first` is the place
    of the run's first token in the first of them. Values are copied as they are; keys are turned by `shift` positions
    (the distance from the place in the module, where they were turned first, to that in the prompt: 0 is a plain copy).

        run     start 20  count 30  first 4  shift 8, blocks of 16 tokens, `blocks` [5, 9, 7] from `offset` on
        copied  block 5 slots 4 to 15, block 9 slots 0 to 15, block 7 slots 0 and 1 -> tokens 20 to 49

    Neither the first token of a run nor its end need be at the border of a block, of the row or of the module. The
    blocks of the row are in its table by this plan at the latest. Sources are complete since an earlier step, stay as
    they are until this step is done, and no run of a plan reads what another writes.
    """

    row: I32 = field(default_factory=_empty)
    group: I32 = field(default_factory=_empty)
    start: I32 = field(default_factory=_empty)
    count: I32 = field(default_factory=_empty)
    shift: I32 = field(default_factory=_empty)
    first: I32 = field(default_factory=_empty)
    offset: I32 = field(default_factory=_empty)
    blocks: I32 = field(default_factory=_empty)


@value
class Swaps:
    """Blocks copied to or from host places. `ticket` comes back in `StepResult.copies_done`, or in `copies_failed`."""

    ticket: I32 = field(default_factory=_empty)
    group: I32 = field(default_factory=_empty)
    block: I32 = field(default_factory=_empty)
    place: I32 = field(default_factory=_empty)


@value
class Moves:
    """Blocks copied between places of the host and of a disk. Tickets come back as those of swaps do."""

    ticket: I32 = field(default_factory=_empty)
    group: I32 = field(default_factory=_empty)
    host: I32 = field(default_factory=_empty)
    disk: I32 = field(default_factory=_empty)
    # What the blocks hold, and what is left of its uses; not logged.
    contents: tuple[BlockKey, ...] = ()
    uses_left: tuple[int, ...] = ()

    def heads(self) -> list[BlockHead]:
        """What a store has to know of each block."""
        pairs = zip(self.contents, self.uses_left, strict=True)
        return [BlockHead(key.key, key.check, uses) for key, uses in pairs]


class EncodeJoin(NamedTuple):
    """An item of a group that starts. Its vectors go into these pages, in their order."""

    media: int  # the number under which the runner holds it
    units: int
    outputs: int
    pages: tuple[int, ...]


@value
class Encodes:
    """What is computed of the group of items that is being encoded: `count` positions of its line from `first` on.

    The line has 2 x layers x units positions: for each layer the keys and values of all units, then attention and what
    follows unit by unit. With the last of them the vectors are in their pages, for the computation of this step too.
    """

    joins: tuple[EncodeJoin, ...] = ()  # a group starts; the one before it is complete, or no longer needed
    first: int = 0
    count: int = 0


@value
class StepWork:
    """How much a step computes: what a cost model and a kernel choice need, summed while planning."""

    decode_rows: int = 0
    decode_context: int = 0  # tokens of KV the decoding rows read
    prefill_tokens: int = 0  # tokens in spans, padding included
    prefill_context_products: int = 0  # sum over these tokens of the context each attends to
    logit_rows: int = 0  # rows that are sampled
    swap_blocks: int = 0  # 0 where prefixes move too: copies then run beside steps
    encode_positions: int = 0
    encode_products: int = 0  # pairs of a position and a unit it attends to
    placed_tokens: int = 0  # copied to their place, not computed

    @property
    def has_more(self) -> bool:
        """It does what no size of a step is learned from."""
        return self.swap_blocks > 0 or self.encode_positions > 0 or self.placed_tokens > 0


# Kinds of drafts: the source, how sure it is, and how the row's last draft fared.
DRAFT_KINDS = 32
LEAST_CHANCE = 0.02  # below which a draft is never made


def draft_depth(trust: float, floor: float, width: int) -> int:
    """How many drafts of a kind in a row are worth their time: the chance of the last is above the floor."""
    if trust <= LEAST_CHANCE:
        return 0
    return (
        width
        if trust >= 1.0
        else min(int(math.log(min(max(floor, LEAST_CHANCE), 1.0)) / math.log(trust)), width)
    )


NO_TRUST: F32 = np.zeros(0, np.float32)
NO_TRUST.flags.writeable = False


# Most parts of most plans are empty; these stand for them, so that nothing is made for what is not there.
NO_JOINS, NO_SPANS, SAME_ROWS, NO_ROW_COPIES = RowJoins(), RowSpans(), RowSet(), RowCopies()
NO_APPENDS, NO_BLOCK_COPIES, NO_SWAPS, NO_WORK = BlockAppends(), BlockCopies(), Swaps(), StepWork()
NO_MOVES, NO_DROPS, NO_ENCODES, NO_PLACEMENTS = Moves(), RowDrops(), Encodes(), Placements()


class StepPlan(NamedTuple):
    """What the runner does in one step."""

    seq: int  # plans are numbered from 1; a gap is an error
    full: bool = False  # True: a snapshot, all rows are listed in joins
    leaves: I32 = EMPTY  # rows set free; used again only when every earlier step has completed
    joins: RowJoins = NO_JOINS
    spans: RowSpans = NO_SPANS
    decode_rows: RowSet = SAME_ROWS
    new_blocks: BlockAppends = NO_APPENDS
    block_copies: BlockCopies = NO_BLOCK_COPIES
    row_copies: RowCopies = NO_ROW_COPIES
    swap_out: Swaps = NO_SWAPS
    swap_in: Swaps = NO_SWAPS
    store: Moves = NO_MOVES  # from the host to the disk
    fetch: Moves = NO_MOVES  # from the disk to the host
    drops: RowDrops = NO_DROPS
    encodes: Encodes = NO_ENCODES
    placements: Placements = NO_PLACEMENTS
    pad_tokens: int = 0  # prompt padding, computed for real into the null block
    padding_rows: int = 0  # decode rows that have finished and only keep the batch rectangular
    work: StepWork = NO_WORK
    draft_width: int = 0  # most drafts of one decoding row
    draft_tokens: int = 0  # most drafts of all rows together: those that are most likely right
    draft_floor: float = 0.0  # least chance at which a draft is worth its time
    trust: F32 = NO_TRUST  # chance of each kind of draft, where it has moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """How likely one token was, and which were likelier; only for rows that asked."""

    row: int
    position: int  # of the token in its sequence, the prompt included
    token: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    is_drafted: bool = False  # it came as a draft that was right; the scheduler says so


@value
class StepTimes:
    """When the step ran, by the runner's clock, in seconds."""

    # When the runner got the step; if steps were ahead of it, when they ended.
    start_s: float = 0.0
    end_s: float = 0.0


NO_TIMES = StepTimes()


NOT_COUNTED: I32 = np.zeros(DRAFT_KINDS, np.int32)
NOT_COUNTED.flags.writeable = False


class DraftTally(NamedTuple):
    """How drafts fared, by kind: those compared with the token that came, and those that were that token."""

    compared: I32
    equal: I32
    offered: I32 = NOT_COUNTED  # rows that had drafts, verified or not; where steps have sizes


class RowVector(NamedTuple):
    """What the prompt of a pooled row came to; the row ends with it."""

    row: int
    values: F32


class GuideWork(NamedTuple):
    """What the guides of a step's rows took and brought."""

    masks: int
    mask_s: float  # making them
    forced: int = 0  # tokens that a guide was certain of, taken as drafts
    # That the draw waited for them: on a CPU all of it, on a GPU what its forward pass does not hide.
    wait_s: float = 0.0
    certain: int = 0  # tokens that guides were certain of, with room for them or not; on a GPU not counted


class StepResult(NamedTuple):
    """What a step gave. The arrays are aligned: entry i speaks of `rows[i]`, one entry for each row that took part."""

    seq: int
    rows: I32
    generation: I32  # as of the plan; a late result never reaches the row's next owner
    tokens: I32  # [rows, width]; width > 1 with drafts
    # How many of them are valid; 0 for a chunk that does not end its prompt. (A tuple's own `count` is of no use here.)
    count: I32  # type: ignore[assignment]
    finished: U8  # RUNNING_ON, STOPPED (a stop id) or AT_LENGTH
    finite: Bool  # False: this row's numbers are not usable
    copies_done: I32 = EMPTY  # tickets of swaps and moves that have completed
    logprobs: tuple[RowLogprobs, ...] = ()  # of rows in this result, the prompt's tokens among them
    times: StepTimes = NO_TIMES
    verified: I32 = EMPTY  # drafts computed, by row; empty: none
    predicted: I32 = EMPTY  # of these, from the prediction of the row's request; empty: none
    drafts: DraftTally | None = None
    guided: GuideWork | None = None  # None: no row had a guide
    # Tickets whose bytes were not written, or are not what they should be.
    copies_failed: I32 = EMPTY
    disk_is_off: bool = False  # it failed too often: every ticket of it will fail from now on
    vectors: tuple[RowVector, ...] = ()  # of pooled rows whose prompt is computed
    bad_encodings: I32 = EMPTY  # items of the group that this step completes whose numbers are not usable


class Pending(Protocol):
    """A submitted step. Its result exists only once `wait` returns."""

    def supply(self, guides: Mapping[int, Guide]) -> None:
        """The guides of the step's rows, which stand behind the tokens of the steps before. Called once, before
        `wait`, where a row has one."""
        ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Computes plans, in order. Knows rows, never requests; decides nothing."""

    def reset(self, full: StepPlan) -> None:
        """Forget every row and every device block, then take over the rows of a full plan."""
        ...

    def submit(self, plan: StepPlan) -> Pending: ...


class MediaRunner(Protocol):
    """A runner that sees pictures. What it holds outlives a reset."""

    def hold(self, media: int, given: MediaInput) -> None:
        """Keep what an item is made from under its number, until it is dropped."""
        ...

    def drop(self, media: int) -> None: ...


class StepChecker(Protocol):
    """Looks at the state after each half of a step; see `scheduler.invariants`."""

    def after_schedule(self, plan: StepPlan | None) -> None: ...

    def after_update(self, result: StepResult | None) -> None: ...


# What stands in the place of a runner that is not there, and of a step that has no result.


class NoRunner:
    """In the place of the runner of an engine that sleeps."""

    def submit(self, plan: StepPlan) -> Pending:
        raise AssertionError("an engine that sleeps makes no step")

    def reset(self, full: StepPlan) -> None:
        raise AssertionError("an engine that sleeps has nothing to reset")


@dataclass(slots=True)
class FailedStep:
    """The pending of a step that has no result."""

    error: Exception

    def supply(self, guides: Mapping[int, Guide]) -> None:
        raise self.error

    def wait(self) -> StepResult:
        raise self.error
