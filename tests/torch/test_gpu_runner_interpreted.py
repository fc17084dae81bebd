"""The runner of the GPU through Triton's interpreter: token by token what the runner of the CPU gives.

A tiny model in float32; rows come in chunks, share a step with others, draw with every kind of parameters, and the
host plans ahead. tests/gpu has whole engines on the card.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.guides import ScriptedMaker, structure
from tests.torch.interpreted import exact_fp8, reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, PreemptionCosts, SchedulerConfig
from paceline.core.parameters import KVKeep
from paceline.core.plan import RowLogprobs, Runner
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.kv.tiers import HOST
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.files.stored import StoredTensor
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu import host_rows
from paceline.runner.gpu.build import DeviceStorage
from paceline.runner.gpu.runner import GPURunner
from paceline.runner.gpu.step_times import with_pace
from paceline.runner.kv_tensors import KVTensors
from paceline.runner.torch_step import TorchStep

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARAMS = (
    SamplingParams(
        max_tokens=7, temperature=0.7, seed=4, top_p=0.9, frequency_penalty=0.5, min_tokens=3, logprobs=5
    ),
    SamplingParams(
        max_tokens=11, temperature=0.8, seed=3, min_p=0.05, bad_words=((7,),), logit_bias={5: 3.0}
    ),
    SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(max_tokens=6, temperature=1.2, seed=9, top_k=5, logprobs=1),
    SamplingParams(max_tokens=7, temperature=0.9, seed=1, n=2, logprobs=0),
    SamplingParams(max_tokens=9, temperature=0.9, seed=2, structured_outputs=structure(4, 6)),
    SamplingParams(max_tokens=5, temperature=0.0, top_p=0.9, structured_outputs=structure(5, 8), logprobs=2),
    SamplingParams(
        max_tokens=7,
        temperature=1.1,
        top_k=9,
        seed=6,
        structured_outputs=structure(1, 7),
        min_tokens=3,
        logprobs=20,
        prompt_logprobs=1,
    ),
)


@pytest.fixture(autouse=True)
def short_beginnings_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "SHORTEST_SHARED", 64)
    monkeypatch.setattr(host_rows, "LEAST_SPARED", 0)


class SameWeights(DeviceStorage):
    """Made-up weights are those of the CPU."""

    def _moved(self, stored: StoredTensor) -> torch.Tensor:
        return torch.from_numpy(stored.to_float32())


class UnwarmedRunner(GPURunner):
    """Runs no step before its first: nothing is compiled here, and the test of the pace warms up once."""

    def _warm_up(self) -> None:
        pass


class QuickRunner(UnwarmedRunner):
    """For tests of other things than products: that of a single row takes the interpreter longest."""

    def _warm_up(self) -> None:
        self._decoder._is_plain = self._decoder._joins_norms = False


def make_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    on_gpu: bool,
    kv_dtype: torch.dtype | None = None,
    kind: type[GPURunner] = QuickRunner,
) -> Runner:
    ends, device = checkpoint.spec.eos_token_ids, torch.device("cpu")
    if not on_gpu:
        return CPURunner(config, TorchStep(build_decoder(checkpoint, 512), config.kv), ends)
    parts = build_decoder(checkpoint, 2, SameWeights(device, torch.float32)).parts
    return kind(config, checkpoint.spec, parts, ends, device=device, kv_dtype=kv_dtype)


Logprobs = dict[tuple[int, int], RowLogprobs]  # by request and position


def generate(
    folder: Path, *, on_gpu: bool, depth: int, kv_dtype: torch.dtype | None = None
) -> tuple[dict[int, list[int]], Logprobs]:
    checkpoint = open_checkpoint(folder, load_format="dummy")
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=24, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=256),
        depth=depth,
    )
    runner = make_runner(checkpoint, config, on_gpu=on_gpu, kv_dtype=kv_dtype, kind=UnwarmedRunner)
    engine = build_engine(config, runner, guide_maker=ScriptedMaker(checkpoint.spec.vocab_size))
    random = np.random.default_rng(0)
    found: dict[int, list[int]] = {}
    prompts = [random.integers(0, 512, length).tolist() for length in (5, 70, 75, 1, 90, 40, 3, 20)]
    prompts[2][:64] = prompts[1][:64]
    for prompt, params in zip(prompts, PARAMS, strict=True):
        found |= {number: [] for number in engine.add(prompt, params)}
    logprobs: Logprobs = {}
    shared = 0
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped()
        if isinstance(runner, GPURunner):
            shared = max(shared, len(runner._rows.sharing))
        for told in events.logprobs:
            logprobs[told.request, told.logprobs.position] = told.logprobs
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    assert shared == 2 * on_gpu, "two prompts with the same beginning, and two branches of one"
    guided = sum(len(found[number]) for number in list(found)[-3:])
    # The last three have guides, and one that is over may have a mask for a token that is dropped.
    assert guided <= engine.scheduler.state.counters.masks <= guided + 3
    return found, logprobs


def assert_same(found: Logprobs, expected: Logprobs) -> None:
    assert found.keys() == expected.keys()
    for key, right in expected.items():
        told = found[key]
        assert (told.token, told.rank, told.top_tokens) == (right.token, right.rank, right.top_tokens)
        assert told.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert told.top_logprobs == pytest.approx(right.top_logprobs, abs=1e-4)


def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected, right = generate(tmp_path, on_gpu=False, depth=0)
    assert all(expected.values())
    assert [len(tokens) for tokens in expected.values()][-3:] == [6, 5, 7]
    assert {len(told.top_tokens) for told in right.values()} == {0, 1, 2, 5, 20}
    # At a depth of 1 the same requests run with eight bits, below.
    tokens, logprobs = generate(tmp_path, on_gpu=True, depth=3)
    assert tokens == expected
    assert_same(logprobs, right)


def test_tokens_with_eight_bits_are_those_of_a_cpu_that_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, copied blocks and neighbours included: what is read is what was rounded once, at the store."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plain, _ = generate(tmp_path, on_gpu=False, depth=0)
    write, fp8 = KVTensors.write, torch.float8_e4m3fn

    def rounded(self: KVTensors, layer: int, slots: torch.Tensor, *new: torch.Tensor) -> None:
        keys, values = (part.clamp(-448, 448).to(fp8).float() for part in new)
        write(self, layer, slots, keys, values)

    monkeypatch.setattr(KVTensors, "write", rounded)
    expected, _ = generate(tmp_path, on_gpu=False, depth=0)
    assert expected != plain, "eight bits make a difference, or this test says nothing"
    exact_fp8(monkeypatch)
    assert generate(tmp_path, on_gpu=True, depth=1, kv_dtype=fp8)[0] == expected


def small_engine(folder: Path, *, on_gpu: bool, depth: int) -> tuple[Engine, Runner]:
    checkpoint = open_checkpoint(folder, load_format="dummy")
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=24, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=256),
        depth=depth,
    )
    runner = make_runner(checkpoint, config, on_gpu=on_gpu)
    return build_engine(config, runner), runner


def forked(folder: Path, *, on_gpu: bool, depth: int) -> tuple[list[list[int]], int]:
    """Tokens of a request and of branches with a token put behind what they share, and steps whose rows all decode
    although a branch has joined."""
    engine, runner = small_engine(folder, on_gpu=on_gpu, depth=depth)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    (parent,) = engine.add([7, 8, 9, 10, 11], sampling)
    found: dict[int, list[int]] = {parent: []}
    lent = 0
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped() if depth else engine.step()
        assert engine.last_error is None, repr(engine.last_error)
        lent += on_gpu and bool(len(runner._rows._lent))  # type: ignore[attr-defined]
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        if len(found) == 1 and len(found[parent]) >= 3:
            made = [engine.fork(parent, 1, at=2, append=[token])[0] for token in (20, 30)]
            found |= {number: [] for number in made}
    return list(found.values()), lent


def test_branches_of_one_token_decode_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected, _ = forked(tmp_path, on_gpu=False, depth=0)
    assert [len(tokens) for tokens in expected] == [6, 3, 3] and expected[1] != expected[2]
    for depth in (0, 1):
        assert forked(tmp_path, on_gpu=True, depth=depth) == (expected, 1)


def dropping(folder: Path, *, on_gpu: bool, depth: int, preempt: bool = False) -> list[list[int]]:
    """Tokens of a request that drops a block."""
    engine, _ = small_engine(folder, on_gpu=on_gpu, depth=depth)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, kv_keep=KEPT)
    prompt = np.random.default_rng(1).integers(0, 512, 66).tolist()
    found: dict[int, list[int]] = {engine.add(prompt, sampling)[0]: []}
    dropped = 0
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped()
        assert engine.last_error is None, repr(engine.last_error)
        dropped += sum(ending.cost.dropped for ending in events.finished)
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
                if preempt and len(found[number]) == 4:
                    assert engine.scheduler.preempt(RequestId(number), swap=False)
    assert dropped == 64, "one block"
    return list(found.values())


KEPT = KVKeep(first=0, recent=5)


def test_requests_that_drop_kv_get_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """Also after a preemption, when what they had is computed again as it was."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = dropping(tmp_path, on_gpu=False, depth=0)
    assert dropping(tmp_path, on_gpu=False, depth=0, preempt=True) == expected
    assert dropping(tmp_path, on_gpu=True, depth=2, preempt=True) == expected


