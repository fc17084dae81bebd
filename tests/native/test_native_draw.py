"""Tokens that a step draws are those of the sampler, for every kind of logits and parameters."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.cpu_kernels import VOCABULARY, Draws, model_logits
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.runner.cpu import CPURunner
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.code import Code
from paceline.runner.native.model import NativeModel, build_model
from paceline.runner.native.step import NativeStep
from paceline.runner.sampling.sampler import Settled, Wanted
from tests.bits import Between, Changing, Circumstances
from tests.kernels import host_code
from tests.quantized_helpers import QuantizedSource, tiny_spec

Floats = NDArray[np.float32]
Index = NDArray[np.int64]

VOCABULARIES = (1, 3, 16, 17, 64, 257, 1000, 3001, 8192, 8193, 20000, 49152)
SHARES = (2, 3, 4, 5, 6, 6, 20, 30, 10, 8, 4, 2)  # of the rows; a row of a large vocabulary takes longer


def settle(draws: Draws, logits: Floats, rows: Index, positions: Index) -> Settled:
    stored = np.full((len(rows), -(-logits.shape[1] // 16) * 16), np.nan, np.float32)
    stored[:, : logits.shape[1]] = logits  # nothing behind a row may be looked at
    return draws.settle(stored, rows, positions)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Some rows are greedy; of the others some use each way to cut, and some several."""
    if rng.random() < 0.1:
        return SamplingParams(temperature=0.0, min_tokens=0)
    cut_k, cut_p, cut_min = rng.random(3) < 0.4
    return SamplingParams(
        temperature=float(rng.choice([1e-5, 0.01, 0.2, 0.7, 0.8, 1.0, 1.3, 2.0])),
        top_k=int(rng.choice([1, 2, 5, 40, 300, 5000])) if cut_k else 0,
        top_p=float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12])) if cut_p else 1.0,
        min_p=float(rng.choice([1.0, 0.3, 0.05, 1e-3, 1e-9, 1e-300])) if cut_min else 0.0,
        seed=int(rng.integers(-(2**62), 2**62)),
    )


