"""Answers with a structure on the card: each token is one that its guide allows, and the others are not disturbed."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline import LLM, SamplingParams
from paceline.engine.guides import Guides
from tests.gpu.engine_cases import PROMPTS, engine
from tests.guides import ScriptedGuide, ScriptedMaker, structure


def with_guides(llm: LLM) -> int:
    """Structures by arithmetic, for a model without a tokenizer; returns the size of its vocabulary."""
    inner, vocab_size = llm.loaded.engine, llm.loaded.checkpoint.spec.vocab_size
    inner.guides = Guides(inner.scheduler, ScriptedMaker(vocab_size))
    return vocab_size


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_every_token_is_allowed(eager: bool, depth: int, drafts: str) -> None:
    """Rules, truncation, log-probabilities, branches and rows without a guide share their steps."""
    params = [
        SamplingParams(max_tokens=30, temperature=0.0, structured_outputs=structure(1, 17)),
        SamplingParams(max_tokens=30, temperature=0.9, seed=3, structured_outputs=structure(2, 30)),
        SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True),
        SamplingParams(
            max_tokens=30, temperature=0.8, seed=5, top_p=0.9, structured_outputs=structure(3, 25)
        ),
        SamplingParams(
            max_tokens=30, temperature=0.8, seed=6, logprobs=2, structured_outputs=structure(4, 9)
        ),
        SamplingParams(
            max_tokens=30, temperature=0.8, seed=7, min_tokens=4, n=2, structured_outputs=structure(5, 12)
        ),
        SamplingParams(
            max_tokens=9, temperature=0.0, frequency_penalty=0.5, structured_outputs=structure(6, 12)
        ),
    ]
    with engine("qwen3", enforce_eager=eager, depth=depth, speculative_config=drafts) as llm:
        vocab_size = with_guides(llm)
        outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        forced = llm.loaded.engine.scheduler.state.counters.forced_tokens
    assert (forced > 0) == (drafts != "off")
    for output, given in zip(outputs, params, strict=True):
        if given.structured_outputs is None:
            assert len(output.outputs[0].token_ids) == 30
            continue
        for branch in output.outputs:
            guide = ScriptedGuide(given.structured_outputs.source, vocab_size)
            guide.consume(branch.token_ids)  # raises for a token that is not allowed
            assert guide.is_over or branch.finish_reason == "length"
            assert len(branch.token_ids) == min(given.max_tokens, guide.count)


def test_rows_without_a_guide_give_what_they_give_alone() -> None:
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    guided = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=structure(8, 20))
    with engine("qwen3") as llm:
        with_guides(llm)
        alone = [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:4], free, use_tqdm=False)]
        mixed = llm.generate([*PROMPTS[:4], *PROMPTS[:4]], [free] * 4 + [guided] * 4, use_tqdm=False)
    # Together products may differ in their last bit, which now and then moves a token.
    assert sum(each.outputs[0].token_ids == one for each, one in zip(mixed[:4], alone, strict=True)) >= 2


@pytest.mark.parametrize("width", [1, 7])
def test_forced_tokens_change_no_other(width: int) -> None:
    """In float32 products of another size differ by roundings that no draw hangs on."""
    params = [
        SamplingParams(max_tokens=40, temperature=0.8, seed=index, structured_outputs=structure(index, 35))
        if index % 3
        else SamplingParams(max_tokens=40, temperature=0.8, seed=index, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    found = []
    for drafts in ("off", json.dumps({"method": "ngram", "num_speculative_tokens": width})):
        with engine("qwen3", dtype="float32", speculative_config=drafts) as llm:
            with_guides(llm)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            counters = llm.loaded.engine.scheduler.state.counters
    assert found[0] == found[1] and counters.forced_tokens > 0
