"""Adapters that PEFT has made and saved: greedy tokens equal those of transformers with PEFT's own products."""

from __future__ import annotations

import copy
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, LoRARequest
from tests.adapter_folders import ALL_SEVEN
from tests.torch.parity import Reference, greedy_reference
from tests.torch.test_adapters import CLEAR, GREEDY, NUM_NEW, OPTIONS, prompts
from tests.torch.tiny_models import save

QV = ("q_proj", "v_proj")
# Targets, rank, alpha, rsLoRA.
MADE = [
    (QV, 4, 8, False),
    (QV, 16, 32, True),
    (ALL_SEVEN, 8, 16, False),
    (ALL_SEVEN, 16, 20, True),
    (QV, 8, 4, False),
]
TIGHT = {"max_num_batched_tokens": 13, "num_blocks": 16, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def peft() -> Any:
    if find_spec("peft") is None:
        if os.environ.get("PACELINE_REQUIRE_PEFT") == "1":
            pytest.fail("peft is not installed: pip install peft==0.21.2")
        pytest.skip("peft is not installed")
    return import_module("peft")


def adapted(peft: Any, model: Any, made: tuple[tuple[str, ...], int, int, bool], seed: int) -> Any:
    """A copy of a model with an adapter that says something: PEFT begins with one that does not."""
    targets, rank, alpha, rslora = made
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=list(targets), use_rslora=rslora
    )
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped.eval()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_equal_those_of_peft(peft: Any, name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "model")
    requests: list[LoRARequest | None] = [None]
    references: list[list[Reference]] = [[greedy_reference(model, each, NUM_NEW) for each in prompts()]]
    for number, made in enumerate(MADE, 1):
        wrapped = adapted(peft, model, made, number)
        references.append([greedy_reference(wrapped, each, NUM_NEW) for each in prompts()])
        wrapped.save_pretrained(tmp_path / f"{number}")
        requests.append(LoRARequest(f"{number}", number, str(tmp_path / f"{number}")))
    assert len({each.output for of_model in references for each in of_model}) == 3 * len(requests)
    pairs = [(adapter, prompt) for prompt in range(3) for adapter in range(len(requests))]
    compared: list[float] = []  # shares of answers
    for options in ({}, {"cpu_backend": "torch"}, TIGHT, {"max_loras": 2}):
        llm = LLM(str(tmp_path / "model"), **OPTIONS | options)
        for group in (
            [pairs[1]],
            [pairs[3]],
            pairs,
            pairs,
        ):  # alone, together, and once more after prefix hits
            outputs = llm.generate(
                [prompts()[prompt] for _, prompt in group],
                GREEDY,
                use_tqdm=False,
                lora_request=[requests[adapter] for adapter, _ in group],
            )
            for (adapter, prompt), output in zip(group, outputs, strict=True):
                tokens, reference = tuple(output.outputs[0].token_ids), references[adapter][prompt]
                clear = next(
                    (at for at, gap in enumerate(reference.gaps) if gap < CLEAR), len(reference.gaps)
                )
                assert tokens[:clear] == reference.output[:clear]
                compared.append(clear / len(reference.gaps))
    assert sum(compared) > 0.8 * len(compared), "most references are undecided"
