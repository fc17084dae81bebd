"""What changes a row's logits before a token is drawn: logit rules, then truncation (min-p, top-k, top-p).

Logit rules apply to greedy rows too. Their order is vLLM's: what a guide allows, allowed ids, bad words, min_tokens,
logit bias, then the penalties. A `LogitRules` belongs to one owner of a row and is thrown away with it; only rows that
use a rule have one. All arithmetic is float32, one rounding per operation. Costs are per row and per token seen, never
per vocabulary entry, but for guides and allowed ids.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Mask
from paceline.core.sampling import SamplingParams

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

OUT = np.float32(-np.inf)  # the logit of a token that must not be chosen


# By the bits of a mask's byte, lowest first: the most that eight logits may be.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS: F32 = np.where(_BITS == 1, -OUT, OUT)


def keep_allowed(logits: F32, mask: Mask) -> None:
    """Tokens that are not in the mask are out, those behind its end too. The lesser of logit and bound takes 10 us for
    49,152 logits; `logits[~bits] = OUT` takes 35, and 500 where every second token is out."""
    bounds = _BOUNDS.take(mask.view(np.uint8), axis=0).reshape(-1)[: len(logits)]
    np.minimum(logits[: len(bounds)], bounds, out=logits[: len(bounds)])
    logits[len(bounds) :] = OUT


class LogitRules:
    """The rules of one row, and what they remember of its tokens."""

    def __init__(
        self, params: SamplingParams, tokens: I32, num_prompt: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, dtype=np.int64)
        self._bad_words = BadWords(params, tokens) if params.bad_words else None
        self._stop_ids = params.stop_token_ids + eos_token_ids
        self._stop_from = num_prompt + params.min_tokens
        self._bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._penalties = Penalties(params, tokens, num_prompt) if uses_penalties(params) else None

    def apply(self, logits: F32, position: int, mask: Mask | None = None) -> None:
        """Change one row's logits in place; `position`: of the token to be chosen; `mask`: what a guide allows."""
        if mask is not None:
            keep_allowed(logits, mask)
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits[:] = OUT
            logits[self._allowed] = kept
        self._ban(logits, position, is_guided=mask is not None)
        logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)

    def _ban(self, logits: F32, position: int, *, is_guided: bool) -> None:
        """Bad words, and ends of the output before its time. What would leave no token at all is not banned."""
        banned = [] if self._bad_words is None else self._bad_words.banned()
        if position < self._stop_from:
            banned += self._stop_ids
        if not banned:
            return
        before = logits[banned]
        logits[banned] = OUT
        if self._allowed is None and not is_guided and len(banned) < len(logits):
            return
        left = logits if self._allowed is None else logits[self._allowed]
        if left.max() == OUT:
            logits[banned] = before

    def note(self, token: int) -> None:
        """The row has one more token of output."""
        if self._bad_words is not None:
            self._bad_words.note(token)
        if self._penalties is not None:
            self._penalties.note(token)


class BadWords:
    """Sequences of ids that must not be completed: the last id is out while the row ends in the ids before it."""

    def __init__(self, params: SamplingParams, tokens: I32) -> None:
        words = []
        for word in params.bad_words:
            assert not isinstance(word, str), "text is turned into token ids before a request is added"
            if word:  # an empty word names no token
                words.append((tuple(word[:-1]), word[-1]))
        longest = max((len(beginning) for beginning, _ in words), default=0)
        self._words = tuple(words)
        self._recent = deque(tokens[len(tokens) - min(longest, len(tokens)) :].tolist(), maxlen=longest)

    def banned(self) -> list[int]:
        recent = tuple(self._recent)
        return [
            last for beginning, last in self._words if recent[len(recent) - len(beginning) :] == beginning
        ]

    def note(self, token: int) -> None:
        self._recent.append(token)


class Penalties:
    """Repetition over all tokens of the row, frequency and presence over its output only.

    The table holds the distinct tokens that matter: `ids[:used]` with `counts`, how often each is in the output.
    """

    def __init__(self, params: SamplingParams, tokens: I32, num_prompt: int) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        # The prompt is only of interest to the repetition penalty.
        prompt = tokens[: num_prompt if params.repetition_penalty != 1.0 else 0]
        output, counts = np.unique(tokens[num_prompt:], return_counts=True)
        only_prompt = np.setdiff1d(prompt, output)
        self._used = len(output) + len(only_prompt)
        self._ids: I64 = np.concatenate([output, only_prompt]).astype(np.int64)
        self._counts: F32 = np.zeros(self._used, dtype=np.float32)
        self._counts[: len(output)] = counts
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}

    def apply(self, logits: F32) -> None:
        ids, counts = self._ids[: self._used], self._counts[: self._used]
        values = logits[ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[ids] = values

    def note(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._append(token)
        self._counts[place] += 1

    def _append(self, token: int) -> int:
        if self._used == len(self._ids):
            more = max(64, self._used)
            self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.float32)])
        self._ids[self._used] = token
        self._used += 1
        return self._used - 1


