"""Sampling on the device: sampling parameters as columns of the rows, logit rules for the rows that need them.

A row is plain (temperature, seed, stop ids), has logit rules (top-k, top-p, min-p, penalties, bias, bans), or is the
host's: it needs logprobs of its prompt or of the whole vocabulary, bad words of several ids, or more than the device
has room for. Host rows are sampled by the reference sampler, and the device gets the tokens. Log-probabilities of other
rows are made on the device behind the draw (`kernels/token_logprobs.py`) and read with the step's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.guide import Guide, Mask
from paceline.core.plan import GuideWork, RowJoins, RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.forward import DeviceDecoder
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.gumbel_sampling import (
    Candidates,
    SamplingColumns,
    allocate_candidates,
    sample,
)
from paceline.runner.gpu.kernels.logit_rules import (
    EVERYTHING,
    LIST_ENTRIES,
    NO_PLACE,
    KnownTokens,
    RuleColumns,
    allocate_rule_pool,
    apply_rules,
    fill_seen,
    mask_logits,
    note_drawn,
)
from paceline.runner.gpu.kernels.step_rows import (
    FORCED_STOP,
    MAX_STOP_IDS,
    NOT_FINITE,
    DrawnTokens,
    update_rows,
)
from paceline.runner.gpu.kernels.token_logprobs import (
    MOST_LOGPROBS,
    REPORT_WIDTH,
    LogprobColumns,
    allocate_logprob_parts,
    token_logprobs,
)
from paceline.runner.gpu.kernels.truncation import (
    MAX_VOCABULARY,
    TruncationColumns,
    allocate_floor_search,
    truncate,
)
from paceline.runner.gpu.kernels.verify import DrawnBehind
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.sampling.noise import key_of
from paceline.runner.sampling.processors import always_needs_rules, uses_penalties
from paceline.runner.sampling.sampler import ALL, Sampler, prompt_logprobs
from paceline.text.guide.matcher import GuideBatch

I32 = NDArray[np.int32]
NOT_ASKED = -1  # 0 asks for the drawn token alone
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
PLACES = 64  # rows with rules at a time; further ones are the host's
_MANY = 64  # rows from which candidates are looked for in large tiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MaskedRows:
    """The guides of rows that are drawn in a step, and in those behind it as long as both stay the same."""

    rows: I64
    guides: Mapping[int, Guide]
    batch: GuideBatch  # of rows that the device draws
    count: int
    of_hosts: Mapping[int, Guide]  # by place among the rows that the host draws


class DeviceSampler:
    """Columns, pools and buffers of sampling."""

    def __init__(
        self,
        memory: RowMemory,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        queue: DeviceQueue,
        max_draws: int,
    ) -> None:
        device = queue.device
        self._memory, self._device, self._vocab_size = memory, device, vocab_size
        self._queue, self._copies = queue, DeviceQueue(device)
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self.host = Sampler(memory.num_rows, vocab_size, eos_token_ids)
        self.is_host: Bool = np.zeros(memory.num_rows + 1, np.bool_)
        self.has_logit_rules: Bool = np.zeros(memory.num_rows + 1, np.bool_)
        self.is_guided: Bool = np.zeros(memory.num_rows + 1, np.bool_)
        self._guided: set[int] = set()  # the same rows
        self.guided: GuideWork | None = None  # of the last step with guides
        self.masked = Mark(None)  # behind the masks of that step
        self._masked: _MaskedRows | None = None
        self.logprobs = LogprobReports(memory, vocab_size, device)
        words = (vocab_size + 31) // 32
        # Filled for a step when the step before is done, and so is its copy to the device, and what read that there.
        self._masks = torch.zeros(
            memory.max_slots, words, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._mask_of = torch.full(
            (memory.max_slots,), -1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device_masks = torch.zeros(memory.max_slots, words, dtype=torch.int32, device=device)
        self._device_mask_of = torch.full((memory.max_slots,), -1, dtype=torch.int32, device=device)
        self._pool = allocate_rule_pool(PLACES, vocab_size, device)
        self._free = list(range(PLACES))
        self._places: dict[int, int] = {}  # by row
        self._search = allocate_floor_search(max_draws, device)
        self._chosen = torch.zeros(max_draws, dtype=torch.int32, device=device)
        self._finite = torch.zeros(max_draws, dtype=torch.uint8, device=device)
        self.drawn = torch.zeros(2, memory.max_slots, dtype=torch.int32, device=device)
        self._candidates: dict[bool, Candidates] = {
            True: allocate_candidates(max_draws, vocab_size, device, turns=8),
            False: allocate_candidates(_MANY - 1, vocab_size, device, turns=2),
        }

    # -- rows come and go ------------------------------------------------------------------------------------

    def leave(self, rows: list[int]) -> None:
        for row in rows:
            self._guided.discard(row)
            self.logprobs.leave(row)
            place = self._places.pop(row, None)
            if place is not None:
                self._free.append(place)

    def write_columns(self, joins: RowJoins) -> None:
        """Before the row memory is sent: write every sampling column of the rows that join."""
        at = joins.row.astype(np.int64)
        self.leave(at.tolist())
        stops = np.full((len(at), MAX_STOP_IDS), -1, np.int32)
        cuts = np.zeros((len(at), 3))
        counts = np.zeros(len(at), np.int64)  # of likeliest tokens
        for index, (row, params) in enumerate(zip(at.tolist(), joins.sampling, strict=True)):
            ends = params.stop_token_ids + (() if params.ignore_eos else self._eos)
            truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
            has_rules = always_needs_rules(params) or params.min_tokens > 0
            is_host = self._is_for_host(params, len(ends), truncates, has_rules)
            self.is_host[row] = is_host
            self.is_guided[row] = params.structured_outputs is not None
            if self.is_guided[row]:
                self._guided.add(row)
            self.has_logit_rules[row] = not is_host and (truncates or has_rules)
            counts[index] = NOT_ASKED if is_host or params.logprobs is None else params.logprobs
            stops[index, : len(ends[:MAX_STOP_IDS])] = ends[:MAX_STOP_IDS]
            cuts[index] = (0, 1, 0) if is_host else (max(params.top_k, 0), params.top_p, params.min_p)
            if has_rules and not is_host:
                self._write_rules(row, params, int(joins.num_prompt[index]))
        memory = self._memory
        memory.put("stop_ids", at, stops)
        memory.put_wide("temperature", at, np.array([params.temperature for params in joins.sampling]))
        seeds = np.array([key_of(params.seed or 0) for params in joins.sampling], np.uint64)
        memory.put_wide("seed", at, seeds.view(np.int64))
        memory.put("top_k", at, np.minimum(cuts[:, 0], self._vocab_size))
        memory.put_wide("top_p", at, np.ascontiguousarray(cuts[:, 1]))
        memory.put_wide("min_p", at, np.ascontiguousarray(cuts[:, 2]))
        memory.put("num_prompt", at, joins.num_prompt)
        self.logprobs.join(at, counts)
        memory.put("place", at, [self._places.get(row, NO_PLACE) for row in at.tolist()])

    def count_known_tokens(self, rows: list[int]) -> None:
        """After the row memory was sent: count the tokens that rules of the rows that joined depend on."""
        counted = [row for row in rows if row in self._places]
        if counted:
            self._count_known(counted)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Launch what is launched beside a step's own kernels, for the dummy row, which has no rules. `dtype`: of
        logits."""
        self._count_known([self._memory.dummy_row])
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        self.hide(logits)
        self.report(logits, self._memory.column("slot_rows")[:1])

    def _count_known(self, rows: list[int]) -> None:
        memory = self._memory
        known = KnownTokens(
            tokens=memory.columns.tokens,
            length=memory.columns.length,
            num_prompt=memory.column("num_prompt"),
        )
        fill_seen(self._pool, self._sent(rows, torch.int32), memory.column("place"), known)

    def _is_for_host(self, params: SamplingParams, num_stops: int, truncates: bool, has_rules: bool) -> bool:
        """Rows the device cannot sample. A new sampling parameter is listed here until it has a kernel."""
        of_everything = params.logprobs == ALL
        if of_everything or params.prompt_logprobs is not None or num_stops > MAX_STOP_IDS:
            return True
        # Lists may leave no token of those that a guide allows; then they yield, which only the host knows.
        is_guided = params.structured_outputs is not None
        if is_guided and (params.bad_words or params.min_tokens):
            return True
        if has_rules:
            listed = len(params.allowed_token_ids or ()) + len(params.bad_words) + len(params.logit_bias)
            listed += len(params.stop_token_ids) + len(self._eos)
            words = any(len(word) > 1 for word in params.bad_words)
            if words or listed > LIST_ENTRIES or not self._free:
                return True
        return truncates and self._vocab_size > MAX_VOCABULARY

    def _write_rules(self, row: int, params: SamplingParams, num_prompt: int) -> None:
        place = self._places[row] = self._free.pop()
        allowed = params.allowed_token_ids
        banned = [token for word in params.bad_words for token in word if not isinstance(token, str)]
        ends = [*params.stop_token_ids, *self._eos]
        tokens = [*(allowed or ()), *banned, *ends, *params.logit_bias]
        bias = [0.0] * (len(tokens) - len(params.logit_bias)) + list(params.logit_bias.values())
        number = EVERYTHING if allowed is None else len(allowed)
        pool, used = self._pool, slice(0, len(tokens))
        pool.tokens[place, used] = self._sent(tokens, torch.int32)
        pool.bias[place, used] = self._sent(bias, torch.float32)
        counts = [number, len(banned), len(ends), len(params.logit_bias)]
        pool.counts[place] = self._sent(counts, torch.int32)
        neutral = (1.0, 0.0, 0.0)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        pool.penalties[place] = self._sent(penalties if uses_penalties(params) else neutral, torch.float32)
        pool.stop_from[place].fill_(num_prompt + params.min_tokens)  # an assignment would wait

    def _sent(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """On the device once what is queued before is done: from memory that is not pinned, torch would wait."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)

    # -- a step ------------------------------------------------------------------------------------------------

    def sample(
        self, logits: Tensor, slot_rows: Tensor, *, with_rules: bool, positions: Tensor | None = None
    ) -> None:
        """A token for each of `slot_rows` from its logits, which are changed where a row has rules. `positions`: of the
        tokens, where a row has several draws; None: each is the next of its row."""
        memory, count = self._memory, len(logits)
        if with_rules:
            apply_rules(logits, self._pool, self._rule_columns(slot_rows, positions))
            cuts = TruncationColumns(
                slot_rows=slot_rows,
                temperature=memory.wide("temperature", torch.float64),
                top_k=memory.column("top_k"),
                top_p=memory.wide("top_p", torch.float64),
                min_p=memory.wide("min_p", torch.float64),
            )
            truncate(logits, cuts, self._search)
        columns = SamplingColumns(
            slot_rows=slot_rows,
            temperature=memory.wide("temperature", torch.float64),
            seed=memory.wide("seed", torch.int64),
            position=memory.columns.length if positions is None else positions,
            by_slot=positions is not None,
        )
        candidates = self._candidates[count >= _MANY]
        sample(self._chosen[:count], self._finite[:count], logits, columns, candidates)

    def update(self, slot_rows: Tensor, *, with_rules: bool) -> None:
        """The rows take their tokens; `drawn` holds them for the host."""
        count = len(slot_rows)
        drawn = DrawnTokens(token=self.drawn[0, :count], code=self.drawn[1, :count])
        update_rows(self._memory.columns, drawn, slot_rows, self._chosen[:count], self._finite[:count])
        if with_rules:
            note_drawn(self._pool, self._rule_columns(slot_rows), drawn.token)

    def report(self, logits: Tensor, slot_rows: Tensor) -> None:
        """How likely the tokens drawn last were, for the rows that ask, from the raw logits they were drawn from."""
        self.logprobs.make(logits, slot_rows, self._chosen[: len(logits)])

    def drawn_behind(self, ids: Tensor) -> DrawnBehind:
        """What `sample` drew last, behind these tokens."""
        count = len(ids)
        return DrawnBehind(ids=ids, chosen=self._chosen[:count], finite=self._finite[:count])

    def note_first(self, slot_rows: Tensor, tokens: Tensor) -> None:
        """Rows with penalties have drawn one token each; those of other rows do not matter."""
        note_drawn(self._pool, self._rule_columns(slot_rows), tokens)

    def any_guided(self, batch: DeviceBatch) -> bool:
        """Whether a row that gets a token has a guide."""
        return bool(self._guided) and bool(self.is_guided[batch.sampled].any())

    def load_masks(self, rows: I64, guides: Mapping[int, Guide]) -> dict[int, Mask | None]:
        """Ask the guides of the rows that are drawn, and send what they allow to the device, but for the host's rows;
        returns the masks of those, by place among them."""
        masked = self._masked
        if masked is None or masked.guides is not guides or not np.array_equal(masked.rows, rows):
            masked = self._masked = self._masking(rows, guides)
        started_s = time.perf_counter()
        masks = self._masks[: masked.count]
        masked.batch.fill_masks(masks.numpy().view(np.uint32))
        of_hosts = {place: guide.mask() for place, guide in masked.of_hosts.items()}
        self.guided = GuideWork(masked.count + len(of_hosts), time.perf_counter() - started_s)
        if masked.count:
            with self._copies.entered():  # beside the forward pass
                self._device_masks[: masked.count].copy_(masks, non_blocking=True)
            self._queue.follow(self._copies)
        self.masked = Mark.timed(self._device)
        return of_hosts

    def _masking(self, rows: I64, guides: Mapping[int, Guide]) -> _MaskedRows:
        """The guides of rows that are drawn; where their masks lie goes to the device."""
        is_guided, is_host = self.is_guided[rows], self.is_host[rows]
        places = np.flatnonzero(is_guided & ~is_host)
        mask_of = np.full(len(self._mask_of), -1, np.int32)
        mask_of[places] = np.arange(len(places))
        known = self._mask_of.numpy()
        if not np.array_equal(known, mask_of):
            known[:] = mask_of
            self._device_mask_of.copy_(self._mask_of, non_blocking=True)
        hosts = rows[is_host].tolist()
        return _MaskedRows(
            rows=rows,
            guides=guides,
            batch=GuideBatch([guides[row] for row in rows[places].tolist()]),
            count=len(places),
            of_hosts={place: guides[row] for place, row in enumerate(hosts) if self.is_guided[row]},
        )

    def hide(self, logits: Tensor) -> None:
        """Hide what the guides of rows do not allow, as the masks that were loaded last say."""
        mask_logits(logits, self._device_masks, self._device_mask_of)

    def sample_on_host(
        self, logits: Tensor, rows: I64, positions: I64, masks: Mapping[int, Mask | None] | None = None
    ) -> tuple[RowLogprobs, ...]:
        """Tokens of the host's rows replace those the device drew; `rows` are those of `logits`. `masks`: what guides
        allow, by place among the host's rows."""
        which = np.flatnonzero(self.is_host[rows])
        if not len(which):
            return ()
        places = torch.from_numpy(which).to(self._device)
        values = logits.index_select(0, places).float().cpu().numpy()
        drawn = self.host.sample(values, rows[which], positions[which], masks=masks)
        finite = np.where(drawn.finite, np.where(drawn.stopped, FORCED_STOP, 1), 0).astype(np.uint8)
        tokens = np.where(drawn.finite, drawn.tokens, 0).astype(np.int32)
        self._chosen[places] = torch.from_numpy(tokens).to(self._device)
        self._finite[places] = torch.from_numpy(finite).to(self._device)
        return drawn.logprobs

    def _rule_columns(self, slot_rows: Tensor, positions: Tensor | None = None) -> RuleColumns:
        memory = self._memory
        return RuleColumns(
            slot_rows=slot_rows,
            place=memory.column("place"),
            position=memory.columns.length if positions is None else positions,
            by_slot=positions is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedLogprobs:
    """The draws of one step whose rows ask, and where the host finds what is reported of them."""

    places: I64  # among the draws
    rows: I64
    positions: I64  # of the tokens drawn
    counts: I64  # likeliest tokens of each
    words: Tensor  # int32 [slots, REPORT_WIDTH], pinned

    def read(self, tokens: I32, codes: I32) -> tuple[RowLogprobs, ...]:
        """When the step is done; `tokens` and `codes` are those of all its draws."""
        code = codes[self.places]
        told = np.flatnonzero((code >= 0) & (code != NOT_FINITE))
        at = self.places[told]
        words = self.words.numpy()[at]
        numbers = words.view(np.float32)
        columns = (
            self.rows[told].tolist(),
            self.positions[told].tolist(),
            tokens[at].tolist(),
            numbers[:, 0].tolist(),
            words[:, 1].tolist(),
            self.counts[told].tolist(),
            words[:, 2 : 2 + MOST_LOGPROBS].tolist(),
            numbers[:, 2 + MOST_LOGPROBS :].tolist(),
        )
        return tuple(
            RowLogprobs(
                row=row,
                position=position,
                token=token,
                logprob=logprob,
                rank=rank,
                top_tokens=tuple(likeliest[:count]),
                top_logprobs=tuple(logprobs[:count]),
            )
            for row, position, token, logprob, rank, count, likeliest, logprobs in zip(*columns, strict=True)
        )


class LogprobReports:
    """Which rows ask, and where the reports of a step come to. Steps in which no row asks do nothing of this."""

    def __init__(self, memory: RowMemory, vocab_size: int, device: torch.device) -> None:
        self._memory, self._vocab_size = memory, vocab_size
        self._counts: I64 = np.full(memory.num_rows + 1, NOT_ASKED)  # likeliest tokens, by row
        self._asking: set[int] = set()  # rows
        self._parts = allocate_logprob_parts(memory.max_slots, vocab_size, device)
        shape = (memory.max_slots, REPORT_WIDTH)
        self._report = torch.zeros(shape, dtype=torch.int32, device=device)
        # One for each step under way, as for tokens.
        steps = memory.depth + 2
        self._ring = torch.zeros((steps, *shape), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._turn = 0

    def join(self, rows: I64, counts: I64) -> None:
        """Rows start anew; `counts`: how many of the likeliest tokens each asks for, or NOT_ASKED."""
        self._counts[rows] = np.minimum(counts, self._vocab_size)
        asks = counts != NOT_ASKED
        self._asking.difference_update(rows.tolist())
        self._asking.update(rows[asks].tolist())
        self._memory.put("logprobs", rows, asks)

    def leave(self, row: int) -> None:
        self._asking.discard(row)

    def any_asked(self, batch: DeviceBatch) -> bool:
        """Whether a row that gets a token asks."""
        return bool(self._asking) and bool((self._counts[batch.sampled] != NOT_ASKED).any())

    def asked(self, batch: DeviceBatch, num_tokens: I64) -> AskedLogprobs | None:
        """What the rows that get a token in a step ask for; None: nothing. `num_tokens`: of all rows, the ones to be
        drawn included."""
        if not self.any_asked(batch):
            return None
        rows = batch.sampled
        places = np.flatnonzero(self._counts[rows] != NOT_ASKED)
        self._turn = (self._turn + 1) % len(self._ring)
        asking = rows[places]
        return AskedLogprobs(
            places=places,
            rows=asking,
            positions=num_tokens[asking] - 1,
            counts=self._counts[asking],
            words=self._ring[self._turn],
        )

    def make(self, logits: Tensor, slot_rows: Tensor, tokens: Tensor) -> None:
        """The reports of drawn `tokens` [draws] from raw `logits` [draws, vocabulary]."""
        columns = LogprobColumns(slot_rows=slot_rows, wanted=self._memory.column("logprobs"), tokens=tokens)
        token_logprobs(self._report[: len(logits)], logits, columns, self._parts)

    def send(self, asked: AskedLogprobs) -> None:
        """To the host, as far as a row asks."""
        count = int(asked.places[-1]) + 1
        asked.words[:count].copy_(self._report[:count], non_blocking=True)


def reports_of_prompts(
    rows: HostRows, batch: DeviceBatch, hidden: Tensor, decoder: DeviceDecoder
) -> tuple[RowLogprobs, ...]:
    """How likely each prompt token was, for the few rows that want to know. Waits for the device."""
    found: list[RowLogprobs] = []
    firsts = len(batch.decode) + np.cumsum(batch.count) - batch.count
    most = rows.memory.max_slots  # rows of logits there is room for
    for index in np.flatnonzero(rows.prompt_logprobs[batch.spans] > -2).tolist():
        row, start = int(batch.spans[index]), int(batch.start[index])
        end = min(start + int(batch.count[index]), int(rows.num_prompt[row]) - 1)
        if start >= end:
            continue
        first = int(firsts[index])
        positions = np.arange(start + 1, end + 1)
        targets = rows.memory["tokens"].host[row, positions].astype(np.int64)
        for begin in range(0, end - start, most):
            part = slice(begin, min(begin + most, end - start))
            states = hidden[first + part.start : first + part.stop]
            logits = decoder.logits(states, None).float().cpu()
            found += prompt_logprobs(
                logits.numpy(), targets[part], positions[part], row, int(rows.prompt_logprobs[row])
            )
    return tuple(found)
