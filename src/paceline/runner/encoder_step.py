"""A step of an encoder (`cpu.StepCompute`): whole sequences, no keys and values.

Tokens of a text see those behind them, so that nothing of it can be computed before its last token is scheduled. A
chunk that does not end its text computes nothing; the one that does computes all of it. What computes is a
`TextEncoder`: the native kernels (`native.encoder`) or torch (`models.encoder`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.models.files.stored import TensorSource, check_finite
from paceline.models.spec import ModelSpec
from paceline.runner.device_rows import DeviceRows, FlatBatch

Index = NDArray[np.int64]
Floats = NDArray[np.float32]
TIMED_TEXTS, TIMED_TOKENS = 8, 32


class NoKV:
    """In the place of the keys and values of a model that has none."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def clear(self, group: int, slots: Index) -> None:
        return None

    def wipe(self) -> None:
        return None

    def copy_blocks(self, group: int, source: Index, target: Index) -> None:
        return None

    def place(self, group: int, source: Index, target: Index, shift: int) -> None:
        raise AssertionError("a model without keys and values has nothing to place")

    def swap_out(self, group: int, blocks: Index, places: Index) -> None:
        return None

    def swap_in(self, group: int, blocks: Index, places: Index) -> None:
        return None

    def pack(self, place: int, into: NDArray[np.uint8]) -> None:
        return None

    def unpack(self, place: int, source: NDArray[np.uint8]) -> None:
        return None


class TextEncoder(Protocol):
    """Texts in, hidden states out."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(
        self, texts: Sequence[Index], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Floats]: ...


class ClassifierHead:
    """Scores of the labels of a text. In numpy: it is two products of one vector."""

    def __init__(self, source: TensorSource) -> None:
        options = source.spec.encoder
        assert options is not None
        self.options, self.eps = options, source.spec.norm_eps

        def read(name: str) -> Floats:
            if name not in source.names():
                return np.zeros(1, np.float32)
            values = source.tensor(name).to_float32()
            check_finite(values, name)
            return values.copy()

        first, second = options.head
        self.values = {
            "dense": read(first + ".weight"),
            "dense_bias": read(first + ".bias"),
            "scores": read(second + ".weight"),
            "scores_bias": read(second + ".bias"),
        }
        if options.head_norm:
            self.values["norm"] = read(options.head_norm + ".weight")

    def scores(self, states: Floats, *, raw: bool) -> Floats:
        """From the states of all tokens; of one label, how much it holds. `raw`: without softmax or sigmoid."""
        values, options = self.values, self.options
        state = states.mean(axis=0) if options.head_mean else states[0]
        inner = values["dense"] @ state + values["dense_bias"]
        inner = np.tanh(inner) if options.head_activation == "tanh" else _gelu(inner)
        if "norm" in values:
            inner = inner - inner.mean()
            inner = inner / np.sqrt(np.square(inner).mean() + self.eps) * values["norm"]
        return self.scored(values["scores"] @ inner + values["scores_bias"], raw=raw)

    @staticmethod
    def scored(logits: NDArray[np.floating], *, raw: bool) -> Floats:
        """Logits as scores."""
        logits = logits.astype(np.float64)
        found = logits
        if not raw and len(logits) == 1:
            found = 1 / (1 + np.exp(-logits))
        elif not raw:
            weights = np.exp(logits - logits.max())
            found = weights / weights.sum()
        scores: Floats = found.astype(np.float32)
        return scores


def _gelu(x: Floats) -> Floats:
    shares = [0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    return x * np.array(shares, np.float32)


class EncoderStep:
    """Computes the texts that a step completes.

    `most_tokens` are computed together, unless one text has more. `around`: entered for a number of tokens.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        head: ClassifierHead | None,
        block_size: int,
        most_tokens: int,
        around: Callable[[int], AbstractContextManager[None]],
        work: Callable[[], CPUWork],
        pulse: Pulse,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = encoder.spec
        self.kv = NoKV(block_size)
        self.pictures = None
        self.close = close
        self.work = work
        self._encoder = encoder
        self._head = head
        self._most_tokens = most_tokens
        self._around = around
        self._pulse = pulse
        self._states: dict[int, Floats] = {}  # of the last batch, by the index of the row
        self._none: Floats = np.zeros((0, encoder.spec.hidden_size), np.float32)

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        ends = batch.start + batch.count
        whole = np.flatnonzero((ends >= rows.num_tokens[batch.rows]) & ~batch.masked).tolist()
        self._states = {}
        good = np.ones(len(batch.tokens), np.bool_)
        for part in parts_of(whole, ends, self._most_tokens):
            texts = [rows.tokens[batch.rows[index], : ends[index]] for index in part]
            with self._around(int(ends[part].sum())):
                found = self._encoder.forward(
                    texts, self._pulse.beat, rows.second_at[batch.rows[part]].tolist()
                )
            for index, states in zip(part, found, strict=True):
                self._states[index] = states
                if not np.isfinite(states).all():
                    good[batch.row_of == index] = False
        return good

    def states(self, batch: FlatBatch, index: int, *, only_last: bool) -> Floats:
        return self._states.get(index, self._none)

    def classify(self, states: Floats, *, raw: bool) -> Floats:
        assert self._head is not None
        return self._head.scores(states, raw=raw)

    def logits(self, tokens: Index) -> Floats:
        raise AssertionError("an encoder has no logits")


def parts_of(whole: list[int], sizes: Index, most_tokens: int) -> list[list[int]]:
    """Texts in groups of bounded size, at least one each."""
    parts: list[list[int]] = []
    total = most_tokens
    for index in whole:
        total += int(sizes[index])
        if total > most_tokens:
            parts.append([])
            total = int(sizes[index])
        parts[-1].append(index)
    return parts


def token_seconds(encoder: TextEncoder) -> float:
    """Seconds that a token takes."""
    texts = [np.zeros(TIMED_TOKENS, np.int64)] * TIMED_TEXTS
    taken = []
    for _ in range(3):  # the first pays for threads and memory
        started_s = time.perf_counter()
        encoder.forward(texts, lambda: None)
        taken.append(time.perf_counter() - started_s)
    return min(taken) / (TIMED_TEXTS * TIMED_TOKENS)
