"""The sampler: logits of many rows in, one token for each out.

It owns what sampling remembers of a row, written anew when the row is joined. It knows rows and positions,
never requests or text. A step of greedy rows without rules is one pass over the logits; everything else is
done for the rows that ask for it. A row's token depends on its own logits, parameters and tokens alone; if what
it asks for raises, it alone has no token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Mask
from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.noise import LANES, MAX_NOISE, gumbel, key_of, lane_words, token_words
from paceline.runner.sampling.processors import LogitRules, always_needs_rules, floors

# Sampling parameters as columns over rows, so that a step asks about all of its rows at once.
#
# A join writes every column of its row: nothing of the former owner stays. What only few rows use and does not fit
# a column (biases, word lists, counts) lives in `processors.LogitRules`.


GREEDY_BELOW = 1e-5  # a temperature below this is 0: dividing by it would only overflow
NO_LOGPROBS = -2  # -1 asks for all of them
NO_TOKEN = -1


class RowParameters:
    """One entry per row in each column."""

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self.temperature: NDArray[np.float64] = np.zeros(num_rows)
        self.random: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)  # False: greedy
        self.key: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        self.top_k: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)  # 0: off
        self.top_p: NDArray[np.float64] = np.ones(num_rows)
        self.min_p: NDArray[np.float64] = np.zeros(num_rows)
        self.num_logprobs: NDArray[np.int64] = np.full(num_rows, NO_LOGPROBS, dtype=np.int64)
        self.has_rules: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        # Neither rules nor log-probabilities.
        self.is_plain: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.stop_from: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)  # first position that may stop
        self.stops: NDArray[np.int32] = np.full((num_rows, 1), NO_TOKEN, dtype=np.int32)

    def write(self, row: int, params: SamplingParams, num_prompt: int, has_rules: bool) -> None:
        self.temperature[row] = params.temperature
        self.random[row] = params.temperature >= GREEDY_BELOW
        assert params.seed is not None or not self.random[row], "a row that draws has a seed"
        self.key[row] = key_of(params.seed or 0)
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.has_rules[row] = has_rules
        self.is_plain[row] = not has_rules and params.logprobs is None
        self.stop_from[row] = num_prompt + params.min_tokens
        self._write_stops(row, params.stop_token_ids + (() if params.ignore_eos else self._eos))

    def _write_stops(self, row: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(stops)] = stops


# The draw: the token with the largest (logit - top) / temperature + noise, in float64, lowest id among equals.
#
# That is one draw from the softmax of the kept logits (the Gumbel-max trick). Only few tokens can win, and it is
# cheap to know which: the likeliest token's own score is a bar, the noise of others is bounded, first by its
# largest value, then by its word. What passes both bounds is computed by the definition; the bounds never change
# which token wins.


F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

BATCH = 4096  # groups: smaller rows share a call of the generator, larger ones get their own
SLACK = np.float32(1e-3)  # far more than what float32 rounds away in the bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The draws of one step, a row each; every row's top is finite."""

    logits: F32  # [rows, vocabulary]
    best: I64  # the token with the largest logit
    floor: F32  # tokens with a lower logit are out
    temperature: F64  # above 0
    key: U64
    position: I64


def draw(draws: Draws) -> I64:
    """The token of each row."""
    race = _Race(draws)
    tokens = draws.best.copy()
    for owners, groups in race.batches():
        winners, drawn = race.run(owners, groups)
        tokens[winners] = drawn
    return tokens


