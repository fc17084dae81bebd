"""Adapters on the native kernels: each kernel against float64, and the same bits whatever happens around a row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.models.files.adapter_files import Adapter, LowRank
from paceline.runner.native.adapters import NativeAdapters
from paceline.runner.native.checks import aligned
from paceline.runner.native.code import Code
from paceline.runner.native.layout import BF16, F16, F32, MATRICES
from paceline.runner.native.model import NativeModel, build_model
from tests.bits import Adapted, Circumstances, Prompt, Record, differences
from tests.kernels import checked_code
from tests.native.adapters import in_type, make_adapter
from tests.native.float64_model import Float64Model
from tests.native.runs import record_native
from tests.native.test_native_engine import (
    ALONE,
    CIRCUMSTANCES,
    FEW,
    MAX_LEN,
    THREADS,
    model,
    prompts,
    source,
)
from tests.native.test_native_kernels import address, arguments
from tests.quantized_helpers import QuantizedSource, tiny_spec

Floats = NDArray[np.float32]
KINDS = {"float32": F32, "bfloat16": BF16, "float16": F16}
NUM_NEW = 6


# ---------------------------------------------------------------- each kernel


class Matrices:
    """The two matrices of one part as the kernels read them."""

    def __init__(self, code: Code, dtype: str, rank: int, outputs: int = 64, inputs: int = 96) -> None:
        rng = np.random.default_rng(rank)
        a, b = rng.normal(0, 0.1, (rank, inputs)), rng.normal(0, 0.1, (outputs, rank))
        self.pair = LowRank(in_type(a.astype(np.float32), dtype), in_type(b.astype(np.float32), dtype))
        spec = replace(tiny_spec(), num_layers=1)
        self._adapters = NativeAdapters(spec)
        self._adapters.put(1, Adapter(identity="x", rank=rank, parts={(0, "q"): self.pair}))
        row = self._adapters.of_tokens(np.ones(1, np.int64)).tables[0].places[0, 0]
        self.fields = {name: int(row[at]) for name, at in MATRICES.items()}
        self.code, self.outputs, self.inputs = code, outputs, inputs

    def shrink(self, x: Floats) -> Floats:
        fields, low = self.fields, aligned(len(x) * self.fields["ranks"] * 4).view(np.float32)
        where = (fields["a_kind"], fields["a"], address(x), self.inputs, fields["ranks"], address(low))
        self.code.probe("shrink", arguments(*where, fields["ranks"] * 4, len(x)))
        return low.reshape(len(x), -1)

    def expand(self, low: Floats, out: Floats) -> Floats:
        """At most four rows."""
        fields, added = self.fields, out.copy()
        where = (fields["b_kind"], fields["b"], fields["ranks"], address(low), low.shape[1] * 4)
        self.code.probe(
            "expand",
            arguments(*where, len(low), address(added), self.outputs * 4, self.outputs // 16),
        )
        return added


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rank", [1, 4, 6, 8, 16, 33])
def test_both_products_are_those_of_float64(code: Code, plain: Code, dtype: str, rank: int) -> None:
    matrices, rng = Matrices(code, dtype, rank), np.random.default_rng(1)
    assert matrices.fields["a_kind"] == matrices.fields["b_kind"] == KINDS[dtype]
    x = rng.normal(0, 1, (4, 96)).astype(np.float32)
    own = rng.normal(0, 1, (4, 64)).astype(np.float32)
    low = matrices.shrink(x)
    exact = x.astype(np.float64) @ matrices.pair.a.astype(np.float64).T
    np.testing.assert_allclose(low[:, :rank], exact, atol=1e-6)
    assert not low[:, rank:].any()
    added = matrices.expand(low, own)
    np.testing.assert_allclose(added, own + exact @ matrices.pair.b.astype(np.float64).T, atol=1e-5)
    for rows in (1, 2, 3):
        assert np.array_equal(matrices.shrink(x[:rows]), low[:rows])
        assert np.array_equal(matrices.expand(low[:rows], own[:rows]), added[:rows]), "a row beside others"
    other = Matrices(plain, dtype, rank)
    assert np.array_equal(other.shrink(x), low) and np.array_equal(other.expand(low, own), added)


def test_numbers_that_are_not_finite_stay_so(code: Code) -> None:
    matrices = Matrices(code, "float32", 8)
    x = np.ones((2, 96), np.float32)
    x[1, 30] = np.nan
    added = matrices.expand(matrices.shrink(x), np.zeros((2, 64), np.float32))
    assert np.isfinite(added[0]).all() and np.isnan(added[1]).all()


# ---------------------------------------------------------------- in a model


@cache
def adapters(kind: str) -> list[Adapter]:
    """Of few parts and of all, of ranks that fill four and that do not, of every type."""
    spec = model(kind).spec
    return [
        make_adapter(spec, 4, ("q", "v"), seed=1),
        make_adapter(spec, 6, dtype="bfloat16", seed=2),
        make_adapter(spec, 16, dtype="float16", seed=3),
        make_adapter(spec, 1, ("k", "o", "down"), seed=4),
    ]


def numbers() -> list[int]:
    """Of each prompt: every adapter, and none; the last has the one of the prompt that it begins as."""
    drawn = [(2 * index + 1) % 5 for index in range(len(prompts()))]
    return [*drawn[:-1], drawn[-3]]


def adapted(prompt: Prompt, number: int, kind: str = "plain") -> Prompt:
    return Adapted.of(prompt, adapters(kind)[number - 1]) if number else prompt


@cache
def alone(kind: str) -> Record:
    return run(model(kind), range(len(prompts())), ALONE)


def run(chosen: NativeModel, which: Sequence[int], around: Circumstances, code: Code | None = None) -> Record:
    kind = "experts" if chosen.spec.experts else "plain"
    given = [adapted(prompts()[index], numbers()[index], kind) for index in which]
    return record_native(chosen, given, around, num_new=NUM_NEW, num_blocks=80, code=code)


def only(whole: Record, which: Sequence[int]) -> Record:
    return replace(whole, outputs=[whole.outputs[index] for index in which])


@pytest.mark.parametrize("kind", ["plain", "experts"])
@pytest.mark.parametrize("around", [each for each in CIRCUMSTANCES if each.budget > 1], ids=str)
def test_the_same_bits_as_alone(kind: str, around: Circumstances) -> None:
    found = run(model(kind), range(len(prompts())), around)
    assert not differences(found, alone(kind))
    assert bool(found.preempted) == bool(around.preempt) and bool(found.hits) == around.caching


@pytest.mark.parametrize("threads", THREADS, ids=str)
def test_the_same_bits_with_any_number_of_threads(threads: tuple[int, ...]) -> None:
    found = run(model("plain"), FEW, Circumstances(threads=threads, budget=40))
    assert not differences(found, only(alone("plain"), FEW))


def test_steps_touch_no_other_memory() -> None:
    for kind in ("plain", "experts"):
        found = run(model(kind), FEW, Circumstances(threads=(2,), budget=40), checked_code())
        assert not differences(found, only(alone(kind), FEW))


def test_rows_without_an_adapter_are_as_in_an_engine_without_any() -> None:
    plain = [index for index, number in enumerate(numbers()) if not number]
    assert len(plain) > 1
    given = [prompts()[index] for index in plain]
    before = record_native(model("plain"), given, ALONE, num_new=NUM_NEW)
    assert before.outputs == [alone("plain").outputs[index] for index in plain]
    assert all(alone("plain").bits[key] == bits for key, bits in before.bits.items())


def test_every_adapter_says_something_else() -> None:
    prompt = prompts()[8]
    asked = [adapted(prompt, number) for number in range(5)]
    found = record_native(model("plain"), asked, ALONE, num_new=NUM_NEW)
    assert len(set(found.outputs)) == 5


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_logits_are_those_of_the_same_arithmetic_in_float64(number: int) -> None:
    given: QuantizedSource = source("plain")
    rng = random.Random(3)
    texts: list[Prompt] = [tuple(rng.randrange(160) for _ in range(8)) for _ in range(12)]
    asked = [adapted(text, number) for text in texts]
    found = record_native(build_model(given, MAX_LEN), asked, Circumstances(budget=64), num_new=1)
    exact = Float64Model(given, adapter=adapters("plain")[number - 1])
    gaps = []
    for text in texts:
        logits = [
            np.frombuffer(found.bits[(-number, *text[:end])], np.float32) for end in range(1, len(text) + 1)
        ]
        expected = exact.logits(text)
        gaps.append(np.abs(np.stack(logits) - expected).max(axis=1) / np.abs(expected).max())
    # See test_native_engine: an input may fall over the edge of a step of eight bits.
    assert np.mean(np.concatenate(gaps) < 1e-4) > 0.7 and np.concatenate(gaps).max() < 0.05


def test_a_number_that_is_not_in_memory_is_an_error() -> None:
    memory = NativeAdapters(tiny_spec())
    memory.put(1, make_adapter(tiny_spec(), 4))
    memory.of_tokens(np.array([0, 1, 0]))
    memory.drop(1)
    with pytest.raises(KeyError):
        memory.of_tokens(np.array([0, 1, 0]))


def test_many_tokens_of_one_adapter_are_shared_out_in_blocks() -> None:
    memory = NativeAdapters(tiny_spec())
    memory.put(3, make_adapter(tiny_spec(), 4))
    memory.put(7, make_adapter(tiny_spec(), 9))
    of = memory.of_tokens(np.array([0, 7] + [3] * 130 + [0, 7]))
    assert of.ranks == 12 and of.blocks[:, 1:].tolist() == [[0, 64], [64, 64], [128, 2], [130, 2]]
    assert of.tokens.tolist() == [*range(2, 132), 1, 133]
    assert np.flatnonzero(of.of_token == 0).tolist() == [0, 132]