def test_the_pace_of_a_runner_is_measured(tmp_path: Path) -> None:
    small = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | small))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    given = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=34, max_model_len=64)
    config = EngineConfig(kv=KVConfig(block_size=64, num_blocks=8, groups=(GroupSpec(),)), scheduler=given)
    device = torch.device("cpu")
    parts = build_decoder(checkpoint, 2, SameWeights(device, torch.float32)).parts
    runner = GPURunner(config, checkpoint.spec, parts, checkpoint.spec.eos_token_ids, device=device)
    paced = with_pace(given, runner)
    assert paced.keeps_pace and paced.step_costs is not None and paced.max_num_batched_tokens == 34
    assert paced.step_costs.sizes == (34,) and paced.step_costs.seconds[0] > 0 < paced.step_costs.context_s
    assert runner._pools.context_bytes == 2 * 1 * 32 * 4


def test_a_prefix_computed_found_on_the_device_and_loaded_from_the_host_gives_the_same_tokens(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    costs = PreemptionCosts(token_s=1.0, block_s=1e-6, step_s=0.0)
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=4, num_host_blocks=12, cache_on_host=True, eviction="lru"),
        scheduler=SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=72, max_model_len=96, preemption_costs=costs
        ),
        depth=1,
    )
    engine = build_engine(config, make_runner(checkpoint, config, on_gpu=True))
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 512, 70).tolist() for _ in range(4)]
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def answer(prompt: list[int]) -> tuple[list[int], int, int]:
        """Its tokens, how many of the prompt's were found, and how many of these on the host."""
        found = engine.scheduler.state.counters.found_tokens
        before = found[HOST]
        engine.add(prompt, greedy)
        tokens: list[int] = []
        cached = 0
        while engine.has_requests or not engine.is_idle:
            events = engine.step_overlapped()
            tokens += [token for batch in events.tokens for token in batch.tokens.tolist()]
            cached += sum(end.num_cached for end in events.finished)
            assert engine.last_error is None, repr(engine.last_error)
        return tokens, cached, found[HOST] - before

    computed = answer(prompts[0])
    assert answer(prompts[0]) == (computed[0], 64, 0)
    for other in prompts[1:]:
        assert answer(other)[1:] == (0, 0)
    assert computed[1:] == (0, 0) and answer(prompts[0]) == (computed[0], 64, 64)