class _Race:
    """The tokens that can win, by groups of four that share one call of the generator."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._logits = _whole_groups(draws.logits)
        self._top = draws.logits[np.arange(len(draws.best)), draws.best].astype(np.float64)
        self._bar = gumbel(token_words(draws.key, draws.position, draws.best))
        reach = _largest_below(self._top + draws.temperature * (self._bar - MAX_NOISE))
        self._lowest = np.maximum(draws.floor, reach)

    def batches(self) -> Iterator[tuple[I64, I64]]:
        """Rows and groups to compute together: one owner for each group, or one for all of them."""
        small: list[tuple[int, I64]] = []
        size = 0
        for i, lowest in enumerate(self._lowest):
            in_reach = (self._logits[i] >= lowest).view(np.uint32) != 0  # four flags at once
            groups = np.flatnonzero(in_reach)
            if len(groups) >= BATCH:
                yield np.array([i]), groups
                continue
            small.append((i, groups))
            size += len(groups)
            if size >= BATCH:
                yield _joined(small)
                small, size = [], 0
        if small:
            yield _joined(small)

    def run(self, owners: I64, groups: I64) -> tuple[I64, I64]:
        """The rows of a batch and their winning tokens."""
        draws = self._draws
        values = self._values(owners, groups)
        words = lane_words(draws.key[owners], draws.position[owners], groups)
        at, lane = np.divmod(np.flatnonzero(self._may_win(values, words, owners)), LANES)
        owner = np.broadcast_to(owners, groups.shape)[at]
        offset = (values[at, lane] - self._top[owner]) / draws.temperature[owner]
        scores = offset + gumbel(words[at, lane])
        tokens = groups[at] * LANES + lane
        # Entries are in order of row, then token, so the first of equal scores has the lowest id.
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        best = np.maximum.reduceat(scores, starts)
        lengths = np.diff(starts, append=len(owner))
        places = np.flatnonzero(scores == np.repeat(best, lengths))
        winners, first = np.unique(owner[places], return_index=True)
        return winners, tokens[places[first]]

    def _values(self, owners: I64, groups: I64) -> F32:
        """The logits of each group."""
        by_group = self._logits.reshape(len(self._logits), -1, LANES)
        if len(owners) > 1:
            return by_group[owners, groups]
        row: F32 = by_group[owners[0]]
        return row if len(groups) == len(row) else row.take(groups, axis=0)

    def _may_win(self, values: F32, words: U32, owners: I64) -> NDArray[np.bool_]:
        """Whether a token is kept and its noise can lift it over the bar."""
        top, bar = self._top[owners].astype(np.float32), self._bar[owners].astype(np.float32)
        temperature = self._draws.temperature[owners].astype(np.float32)
        offset = (values - top[:, None]) / temperature[:, None]
        can_reach = offset + noise_bound(words) >= (bar - SLACK)[:, None]
        return can_reach & (values >= self._lowest[owners][:, None])


def noise_bound(words: U32) -> F32:
    """Nearly the noise of each word, and never below it, without a logarithm.

    With v = 1 - u the noise -log(-log(1 - v)) is at most -log(v), and the bits of a float32, read as an
    integer, are a piecewise linear function of its logarithm that is never above it.
    """
    distance = (~words).astype(np.float32)  # v in units of 2^-32, at most half a unit short
    log2 = distance.view(np.int32).astype(np.float32) * np.float32(2.0**-23) - np.float32(127 + 32)
    return log2 * np.float32(-math.log(2))


def _joined(parts: list[tuple[int, I64]]) -> tuple[I64, I64]:
    owners = np.repeat([i for i, _ in parts], [len(groups) for _, groups in parts])
    return owners, np.concatenate([groups for _, groups in parts])


def _whole_groups(logits: F32) -> F32:
    """The logits, with tokens that cannot be drawn added where the last group is not whole."""
    missing = -logits.shape[1] % LANES
    if missing == 0:
        return np.ascontiguousarray(logits)
    return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)


def _largest_below(bound: F64) -> F32:
    """The largest float32 that is not above each bound."""
    near = bound.astype(np.float32)
    return np.where(near > bound, np.nextafter(near, np.float32(-np.inf)), near)


I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

_logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What rows that get a token ask for, for a step that draws: an entry for each row.

    As long as the same rows ask for the same, all but the positions are the same arrays.
    """

    rows: I64
    is_plain: Bool  # nothing but the logits and the columns below decides
    random: Bool  # False: greedy
    temperature: F64
    top_k: I64  # 0: off
    top_p: F64
    min_p: F64
    key: U64
    position: I64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settled:
    """Tokens that a step has drawn, where it could: those that `Sampler.sample` would have given."""

    tokens: I64
    is_settled: Bool  # False: the row is left to the sampler

    def of(self, places: I64) -> Settled:
        """Some of them."""
        if len(places) == len(self.tokens):
            return self
        return Settled(tokens=self.tokens[places], is_settled=self.is_settled[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What one call gave; entry i of each array belongs to the i-th row sampled."""

    tokens: I32
    finite: Bool  # False: the logits are not usable, or no token is left; the token then means nothing
    stopped: Bool  # the token ends the row: a stop id, or end of sequence unless that is ignored
    logprobs: tuple[RowLogprobs, ...]  # of rows that request them, where finite


class Sampler:
    """Draws tokens for rows on the CPU."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        # Some models name an end of sequence that they have no logit for; it can never be drawn.
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._parameters = RowParameters(num_rows, self._eos)
        self._rules: dict[int, LogitRules] = {}
        self._last_wanted: Wanted | None = None

    def join(self, row: int, params: SamplingParams, tokens: I32, num_prompt: int) -> None:
        """The row starts anew with all tokens it knows, of which the first `num_prompt` are its prompt.

        After a preemption the others are the output so far: they count as output here too.
        """
        self._last_wanted = None
        # What a guide allows is a rule too: it comes with each step.
        has_rules = always_needs_rules(params) or params.structured_outputs is not None
        self._parameters.write(row, params, num_prompt, has_rules)
        self._rules.pop(row, None)
        if has_rules or params.min_tokens > 0:
            self._rules[row] = LogitRules(params, tokens, num_prompt, self._eos)

    def wanted(self, rows: I64, positions: I64) -> Wanted:
        """The parameters of rows that are about to get a token; `positions` as in `sample`."""
        columns, last = self._parameters, self._last_wanted
        is_plain = columns.is_plain[rows] & (positions >= columns.stop_from[rows])
        if last is not None and np.array_equal(rows, last.rows) and np.array_equal(is_plain, last.is_plain):
            return replace(last, position=positions)
        self._last_wanted = Wanted(
            rows=rows,
            is_plain=is_plain,
            random=columns.random[rows],
            temperature=columns.temperature[rows],
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            min_p=columns.min_p[rows],
            key=columns.key[rows],
            position=positions,
        )
        return self._last_wanted

    def sample(
        self,
        logits: F32,
        rows: I64,
        positions: I64,
        settled: Settled | None = None,
        places: I64 | None = None,
        masks: Mapping[int, Mask | None] | None = None,
    ) -> Sampled:
        """The next token of each row; `positions[i]` is its index in the row's sequence.

        `logits` is float32 of shape [number, vocabulary] and may be changed; those of row i stand at `places[i]`, or
        without places at i. Rows that are `settled` keep the token they have. `masks`: what guides allow, by place.
        """
        assert logits.dtype == np.float32 and logits.shape[1:] == (self._vocab_size,)
        # Logits near the largest float overflow to infinities that mean what they say: a token far out of reach.
        with np.errstate(over="ignore"):
            if settled is None:
                if places is not None and len(places) < len(logits):
                    logits = logits[places]
                return self._sample(logits, rows, positions, places, masks)
            left = np.flatnonzero(~settled.is_settled)
            tokens, finite = settled.tokens.astype(np.int32), np.ones(len(rows), np.bool_)
            logprobs: tuple[RowLogprobs, ...] = ()
            if len(left):
                own = left if places is None else places[left]
                others = self._sample(logits[own], rows[left], positions[left], own, masks)
                tokens[left], finite[left], logprobs = others.tokens, others.finite, others.logprobs
            return Sampled(
                tokens=tokens, finite=finite, stopped=self._stopped(tokens, finite, rows), logprobs=logprobs
            )

    def guess(self, logits: F32, rows: I64, positions: I64) -> I64:
        """What rows would draw from these logits by their noise and temperature alone: drafts. Nothing is noted."""
        tokens: I64 = logits.argmax(axis=1)
        drawn = np.flatnonzero(self._parameters.random[rows])
        if len(drawn):
            with np.errstate(over="ignore"):
                tokens[drawn] = self._draw(logits, tokens, rows, positions, drawn)
        return tokens

    def _stopped(self, tokens: NDArray[np.integer[Any]], finite: Bool, rows: I64) -> Bool:
        stopped: Bool = finite & (self._parameters.stops[rows] == tokens[:, None]).any(axis=1)
        return stopped

    def _sample(
        self,
        values: F32,
        rows: I64,
        positions: I64,
        places: I64 | None,
        masks: Mapping[int, Mask | None] | None,
    ) -> Sampled:
        columns = self._parameters
        tokens = values.argmax(axis=1)  # a row's first NaN counts as its largest
        finite = np.isfinite(values[np.arange(len(rows)), tokens])
        reported = finite & (columns.num_logprobs[rows] != NO_LOGPROBS)
        ruled = np.flatnonzero(finite & (columns.has_rules[rows] | (positions < columns.stop_from[rows])))
        raw = {i: values[i].copy() for i in ruled.tolist() if reported[i]}
        for i in ruled.tolist():
            try:
                mask = None if masks is None else masks.get(i if places is None else int(places[i]))
                self._rules[int(rows[i])].apply(values[i], int(positions[i]), mask)
            except Exception:
                finite[i] = _given_up(rows[i])
                continue
            tokens[i] = values[i].argmax()
            finite[i] = np.isfinite(values[i, tokens[i]])
        drawn = np.flatnonzero(finite & columns.random[rows])
        if len(drawn):
            tokens[drawn] = self._draw(values, tokens, rows, positions, drawn)
        for i in ruled[finite[ruled]].tolist():
            try:
                self._rules[int(rows[i])].note(int(tokens[i]))
            except Exception:
                finite[i] = _given_up(rows[i])
        logprobs: list[RowLogprobs] = []
        for i in np.flatnonzero(reported & finite).tolist():
            row, top = int(rows[i]), int(columns.num_logprobs[rows[i]])
            try:
                logprobs.append(
                    token_logprobs(raw.get(i, values[i]), int(tokens[i]), row, int(positions[i]), top)
                )
            except Exception:
                finite[i] = _given_up(row)
        return Sampled(
            tokens=tokens.astype(np.int32),
            finite=finite,
            stopped=self._stopped(tokens, finite, rows),
            logprobs=tuple(logprobs),
        )

    def _draw(self, values: F32, best: I64, rows: I64, positions: I64, drawn: I64) -> I64:
        """Tokens of the rows at the places `drawn`, which have a temperature."""
        columns, own = self._parameters, rows[drawn]
        logits = values if len(drawn) == len(rows) else values[drawn]
        temperature = columns.temperature[own]
        floor = floors(logits, temperature, columns.top_k[own], columns.top_p[own], columns.min_p[own])
        return draw(
            Draws(
                logits=logits,
                best=best[drawn],
                floor=floor,
                temperature=temperature,
                key=columns.key[own],
                position=positions[drawn],
            )
        )


def _given_up(row: int) -> bool:
    """What one row asks for has raised: it ends alone. Never finite."""
    _logger.exception("row %d cannot be sampled", row)
    return False


# Log-probabilities: the log-softmax of the raw logits, before any rule or temperature.
#
# For one token, its own value and rank (1 + the number of likelier tokens, so equals share a rank) and the
# likeliest tokens in order, lower ids first among equals. The same number stands for the same token in both.


ALL = -1


def prompt_logprobs(raw: F32, targets: I64, positions: I64, row: int, top: int) -> tuple[RowLogprobs, ...]:
    """How likely each target was, where `raw[i]` predicts `targets[i]`, the token at `positions[i]`.

    A position whose logits are not finite numbers is left out: there is nothing true to say about it.
    """
    finite = np.isfinite(raw.max(axis=1, initial=-np.inf))
    return tuple(
        token_logprobs(raw[i], int(targets[i]), row, int(positions[i]), top)
        for i in np.flatnonzero(finite).tolist()
    )


def token_logprobs(raw: F32, token: int, row: int, position: int, top: int) -> RowLogprobs:
    """What is reported of one token; `top` is how many of the likeliest tokens, -1 for all."""
    wide = raw.astype(np.float64)
    wide -= wide.max()
    log_total = np.log(np.exp(wide).sum())
    likeliest = _likeliest(raw, len(raw) if top == ALL else min(top, len(raw)))
    return RowLogprobs(
        row=row,
        position=position,
        token=token,
        logprob=float(wide[token] - log_total),
        rank=1 + int(np.count_nonzero(raw > raw[token])),
        top_tokens=tuple(likeliest.tolist()),
        top_logprobs=tuple((wide[likeliest] - log_total).tolist()),
    )


def _likeliest(raw: F32, count: int) -> I64:
    """The tokens with the largest logits, largest first, lower ids first among equals."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    if count == len(raw):
        return np.argsort(-raw, kind="stable")
    smallest = np.partition(raw, len(raw) - count)[len(raw) - count]
    candidates = np.flatnonzero(raw >= smallest)  # in order of id
    return candidates[np.argsort(-raw[candidates], kind="stable")][:count]
