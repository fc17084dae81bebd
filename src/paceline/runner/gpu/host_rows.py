"""The host's side of the rows: applies plans to the row memory and knows what a step's batch consists of.

It knows of every row what the host can know without asking the device: its generation, how far its known tokens are
computed, which token a step will draw for it. It never reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig
from paceline.core.plan import RowJoins, StepPlan
from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.shared_attention import MAX_GROUPS
from paceline.runner.gpu.row_memory import RowMemory

# Computing shared beginnings apart costs two more kernels a layer: together they must spare enough reading.
SHORTEST_SHARED = 256  # tokens
LEAST_SPARED = 16_384  # tokens that all groups need not read again
_DEEPEST = 16  # how often a group is divided into smaller ones with longer beginnings

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBatch:
    """The rows of one step: those that decode, in slots of the batch, then spans."""

    decode: I64
    spans: I64  # rows
    start: I64  # place of each span's first token in its row's tables
    count: I64
    finishing: I64  # numbers of the spans that end with a token drawn
    generation: I32  # of all rows, decoding ones first
    num_pad: int
    has_lent: bool = False  # rows that decode in this step alone: there are no places for drafts of theirs

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + int(self.count.sum()) + self.num_pad

    @property
    def sampled(self) -> I64:
        """Rows that get a token, in the order of the draw."""
        return np.concatenate([self.decode, self.spans[self.finishing]])


class HostRows:
    """What the host knows of the rows on the device."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.memory = RowMemory(config, device)
        self.lends = True  # whether rows with a single token to compute may decode
        # Layers that see a window have no beginning that stays.
        self.can_share = len(config.kv.groups) == 1 and config.kv.groups[0].window is None
        num_rows = self.memory.num_rows + 1  # the dummy is the last
        self.generation: I32 = np.zeros(num_rows, np.int32)
        self.num_prompt: I64 = np.zeros(num_rows, np.int64)
        # As of the last step submitted, if no row stopped.
        self.num_tokens: I64 = np.zeros(num_rows, np.int64)
        self.computed: I64 = np.zeros(num_rows, np.int64)  # of known tokens
        self.dropped: I64 = np.zeros(num_rows, np.int64)  # tokens that tables have no entries for
        self.decoding: Bool = np.zeros(num_rows, np.bool_)
        self.prompt_logprobs: I64 = np.full(num_rows, -2, np.int64)
        self.pooled: Bool = np.zeros(num_rows, np.bool_)  # no token of it is ever drawn
        # By row that sees pictures: where each begins and ends, and its number.
        self.media: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.decode: I64 = np.zeros(0, np.int64)
        self._lent: I64 = np.zeros(0, np.int64)  # rows that decode in the last step alone
        self.sharing: list[SharingRows] = []  # decoding rows that share a beginning; the first slots

    def clear(self) -> None:
        """All rows are empty, and none decodes on the device."""
        self.memory.forget_changes()
        self.media.clear()
        self.decoding[:] = False
        self._lent = self._lent[:0]
        self._renew_slots()

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins, row copies, block appends and copied blocks of a plan."""
        change, joins = plan.decode_rows, plan.joins
        if self.media:
            for row in plan.leaves.tolist():
                self.media.pop(row, None)
        if len(joins.row):
            self._join(joins)
            self._copy_tokens(plan)
        if len(plan.drops.row):
            at = plan.drops.row.astype(np.int64)
            self.dropped[at] = plan.drops.num_tokens
            self.memory.put("dropped", at, plan.drops.num_tokens)
        for columns, blocks in (
            (plan.new_blocks, plan.new_blocks.block),
            (plan.block_copies, plan.block_copies.target),
        ):
            if len(columns.row):
                self._set_blocks(columns.row, columns.group, columns.index, blocks)
        others = len(plan.leaves) or len(joins.row) or len(change.added) or len(change.removed)
        lent = self._only_decoding(plan)
        if others or len(plan.drops.row) or len(self._lent) or len(lent):
            self.decoding[self._lent] = False
            self.decoding[plan.leaves] = False
            self.decoding[joins.row] = False
            self.decoding[change.removed] = False
            self.decoding[change.added] = True
            self.decoding[lent] = True
            self._lent = lent
            self._renew_slots()  # of rows whose blocks are known; one that drops some has them in common with no other

    def _only_decoding(self, plan: StepPlan) -> I64:
        """Rows with a span, if all of these are one token each, behind which one is drawn: as of a branch that shares
        all but what was put behind it. They decode for this step, which then needs no other kernels than any."""
        spans = plan.spans.row.astype(np.int64)
        is_last = self.computed[spans] + 1 == self.num_tokens[spans]
        is_plain = (plan.spans.num_scheduled == 1) & is_last & (self.prompt_logprobs[spans] < -1)
        is_plain &= ~self.pooled[spans]
        if self.media:  # a last token that stands for a picture is none of the vocabulary
            is_plain &= np.array([not self._ends_in_picture(row) for row in spans.tolist()], np.bool_)
        return spans if self.lends and not plan.pad_tokens and is_plain.all() else spans[:0]

    def _ends_in_picture(self, row: int) -> bool:
        items = self.media.get(row)
        return items is not None and items[-1][1] >= self.num_tokens[row]

    def batch(self, plan: StepPlan) -> DeviceBatch:
        """The rows of the step of a plan that has been applied; counters are those after it."""
        spans = plan.spans.row.astype(np.int64)
        count = plan.spans.num_scheduled.astype(np.int64)
        if len(self._lent):
            self.computed[spans] += count
            spans, count = spans[:0], count[:0]
        start = self.computed[spans]
        self.computed[spans] += count
        is_whole = self.computed[spans] == self.num_tokens[spans]
        finishing = np.flatnonzero(is_whole & ~self.pooled[spans])
        self.num_tokens[self.decode] += 1
        self.num_tokens[spans[finishing]] += 1
        rows = np.concatenate([self.decode, spans]) if len(spans) else self.decode
        return DeviceBatch(
            decode=self.decode,
            spans=spans,
            start=start - self.dropped[spans],
            count=count,
            finishing=finishing,
            generation=self.generation[rows],
            num_pad=plan.pad_tokens,
            has_lent=bool(len(self._lent)),
        )

    def dummy_batch(
        self, number: int, count: int, *, start: int = 0, num_decode: int | None = None
    ) -> DeviceBatch:
        """A batch that changes nothing: `number` spans of `count` tokens from `start` on, and decoding rows, half as
        many unless it is said."""
        dummy = self.memory.dummy_row
        return DeviceBatch(
            decode=np.full(number // 2 if num_decode is None else num_decode, dummy),
            spans=np.full(number, dummy),
            start=np.full(number, start, np.int64),
            count=np.full(number, count),
            finishing=np.arange(number - number // 2),
            generation=np.zeros(number, np.int32),
            num_pad=0,
        )

    def put_batch(self, batch: DeviceBatch, most_spans: int, num_draws: int) -> None:
        """Write the spans of a step, and which rows get a token.

        Places up to `most_spans` that the step does not use become empty; draws up to `num_draws` without a row are
        made from the first token.
        """
        memory, slots, number = self.memory, len(batch.decode), len(batch.spans)
        at = slice(0, number)
        first = slots + np.cumsum(batch.count) - batch.count
        columns = {"row": batch.spans, "first": first, "count": batch.count, "position": batch.start}
        for name, values in columns.items():
            memory.put(f"span_{name}", at, values)
        unused = memory["span_count"].host[number:most_spans, 0]
        if unused.any():
            memory.put("span_count", slice(number, number + len(unused)), np.zeros(len(unused), np.int32))
        last = (first + batch.count - 1)[batch.finishing]
        draws = ((batch.sampled, memory.dummy_row), (np.concatenate([np.arange(slots), last]), 0))
        for name, (values, nothing) in zip(("sample_rows", "sample_tokens"), draws, strict=True):
            spare = np.full(num_draws - len(values), nothing)
            memory.put(name, slice(0, num_draws), np.concatenate([values, spare]))

    # -- changes -------------------------------------------------------------------------------------------

    def _join(self, joins: RowJoins) -> None:
        at, memory = joins.row.astype(np.int64), self.memory
        self.generation[at] = joins.generation
        self.num_prompt[at] = joins.num_prompt
        self.num_tokens[at] = joins.num_tokens
        self.computed[at] = joins.num_computed
        memory.put("length", at, joins.num_tokens)
        memory.put("max_length", at, joins.limit)
        memory.put("active", at, np.ones(len(at), np.int32))
        self.dropped[at] = 0
        memory.put("dropped", at, np.zeros(len(at), np.int32))
        for index, (row, params) in enumerate(zip(at.tolist(), joins.sampling, strict=True)):
            wanted = params.prompt_logprobs
            self.prompt_logprobs[row] = -2 if wanted is None else wanted
            self.pooled[row] = params.pooling is not None
            memory.put_tokens(row, joins.tokens[index])
            self.media.pop(row, None)
            if joins.media and joins.media[index]:
                self.media[row] = joins.media[index]

    def _copy_tokens(self, plan: StepPlan) -> None:
        """A branch has its parent's tokens, some of which only the device may know."""
        copies, tokens = plan.row_copies, self.memory["tokens"].device
        if not len(copies.source):
            return
        self.memory.send()  # the parent may have joined in this very plan
        columns = (copies.source.tolist(), copies.target.tolist(), copies.num_tokens.tolist())
        for source, target, count in zip(*columns, strict=True):
            tokens[target, :count] = tokens[source, :count]

    def _set_blocks(self, rows: I32, groups: I32, index: I32, blocks: I32) -> None:
        for group in range(len(self.memory.tables)):
            mine = groups == group if len(self.memory.tables) > 1 else slice(None)
            at, entry = rows[mine].astype(np.int64), index[mine].astype(np.int64)
            section = self.memory[f"table{group}"]
            section.host[at, entry] = blocks[mine]
            self.memory.touch(section.start + at * section.width + entry)

    def _renew_slots(self) -> None:
        """The slots of the batch follow the rows that decode, in order; slots without a row point to the dummy row."""
        rows = np.flatnonzero(self.decoding)
        self.sharing = self._find_sharing(rows)
        self._send_sharing()
        if self.sharing:
            together = np.concatenate([group.rows for group in self.sharing])
            rows = np.concatenate([together, np.setdiff1d(rows, together)])
        self.decode = rows
        section = self.memory["slot_rows"].host[:, 0]
        slots = np.full(len(section), self.memory.dummy_row, np.int32)
        slots[: len(self.decode)] = self.decode
        changed = np.flatnonzero(slots != section)
        if len(changed):
            self.memory.put("slot_rows", changed, slots[changed])

    # -- shared beginnings -------------------------------------------------------------------------------------

    def _find_sharing(self, rows: I64) -> list[SharingRows]:
        """Groups of `rows` whose first blocks are the same: those that spare most, if they spare enough."""
        if not self.can_share or not len(rows):
            return []
        table = self.memory["table0"].host
        # Whole blocks that a row has computed: what follows is its own.
        whole = (self.num_tokens[rows] - self.dropped[rows] - 1) // BLOCK_SIZE
        blocks, which, counts = np.unique(table[rows, 0], return_inverse=True, return_counts=True)
        may_share = (whole * BLOCK_SIZE >= SHORTEST_SHARED) & ((counts > 1) & (blocks != 0))[which]
        rows, whole = rows[may_share], whole[may_share]
        if len(rows) < 2:
            return []
        found = best_groups(table[rows, : whole.max()], whole)
        found = sorted(found, key=lambda group: -group.spared)[:MAX_GROUPS]
        if sum(group.spared for group in found) < LEAST_SPARED:
            return []
        return [SharingRows(rows[group.rows], group.length) for group in found]

    def _send_sharing(self) -> None:
        memory, groups = self.memory, self.sharing
        column = memory["shared"].host[:, 0]
        wanted = np.zeros_like(column)
        for group in groups:
            wanted[group.rows] = group.length
        changed = np.flatnonzero(column != wanted)
        if len(changed):
            memory.put("shared", changed, wanted[changed])
        counts = np.array([len(group.rows) for group in groups], np.int64)
        entries = np.zeros((4, MAX_GROUPS), np.int32)
        entries[0, : len(groups)] = [group.rows[0] for group in groups]
        entries[1, : len(groups)] = np.cumsum(counts) - counts
        entries[2, : len(groups)] = counts
        entries[3, : len(groups)] = [group.length for group in groups]
        for name, new in zip(("row", "first", "count", "length"), entries, strict=True):
            changed = np.flatnonzero(memory[f"shared_{name}"].host[:, 0] != new)
            if len(changed):
                memory.put(f"shared_{name}", changed, new[changed])


