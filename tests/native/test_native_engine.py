"""A quantised model on the native kernels: a request's logits have the same bits whatever happens around it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.parameters import KVKeep
from paceline.core.plan import StepResult
from paceline.core.sampling import SamplingParams
from paceline.factory import build_engine
from paceline.models.spec import ExpertsSpec, ModelSpec
from paceline.runner.cpu import CPURunner
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.checks import is_checking
from paceline.runner.native.layout import COLUMNS, Q8, Q8_GROUP, SUB_BLOCK
from paceline.runner.native.model import NativeModel, build_model, objection
from paceline.runner.native.step import NativeStep
from tests.bits import Between, Circumstances, Prompt, Record, differences
from tests.kernels import host_code
from tests.native.float64_model import Float64Model
from tests.native.runs import record_native, step_threads
from tests.quantized_helpers import QuantizedSource, tiny_spec

NUM_NEW = 12
MAX_LEN = 400
LENGTHS = (1, 2, 5, 9, 16, 17, 31, 33, 47, 64, 90, 280)
ALONE = Circumstances(alone=True, budget=512)

CIRCUMSTANCES = [
    Circumstances(),
    Circumstances(budget=1),
    Circumstances(budget=7, block_size=32),
    Circumstances(budget=50, block_size=64),
    Circumstances(budget=300),
    Circumstances(alone=True, budget=13, block_size=32),
    Circumstances(alone=True, caching=True, block_size=32),
    Circumstances(caching=True, preempt="recompute", depth=1),
    Circumstances(preempt="swap", block_size=64),
    Circumstances(fork=True, budget=30),
    Circumstances(fork=True, caching=True, preempt="swap", block_size=32, depth=2),
    Circumstances(mode="static"),
    Circumstances(mode="dynamic", depth=1),
]
# A token a step takes long, and threads that share few cores wait for each other: fewer prompts do.
FEW = (3, 8, 10)
THREADS = [(1,), (2,), (3,), (8,), (1, 8, 2, 3)]


def spec_of(kind: str) -> ModelSpec:
    """Plain; or with windows, experts in two of three layers, norms of heads and biases."""
    if kind != "experts":
        return tiny_spec()
    experts = ExpertsSpec(num_experts=5, per_token=2, intermediate_size=64, normalize=True, layers=(0, 2))
    return replace(tiny_spec(tied=True, window=24), experts=experts, qk_norm=True, qkv_bias=True)


@cache
def source(kind: str) -> QuantizedSource:
    """Four bits, with eight in the embedding and in the values' matrix; or eight bits alone."""
    if kind == "bytes":
        return QuantizedSource(spec_of(kind), "Q8_0")
    return QuantizedSource(spec_of(kind), "Q4_1", mixed=True)


@cache
def model(kind: str) -> NativeModel:
    assert not objection(source(kind), 16)
    return build_model(source(kind), MAX_LEN)


def prompts() -> list[Prompt]:
    """Short and long ones, the last with the beginning of another."""
    rng = random.Random(1)
    drawn = [tuple(rng.randrange(3, 140) for _ in range(length)) for length in LENGTHS]
    return [*drawn, (*drawn[-2][:70], 5, 6, 7)]


@cache
def alone(kind: str, kv_dtype: str = "float32") -> Record:
    around = replace(ALONE, kv_dtype=kv_dtype)
    return record_native(model(kind), prompts(), around, num_new=NUM_NEW)


def only(run: Record, chosen: Sequence[int]) -> Record:
    return replace(run, outputs=[run.outputs[index] for index in chosen])


@pytest.mark.parametrize(
    "kind, kv_dtype", [("plain", "float32"), ("experts", "float32"), ("experts", "int8")]
)
@pytest.mark.parametrize("around", CIRCUMSTANCES, ids=str)
def test_the_same_bits_as_alone(kind: str, kv_dtype: str, around: Circumstances) -> None:
    """Keys and values that are rounded to bytes are rounded once: chunks, hits, copies and swaps read the same."""
    chosen = range(len(prompts())) if around.budget > 1 else FEW
    given = [prompts()[index] for index in chosen]
    around = replace(around, kv_dtype=kv_dtype)
    run = record_native(model(kind), given, around, num_new=NUM_NEW, num_blocks=80)
    assert not differences(run, only(alone(kind, kv_dtype), chosen))
    assert len(run.bits) > sum(map(len, given)) // 2
    assert bool(run.preempted) == bool(around.preempt)
    assert bool(run.forked) == around.fork
    assert bool(run.hits) == around.caching


