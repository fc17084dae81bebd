"""The runner on the CPU: rows, copies and sampling of a step around whatever computes it.

Plans are computed in order when they are waited for. Copies and swaps are done at once and reported with the step
they came in. Knows rows and numbers; never a request, never text. What computes is a `StepCompute`: the native kernels
(`native.step`), or plain torch in float32 (`torch_step`), the reference that everything is checked against.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig
from paceline.core.counters import CPUWork
from paceline.core.guide import Guide, Mask, masks_along
from paceline.core.plan import (
    AT_LENGTH,
    EMPTY,
    RUNNING_ON,
    STOPPED,
    GuideWork,
    RowLogprobs,
    Runner,
    StepPlan,
    StepResult,
    StepTimes,
)
from paceline.core.standing import HOST_LOST, WEIGHTS_DROPPED, Pulse
from paceline.core.stretch import MediaInput
from paceline.models.files.adapter_files import Adapter
from paceline.models.spec import ModelSpec
from paceline.runner.device_rows import (
    DeviceRows,
    Drafts,
    FlatBatch,
    Places,
    count_computed,
    last_entries,
    make_batch,
)
from paceline.runner.drafts import Drafter, FollowingDrafter, Forced, History, NgramDrafter, follow_guides
from paceline.runner.pictures import Pictures
from paceline.runner.pooling import Pooler, States
from paceline.runner.sampling.sampler import Sampler, Settled, Wanted, prompt_logprobs

if TYPE_CHECKING:
    from paceline.runner.stores.store_level import StoreLevel

I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Index = NDArray[np.int64]
Floats = NDArray[np.float32]

LOGITS_AT_ONCE = 64  # of a prompt's tokens: a row of logits is large

_logger = logging.getLogger("paceline")


class KVStore(Protocol):
    """Keys and values in blocks, by layer group."""

    @property
    def block_size(self) -> int: ...
    def clear(self, group: int, slots: Index) -> None: ...
    def wipe(self) -> None: ...
    def copy_blocks(self, group: int, source: Index, target: Index) -> None: ...
    def place(self, group: int, source: Index, target: Index, shift: int) -> None: ...
    def swap_out(self, group: int, blocks: Index, places: Index) -> None: ...
    def swap_in(self, group: int, blocks: Index, places: Index) -> None: ...
    def pack(self, place: int, into: NDArray[np.uint8]) -> None: ...
    def unpack(self, place: int, source: NDArray[np.uint8]) -> None: ...


class StepCompute(Protocol):
    """Computes the tokens of a step; keeps their keys and values."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def kv(self) -> KVStore: ...
    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> Bool:
        """Compute a batch; returns which tokens have finite numbers. `due`: tokens whose logits are wanted next."""
        ...

    def work(self) -> CPUWork:
        """What the threads have done since the start."""
        ...

    def logits(self, tokens: Index) -> Floats:
        """Logits [tokens, vocabulary] of tokens of the last batch; the caller may change them."""
        ...


@runtime_checkable
class SamplingStep(StepCompute, Protocol):
    """A step that draws tokens too, where nothing but the logits decides."""

    def forward_and_draw(
        self, rows: DeviceRows, batch: FlatBatch, due: Index, wanted: Wanted
    ) -> tuple[Bool, Settled]:
        """`forward`, and the next tokens of the rows that `due` belongs to."""
        ...


