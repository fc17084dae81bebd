"""Adapters of the GPU's runner through Triton's interpreter: tokens are those of the CPU's step.

A tiny model in float32. Rows with different adapters, of one and of two panels of ranks, share steps with rows that
have none; with drafts and without; and a place is taken again. tests/gpu has whole engines on the card.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.adapter_folders import ALL_SEVEN, adapter_arrays, write_adapter
from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, ModelConfig, SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.core.adapter import NO_ADAPTER
from paceline.core.plan import Runner
from paceline.core.sampling import SamplingParams
from paceline.engine.adapters import AdapterMemory, Adapters
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.factory import build_engine
from paceline.models.files.adapter_files import open_adapter
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu.adapters import AdapterRoom
from paceline.runner.gpu.build import choose_gpu_sizes
from paceline.runner.gpu.drafts.drafted_steps import DraftedSteps
from paceline.runner.gpu.graphs import DraftKey
from paceline.runner.gpu.kv_pools import device_block_bytes
from paceline.runner.torch_step import TorchStep
from paceline.scheduler.invariants import InvariantChecker
from tests.torch.test_gpu_drafts_interpreted import SIZES
from tests.torch.test_gpu_runner_interpreted import CONFIG, QuickRunner, SameWeights

ROOM = AdapterRoom(places=2, max_rank=20)
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
RULED = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, repetition_penalty=1.3)
NGRAM = DraftConfig(method="ngram", width=3, sizes=SIZES, seconds=(0.01,) * len(SIZES))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return open_checkpoint(path, load_format="dummy")


@pytest.fixture(scope="module")
def folders(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root, found = tmp_path_factory.mktemp("adapters"), []
    for number, (targets, rank) in enumerate(
        [(("q_proj", "v_proj"), 4), (ALL_SEVEN, 20), (("down_proj",), 16)]
    ):
        arrays = adapter_arrays(checkpoint.spec, targets, rank, seed=number)
        found.append(write_adapter(root / str(number), arrays, rank=rank, targets=targets))
    return found


def make_engine(checkpoint: Checkpoint, *, on_gpu: bool, drafts: DraftConfig | None = None) -> Engine:
    scheduler = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=128,
        drafts=drafts,
        max_loras=ROOM.places if on_gpu else 0,
    )
    kv = KVConfig(block_size=64, num_blocks=24, groups=(GroupSpec(),))
    config = EngineConfig(kv=kv, scheduler=scheduler, depth=1)
    spec, device = checkpoint.spec, torch.device("cpu")
    runner: Runner
    memory: AdapterMemory | None
    if on_gpu:
        parts = build_decoder(checkpoint, 2, SameWeights(device, torch.float32)).parts
        quick = QuickRunner(config, spec, parts, spec.eos_token_ids, device=device, adapter_room=ROOM)
        runner, memory = quick, quick.adapters
    else:
        step = TorchStep(build_decoder(checkpoint, 512), kv)
        runner, memory = CPURunner(config, step, spec.eos_token_ids), step.adapters
    return build_engine(
        config,
        runner,
        make_adapters=lambda scheduler: Adapters(
            scheduler, memory, lambda folder: open_adapter(folder, spec, ROOM.max_rank)
        ),
        make_checker=InvariantChecker,
    )


def answers(engine: Engine, numbers: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Of one prompt for each adapter; their lengths differ, so that some are read while others decode."""
    random = np.random.default_rng(1)
    found: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        prompt = random.integers(3, 512, 4 + 6 * index).tolist()
        found |= {request: [] for request in engine.add(prompt, params, adapter=number)}
    while engine.has_requests or not engine.is_idle:
        for batch in engine.step_overlapped().tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[request].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    return list(found.values())


def with_two(engine: Engine, folders: list[Path]) -> Engine:
    for folder in folders[:2]:
        engine.adapters.load(folder.name, folder)
    return engine


@pytest.fixture(scope="module")
def cpu(checkpoint: Checkpoint, folders: list[Path]) -> Engine:
    return with_two(make_engine(checkpoint, on_gpu=False), folders)


@pytest.mark.parametrize("params", [GREEDY, RULED], ids=["plain", "rules"])
def test_tokens_are_those_of_the_cpu(
    checkpoint: Checkpoint, folders: list[Path], cpu: Engine, params: SamplingParams
) -> None:
    gpu = with_two(make_engine(checkpoint, on_gpu=True), folders)
    mixed = [1, NO_ADAPTER, 2]
    expected = answers(cpu, mixed, params)
    assert expected != answers(cpu, [NO_ADAPTER] * 3, params), "adapters make no difference"
    assert answers(gpu, mixed, params) == expected


def test_rows_with_adapters_verify_drafts(
    checkpoint: Checkpoint, folders: list[Path], cpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = with_two(make_engine(checkpoint, on_gpu=True, drafts=NGRAM), folders)
    compute, adapted = DraftedSteps._compute, []

    def noted(self: DraftedSteps, key: DraftKey) -> None:
        adapted.append(key.adapted)
        compute(self, key)

    monkeypatch.setattr(DraftedSteps, "_compute", noted)
    assert answers(gpu, [2, NO_ADAPTER]) == answers(cpu, [2, NO_ADAPTER])
    assert True in adapted, "no step had drafts"


def test_places_are_taken_again(checkpoint: Checkpoint, folders: list[Path]) -> None:
    """Three adapters and two places. What an adapter does not have is nothing there, whatever the one before it had."""
    cpu, gpu = make_engine(checkpoint, on_gpu=False), make_engine(checkpoint, on_gpu=True)
    for engine in (cpu, gpu):
        for folder in folders:
            engine.adapters.load(folder.name, folder)
    assert len(gpu.scheduler.state.adapters.resident) == ROOM.places
    assert answers(gpu, [2, 1, 3]) == answers(cpu, [2, 1, 3])
    assert gpu.scheduler.state.adapters.evicted > 0


def test_their_room_is_taken_from_the_blocks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, device, spec = 1 << 30, torch.device("cuda"), checkpoint.spec
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * gib, 4 * gib))
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    plain, adapted = (
        choose_gpu_sizes(ModelConfig(), spec, given, device, torch.bfloat16, None, room)["num_blocks"]
        for room in (None, AdapterRoom(places=100, max_rank=16))
    )
    # q, k and v of 64 inputs, o of 128, gate and up of 64, down of 128, with as many outputs as heads and inner have.
    entries = 16 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 2 * (64 + 128) + 128 + 64)
    taken = (plain - adapted) * device_block_bytes(spec, torch.bfloat16)
    assert 100 * entries * 2 <= taken <= 100 * entries * 2 + (5 << 20)
    with pytest.raises(ConfigError, match=r"buffers and adapters .* --max-loras"):
        choose_gpu_sizes(
            ModelConfig(),
            spec,
            given,
            device,
            torch.bfloat16,
            None,
            AdapterRoom(places=4000, max_rank=512),
        )