@pytest.mark.parametrize("kind", ["plain", "experts", "bytes"])
@pytest.mark.parametrize("threads", THREADS, ids=str)
def test_the_same_bits_with_any_number_of_threads(kind: str, threads: tuple[int, ...]) -> None:
    around = Circumstances(threads=threads, budget=40)
    run = record_native(model(kind), [prompts()[index] for index in FEW], around, num_new=4)
    expected = only(alone(kind), FEW)
    expected.outputs = [output[:4] for output in expected.outputs]
    assert not differences(run, expected)
    assert len(run.bits) > sum(len(prompts()[index]) for index in FEW)


def test_bytes_have_other_bits_than_floats() -> None:
    floats, rounded = alone("experts"), alone("experts", "int8")
    same = [text for text in floats.bits.keys() & rounded.bits.keys() if len(text) > 1]
    assert same and not any(floats.bits[text] == rounded.bits[text] for text in same)
    apart = [
        np.abs(
            np.frombuffer(floats.bits[text], np.float32) - np.frombuffer(rounded.bits[text], np.float32)
        ).max()
        for text in same
    ]
    size = max(np.abs(np.frombuffer(floats.bits[text], np.float32)).max() for text in same)
    assert np.median(apart) < 0.02 * size, "a byte is a small error"


def test_outputs_are_varied() -> None:
    for kind, kv_dtype in (("plain", "float32"), ("experts", "float32"), ("experts", "int8")):
        outputs = alone(kind, kv_dtype).outputs
        assert len(set(outputs)) > 0.8 * len(outputs)
        assert sum(len(set(output)) for output in outputs) > 3 * len(outputs)


def test_a_changed_bit_is_noticed() -> None:
    changed = build_model(source("plain"), MAX_LEN)
    at = changed.head.at - changed.arena.address
    changed.arena.memory[at] ^= 1  # the lowest bit of one weight
    run = record_native(changed, prompts(), ALONE, num_new=NUM_NEW)
    assert differences(run, alone("plain"))


@pytest.mark.parametrize("window", [None, 4])
def test_logits_are_those_of_the_same_arithmetic_in_float64(window: int | None) -> None:
    """Where a sum's last bits move an input over the edge of a step of eight bits, the text differs from there on.

    Short texts seldom meet such an edge.
    """
    given = QuantizedSource(tiny_spec(window=window), "Q4_1", mixed=True)
    rng = random.Random(3)
    texts = [tuple(rng.randrange(160) for _ in range(10)) for _ in range(40)]
    run = record_native(build_model(given, MAX_LEN), texts, Circumstances(budget=64), num_new=1)
    gaps: list[NDArray[np.float64]] = []
    unrounded: list[NDArray[np.float64]] = []
    for text in texts:
        found = [np.frombuffer(run.bits[text[:count]], np.float32) for count in range(1, len(text) + 1)]
        for model_, to in (
            (Float64Model(given), gaps),
            (Float64Model(given, rounds_inputs=False), unrounded),
        ):
            exact = model_.logits(text)
            to.append(np.abs(np.stack(found) - exact).max(axis=1) / np.abs(exact).max())
    assert np.mean(np.concatenate(gaps) < 1e-4) > 0.8 and np.concatenate(gaps).max() < 0.05
    assert np.concatenate(unrounded).min() > 1e-3, "this test would not see how inputs are rounded"


def test_logits_of_eight_bits_are_those_of_inputs_that_are_not_rounded() -> None:
    """Within a few ten-thousandths: inputs have sixteen bits."""
    text = prompts()[4]
    run = record_native(model("bytes"), [text], Circumstances(budget=7), num_new=1)
    found = np.stack([np.frombuffer(run.bits[text[: count + 1]], np.float32) for count in range(len(text))])
    for rounds in (True, False):
        exact = Float64Model(source("bytes"), rounds_inputs=rounds).logits(text)
        gaps = np.abs(found - exact).max(axis=1) / np.abs(exact).max()
        assert gaps.max() < 5e-4 and (not rounds or np.median(gaps) < 1e-4)


# ---------------------------------------------------------------- KV that is dropped

KEPT = KVKeep(first=20, recent=40)
DROPPING = [
    Circumstances(kv_keep=KEPT),
    Circumstances(kv_keep=KEPT, budget=1),
    Circumstances(kv_keep=KEPT, budget=7, threads=(2,)),
    Circumstances(kv_keep=KEPT, caching=True, alone=True),
    Circumstances(kv_keep=KEPT, caching=True, preempt="recompute", depth=1),
    Circumstances(kv_keep=KEPT, preempt="swap", depth=2),
]
LONG_OUTPUT = 45