def random_logits(rng: np.random.Generator, vocab_size: int) -> Floats:
    """A row of logits: ordinary ones most often, then everything that a row can be."""
    kind = rng.integers(14)
    scale = rng.choice([0.01, 0.5, 1.0, 3.0, 10.0])
    row = rng.normal(rng.choice([-50.0, 0.0, 20.0]), scale, vocab_size).astype(np.float32)
    some = rng.integers(vocab_size, size=max(1, vocab_size // 50))
    match kind:
        case 0:
            row[:] = rng.choice([0.0, -3.5, 1e30])  # flat
        case 1:
            row = np.round(row)  # many equals
        case 2:
            row[some] = row.max()  # equals at the top
        case 3:
            row = np.clip(row, -30, 30) * np.float32(1e37)
        case 4:
            row[rng.random(vocab_size) < rng.choice([0.5, 0.999])] = -np.inf
        case 5:
            row[some] = np.float32(-3.4e38)
            row[some[0]] = np.float32(3.4e38)
        case 6:
            row[some] += np.float32(15 * scale)  # a few that matter
        case 7:
            row.sort()
        case 8:
            row = np.sort(row)[::-1].copy()
        case 9:
            row *= np.float32(1e-40)  # differences that are hardly numbers
        case 10:
            row[some[0]] = rng.choice([np.nan, np.inf, -np.inf])
            if rng.random() < 0.1:
                row[:] = -np.inf
        case 11:
            row = rng.choice(np.array([0.0, -0.0, -1.0], np.float32), vocab_size)
    return row


@dataclass
class Tally:
    rows: int = 0
    settled: int = 0
    differing: int = 0


def compare(draws: Draws, logits: Floats, rows: Index, positions: Index, tally: Tally) -> None:
    settled = settle(draws, logits, rows, positions)
    expected = draws.sampler.sample(logits.copy(), rows, positions)
    found = draws.sampler.sample(logits.copy(), rows, positions, settled)
    tally.rows += len(rows)
    tally.settled += int(settled.is_settled.sum())
    same = (found.tokens == expected.tokens) & (found.finite == expected.finite)
    same &= (found.stopped == expected.stopped) & (expected.finite | ~settled.is_settled)
    tally.differing += int((~same).sum())


def compare_random_rows(code: Code, count: int, seed: int) -> Tally:
    rng, tally = np.random.default_rng(seed), Tally()
    made = {size: Draws(code, size) for size in VOCABULARIES}
    shares = np.array(SHARES) / sum(SHARES)
    while tally.rows < count:
        size = int(rng.choice(VOCABULARIES, p=shares))
        draws, num_rows = made[size], int(rng.integers(1, 33))
        rows = rng.permutation(64)[:num_rows]
        positions = rng.integers(1, 2 ** rng.integers(2, 40), num_rows)
        for row in rows.tolist():
            draws.sampler.join(row, random_params(rng), np.zeros(1, np.int32), 1)
        logits = np.stack([random_logits(rng, size) for _ in range(num_rows)])
        compare(draws, logits, rows, positions, tally)
    return tally


def test_random_rows_draw_the_tokens_of_the_sampler() -> None:
    tally = compare_random_rows(host_code(), 4000, seed=0)
    assert not tally.differing and tally.settled > 0.6 * tally.rows


def test_the_plain_path_draws_the_same_tokens(plain: Code) -> None:
    tally = compare_random_rows(plain, 600, seed=1)
    assert not tally.differing and tally.settled > 0.6 * tally.rows


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 9))
def test_a_hundred_thousand_rows_draw_the_tokens_of_the_sampler(seed: int) -> None:
    tally = compare_random_rows(host_code(), 12_500, seed=seed)
    assert not tally.differing and tally.settled > 0.6 * tally.rows


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_ordinary_rows_are_settled(code: Code, params: dict[str, Any]) -> None:
    rng, tally = np.random.default_rng(2), Tally()
    draws, rows = Draws(code, VOCABULARY), np.arange(8)
    for row in rows.tolist():
        draws.sampler.join(row, SamplingParams(seed=row, **params), np.zeros(1, np.int32), 1)
    for position in range(1, 11):
        logits = model_logits(rng, len(rows))
        compare(draws, logits, rows, np.full(len(rows), position), tally)
    assert not tally.differing and tally.settled >= 0.97 * tally.rows


def test_top_p_counts_the_mass_of_tokens_that_are_not_listed(code: Code) -> None:
    """A few tokens near the top, and thousands that are too far below to be listed but weigh as much."""
    rng, tally = np.random.default_rng(4), Tally()
    draws, rows = Draws(code, 20000), np.arange(32)
    for position in range(1, 31):
        logits = rng.uniform(-11, -10.1, (len(rows), 20000))
        for row in rows.tolist():
            temperature, top_p = float(rng.choice([0.5, 1.0, 1.7])), float(rng.uniform(0.3, 0.8))
            params = SamplingParams(seed=position, temperature=temperature, top_p=top_p)
            draws.sampler.join(row, params, np.zeros(1, np.int32), 1)
            near = rng.permutation(20000)[:8]
            logits[row, near] = rng.uniform(-2, 0, len(near))
            logits[row, near[0]] = 0.0
            logits[row] *= temperature
        compare(draws, logits.astype(np.float32), rows, np.full(len(rows), position), tally)
    assert not tally.differing and tally.settled > 0.95 * tally.rows


def test_a_flat_row_is_drawn_from_all_its_tokens(code: Code) -> None:
    """The bar rises with what is listed, so that even then few tokens are."""
    draws, rows, tally = Draws(code, 20000), np.arange(32), Tally()
    for row in rows.tolist():
        draws.sampler.join(row, SamplingParams(seed=row, temperature=1.0), np.zeros(1, np.int32), 1)
    logits = np.zeros((len(rows), 20000), np.float32)
    compare(draws, logits, rows, rows + 1, tally)
    assert tally.settled == len(rows) and not tally.differing
    tokens = settle(draws, logits, rows, rows + 1).tokens
    assert len(set(tokens.tolist())) > 28 and tokens.max() > 15000 and tokens.min() < 5000


