"""Quantised weights in the runner of the GPU, through Triton's interpreter: what a CPU gives that rounds the same.

A tiny model whose layers weigh much, so that rounding shows. Prompts come in chunks of more rows than products for few
rows take, then rows decode together, and the last one alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.torch.interpreted import exact_fp8, reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.plan import Runner
from paceline.core.sampling import SamplingParams
from paceline.factory import build_engine
from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import StoredTensor
from paceline.models.layers import DenseLinear, Linear
from paceline.models.load import DenseStorage, build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu.build import DeviceStorage, load_parts
from paceline.runner.gpu.device_layers import GROUPS, GroupedLinear, ScaledLinear, dense_matrix, device_layer
from paceline.runner.gpu.kernels.packed_product import group_numbers
from paceline.runner.gpu.slab_memory import SlabMemory
from paceline.runner.torch_step import TorchStep
from tests.gpu.kernel_references import reference_packed, reference_scaled_rows
from tests.pure.models.quantized_files import FORMATS, WITH_EXPERTS, save, written
from tests.quantized_helpers import stored_matrix
from tests.torch.test_gpu_runner_interpreted import CONFIG, UnwarmedRunner

STRETCH = 6.0  # of the layers' weights
PROMPTS = ((70, 6), (3, 2), (9, 3))  # tokens, and tokens to generate
EIGHT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def stretched(stored: StoredTensor) -> torch.Tensor:
    factor = STRETCH if stored.name.startswith("model.layers.") else 1.0
    return torch.from_numpy(stored.to_float32() * factor)


class SameWeights(DeviceStorage):
    """Made-up weights are those of the CPU."""

    def _moved(self, stored: StoredTensor) -> torch.Tensor:
        return stretched(stored)


class RoundedLinear:
    """A product whose weights and inputs are rounded to eight bits, row by row."""

    def __init__(self, weight: torch.Tensor, kind: torch.dtype) -> None:
        self._kind = kind
        self._weight = self._rounded(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rounded(x) @ self._weight.T

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        rows = reference_scaled_rows(x, self._kind)
        return rows.q.float() * rows.scale[:, None]


class RoundedStorage(DenseStorage):
    """The layers' matrices as eight or four bits would keep them; embedding and head stay."""

    def __init__(self, quantization: str = "auto") -> None:
        super().__init__()
        self._quantization = quantization

    def linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None) -> Linear:
        matrix = torch.cat([stretched(weight) for weight in weights])
        if self._quantization == "auto" or not weights[0].name.startswith("model.layers."):
            return DenseLinear(matrix, bias)
        if self._quantization == "int4":
            group = next(size for size in GROUPS if matrix.shape[1] % size == 0)
            return DenseLinear(reference_packed(*group_numbers(matrix, group, torch.float32)).float())
        return RoundedLinear(matrix, EIGHT[self._quantization])


