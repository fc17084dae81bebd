"""One set of numbers on every processor: golden hashes of logits, made from integers alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.models.files.stored import StoredTensor, decode_blocks, decode_float, tensor_names
from paceline.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from paceline.runner.native.code import Code
from paceline.runner.native.model import build_model, cos_and_sin, objection, rope_tables
from tests.bits import Circumstances, Prompt
from tests.native.runs import record_native
from tests.quantized_helpers import tiny_spec

# Of the logits of every token of some prompts and of what follows them. They are the same on ARM and x86_64, with every
# set of instructions. One that changes means that every answer of every model may change.
GOLDEN = {
    "Q4_1": "42bb0a2ba3920f0a69e06ed9fcaba985e1fbad973ed770a7c6f06950d3a8e131",
    "Q8_0": "85657f0d1dc85db2a36c7b49d7cb2a11a38b8499ef195b6d8f824b4955fe26fb",
    "BF16": "cdc37a7999aa1f7f4de7c47b8a4b4c293be485ff35d3beeb59d233b9c5282bab",
    "experts": "9195b5321a42287f4dcd9c35e401f5b6dcb90429fe137f71d2592117232323e4",
}
NUM_NEW = 6


def drawn(name: str, count: int) -> NDArray[np.uint8]:
    """Bytes that depend on a name alone."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8)


PROMPTS: list[Prompt] = [
    tuple((drawn(f"{length} tokens", length) % 160).tolist()) for length in (1, 4, 7, 13, 45)
]


class IntegerSource:
    """A model of tensors made from integers: nothing in it comes from a library of mathematics."""

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self.spec = spec
        shapes = dict(tensor_names(spec))
        self._tensors = {name: self._make(name, shape, dtype) for name, shape in shapes.items()}

    def _make(self, name: str, shape: tuple[int, ...], dtype: str) -> StoredTensor:
        size = prod(shape)
        numbers = drawn(name, size)
        if len(shape) == 1:
            raw = (numbers.astype(np.float32) / np.float32(128) + np.float32(0.5)).view(np.uint8)
            return StoredTensor(name=name, shape=shape, dtype="F32", raw=raw, decode=decode_float)
        if dtype == "BF16":
            values = (numbers.astype(np.float32) - np.float32(127.5)) / np.float32(512)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            return StoredTensor(name=name, shape=shape, dtype=dtype, raw=raw, decode=decode_float)
        kind = "Q8_0" if "embed" in name or "v_proj" in name else dtype
        blocks = size // 32
        steps = drawn(f"scales of {name}", blocks).astype(np.float16) % 16 + 16
        if kind == "Q8_0":
            halves, words = (steps / np.float16(8192))[:, None], numbers.reshape(blocks, 32)
        else:
            halves = np.stack([steps / np.float16(1024), steps / np.float16(-128)], axis=1)
            words = numbers.reshape(blocks, 32)[:, :16]
        raw = np.concatenate([halves.view(np.uint8), words], axis=1).ravel()
        return StoredTensor(name=name, shape=shape, dtype=kind, raw=raw, decode=decode_blocks)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> StoredTensor:
        return self._tensors[name]


def source(kind: str) -> IntegerSource:
    if kind != "experts":
        return IntegerSource(tiny_spec(window=24), kind)
    experts = ExpertsSpec(num_experts=5, per_token=2, intermediate_size=64, normalize=True, layers=(0, 2))
    spec = replace(tiny_spec(tied=True), experts=experts, qk_norm=True, qkv_bias=True, activation="gelu_tanh")
    return IntegerSource(spec, "Q4_1")


def digest(kind: str, code: Code) -> str:
    assert not objection(source(kind), 16)
    run = record_native(
        build_model(source(kind), 64), PROMPTS, Circumstances(budget=40), num_new=NUM_NEW, code=code
    )
    assert len(set(run.bits.values())) == len(run.bits) > 70
    found = hashlib.sha256(repr(run.outputs).encode())
    for tokens in sorted(run.bits):
        assert np.isfinite(np.frombuffer(run.bits[tokens], np.float32)).all()
        found.update(run.bits[tokens])
    return found.hexdigest()


@pytest.mark.parametrize("kind", list(GOLDEN))
def test_logits_have_the_same_bits_on_every_processor(code: Code, plain: Code, kind: str) -> None:
    assert {digest(kind, code), digest(kind, plain)} == {GOLDEN[kind]}


def test_turns_do_not_depend_on_a_library_of_mathematics() -> None:
    """Exact within the last bit of float64; and equal to what other processors found."""
    rng = np.random.default_rng(0)
    angles = np.concatenate([np.arange(4096) / 64, rng.random(20_000) * 1e6, [0.0]])
    found = cos_and_sin(angles)
    assert max(np.abs(found[0] - np.cos(angles)).max(), np.abs(found[1] - np.sin(angles)).max()) < 5e-16
    seen = hashlib.sha256()
    yarn = RopeSpec(
        rotary_dim=32,
        kind="yarn",
        factor=4.0,
        trained_positions=512,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    )
    for rope in (RopeSpec(rotary_dim=64, theta=500000.0), yarn):
        for table in rope_tables(rope, 20_000):
            seen.update(table.tobytes())
    assert seen.hexdigest() == "920d0aee729f310d489fc878d1a6c3bef3a5c6c0ac21d8853de03f8752ec95bc"