def uses_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def always_needs_rules(params: SamplingParams) -> bool:
    """Whether the row has rules at every position; `min_tokens` alone ends at a known one."""
    lists = params.allowed_token_ids is not None or bool(params.bad_words) or bool(params.logit_bias)
    return lists or uses_penalties(params)


# Which tokens stay in the draw: min-p, top-k and top-p, each as a lowest logit that is kept.
#
# The order is vLLM's: min-p, then top-k of what is left, then top-p of the mass that is left. Each keeps tokens by
# value, so tokens with equal logits stay or go together and no order among them matters. Masses are float64 sums
# over exp((logit - top) / temperature), from the largest down.


F64 = NDArray[np.float64]

SELECT_AT_MOST = 1024  # largest values that are selected; for more, sorting everything is cheaper
HEAD = 10.0  # tokens less than e^-10 times as likely as the best are rarely reached by top-p


def floors(logits: F32, temperature: F64, top_k: I64, top_p: F64, min_p: F64) -> F32:
    """The lowest logit kept in each row: minus infinity where nothing is cut. Every row's top is finite."""
    floor = np.full(len(logits), -np.inf, dtype=np.float32)
    cut_k = (top_k > 0) & (top_k < logits.shape[1])
    cut_p, cut_min = top_p < 1, min_p > 0
    if not (cut_k | cut_p | cut_min).any():
        return floor
    top = logits.max(axis=1).astype(np.float64)
    some = np.flatnonzero(cut_min)
    floor[some] = smallest_from(top[some] + temperature[some] * np.log(min_p[some]))
    some = np.flatnonzero(cut_k)
    if len(some):
        floor[some] = _top_k_floors(
            logits[some], floor[some], top[some], temperature[some], top_k[some], top_p[some]
        )
    for i in np.flatnonzero(cut_p & ~cut_k).tolist():
        floor[i] = _top_p_floor(logits[i], floor[i], top[i], temperature[i], top_p[i])
    return floor


def smallest_from(bound: F64) -> F32:
    """The smallest float32 that is not below each bound."""
    near = bound.astype(np.float32)
    return np.where(near < bound, np.nextafter(near, np.float32(np.inf)), near)


def _top_k_floors(logits: F32, floor: F32, top: F64, temperature: F64, top_k: I64, top_p: F64) -> F32:
    """Floors of rows that all use top-k, some of them with top-p on top of it."""
    largest = _largest(logits, int(top_k.max()))
    floor = np.maximum(floor, np.take_along_axis(largest, top_k[:, None] - 1, axis=1)[:, 0])
    if not (top_p < 1).any():
        return floor
    weights = np.exp((largest - top[:, None]) / temperature[:, None])
    sums = np.cumsum(weights, axis=1)
    rank = np.arange(largest.shape[1])
    # Only the row's own k places count: how many more were selected depends on its neighbours.
    places = ((largest >= floor[:, None]) & (rank < top_k[:, None])).sum(axis=1)
    # Tokens that equal the k-th but have no place among the k are kept, so their mass counts.
    equals = (logits >= floor[:, None]).sum(axis=1) - places
    total = np.take_along_axis(sums, places[:, None] - 1, axis=1)[:, 0]
    total += equals * np.exp((floor - top) / temperature)
    reached = (sums >= (top_p * total)[:, None]) | (rank >= places[:, None] - 1)
    last = reached.argmax(axis=1)
    nucleus = np.take_along_axis(largest, last[:, None], axis=1)[:, 0]
    return np.where(top_p < 1, nucleus, floor)


def _largest(logits: F32, count: int) -> F32:
    """The largest values of each row, in descending order."""
    if count <= SELECT_AT_MOST:
        largest = np.partition(logits, logits.shape[1] - count, axis=1)[:, logits.shape[1] - count :]
        return np.sort(largest, axis=1)[:, ::-1]
    return np.sort(logits, axis=1)[:, ::-1][:, :count]


def _top_p_floor(
    logits: F32, floor: np.float32, top: np.float64, temperature: np.float64, top_p: np.float64
) -> np.float32:
    """The floor of one row that uses top-p without top-k."""
    weights = np.exp((logits - top) / temperature)
    if floor > -np.inf:
        weights[logits < floor] = 0.0
    needed = top_p * weights.sum()
    for lowest in (np.maximum(floor, top - HEAD * temperature), floor):
        head = np.sort(logits[logits >= lowest])[::-1]
        sums = np.cumsum(np.exp((head - top) / temperature))
        if sums[-1] >= needed:
            return np.float32(head[np.searchsorted(sums, needed)])
    return floor  # the two sums differ in their last bits, and top_p is all but 1
