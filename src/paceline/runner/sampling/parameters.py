"""Sampling parameters as columns over rows, so that a step asks about all of its rows at once.

A join writes every column of its row: nothing of the former owner stays. What only few rows use and does not
fit a column (biases, word lists, counts) lives in `processors.LogitRules`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling import SamplingParams
from paceline.runner.noise import key_of

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
        self.stop_from[row] = num_prompt + params.min_tokens
        self._write_stops(row, params.stop_token_ids + (() if params.ignore_eos else self._eos))

    def _write_stops(self, row: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(stops)] = stops