def test_rows_that_need_more_than_their_logits_are_left_to_the_sampler(code: Code) -> None:
    draws, rows = Draws(code, 300), np.arange(6)
    asked = [
        SamplingParams(temperature=1.0, seed=1, min_tokens=10),
        SamplingParams(temperature=1.0, seed=1, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=1.0, seed=1, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=(1, 2)),
        SamplingParams(temperature=1.0, seed=1),
    ]
    for row, params in enumerate(asked):
        draws.sampler.join(row, params, np.zeros(5, np.int32), 5)
    logits = np.random.default_rng(3).normal(0, 1, (6, 300)).astype(np.float32)
    assert settle(draws, logits, rows, np.full(6, 14)).is_settled.tolist() == [False] * 5 + [True]
    # The tenth token may end the row: from here on nothing is left of that rule.
    assert settle(draws, logits, rows, np.full(6, 15)).is_settled.tolist() == [True] + [False] * 4 + [True]


# ---------------------------------------------------------------- in an engine


class Counted(NativeStep):
    settled = left = 0

    def forward_and_draw(
        self, rows: DeviceRows, batch: FlatBatch, due: Index, wanted: Wanted
    ) -> tuple[NDArray[np.bool_], Settled]:
        good, settled = super().forward_and_draw(rows, batch, due, wanted)
        self.settled += int(settled.is_settled.sum())
        self.left += int((~settled.is_settled).sum())
        return good, settled


def asked_for(index: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.7, "top_p": 0.95, "logprobs": 2},
        {"temperature": 1.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_tokens": 6},
    ]
    return SamplingParams(max_tokens=12, seed=index, ignore_eos=index % 2 == 0, **kinds[index % len(kinds)])


def run_engine(
    around: Circumstances, threads: tuple[int, ...], *, is_drawn: bool
) -> tuple[list[Any], Counted]:
    model = tiny_model()
    config = around.config(model.spec, 100, 60)
    step = Counted(model, config, host_code(), max(threads), Changing(threads))
    engine = build_engine(config, CPURunner(config, step if is_drawn else Between(step)))
    try:
        return run_requests(engine, around, model.spec.vocab_size), step
    finally:
        step.close()


def run_requests(engine: Engine, around: Circumstances, vocab_size: int) -> list[Any]:
    """Tokens and ending of each request."""
    rng, found = random.Random(1), dict[int, list[Any]]()
    for index in range(24):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 7, 30]))]
        (request,) = engine.add(prompt, asked_for(index))
        found[int(request)] = []
    count = 0
    while engine.has_requests:
        events = engine.step_overlapped() if around.depth else engine.step()
        assert engine.last_error is None, engine.last_error
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
                count += 1
                if around.preempt and count % 5 == 0 and number in engine.scheduler.state.requests:
                    engine.scheduler.preempt(RequestId(number), swap=around.preempt == "swap")
        for finished in events.finished:
            found[int(finished.request)].append(finished.reason)
    return list(found.values())


@cache
def tiny_model() -> NativeModel:
    return build_model(QuantizedSource(tiny_spec(), "Q4_1", mixed=True), 200)


@cache
def undrawn() -> list[Any]:
    return run_engine(Circumstances(budget=512), (1,), is_drawn=False)[0]


@pytest.mark.parametrize(
    ("around", "threads"),
    [
        (Circumstances(), (1,)),
        (Circumstances(budget=7, depth=1), (2,)),
        (Circumstances(preempt="recompute"), (1, 3)),
        (Circumstances(mode="static"), (2, 1)),
    ],
    ids=str,
)
def test_requests_get_the_tokens_of_the_sampler(around: Circumstances, threads: tuple[int, ...]) -> None:
    outputs, step = run_engine(around, threads, is_drawn=True)
    assert outputs == undrawn()
    assert step.settled > 100 and step.left > 30