class CPURunner:
    """Computes plans."""

    def __init__(
        self,
        config: EngineConfig,
        compute: StepCompute,
        eos_token_ids: tuple[int, ...] | None = None,
        pulse: Pulse | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._config = config
        self._compute = compute
        self._sampling_step = compute if isinstance(compute, SamplingStep) else None
        self._pulse = pulse if pulse is not None else Pulse()
        spec = compute.spec
        self._kv = compute.kv
        # Of steps that may see some.
        self._pictures: Pictures | None = getattr(compute, "pictures", None)
        self._rows = DeviceRows(config)
        self._drafter = drafter
        drafts = config.scheduler.drafts
        if drafter is None and drafts is not None:
            self._drafter = NgramDrafter(History() if drafts.method == "history" else None)
        eos = spec.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._sampler = Sampler(len(self._rows.limit), spec.vocab_size, eos)
        self._follower = self._drafter if isinstance(self._drafter, FollowingDrafter) else None
        if self._follower is not None:
            self._follower.attach(self._sampler)
        # Which it is where the config says that vectors are made.
        self._pooler = Pooler(cast(States, compute))
        self._guided: set[int] = set()  # rows whose tokens a guide allows
        self._guides: dict[int, Mapping[int, Guide]] = {}  # of steps under way
        self._broken: set[int] = set()  # rows that could not be set up: they end with their first step
        self._queue: deque[StepPlan] = deque()
        self._done: dict[int, StepResult] = {}
        self._next_seq = 1

    def copy_out_and_back(self, count: int) -> None:
        """Copy `count` blocks to the swap pool and back; only while they are not in use."""
        blocks, places = np.arange(1, count + 1), np.arange(count)
        self._kv.swap_out(0, blocks, places)
        self._kv.swap_in(0, blocks, places)

    def work(self) -> CPUWork:
        own = self._compute.work()
        return own if self._pictures is None else own.plus(self._pictures.work())

    @property
    def compute(self) -> StepCompute:
        return self._compute

    def close(self) -> None:
        """End the threads that compute, where they are the step's own."""
        close = getattr(self._compute, "close", None)
        if close is not None:
            close()
        if self._pictures is not None:
            self._pictures.close()

    # -- the runner seam -----------------------------------------------------------------------------------

    def hold(self, media: int, given: MediaInput) -> None:
        assert self._pictures is not None, "this model sees no pictures"
        self._pictures.hold(media, given)

    def drop(self, media: int) -> None:
        assert self._pictures is not None, "this model sees no pictures"
        self._pictures.drop(media)

    def reset(self, full: StepPlan) -> None:
        # A plan without rows follows a failed step: what that left on the device may be anything.
        if not len(full.joins.row):
            self._kv.wipe()
            if self._pictures is not None:
                self._pictures.clear()
        self._queue.clear()
        self._guides.clear()
        self._done.clear()
        self._next_seq = full.seq + 1
        self._rows = DeviceRows(self._config)
        self._pooler.clear()
        self._apply(full)

    def submit(self, plan: StepPlan) -> CPUPending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        self._next_seq += 1
        self._queue.append(plan)
        return CPUPending(self, plan.seq)

    def supply(self, seq: int, guides: Mapping[int, Guide]) -> None:
        self._guides[seq] = guides

    def finish_until(self, seq: int) -> StepResult:
        while self._queue and self._queue[0].seq <= seq:
            plan = self._queue.popleft()
            self._pulse.beat()
            self._done[plan.seq] = self._execute(plan)
        return self._done.pop(seq)

    # -- one step ------------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        started_s = time.perf_counter()
        self._apply(plan)
        tickets = self._move_blocks(plan)
        seen = self._pictures
        bad_encodings = EMPTY if seen is None or not plan.encodes.count else seen.compute(plan.encodes)
        rows = self._rows
        guides = self._guides.pop(plan.seq, {})
        drafts, forced = self._drafts(plan, guides)
        batch = make_batch(rows, plan, self._kv.block_size, drafts)
        at = batch.rows
        verified = None if drafts is None else _by_row(drafts.number, len(at))
        due = self._due(batch)
        places = Places.of(batch, due, verified)
        good, settled = self._forward(batch, places)
        finite = self._finite_rows(batch, good, verified)
        masks, mask_s = self._masks(batch, places, guides) if self._guided else (None, 0.0)
        drawn = self._sample(batch, places, finite, good, settled, plan.draft_width, masks)
        logprobs = self._prompt_logprobs(batch, finite) + drawn.logprobs
        vectors = self._pooler.take(rows, batch, finite) if self._pooler else ()
        count_computed(rows, batch, plan.placements)
        if verified is not None:  # of drafts, those that were right
            rows.computed[at] -= np.where(batch.masked, 0, verified - np.maximum(drawn.count - 1, 0))
        tally = None
        if self._drafter is not None and len(due):
            guessed = verified
            if verified is not None and forced is not None:  # what had to come says nothing of guesses
                guessed = verified.copy()
                guessed[: len(forced.rows)][forced.rows] = 0
            self._drafter.observe(rows, at[due], drawn.count[due], None if guessed is None else guessed[due])
            tally = self._drafter.take_tally()
        if self._follower is not None and len(at):
            self._follower.follow(rows, batch)
        predicted = _predicted(drafts, len(at))
        once = last_entries(at, finite) if len(plan.spans.start) else slice(None)
        return StepResult(
            seq=plan.seq,
            rows=at[once].astype(np.int32),
            generation=rows.generation[at[once]],
            tokens=drawn.tokens[once],
            count=drawn.count[once],
            finished=drawn.finished[once],
            finite=finite[once],
            copies_done=tickets,
            logprobs=logprobs,
            times=StepTimes(start_s=started_s, end_s=time.perf_counter()),
            verified=EMPTY if verified is None else verified[once].astype(np.int32),
            predicted=predicted[once] if len(predicted) else predicted,
            drafts=tally,
            guided=_guide_work(len(masks), mask_s, drawn.count, forced) if masks else None,
            vectors=vectors,
            bad_encodings=bad_encodings,
        )

    def _drafts(self, plan: StepPlan, guides: Mapping[int, Guide]) -> tuple[Drafts | None, Forced | None]:
        """Guessed tokens of the decoding rows, and how many of each; then what guides are certain of."""
        if self._drafter is None:
            return None, None
        at = np.flatnonzero(self._rows.decoding)
        drafts = self._drafter.propose(self._rows, plan, at)
        if not guides:
            return drafts, None
        return follow_guides(guides, self._rows, plan, at, drafts)

    def _masks(
        self, batch: FlatBatch, places: Places, guides: Mapping[int, Guide]
    ) -> tuple[dict[int, Mask | None], float]:
        """What the guides of rows that get a token allow there and behind their drafts, by place, and the seconds
        it took."""
        started_s = time.perf_counter()
        rows, masks = self._rows, {}
        for first in places.firsts.tolist():
            row = int(batch.rows[places.row[first]])
            if row not in self._guided:
                continue
            count = 0
            while places.has_next is not None and places.has_next[first + count]:
                count += 1
            start = int(rows.num_tokens[row])
            drafts = rows.tokens[row, start : start + count].tolist()
            for place, mask in enumerate(masks_along(guides[row], drafts), first):
                masks[place] = mask
        return masks, time.perf_counter() - started_s

    def _apply(self, plan: StepPlan) -> None:
        if self._drafter is not None:
            for row in plan.leaves.tolist():
                self._drafter.leave(self._rows, row)
        if self._pooler:
            for row in plan.leaves.tolist():
                self._pooler.leave(row)
        self._rows.apply(plan)
        for row, sampling in zip(plan.joins.row.tolist(), plan.joins.sampling, strict=True):
            known = self._rows.tokens[row, : self._rows.num_tokens[row]].astype(np.int32)
            self._broken.discard(row)
            self._guided.discard(row)
            if sampling.structured_outputs is not None:
                self._guided.add(row)
            if self._drafter is not None:
                assert not isinstance(sampling.prediction, str)
                self._drafter.join(self._rows, row, sampling.prediction)
            if self._pooler or sampling.pooling is not None:
                self._pooler.join(row, sampling.pooling)
                if sampling.pooling is not None:  # no token of it is ever drawn
                    self._rows.second_at[row] = sampling.pooling.second_at
                    continue
            try:
                self._sampler.join(row, sampling, known, int(self._rows.num_prompt[row]))
            except Exception:
                _logger.exception("row %d cannot be set up", row)
                self._broken.add(row)
        if self._follower is not None:
            copies = plan.row_copies
            for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
                self._follower.fork(source, target)

    def _move_blocks(self, plan: StepPlan) -> I32:
        """Swap-outs, copies, placements and swap-ins, in this order; returns the tickets of the swaps."""
        kv, copies = self._kv, plan.block_copies
        out, back = plan.swap_out, plan.swap_in
        _by_group(kv.swap_out, out.group, out.block, out.place)
        if len(copies.row):
            _by_group(kv.copy_blocks, copies.group, copies.source, copies.target)
            self._rows.set_blocks(copies, copies.target)  # copy-on-write
        if len(plan.placements.row):
            for group, source, target, shift in self._rows.place(plan.placements, kv.block_size):
                kv.place(group, source, target, shift)
        _by_group(kv.swap_in, back.group, back.block, back.place)
        if not (len(out.ticket) or len(back.ticket)):
            return EMPTY
        return np.unique(np.concatenate([out.ticket, back.ticket]))

    def _forward(self, batch: FlatBatch, places: Places) -> tuple[Bool, Settled | None]:
        """Compute the batch; which tokens have finite numbers, and what was drawn with it."""
        if not len(batch.tokens):  # only blocks were moved
            return np.ones(0, np.bool_), None
        rows = self._rows
        if self._sampling_step is None or not len(places.token):
            return self._compute.forward(rows, batch, places.token), None
        sampled = batch.rows[places.row]
        wanted = self._sampler.wanted(sampled, rows.num_tokens[sampled] + places.depth)
        return self._sampling_step.forward_and_draw(rows, batch, places.token, wanted)

    def _due(self, batch: FlatBatch) -> Index:
        """Which rows of the batch have computed all they know: they get a token."""
        rows, at = self._rows, batch.rows
        is_due = (batch.start + batch.count >= rows.num_tokens[at]) & ~batch.masked
        if self._broken:
            is_due &= ~np.isin(at, list(self._broken))
        if self._pooler:
            is_due = self._pooler.without_pooled(at, is_due)
        return np.flatnonzero(is_due)

    def _finite_rows(self, batch: FlatBatch, good: Bool, verified: Index | None) -> Bool:
        """Which rows have usable numbers; what the others stored is wiped at once. A draft is not counted: it ends
        where its numbers do."""
        finite = np.ones(len(batch.rows), np.bool_)
        if self._broken:
            finite[np.isin(batch.rows, list(self._broken))] = False
        if good.all():
            return finite | batch.masked
        if verified is not None:
            last = batch.last
            is_draft = np.zeros(len(good), np.bool_)
            owner = batch.row_of[: int(batch.count.sum())]
            is_draft[: len(owner)] = np.arange(len(owner)) > (last - verified)[owner]
            for group, slots in enumerate(batch.slots):
                self._kv.clear(group, slots[~good & is_draft & (slots >= 0)])
            good = good | is_draft
        bad_rows = np.unique(batch.row_of[~good])
        bad = np.isin(batch.row_of, bad_rows[bad_rows < len(batch.rows)])
        for group, slots in enumerate(batch.slots):
            self._kv.clear(group, slots[bad & (slots >= 0)])
        finite[bad_rows[bad_rows < len(batch.rows)]] = False
        return finite | batch.masked

    def _sample(
        self,
        batch: FlatBatch,
        places: Places,
        finite: Bool,
        good: Bool,
        settled: Settled | None,
        width: int,
        masks: dict[int, Mask | None] | None,
    ) -> _Drawn:
        """Draw a token for every row that is due, and write it into the row; where it is the row's first draft, draw
        the next, and so on."""
        rows, at = self._rows, batch.rows
        drawn = _Drawn.none(len(at), width)
        if not len(places.token):
            return drawn
        logits, drafts = self._compute.logits(places.token), places.has_next
        here = places.firsts  # that are drawn now, a row each
        while len(here):
            row = places.row[here]
            sampled = at[row]
            position = rows.num_tokens[sampled]
            own = None if settled is None else settled.of(here)
            one = self._sampler.sample(logits, sampled, position, own, here, masks)
            known = (one.tokens >= 0) & (one.tokens < self._compute.spec.vocab_size)
            finite[row] &= one.finite & known  # an unknown token must not reach the next step, or a client
            token = np.where(known, one.tokens, 0)
            is_guessed = None if drafts is None else token == rows.tokens[sampled, position]
            rows.tokens[sampled, position] = token
            rows.num_tokens[sampled] = position + 1
            drawn.tokens[row, drawn.count[row]] = token
            drawn.count[row] += 1
            at_length = position + 1 >= rows.limit[sampled]
            drawn.finished[row] = np.where(one.stopped, STOPPED, np.where(at_length, AT_LENGTH, RUNNING_ON))
            rows.ended[sampled] = ended = one.stopped | at_length
            drawn.logprobs += one.logprobs
            if is_guessed is None or drafts is None:
                break
            here = here[is_guessed & finite[row] & ~ended & drafts[here]] + 1
            here = here[good[places.token[here]]]
            if masks:  # a guide that fails behind a draft fails again at its own place, where that is known
                allowed = [masks.get(place) for place in here.tolist()]
                here = here[[mask is None or bool(mask.any()) for mask in allowed]]
        return drawn

    def _prompt_logprobs(self, batch: FlatBatch, finite: Bool) -> tuple[RowLogprobs, ...]:
        """How likely each prompt token was, for the few rows that want to know."""
        rows = self._rows
        found: list[RowLogprobs] = []
        wanted = (rows.prompt_logprobs[batch.rows] > -2) & ~batch.masked
        for index in np.flatnonzero(wanted).tolist():
            row, start = int(batch.rows[index]), int(batch.start[index])
            end = min(start + int(batch.count[index]), int(rows.num_prompt[row]) - 1)
            if start >= end:
                continue
            first = int(batch.last[index]) + 1 - int(batch.count[index])
            positions = np.arange(start + 1, end + 1)
            targets = rows.tokens[row, positions]
            try:
                for part in range(0, end - start, LOGITS_AT_ONCE):
                    here = slice(part, min(part + LOGITS_AT_ONCE, end - start))
                    logits = self._compute.logits(np.arange(first + here.start, first + here.stop))
                    top = int(rows.prompt_logprobs[row])
                    found += prompt_logprobs(logits, targets[here], positions[here], row, top)
            except Exception:
                _logger.exception("no logprobs for the prompt of row %d", row)
                finite[index] = False
        return tuple(found)


@dataclass(slots=True, eq=False)
class _Drawn:
    """What the rows of a batch got."""

    tokens: I32
    count: I32
    finished: NDArray[np.uint8]
    logprobs: tuple[RowLogprobs, ...] = ()

    @classmethod
    def none(cls, num_rows: int, width: int) -> _Drawn:
        return cls(
            np.zeros((num_rows, width + 1), np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, RUNNING_ON, np.uint8),
        )


def _by_row(of_decoding: Index, num_rows: int) -> Index:
    """A column over all rows of a batch, of which the decoding ones come first."""
    column: Index = np.zeros(num_rows, np.int64)
    column[: len(of_decoding)] = of_decoding
    return column


def _predicted(drafts: Drafts | None, num_rows: int) -> I32:
    if drafts is None or drafts.predicted is None:
        return EMPTY
    return _by_row(drafts.predicted, num_rows).astype(np.int32)


def _guide_work(masks: int, seconds: float, count: I32, forced: Forced | None) -> GuideWork:
    taken, certain = (0, 0) if forced is None else (forced.taken(count), forced.certain)
    return GuideWork(masks, seconds, taken, seconds, certain)


def _by_group(move: Callable[[int, Index, Index], None], groups: I32, first: I32, second: I32) -> None:
    for group in np.unique(groups).tolist():
        mine = groups == group
        move(group, first[mine].astype(np.int64), second[mine].astype(np.int64))


class CPUPending:
    """A submitted step; computed when it is waited for."""

    def __init__(self, runner: CPURunner, seq: int) -> None:
        self._runner = runner
        self._seq = seq

    def supply(self, guides: Mapping[int, Guide]) -> None:
        self._runner.supply(self._seq, guides)

    def wait(self) -> StepResult:
        return self._runner.finish_until(self._seq)


# The runner of a model on a CPU over its sleeps: dropped with its KV, made again when the model wakes.
#
# At the first level the weights stay where they are: on a CPU, host memory is the device. Their file is not read again,
# and a wake takes milliseconds. At the second level the weights go too, and a wake reads the file as the start did.


Weights = TypeVar("Weights")


class CPUSleeper(Generic[Weights]):
    """`load` reads the weights, `make` puts a runner around them. A disk stays open, with what it holds."""

    on_gpu, levels_lost = False, HOST_LOST

    def __init__(
        self,
        load: Callable[[], Weights],
        make: Callable[[Weights], Any],
        first: Weights,
        disk: StoreLevel | None = None,
    ) -> None:
        self._load = load
        self._make = make
        self._disk = disk
        self._weights: Weights | None = first
        self._runner: Any = None  # a CPURunner, or the lead of several
        self._last = CPUWork()

    def open(self) -> Runner:
        weights = self._weights
        if weights is None:
            weights = self._weights = self._load()
        runner: Any = self._make(weights)
        self._runner = runner
        return runner if self._disk is None else self._disk.start(runner, runner.compute.kv)

    def copy_out_and_back(self, count: int) -> None:
        self._runner.copy_out_and_back(count)

    def make_step(self, config: EngineConfig) -> StepCompute:
        """One more, with the same weights, for what is tried out."""
        weights: Any = self._weights
        return weights.make_step(config)  # type: ignore[no-any-return]

    def let_go(self, level: int) -> None:
        if self._runner is not None:
            self._last = self._runner.work()
            if self._disk is not None:
                self._disk.pause()
            self._runner.close()
            self._runner = None
        if level >= WEIGHTS_DROPPED:
            self.close()
            self._weights = None
            gc.collect()
            with suppress(AttributeError):  # of glibc: what reading weights took goes back to the system
                ctypes.CDLL(None).malloc_trim(0)

    def close(self) -> None:  # other ranks end
        getattr(self._weights, "close", lambda: None)()

    # As the memory of adapters, whichever runner there is. A model that sleeps has none of them.

    def put(self, number: int, adapter: Adapter) -> None:
        self._adapters.put(number, adapter)

    def drop(self, number: int) -> None:
        self._adapters.drop(number)

    def prepare(self, adapter: Adapter) -> Adapter:
        return getattr(self._adapters, "prepare", lambda same: same)(adapter)  # type: ignore[no-any-return]

    @property
    def _adapters(self) -> Any:
        return getattr(None if self._runner is None else self._runner.compute, "adapters", None)

    def work(self) -> CPUWork:
        """What the threads have done; of a model that sleeps, before it did."""
        runner = self._runner
        return self._last if runner is None else runner.work()
