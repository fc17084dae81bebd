"""The sampler: logits of many rows in, one token for each out.

It owns what sampling remembers of a row, written anew when the row is joined. It knows rows and positions,
never requests or text. A step of greedy rows without rules is one pass over the logits; everything else is
done for the rows that ask for it. A row's token depends on its own logits, parameters and tokens alone; if what
it asks for raises, it alone has no token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.runner.sampling.draw import Draws, draw
from paceline.runner.sampling.logprobs import token_logprobs
from paceline.runner.sampling.parameters import NO_LOGPROBS, RowParameters
from paceline.runner.sampling.processors import LogitRules, always_needs_rules
from paceline.runner.sampling.truncation import floors

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What one call gave; entry i of each array speaks of the i-th row asked for."""

    tokens: I32
    finite: Bool  # False: the logits are not usable, or no token is left; the token then means nothing
    stopped: Bool  # the token ends the row: a stop id, or end of sequence unless that is ignored
    logprobs: tuple[RowLogprobs, ...]  # of rows that asked, where finite


class Sampler:
    """Draws tokens for rows on the CPU."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        # Some models name an end of sequence that they have no logit for; it can never be drawn.
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._parameters = RowParameters(num_rows, self._eos)
        self._rules: dict[int, LogitRules] = {}

    def join(self, row: int, params: SamplingParams, tokens: I32, num_prompt: int) -> None:
        """The row starts anew with all tokens it knows, of which the first `num_prompt` are its prompt.

        After a preemption the others are the output so far: they count as output here too.
        """
        has_rules = always_needs_rules(params)
        self._parameters.write(row, params, num_prompt, has_rules)
        self._rules.pop(row, None)
        if has_rules or params.min_tokens > 0:
            self._rules[row] = LogitRules(params, tokens, num_prompt, self._eos)

    def sample(self, logits: torch.Tensor, rows: I64, positions: I64) -> Sampled:
        """The next token of each row; `positions[i]` is its index in the row's sequence.

        `logits` is float32 of shape [len(rows), vocabulary] and may be changed.
        """
        assert logits.dtype == torch.float32 and logits.shape == (len(rows), self._vocab_size)
        # Logits near the largest float overflow to infinities that mean what they say: a token far out of reach.
        with np.errstate(over="ignore"):
            return self._sample(logits.numpy(), rows, positions)

    def _sample(self, values: F32, rows: I64, positions: I64) -> Sampled:
        columns = self._parameters
        tokens = values.argmax(axis=1)  # a row's first NaN counts as its largest
        finite = np.isfinite(values[np.arange(len(rows)), tokens])
        reported = finite & (columns.num_logprobs[rows] != NO_LOGPROBS)
        ruled = np.flatnonzero(finite & (columns.has_rules[rows] | (positions < columns.stop_from[rows])))
        raw = {i: values[i].copy() for i in ruled.tolist() if reported[i]}
        for i in ruled.tolist():
            try:
                self._rules[int(rows[i])].apply(values[i], int(positions[i]))
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
        stopped = finite & (columns.stops[rows] == tokens[:, None]).any(axis=1)
        return Sampled(
            tokens=tokens.astype(np.int32), finite=finite, stopped=stopped, logprobs=tuple(logprobs)
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