def generate(folder: Path, storage: DenseStorage | DeviceStorage) -> tuple[list[list[int]], list[float]]:
    """Tokens of every request, and their log-probabilities in order."""
    checkpoint = open_checkpoint(folder, load_format="dummy")
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=16, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=68, max_model_len=128),
    )
    ends = checkpoint.spec.eos_token_ids
    runner: Runner
    if isinstance(storage, DeviceStorage):
        parts = build_decoder(checkpoint, 2, storage).parts
        runner = UnwarmedRunner(config, checkpoint.spec, parts, ends, device=torch.device("cpu"))
    else:
        runner = CPURunner(config, TorchStep(build_decoder(checkpoint, 512, storage), config.kv), ends)
    engine = build_engine(config, runner)
    found: dict[int, list[int]] = {}
    for length, count in PROMPTS:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=1)
        found |= {
            number: [] for number in engine.add([7 * at % 400 + length for at in range(length)], params)
        }
    logprobs: dict[tuple[int, int], float] = {}
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped()
        for told in events.logprobs:
            logprobs[told.request, told.logprobs.position] = told.logprobs.logprob
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    return list(found.values()), [logprobs[key] for key in sorted(logprobs)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_four_bits_give_up_the_end_of_a_group_that_reaches_far(sign: float) -> None:
    """And that end alone."""
    values = sign * torch.cat([torch.zeros(64), torch.linspace(0, 1, 63), torch.tensor([1.2])])[None]
    numbers, scale, offset = group_numbers(values, 128, torch.float32)
    kept = numbers.float() * scale + offset
    near, far = (kept.min(), kept.max()) if sign > 0 else (kept.max(), kept.min())
    assert near.abs() < 1e-6 and 1.0 < sign * far < 1.18
    whole = (values * 15 / 1.2).round() * 1.2 / 15
    assert (kept - values).square().sum() < 0.97 * (whole - values).square().sum()


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_are_rounded_the_same_in_every_kind_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _, plain = generate(tmp_path, RoundedStorage())
    tokens, expected = generate(tmp_path, RoundedStorage(quantization))
    assert max(abs(a - b) for a, b in zip(plain, expected, strict=True)) > 5e-3, "else this test says nothing"
    exact_fp8(monkeypatch)
    device = SameWeights(torch.device("cpu"), torch.float32, quantization)
    found, logprobs = generate(tmp_path, device)
    assert found == tokens
    assert logprobs == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_of_files_stay_quantised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and gate and up as one, as a layer has them; without quantisation they are unpacked."""
    exact_fp8(monkeypatch)
    model = written(name)
    checkpoint = open_checkpoint(save(tmp_path, model))
    scaled = "int8" in name or ("fp8" in name and "blocks" not in name)
    kept = ScaledLinear if scaled else GroupedLinear
    for quantization, parts in (("auto", ("down",)), ("none", ("down",)), ("auto", ("gate", "up"))):
        names = [f"model.layers.0.mlp.{part}_proj.weight" for part in parts]
        values = torch.from_numpy(np.concatenate([model.values[each] for each in names]))
        storage = DeviceStorage(torch.device("cpu"), torch.float32, quantization)
        linear = storage.linear([checkpoint.tensor(each) for each in names], None)
        if parts == ("down",):
            assert isinstance(linear, kept if quantization == "auto" else DenseLinear)
        x = torch.randn(3, values.shape[1])
        torch.testing.assert_close(linear(x).double(), x.double() @ values.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name, bits", [("fp8 per tensor", 8), ("fp8 blocks", 8), ("compressed int8", 8), ("awq", 4)]
)
def test_experts_of_files_stay_quantised(name: str, bits: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, written(name, values=WITH_EXPERTS)))
    cpu = torch.device("cpu")
    parts = load_parts(checkpoint, cpu, torch.float32)
    layer = device_layer(parts.layers[0], checkpoint.spec, cpu, torch.float32)
    assert layer.experts is not None
    weights = layer.experts.weights
    assert (weights.gate_up.bits, weights.down.bits) == (bits, bits)
    assert (weights.gate_up.shape, weights.down.shape) == ((3, 512, 128), (3, 128, 256))
    # In a home they lie as their kernel wants them: nothing is stacked.
    home = SlabMemory(4, 1 << 20, cpu).home()
    parts = load_parts(checkpoint, cpu, torch.float32, home=home)
    placed = device_layer(parts.layers[0], checkpoint.spec, cpu, torch.float32).experts
    assert placed is not None
    for mine, other in ((placed.weights.gate_up, weights.gate_up), (placed.weights.down, weights.down)):
        assert mine.scale is not None and other.scale is not None
        for here, there in ((mine.q, other.q), (mine.scale, other.scale)):
            assert here.untyped_storage().nbytes() == 4 << 20 and here.stride() == there.stride()
            assert torch.equal(here.contiguous().view(torch.uint8), there.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_matrices_of_gguf_files_stay_in_four_bits(dtype: str) -> None:
    """Where they have no more; others have 16, and that is noted."""
    stored = stored_matrix((32, 256), dtype)
    storage = DeviceStorage(torch.device("cpu"), torch.float32)
    linear = storage.linear([stored, stored], None)
    assert isinstance(linear, DenseLinear if dtype == "Q8_0" else GroupedLinear)
    assert storage.unpacked == ({"Q8_0"} if dtype == "Q8_0" else set())
    values = torch.from_numpy(np.concatenate([stored.to_float32()] * 2))
    torch.testing.assert_close(dense_matrix(linear, torch.float32), values, rtol=1e-6, atol=1e-7)


def test_what_has_to_be_unpacked_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No product takes int8 with more than one scale a row."""
    model = written("compressed int8")
    for name, values in list(model.tensors.items()):
        if name.endswith("weight_scale"):
            model.tensors[name] = np.repeat(values, 2, axis=1)
    load_parts(open_checkpoint(save(tmp_path, model)), torch.device("cpu"), torch.float32)
    assert [record.getMessage() for record in caplog.records] == [
        "matrices of INT8 have 16 bits on the GPU: no product takes them as they are in the file"
    ]


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed int8", "gptq"])
def test_scales_of_keys_and_values_change_nothing_but_their_range(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; of 0.3 and 5.0 the next powers of two are taken."""
    exact_fp8(monkeypatch)
    model = written(name)
    model.tensors["model.layers.0.self_attn.k_scale"] = np.array(0.3, np.float32)
    model.tensors["model.layers.0.self_attn.v_scale"] = np.array([5.0], np.float32)
    checkpoint = open_checkpoint(save(tmp_path, model))
    cpu, fp8 = torch.device("cpu"), torch.float8_e4m3fn
    plain, folded = (load_parts(checkpoint, cpu, torch.float32, kv_dtype=kind) for kind in (None, fp8))
    x, spec = torch.randn(3, 128), checkpoint.spec
    before, after = (parts.layers[0].attention for parts in (plain, folded))
    heads, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = torch.split(before.qkv(x), [heads, keys, keys], dim=-1)
    assert torch.equal(after.qkv(x), torch.cat([q * 0.5, k / 0.5, v / 8.0], dim=-1))
    assert torch.equal(after.output(x), before.output(x) * 8.0)
