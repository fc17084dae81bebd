"""Vectors of the GPU's runners through Triton's interpreter: those of the CPU, in chunks, beside rows that decode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.config.sized import engine_config, with_pools
from paceline.core.counters import CPUWork
from paceline.core.events import Finished
from paceline.core.parameters import PoolingParams
from paceline.core.plan import Runner
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.core.standing import Pulse
from paceline.factory import build_engine
from paceline.models.encoder import Encoder
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.runner.cpu import CPURunner
from paceline.runner.cpu_backend import DECODER_POOLS, classifier_head, encoder_pools
from paceline.runner.encoder_step import EncoderStep
from paceline.runner.gpu.encoder_runner import load_encoder
from paceline.runner.gpu.runner import GPURunner
from paceline.runner.sizing import encoder_sizes
from tests.torch.embeddings.tiny_encoders import CONFIGS, VOCAB, save_encoder
from tests.torch.test_gpu_runner_interpreted import CONFIG, make_runner

CPU, MOST_STEPS = torch.device("cpu"), 200


def pooled(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, pooling=PoolingParams(kind=kind, **more))


def run(
    config: EngineConfig, runner: Runner, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[np.ndarray], list[list[int]]]:
    """Vectors of the requests that end with one, and tokens of all."""
    engine = build_engine(config, runner)
    numbers = [
        engine.add(np.array(prompt, np.int32), each)[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    vectors: dict[int, np.ndarray] = {}
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    for _ in range(MOST_STEPS):
        if not engine.has_requests and engine.is_idle:
            break
        events = engine.step_overlapped()
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                tokens[number].append(token)
        for finished in events.finished:
            assert finished.reason in (FinishReason.STOP, FinishReason.LENGTH), finished
            if finished.vector:
                vectors[finished.request] = np.frombuffer(finished.vector, "<f4")
        assert engine.last_error is None, repr(engine.last_error)
    return [vectors[number] for number in numbers if number in vectors], list(tokens.values())


# -- decoders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [24, 5], ids=["room", "preempted"])
def test_a_decoders_vectors_are_those_of_the_cpu_beside_rows_that_decode(
    tmp_path: Path, num_blocks: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=num_blocks, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=48, max_model_len=256, pools=DECODER_POOLS
        ),
        depth=1,
    )
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        pooled("mean"),
        pooled("last", normalize=True, dimensions=24),
        pooled("choice", token_ids=(5, 9, 300)),
        pooled("choice", token_ids=(7, 8), raw=True),
        SamplingParams(max_tokens=3, temperature=0.8, seed=3, ignore_eos=True),
        pooled("last"),
        pooled("mean", normalize=True),
    ]
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 512, length).tolist() for length in (5, 90, 70, 66, 1, 9, 1, 20)]
    prompts[3][:64] = prompts[2][:64]  # a block that it hits
    expected, written = run(config, make_runner(checkpoint, config, on_gpu=False), prompts, params)
    runner = make_runner(checkpoint, config, on_gpu=True)
    assert isinstance(runner, GPURunner)
    found, tokens = run(config, runner, prompts, params)
    assert len(found) == 6 and tokens == written
    for one, right in zip(found, expected, strict=True):
        assert one.shape == right.shape and np.abs(one - right).max() < 2e-5


def test_numbers_that_are_not_finite_end_their_request_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=24, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=48, max_model_len=256, pools=DECODER_POOLS
        ),
        depth=1,
    )
    runner = make_runner(checkpoint, config, on_gpu=True)
    assert isinstance(runner, GPURunner)
    runner._decoder.embedding[99] = float("nan")
    engine = build_engine(config, runner)
    good, bad = (engine.add(prompt, pooled("mean"))[0] for prompt in ([5, 6, 7], [8, 99, 10]))
    ended: dict[int, Finished] = {}
    while len(ended) < 2:
        ended |= {finished.request: finished for finished in engine.step_overlapped().finished}
    assert ended[good].vector and ended[good].reason is FinishReason.STOP
    assert not ended[bad].vector and ended[bad].reason is FinishReason.ERROR


# -- encoders ----------------------------------------------------------------------------------------------


def encoder_config(checkpoint: Checkpoint, depth: int, budget: int) -> EngineConfig:
    given = {"max_num_batched_tokens": budget, "max_num_seqs": 8, "depth": depth}
    sizes = encoder_sizes(checkpoint.spec, given, lambda: budget)
    return with_pools(
        engine_config(checkpoint.spec.group_windows, sizes), encoder_pools(checkpoint.spec), only=True
    )


def on_cpu(checkpoint: Checkpoint, config: EngineConfig) -> CPURunner:
    encoder, head = Encoder(checkpoint.spec, checkpoint), classifier_head(checkpoint)
    step = EncoderStep(
        encoder, head, config.kv.block_size, 512, lambda tokens: nullcontext(), CPUWork, Pulse()
    )
    return CPURunner(config, step)


@pytest.mark.parametrize("labels", [0, 3], ids=["vectors", "labels"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_encoders_vectors_are_those_of_the_cpu(name: str, labels: int, tmp_path: Path) -> None:
    more = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    save_encoder(name, tmp_path, labels=labels, **(more if labels else {}))
    checkpoint = open_checkpoint(tmp_path)
    config = encoder_config(checkpoint, depth=1, budget=40)
    random = np.random.default_rng(5)
    prompts = [random.integers(2, VOCAB, length).tolist() for length in (1, 20, 5, 33, 7, 3, 12)]
    kinds: list[dict[str, Any]] = (
        [{"kind": "classify", "raw": bool(index % 2)} for index in range(7)]
        if labels
        else [{"kind": kind} for kind in ("mean", "cls", "last", "mean", "last", "cls", "mean")]
    )
    if checkpoint.spec.encoder is not None and checkpoint.spec.encoder.num_types > 1:
        kinds[4]["second_at"] = 6
    params = [pooled(**kind) for kind in kinds]
    expected, _ = run(config, on_cpu(checkpoint, config), prompts, params)
    runner = load_encoder(
        config, checkpoint, classifier_head(checkpoint), device=CPU, dtype=torch.float32, graphs=False
    )
    found, _ = run(config, runner, prompts, params)
    assert len(found) == len(prompts)
    for one, right in zip(found, expected, strict=True):
        assert one.shape == right.shape and np.abs(one - right).max() < 2e-5
