"""The type of the KV cache: refused where it cannot be had, sized and moved by its bytes where it can."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.config.engine import KVConfig, ModelConfig
from paceline.core.parameters import KVKeep
from paceline.core.plan import NO_SWAPS, BlockCopies, Swaps
from paceline.errors import ConfigError
from paceline.lab.bench.machine import engine_sizes
from paceline.models.files.open import open_checkpoint
from paceline.models.load import build_decoder
from paceline.models.spec import FurtherLayer
from paceline.runner import device
from tests.bits import Circumstances
from tests.model_folder import write_model
from tests.torch.bits import record

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cpu_refuses_it_in_one_sentence(name: str, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path))
    with pytest.raises(ConfigError) as caught:
        LLM(folder, load_format="dummy", device="cpu", kv_cache_dtype=name)
    assert str(caught.value) == (
        f"--kv-cache-dtype {name} needs a GPU, and this model runs on the CPU: take int8 or auto"
    )


def test_where_there_is_no_gpu_it_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda: "torch finds no GPU here")
    assert device.choose_device(ModelConfig()) == "cpu"
    with pytest.raises(ConfigError, match="needs a GPU"):
        device.choose_device(ModelConfig(kv_cache_dtype="fp8"))


@pytest.mark.parametrize(
    "capability, is_taken", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_an_old_gpu_refuses_it(
    capability: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert device.choose_device(ModelConfig()) == "cuda"
    if is_taken:
        assert device.choose_device(ModelConfig(kv_cache_dtype="fp8")) == "cuda"
        return
    with pytest.raises(
        ConfigError, match=r"a card is too old for it, a compute capability of 8\.9 is needed"
    ):
        device.choose_device(ModelConfig(kv_cache_dtype="fp8"))


def test_bytes_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda: "")
    with pytest.raises(ConfigError, match="int8 is for a CPU.*take fp8, or add --device cpu"):
        device.choose_device(ModelConfig(kv_cache_dtype="int8"))
    assert device.choose_device(ModelConfig(kv_cache_dtype="int8", device="cpu")) == "cpu"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_bytes_hold_more_tokens(backend: str, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path, head_dim=32))
    found = []
    for kind in ("auto", "int8"):
        llm = LLM(
            folder,
            load_format="dummy",
            device="cpu",
            kv_cache_dtype=kind,
            cpu_backend=backend,
            kv_cache_memory_bytes=1 << 20,
        )
        outputs = llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, detokenize=False)
        )
        assert len(outputs[0].outputs[0].token_ids) == 4
        found.append((engine_sizes(llm.loaded)["kv_cache_dtype"], llm.loaded.config.kv.num_blocks))
    (floats, few), (rounded, many) = found
    assert (floats, rounded) == ("float32", "int8")
    assert pytest.approx(many / few, rel=0.05) == 4 * 32 / (32 + 4)


AROUND = [
    Circumstances(kv_dtype="int8", budget=7),
    Circumstances(kv_dtype="int8", caching=True, alone=True),
    Circumstances(kv_dtype="int8", caching=True, preempt="swap", fork=True),
    Circumstances(kv_dtype="int8", kv_keep=KVKeep(first=3, recent=20), budget=9, preempt="recompute"),
    Circumstances(kv_dtype="float32", kv_keep=KVKeep(first=3, recent=20), budget=9, preempt="swap"),
]


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_torch_rounds_and_drops_alike_whatever_is_around(around: Circumstances, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path), load_format="dummy")
    decoder = build_decoder(checkpoint, 256)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 60) for _ in range(length)) for length in (3, 40, 61)]
    prompts.append((*prompts[2][:48], 5, 6))
    alone = Circumstances(alone=True, budget=128, kv_dtype=around.kv_dtype, kv_keep=around.kv_keep)
    expected = record(decoder, prompts, alone, num_new=40)
    found = record(decoder, prompts, around, num_new=40)
    assert found.outputs == expected.outputs
    assert bool(found.preempted) == bool(around.preempt)
    plain = record(decoder, prompts, Circumstances(alone=True, budget=128), num_new=40)
    same = plain.bits.keys() & expected.bits.keys()
    floats = [np.frombuffer(run.bits[text], np.float32) for text in same for run in (plain, expected)]
    apart = max(np.abs(one - other).max() for one, other in zip(floats[::2], floats[1::2], strict=True))
    assert apart > 1e-4, "nothing was rounded, and nothing was dropped"


def test_a_result_says_which_type_it_was(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), load_format="dummy", device="cpu")
    sizes = engine_sizes(llm.loaded)
    assert (sizes["dtype"], sizes["kv_cache_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize("further", [(), (FurtherLayer(1, 32), FurtherLayer(3, 16), FurtherLayer(8, 16))])
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_blocks_are_copied_and_swapped_byte_for_byte(
    dtype: torch.dtype, further: tuple[FurtherLayer, ...], tmp_path: Path
) -> None:
    """Layers of a model that guesses with them, which may be smaller or larger than the model's."""
    from paceline.runner.gpu.device_queue import DeviceQueue
    from paceline.runner.gpu.kv_pools import KVPools, SwapPool, device_block_bytes

    spec = open_checkpoint(write_model(tmp_path), load_format="dummy").spec
    config = KVConfig(block_size=64, num_blocks=6, num_host_blocks=3)
    pools = KVPools(spec, config, [torch.zeros(1, 4, dtype=torch.int32)], dtype, further)
    assert pools.layers[0].keys.dtype == dtype and len(pools.layers) == spec.num_layers
    assert [each.keys.shape[1::2] for each in pools.further] == [each[:2] for each in further]
    layers = pools.layers + pools.further
    sizes = sum(pool.numel() * pool.itemsize for layer in layers for pool in (layer.keys, layer.values))
    assert sizes == 6 * device_block_bytes(spec, dtype, further)
    assert pools.context_bytes * 64 == device_block_bytes(spec, dtype, further)
    memory = [pool.view(torch.uint8) for layer in layers for pool in (layer.keys, layer.values)]
    for number, part in enumerate(memory):  # every byte there is, those of NaN among them
        part.copy_(torch.arange(part.numel()).add(number).remainder(256).view_as(part))
    before = [part.clone() for part in memory]

    def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(values, np.int32)

    two = column(0, 0)
    pools.copy_blocks(BlockCopies(row=two, group=two, index=two, source=column(1, 2), target=column(2, 3)))
    places = SwapPool(pools.blocks, config.num_host_blocks, DeviceQueue(torch.device("cpu")))
    places.swap(Swaps(ticket=column(7, 7), group=two, block=column(4, 5), place=column(2, 0)), NO_SWAPS)
    assert places.completed(wait=False).tolist() == [7]
    for part in memory:
        part[4:].zero_()
    places.swap(NO_SWAPS, Swaps(ticket=column(9, 8), group=two, block=column(5, 4), place=column(2, 0)))
    assert places.completed(wait=True).tolist() == [8, 9]
    assert not len(places.completed(wait=True))
    for part, old in zip(memory, before, strict=True):
        assert torch.equal(part, old[[0, 1, 1, 1, 5, 4]])


