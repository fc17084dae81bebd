"""A step of an encoder (`cpu.StepCompute`): whole sequences, no keys and values.

Tokens of a text see those behind them, so that nothing of it can be computed before its last token is scheduled. A
chunk that does not end its text computes nothing; the one that does computes all of it.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.models.encoder import Encoder
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.workers import Workers

Index = NDArray[np.int64]
Floats = NDArray[np.float32]
MOST_TOKENS = 8192  # computed together
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

    def swap_out(self, group: int, blocks: Index, places: Index) -> None:
        return None

    def swap_in(self, group: int, blocks: Index, places: Index) -> None:
        return None

    def pack(self, place: int, into: NDArray[np.uint8]) -> None:
        return None

    def unpack(self, place: int, source: NDArray[np.uint8]) -> None:
        return None


class EncoderStep:
    """Computes the texts that a step completes."""

    def __init__(self, encoder: Encoder, block_size: int, workers: Workers, pulse: Pulse) -> None:
        self.spec = encoder.spec
        self.kv = NoKV(block_size)
        self._encoder = encoder
        self._workers = workers
        self._pulse = pulse
        self._states: dict[int, Floats] = {}  # of the last batch, by the index of the row
        self._none: Floats = np.zeros((0, encoder.spec.hidden_size), np.float32)

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        ends = batch.start + batch.count
        whole = np.flatnonzero((ends >= rows.num_tokens[batch.rows]) & ~batch.masked).tolist()
        self._states = {}
        good = np.ones(len(batch.tokens), np.bool_)
        for part in _parts(whole, ends):
            texts = [torch.from_numpy(rows.tokens[batch.rows[index], : ends[index]]) for index in part]
            with self._workers.step(int(ends[part].sum())):
                found = self._encoder.forward(
                    texts, self._pulse.beat, rows.second_at[batch.rows[part]].tolist()
                )
            for index, states in zip(part, found, strict=True):
                self._states[index] = states.numpy()
                if not np.isfinite(self._states[index]).all():
                    good[batch.row_of == index] = False
        return good

    def states(self, batch: FlatBatch, index: int, *, only_last: bool) -> Floats:
        return self._states.get(index, self._none)

    def classify(self, state: Floats, *, raw: bool) -> Floats:
        found: Floats = self._encoder.classify(torch.from_numpy(state), raw=raw).numpy()
        return found

    def logits(self, tokens: Index) -> Floats:
        raise AssertionError("an encoder has no logits")

    def work(self) -> CPUWork:
        return CPUWork(threads=torch.get_num_threads())


def _parts(whole: list[int], sizes: Index) -> list[list[int]]:
    """Texts in groups of bounded size, at least one each."""
    parts: list[list[int]] = []
    total = MOST_TOKENS
    for index in whole:
        total += int(sizes[index])
        if total > MOST_TOKENS:
            parts.append([])
            total = int(sizes[index])
        parts[-1].append(index)
    return parts


def token_seconds(encoder: Encoder) -> float:
    """Seconds that a token takes."""
    texts = [torch.zeros(TIMED_TOKENS, dtype=torch.int64)] * TIMED_TEXTS
    taken = []
    for _ in range(3):  # the first pays for threads and memory
        started_s = time.perf_counter()
        encoder.forward(texts, lambda: None)
        taken.append(time.perf_counter() - started_s)
    return min(taken) / (TIMED_TEXTS * TIMED_TOKENS)