@dataclass(frozen=True, slots=True, eq=False)
class SharingRows:
    """Rows with the same beginning, and how many tokens that has."""

    rows: I64
    length: int

    @property
    def spared(self) -> int:
        """Tokens that need not be read again."""
        return (len(self.rows) - 1) * self.length


def best_groups(table: I32, whole: I64) -> list[SharingRows]:
    """Which rows of `table` [rows, blocks] are best computed together, `whole` of whose blocks can be shared.

    In order of their blocks, rows with the same beginning stand side by side, so that what neighbours have in common
    tells all there is to know. A row is in one group at most.
    """
    start = min(int(whole.min()), _first((table != table[0]).any(axis=0)))
    following = table[whole > start, start : start + 1]
    if start and len(np.unique(following)) == len(
        following
    ):  # as a rule: one beginning, then rows of their own
        length = BLOCK_SIZE * start
        return [SharingRows(np.arange(len(table)), length)] if length >= SHORTEST_SHARED else []
    stored, width = table.tobytes(), table.shape[1] * table.itemsize
    ends = (whole * table.itemsize).tolist()
    keys = [stored[number * width : number * width + end] for number, end in enumerate(ends)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    table, whole = table[order], whole[order]
    differs = np.pad(table[:-1] != table[1:], ((0, 0), (0, 1)), constant_values=True)
    common = np.minimum(differs.argmax(axis=1), np.minimum(whole[:-1], whole[1:]))
    found = _divided((common * BLOCK_SIZE).tolist(), 0, len(order) - 1, 0)
    return [SharingRows(np.array([order[place] for place in places]), length) for places, length in found]


def _first(flags: Bool) -> int:
    """The place of the first that is set, or their number."""
    return int(flags.argmax()) if flags.any() else len(flags)


_Group = tuple[list[int], int]  # places in order, and tokens in common


def _divided(common: list[int], first: int, last: int, depth: int) -> list[_Group]:
    """How to share the beginnings of the rows at `first` to `last`: together, or some in smaller groups that have more
    in common. `common`: tokens that the row at each place and the next have in common."""
    if first == last:
        return []
    least = min(common[first:last])
    length = least if least >= SHORTEST_SHARED else 0
    everything = list(range(first, last + 1))
    together = _with_rest([], everything, length)
    if depth == _DEEPEST:
        return together
    cuts = [first - 1, *(place for place in range(first, last) if common[place] == least), last]
    smaller = [
        group
        for before, end in pairwise(cuts)
        if end > before + 1
        for group in _divided(common, before + 1, end, depth + 1)
    ]
    if not smaller:
        return together
    worth_it = [(places, own) for places, own in smaller if (len(places) - 1) * own > len(places) * length]
    ways = (together, _with_rest(worth_it, everything, length), _with_rest(smaller, everything, length))
    return max(ways, key=lambda groups: sum((len(places) - 1) * own for places, own in groups))


def _with_rest(groups: list[_Group], places: list[int], length: int) -> list[_Group]:
    """These groups, and one of the places in none of them, if that has a beginning."""
    if not length:
        return groups
    grouped = {place for members, _ in groups for place in members}
    rest = [place for place in places if place not in grouped]
    return [*groups, (rest, length)] if len(rest) > 1 else groups