def test_host_memory_for_prefixes_is_for_a_gpu_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda: "no GPU is found here")
    with pytest.raises(ConfigError, match="--kv-offloading-size is for a GPU.*--kv-cache-memory-bytes"):
        device.choose_device(ModelConfig(kv_offloading_size=1.0))
    pytest.importorskip("triton", reason="Triton is not installed")
    from paceline.runner.gpu import build

    monkeypatch.setattr(build, "free_memory", lambda: 10 << 30)
    one: Any = types.SimpleNamespace(group_windows=(None,))
    two: Any = types.SimpleNamespace(group_windows=(None, 512))
    sizes = build.host_blocks(8.0, 1 << 20, one, {})
    assert sizes == {"num_host_blocks": 8192, "cache_on_host": True}
    refused: tuple[tuple[float, Any, dict[str, int], str], ...] = (
        (8.1, one, {}, "is more than 80% of the 10.0 GiB of memory that is available: give at most 8.0"),
        (1.0, one, {"num_host_blocks": 4}, "and --num-host-blocks 4 say the same"),
        (1.0, two, {}, "sliding windows"),
        (0.0001, one, {}, "holds no KV block"),
    )
    for size, spec, given, words in refused:
        with pytest.raises(ConfigError, match=words):
            build.host_blocks(size, 1 << 20, spec, given)
