"""Two models in one piece of memory through Triton's interpreter: tokens are those of each alone, whichever slabs their
blocks lie in, and after sleeps in which the other one has written over the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.model_set import SharedMemory
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.slab_trade import SlabTrade, broken_slabs
from paceline.factory import build_engine
from paceline.kv.slabs import Owner, SlabMarket
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu.kv_pools import part_shape
from paceline.runner.gpu.runner import GPURunner
from paceline.runner.gpu.slab_memory import GPUSleeper, Home, SlabMemory, choose_slab_bytes
from paceline.runner.torch_step import TorchStep
from tests.torch.test_gpu_runner_interpreted import CONFIG, SameWeights

DEVICE = torch.device("cpu")
LONGEST = 192
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
SHAPES: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 1, "num_hidden_layers": 2})


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPURunner, "_prepare", lambda self, graphs: None)


def prompts(seed: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 512, 66).tolist() for _ in range(count)]


def answers(engine: Engine, given: list[list[int]], trade: SlabTrade | None = None) -> list[list[int]]:
    found: dict[int, list[int]] = {engine.add(each, GREEDY)[0]: [] for each in given}
    while engine.has_requests or not engine.is_idle:
        if trade is not None:
            trade.settle()
            assert list(broken_slabs(trade)) == []
        events = engine.step_overlapped()
        assert engine.last_error is None, repr(engine.last_error)
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
    return list(found.values())


def opened(folder: Path) -> list[Checkpoint]:
    checkpoints = []
    for number, changes in enumerate(SHAPES):
        path = folder / str(number)
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        checkpoints.append(open_checkpoint(path, load_format="dummy"))
    return checkpoints


def engine_config(**kv: Any) -> EngineConfig:
    return EngineConfig(
        kv=KVConfig(block_size=64, **kv),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=192, max_model_len=LONGEST),
        depth=1,
    )


class TwoModels:
    def __init__(self, checkpoints: list[Checkpoint], num_slabs: int) -> None:
        shapes = [part_shape(each.spec, torch.float32) for each in checkpoints]
        memory = self.memory = SlabMemory(num_slabs, choose_slab_bytes(shapes, 100_000, 200_000), DEVICE)
        shared = SharedMemory(
            num_slabs=num_slabs, slab_bytes=memory.slab_bytes, kv_slabs=8, part=0.5, device=memory
        )
        owners: list[Owner] = []
        self.engines, self.sleepers = [], []
        for checkpoint, shape in zip(checkpoints, shapes, strict=True):
            given = {"block_size": 64, "max_model_len": LONGEST}
            sizes = shared.sizes(given, shape.block_bytes, LONGEST, None)
            del sizes["block_size"], sizes["max_model_len"]
            config, home = engine_config(**sizes), memory.home()

            def load(home: Home, checkpoint: Checkpoint = checkpoint) -> Any:
                storage = SameWeights(DEVICE, torch.float32, home=home)
                return build_decoder(checkpoint, 2, storage).parts

            parts = load(home)
            ends = checkpoint.spec.eos_token_ids
            runner = GPURunner(config, checkpoint.spec, parts, ends, device=DEVICE, memory=memory)
            self.engines.append(build_engine(config, runner))
            self.sleepers.append(GPUSleeper(home, load, runner))
            floor = config.kv.least_blocks // config.kv.slab_blocks
            owners.append(
                Owner(name=str(len(owners)), floor=floor, ceiling=config.kv.most_slabs, home=home.slabs)
            )
        self.trade = SlabTrade(SlabMarket(num_slabs, owners), self.engines)
        self.trade.begin()

    def sleep(self, model: int, level: int) -> None:
        self.engines[model].sleep()
        self.sleepers[model].let_go(level)
        self.trade.slept(model)

    def wake(self, model: int) -> None:
        assert self.trade.make_room(model)
        self.engines[model].wake(self.sleepers[model].open())


def alone(checkpoint: Checkpoint, given: list[list[int]]) -> list[list[int]]:
    """On the CPU, as test_gpu_runner_interpreted.py compares them."""
    config = engine_config(num_blocks=24)
    step = TorchStep(build_decoder(checkpoint, 512), config.kv)
    return answers(build_engine(config, CPURunner(config, step, checkpoint.spec.eos_token_ids)), given)


def test_tokens_do_not_depend_on_slabs_nor_on_sleep(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    asked = [prompts(model, 2) for model in (0, 1)]
    expected = [alone(checkpoint, given) for checkpoint, given in zip(checkpoints, asked, strict=True)]
    assert expected[0] != expected[1]
    # That of null blocks, two homes, and room for one of them at its peak.
    both = TwoModels(checkpoints, 1 + 7 + 3)
    home = both.trade.market.owners[0].home
    assert both.trade.market.owners[1].home.stop == 1 + 7
    for model in (0, 1):
        assert answers(both.engines[model], asked[model], both.trade) == expected[model]
    assert both.trade.num_reclaimed > 0, "the second had to take what the first had cached"
    for level in (1, 2):
        both.sleep(0, level)
        before = both.memory.bytes.clone()
        answers(both.engines[1], prompts(10 + level, 1), both.trade)
        both.memory.bytes[home.start * both.memory.slab_bytes : home.stop * both.memory.slab_bytes] ^= 0x5A
        assert not torch.equal(before, both.memory.bytes)
        both.wake(0)
        assert answers(both.engines[0], asked[0], both.trade) == expected[0]
