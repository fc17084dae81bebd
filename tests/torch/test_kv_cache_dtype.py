"""The type of the KV cache: refused where it cannot be had, sized and moved by its bytes where it can."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM
from paceline.config.engine import KVConfig, ModelConfig
from paceline.core.plan import NO_SWAPS, BlockCopies, Swaps
from paceline.errors import ConfigError
from paceline.lab.bench.machine import engine_sizes
from paceline.models.files.open import open_checkpoint
from paceline.runner import device
from tests.model_folder import write_model

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cpu_refuses_it_in_one_sentence(name: str, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path))
    with pytest.raises(ConfigError) as caught:
        LLM(folder, load_format="dummy", device="cpu", kv_cache_dtype=name)
    assert str(caught.value) == (
        f"--kv-cache-dtype {name} needs a GPU, and this model runs on the CPU: take auto"
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


def test_a_result_says_which_type_it_was(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), load_format="dummy", device="cpu")
    sizes = engine_sizes(llm.loaded)
    assert (sizes["dtype"], sizes["kv_cache_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_blocks_are_copied_and_swapped_byte_for_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    from paceline.runner.gpu.device_queue import DeviceQueue
    from paceline.runner.gpu.kv_pools import KVPools, SwapPool, device_block_bytes

    spec = open_checkpoint(write_model(tmp_path), load_format="dummy").spec
    config = KVConfig(block_size=64, num_blocks=6, num_host_blocks=3)
    pools = KVPools(spec, config, [torch.zeros(1, 4, dtype=torch.int32)], dtype)
    assert pools.layers[0].keys.dtype == dtype
    sizes = sum(pool.numel() * pool.itemsize for layer in pools.layers for pool in (layer.keys, layer.values))
    assert sizes == 6 * device_block_bytes(spec, dtype)
    memory = [pool.view(torch.uint8) for layer in pools.layers for pool in (layer.keys, layer.values)]
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
