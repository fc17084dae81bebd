"""Whole engines with drafts on the card: tokens of an engine without, and the same bytes however steps are run.

A drafted row is computed in a step of another size, whose products have other bits: a token may differ where the two
best logits are closer than bfloat16 can tell apart.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from paceline import SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.engine_cases import GREEDY, PROMPTS, engine, first_gaps, reference, tokens_of

CLOSE = 2e-2  # two logits that bfloat16 may swap
NAMES = ("llama", "qwen3", "gemma3", "mixtral")
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 7})


def oracle(acceptance: float, width: int = 4) -> str:
    return json.dumps({"method": "oracle", "num_speculative_tokens": width, "acceptance": acceptance})


def verified(llm: object) -> tuple[int, int]:
    counters = llm.loaded.engine.scheduler.state.counters  # type: ignore[attr-defined]
    return counters.draft_tokens, counters.accepted_tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("acceptance", [1.0, 0.6])
def test_drafted_greedy_tokens_are_those_of_transformers(name: str, acceptance: float) -> None:
    expected = reference(name)
    told = [replace(GREEDY, prediction=tuple(tokens)) for tokens, _ in expected]
    with engine(name, speculative_config=oracle(acceptance)) as llm:
        found = tokens_of(llm, PROMPTS, told)
        drafts, right = verified(llm)
    gaps = first_gaps(found, expected)
    print(f"{name}: {drafts} drafts, {right} right; {len(gaps)} of {len(found)} differ")
    assert max(gaps, default=0.0) < CLOSE
    assert right > 50, "no draft was right, or this test says nothing"


def test_what_requests_are_expected_to_say_is_drafted_from() -> None:
    """Words put in; more requests than rows, so that places of predictions are used again."""
    prompts = PROMPTS * 3
    params = [
        SamplingParams(max_tokens=40, temperature=0.8, seed=index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    with engine("qwen3", dtype="float32", max_num_seqs=8) as llm:
        expected = tokens_of(llm, prompts, params)
    told = [
        replace(given, prediction=(*answer[:9], 4, 4, 4, 4, *answer[9:]) if index % 3 else ())
        for index, (given, answer) in enumerate(zip(params, expected, strict=True))
    ]
    with engine("qwen3", dtype="float32", max_num_seqs=8, speculative_config="auto") as llm:
        outputs = llm.generate(prompts, told, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    for index, output in enumerate(outputs):
        counts = (output.accepted_prediction_tokens, output.rejected_prediction_tokens)
        assert (counts == (0, 0)) == (index % 3 == 0), counts
    assert sum(output.accepted_prediction_tokens for output in outputs) > 10 * len(prompts)


@pytest.mark.parametrize("name", NAMES)
def test_how_steps_are_run_changes_no_byte(name: str) -> None:
    """Replayed from graphs and launched one by one. A table of seconds that does not move would be needed for the same
    sizes of steps: with one request at a time, whose drafts are all right, there is one choice."""
    told = [replace(GREEDY, prediction=tuple(tokens)) for tokens, _ in reference(name)[:5]]
    found = []
    for eager in (False, True):
        with engine(name, speculative_config=oracle(1.0, 3), enforce_eager=eager, max_num_seqs=1) as llm:
            found.append(
                [tokens_of(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, told, strict=False)]
            )
            assert verified(llm)[1] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token_where_numbers_are_exact(temperature: float) -> None:
    """In float32 products of another size differ by roundings that no draw hangs on."""
    params = [
        SamplingParams(max_tokens=50, temperature=temperature, seed=index, ignore_eos=True, top_p=0.95)
        for index in range(len(PROMPTS))
    ]
    with engine("qwen3", dtype="float32") as llm:
        expected = tokens_of(llm, PROMPTS, params)
    for config in (NGRAM, oracle(0.7, 7)):
        told = [
            replace(given, prediction=tuple(answer)) for given, answer in zip(params, expected, strict=True)
        ]
        with engine("qwen3", dtype="float32", speculative_config=config) as llm:
            assert tokens_of(llm, PROMPTS, told) == expected
            assert verified(llm)[0] > 0 or config is NGRAM, (
                "a text that does not repeat itself has no n-grams"
            )


def test_rows_of_every_kind_share_steps_with_drafts() -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=0.7, seed=4, top_p=0.9, min_tokens=9, logit_bias={5: 9.0}),
        SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.5, presence_penalty=0.2),
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, bad_words=((7,),)),
        SamplingParams(max_tokens=40, temperature=0.8, seed=8, min_p=0.05, top_k=40),
        SamplingParams(max_tokens=12, temperature=0.8, seed=9, logprobs=2),
    ]
    found = []
    for config in ("off", NGRAM):
        with engine("llama", dtype="float32", speculative_config=config) as llm:
            found.append(tokens_of(llm, PROMPTS[: len(params)], params))
    assert found[0] == found[1]