@cache
def dropping_alone(kv_dtype: str) -> Record:
    around = replace(ALONE, kv_keep=KEPT, kv_dtype=kv_dtype)
    given = [prompts()[index] for index in FEW]
    return record_native(model("plain"), given, around, num_new=LONG_OUTPUT)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("around", DROPPING, ids=str)
def test_what_is_dropped_follows_from_positions_alone(kv_dtype: str, around: Circumstances) -> None:
    """Chunks, hits, preemption and others in the batch change no bit of an answer that drops KV."""
    given = [prompts()[index] for index in FEW]
    around = replace(around, kv_dtype=kv_dtype)
    run = record_native(model("plain"), given, around, num_new=LONG_OUTPUT, num_blocks=80)
    assert not differences(run, dropping_alone(kv_dtype))
    assert bool(run.preempted) == bool(around.preempt)
    whole = record_native(model("plain"), given, replace(around, kv_keep=None), num_new=LONG_OUTPUT)
    assert run.outputs != whole.outputs, "nothing was dropped"


def test_a_token_sees_the_beginning_and_what_is_recent() -> None:
    """Against the same model in float64 with what is dropped hidden; positions stay those of the tokens."""
    given = QuantizedSource(tiny_spec(), "F32")
    text = tuple(random.Random(5).randrange(160) for _ in range(70))
    around = Circumstances(budget=64, kv_keep=KEPT)
    run = record_native(build_model(given, MAX_LEN), [text], around, num_new=50)
    tokens = (*text, *run.outputs[0][:-1])
    seen = np.ones((len(tokens), len(tokens)), np.bool_)
    for position in range(len(text), len(tokens)):
        seen[position, 32 : max(32, (position + 1 - KEPT.recent) // 16 * 16)] = False
    assert not seen[-1, 32:64].any() and seen[-1, :32].all() and seen[len(text) - 1].all()
    exact = Float64Model(given, rounds_inputs=False).logits(tokens, seen)
    found = [np.frombuffer(run.bits[tokens[: count + 1]], np.float32) for count in range(len(tokens))]
    np.testing.assert_allclose(np.stack(found), exact, atol=2e-3 * float(np.abs(exact).max()))


# ---------------------------------------------------------------- what is written where


class Watched(Between):
    """Steps that may write their tokens' slots and nothing else, and find finite numbers wherever they look."""

    def __init__(self, step: NativeStep) -> None:
        super().__init__(step)
        self._pool = step.kv
        self.padding = self.bad = 0  # tokens

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64]) -> NDArray[np.bool_]:
        self.check_memory()
        before = [pool.copy() for pool in self._pool.layers]
        good = super().forward(rows, batch, due)
        for old, new, group in zip(before, self._pool.layers, self._pool.layer_groups, strict=True):
            changed = np.flatnonzero(self._by_slot(old != new).any(axis=1))
            assert set(changed.tolist()) <= set(batch.slots[group].tolist()), "a slot of another token"
        self.padding += int((batch.row_of == len(batch.rows)).sum())
        self.bad += int((~good).sum())
        return good

    def check_memory(self) -> None:
        for pool in self._pool.layers:
            assert np.isfinite(pool).all()
            assert not pool[0].any(), "the null block holds something"

    def _by_slot(self, pool: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[slots, numbers of a token]."""
        count = pool.shape[0] * pool.shape[1] * SUB_BLOCK
        return np.concatenate([part.reshape(count, -1) for part in self._pool.by_token(pool)], axis=1)


def record_watched(native: NativeModel, given: list[Prompt], around: Circumstances) -> tuple[Record, Watched]:
    watched: list[Watched] = []

    def watch(step: NativeStep) -> Watched:
        watched.append(Watched(step))
        return watched[-1]

    run = record_native(native, given, around, num_new=NUM_NEW, num_blocks=80, change=watch)
    watched[0].check_memory()
    return run, watched[0]


@pytest.mark.parametrize("kind", ["plain", "experts"])
@pytest.mark.parametrize("mode", ["static", "dynamic", "continuous"])
def test_a_step_stores_its_tokens_and_padding_stores_nothing(kind: str, mode: str) -> None:
    chosen = range(10)
    given = [prompts()[index] for index in chosen]
    run, watched = record_watched(model(kind), given, Circumstances(mode=mode, block_size=32, budget=100))
    assert bool(watched.padding) == (mode != "continuous")
    assert not differences(run, only(alone(kind), chosen))


def poisoned(kind: str, token: int) -> NativeModel:
    """The model, with a token whose embedding is not a number."""
    made = build_model(source(kind), MAX_LEN)
    assert made.embedding.kind == Q8
    at, groups = made.embedding.at - made.arena.address, made.embedding.inputs // 32
    panel = at + token // COLUMNS * groups * Q8_GROUP
    place = made.arena.memory[panel : panel + groups * Q8_GROUP].reshape(groups, Q8_GROUP)
    place[:, Q8_GROUP - 64 :].view(np.float16)[:, token % COLUMNS] = np.nan
    return made


@pytest.mark.parametrize(
    "around",
    [
        Circumstances(),
        Circumstances(threads=(2,)),
        Circumstances(budget=7, block_size=64, depth=1),
        Circumstances(preempt="swap", caching=True, block_size=32),
        Circumstances(mode="static"),
    ],
    ids=str,
)
def test_a_row_that_is_not_a_number_ends_alone_and_leaves_nothing(around: Circumstances) -> None:
    """Embedding and output matrix are two here: the token is not a number as an input, and cannot be one as output."""
    chosen = (4, 7, 9)
    used = {token for index in chosen for token in (*prompts()[index], *alone("plain").outputs[index])}
    poison = next(token for token in range(140, 160) if token not in used)
    bad = [(poison,), (*prompts()[9][:40], poison, 5, 6)]
    given = [bad[0], *(prompts()[index] for index in chosen), bad[1]]
    run, watched = record_watched(poisoned("plain", poison), given, around)
    assert run.outputs[0] == run.outputs[-1] == ()
    assert watched.bad > 0
    run.outputs = run.outputs[1:-1]
    assert not differences(run, only(alone("plain"), chosen))


def calls_of_steady_steps(num_rows: int, sampling: SamplingParams) -> list[int]:
    """How many functions the runner calls in each of some steps in which all rows decode."""
    config = Circumstances(budget=512).config(model("plain").spec, MAX_LEN, 200)
    step, counts = NativeStep(model("plain"), config, host_code(), 1), []
    engine = build_engine(config, runner := CPURunner(config, step, ()))
    for index in range(num_rows):  # blocks are not crossed: 3 and 9 tokens are of the first of 16
        engine.add([5, 6, 7 + index], sampling)
    finish = runner.finish_until

    def counted(seq: int) -> StepResult:
        seen = 0

        def see(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            return finish(seq)
        finally:
            sys.setprofile(None)
            counts.append(seen)

    runner.finish_until = counted  # type: ignore[method-assign]
    try:
        for _ in range(6):
            engine.step()
            assert engine.last_error is None
    finally:
        runner.close()
    return counts[2:]


@pytest.mark.skipif(is_checking(), reason="the table of addresses grows with what rows hold")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_host_does_as_much_for_many_rows_as_for_few(temperature: float) -> None:
    """In a step in which nothing but the tokens is new: whole columns, and no row by itself."""
    sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=1, ignore_eos=True)
    few, many = (calls_of_steady_steps(rows, sampling) for rows in (3, 40))
    assert max(few) == max(many) > 50


def test_threads_end_with_the_step_that_owns_them() -> None:
    """As when a runner that was timed is let go of."""
    config = Circumstances().config(model("plain").spec, MAX_LEN, 40)
    before = step_threads()
    step = NativeStep(model("plain"), config, host_code(), 3)
    assert step_threads() == before + 2
    del step
    assert step_threads() == before


def test_runners_of_one_model_have_separate_caches() -> None:
    """As when a small runner is timed beside the one that serves."""
    config = Circumstances().config(model("plain").spec, MAX_LEN, 40)
    steps = [NativeStep(model("plain"), config, host_code(), 1) for _ in range(2)]
    try:
        rows = DeviceRows(config)
        rows.tables[0][0, 0] = 1
        one = np.arange(1)
        batch = FlatBatch(
            rows=one,
            start=one,
            count=one + 1,
            masked=one > 0,
            tokens=one + 7,
            positions=one,
            places=one,
            lengths=one + 1,
            row_of=one,
            slots=(one + SUB_BLOCK,),
        )
        assert steps[0].forward(rows, batch, one).all()
        written = [any(pool.any() for pool in step.kv.layers) for step in steps]
    finally:
        for step in steps:
            step.close()
    assert written == [True, False]
