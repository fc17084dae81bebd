"""`LLM` on either CPU backend: the same answers, and a model that the native kernels do not cover is told so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, LoRARequest, SamplingParams
from paceline.core.standing import WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.errors import ConfigError
from paceline.models.files import open as files
from tests.adapter_folders import adapter_arrays, write_adapter
from tests.model_folder import write_model
from tests.torch.llm_helpers import OPTIONS, is_at_rest

PROMPTS = ["a", "what it takes", "a text of some length, " * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the native kernels cover."""
    return write_model(tmp_path_factory.mktemp("model"))


def answers(folder: Path, backend: str, **options: Any) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(folder), cpu_backend=backend, **OPTIONS, **options)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    found = []
    for output in llm.generate(PROMPTS, sampling, use_tqdm=False):
        (branch,) = output.outputs
        assert branch.logprobs is not None
        pairs = zip(branch.token_ids, branch.logprobs, strict=True)
        found.append((list(branch.token_ids), [entries[token].logprob for token, entries in pairs]))
    assert is_at_rest(llm._front.engine)
    return found


def test_both_backends_give_the_same_answers(folder: Path) -> None:
    native, torch = answers(folder, "native"), answers(folder, "torch")
    assert answers(folder, "auto") == native
    for (ours, likely), (theirs, expected) in zip(native, torch, strict=True):
        assert ours == theirs
        assert likely == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "changes, options, reason",
    [
        ({"hidden_size": 32}, {}, "head size"),
        ({"intermediate_size": 48}, {}, "intermediate size"),
        ({}, {"block_size": 8}, "blocks of 8"),
    ],
)
def test_a_model_that_is_not_covered_is_refused_by_name_and_computed_by_torch(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, int], reason: str
) -> None:
    folder = write_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder), cpu_backend="native", **OPTIONS, **options)
    llm = LLM(str(folder), **OPTIONS, **options)
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_model_with_windows_can_be_timed_for_a_pace(tmp_path: Path, backend: str) -> None:
    """Its layers have two groups of blocks, also on the small engine that is timed."""
    layers = ["sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "sliding_window": 24}
    gemma: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": layers,
        "query_pre_attn_scalar": 16,
    }
    folder = write_model(tmp_path, **sizes, **gemma)
    llm = LLM(str(folder), cpu_backend=backend, step_target_ms=50, **OPTIONS)
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_weights_are_quantised_while_loading(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=32)
    (_, exact), *_ = answers(folder, "native")
    for quantization, within in (("int8", 0.05), ("int4", 0.5)):
        (_, likely), *_ = answers(folder, "native", quantization=quantization)
        apart = np.abs(np.subtract(likely[:1], exact[:1])).max()
        assert 0 < apart < within


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"quantization": "int4", "cpu_backend": "torch"}, "needs --cpu-backend native"),
        ({"quantization": "int8", "block_size": 8}, "needs the native CPU kernels: blocks of 8"),
    ],
)
def test_quantization_that_cannot_be_is_refused(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder), **OPTIONS, **options)


def test_a_quantised_file_is_not_quantised_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_quantised_tensors(path: Path, **options: Any) -> files.Checkpoint:
        checkpoint = open_checkpoint(path, **options)
        return replace(checkpoint, stored={"Q4_1": files.StoredType()})

    open_checkpoint = files.open_checkpoint
    monkeypatch.setattr(files, "open_checkpoint", with_quantised_tensors)
    with pytest.raises(ConfigError, match="quantised already .Q4_1.; leave it at auto"):
        LLM(str(folder), quantization="int8", **OPTIONS)


def test_types_that_are_rounded_anew_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def with_quantised_tensors(path: Path, **options: Any) -> files.Checkpoint:
        checkpoint = open_checkpoint(path, **options)
        return replace(checkpoint, stored=dict.fromkeys(("F32", "Q4_K", "Q6_K", "Q8_0"), files.StoredType()))

    open_checkpoint = files.open_checkpoint
    monkeypatch.setattr(files, "open_checkpoint", with_quantised_tensors)
    with caplog.at_level(logging.INFO, "paceline"):
        LLM(str(folder), **OPTIONS)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("weights of Q6_K are computed as 8 bits with a scale for 32 inputs") == 1


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_adapters_are_read_again_after_a_sleep(folder: Path, tmp_path: Path, backend: str) -> None:
    llm = LLM(str(folder), cpu_backend=backend, enable_lora=True, max_lora_rank=8, **OPTIONS)
    arrays = adapter_arrays(llm.loaded.checkpoint.spec, rank=4, seed=3)
    own = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", arrays, rank=4)))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        outputs = llm.generate(PROMPTS[1:], sampling, use_tqdm=False, lora_request=[own, None])
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected, sleeper = tokens(), llm.loaded.sleeper
    assert sleeper is not None
    for level in (WEIGHTS_KEPT, WEIGHTS_DROPPED):
        llm.loaded.engine.sleep()
        sleeper.let_go(level)
        llm.loaded.engine.wake(sleeper.open())
        assert tokens() == expected
