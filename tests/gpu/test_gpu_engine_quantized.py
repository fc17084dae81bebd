"""Whole engines on the card with weights of eight and four bits, made on loading and read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

from tests.gpu.engine_cases import ENGINE, GREEDY, PROMPTS, generate, saved
from tests.pure.models.quantized_files import FORMATS, save, written

KINDS = pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=0)


def first_logprobs(**options: Any) -> list[float]:
    llm = LLM(saved("qwen3"), **ENGINE | options)
    found = []
    for output in llm.generate(PROMPTS, FIRST, use_tqdm=False):
        (branch,) = output.outputs
        assert branch.logprobs is not None
        found.append(branch.logprobs[0][branch.token_ids[0]].logprob)
    return found


@KINDS
def test_answers_stay_close_to_those_of_sixteen_bits(quantization: str) -> None:
    plain, found = first_logprobs(), first_logprobs(quantization=quantization)
    apart = sum(abs(a - b) for a, b in zip(plain, found, strict=True)) / len(plain)
    assert 0 < apart < {"fp8": 0.2, "int8": 0.1, "int4": 0.6}[quantization]


@KINDS
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_how_steps_are_run_changes_no_byte(quantization: str, name: str) -> None:
    prompts = PROMPTS[:-2]
    graphs = generate(name, prompts, depth=1, quantization=quantization)
    assert generate(name, prompts, depth=1, enforce_eager=True, quantization=quantization) == graphs
    assert generate(name, prompts, depth=0, quantization=quantization) == graphs


@KINDS
def test_nothing_is_compiled_while_serving(quantization: str) -> None:
    from paceline.runner.gpu.compile import late_compilations

    llm = LLM(saved("qwen3"), **ENGINE | {"quantization": quantization})
    before = len(late_compilations)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert late_compilations[before:] == []


@pytest.mark.parametrize("name", FORMATS)
def test_folders_of_every_kind_answer_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    """The first token: weights are the same, inputs are rounded on the card only."""
    folder = str(save(tmp_path, written(name)))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64}
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)
    prompts = [[5], [9, 8, 7, 6, 5, 4, 3], list(range(1, 31))]
    tops = []
    for more in ({"device": "cpu", "cpu_backend": "torch"}, {"device": "cuda", "num_blocks": 16}):
        outputs = LLM(folder, **options, **more).generate(prompts, params, use_tqdm=False)
        tops.append([set(output.outputs[0].logprobs[0]) for output in outputs])  # type: ignore[index]
    for right, found in zip(*tops, strict=True):
        assert len(right & found) >= 2


def test_other_types_of_the_arithmetic_are_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 computes in bfloat16"):
        LLM(saved("qwen3"), **ENGINE | {"quantization": "fp8", "dtype": "float16"})
