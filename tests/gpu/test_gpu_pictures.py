"""Pictures on the card: answers of transformers, the same bytes however steps are run, nothing compiled late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.compile import late_compilations
from tests.torch.vision.tiny_models import (
    KINDS,
    Prompt,
    picture,
    prompt,
    reference_logits,
    reference_tokens,
    save_model,
)

NUM_TOKENS, CLOSE = 16, 2e-2
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    return folder, save_model(request.param, folder)


def prompts(name: str) -> list[Prompt]:
    one, two, three = (picture(name, seed) for seed in range(3))
    return [
        prompt(name, 5, one, 9),
        prompt(name, one, 3, two, 1, three, 20, seed=1),
        prompt(name, 30, seed=2),
        prompt(name, 17, two, 1, two, seed=3),
    ]


def answers(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        assert llm.loaded.hardware.runner["name"] == "gpu"
        late_compilations.clear()
        engine, found = llm.loaded.engine, dict[int, list[int]]()
        for each in prompts(folder.name):
            for number in engine.add(each.tokens, GREEDY, media=each.parts):
                found[number] = []
        while engine.has_requests or not engine.is_idle:
            for told in engine.step_overlapped().tokens:
                for request, token in zip(told.requests.tolist(), told.tokens.tolist(), strict=True):
                    found[request].append(token)
        assert engine.last_error is None and not late_compilations
        return list(found.values())


def first_gap(model: Any, given: Prompt, found: list[int], wanted: list[int]) -> float:
    """By how much the reference prefers its own token where the two answers part; 0: they do not."""
    for count, (one, right) in enumerate(zip(found, wanted, strict=True)):
        if one != right:
            logits = reference_logits(model, given._replace(tokens=given.tokens + wanted[:count]))[-1]
            return float(logits[right] - logits[one])
    return 0.0


def test_answers_are_those_of_transformers(saved: tuple[Path, Any]) -> None:
    model, asked = saved[1], prompts(saved[0].name)
    wanted = [reference_tokens(model, each, NUM_TOKENS) for each in asked]
    for options in ({}, {"encode": "whole", "max_num_batched_tokens": 512}):
        found = answers(saved[0], dtype="float32", **options)
        gaps = [first_gap(model, *each) for each in zip(asked, found, wanted, strict=True)]
        print("answers part where the reference's choice leads by", gaps)
        assert max(gaps) < CLOSE


def test_how_steps_are_run_changes_no_token(saved: tuple[Path, Any]) -> None:
    graphs = answers(saved[0])
    for options in ({"enforce_eager": True}, {"depth": 0}):
        assert answers(saved[0], **options) == graphs


def test_drafts_are_refused(saved: tuple[Path, Any]) -> None:
    with pytest.raises(Exception, match="makes no drafts on a GPU"):
        answers(saved[0], speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
