"""Draft heads and draft models on the card: tokens of an engine without, and the same bytes however steps are run.

Random guessers with weak logits, at a temperature at which noise, which they and the model have in common, makes many
drafts right.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.errors import ConfigError
from paceline.models.files.head_folder import HeadFiles, head_tensors, new_head, write_head
from paceline.models.files.open import open_checkpoint
from paceline.scheduler import draft_budget
from tests.gpu.engine_cases import ENGINE, PROMPTS, engine, saved, tokens_of

NUM_NEW = 50
KINDS = ["eagle", "medusa", "draft_model"]
# Draft models whose heads are larger and smaller than the model's, and one with windows.
SMALLER = {"llama": "qwen3", "qwen3": "llama-tied", "gemma3": "mistral"}


def with_model(folder: str, width: int = 4) -> str:
    return json.dumps({"method": "draft_model", "model": folder, "num_speculative_tokens": width})


def drafts_of(folder: Path, name: str, kind: str, width: int = 4) -> str:
    """The config that uses another model, or a random head that is written to `folder`, for a model."""
    if kind == "draft_model":
        return with_model(saved(SMALLER[name]), width)
    spec = open_checkpoint(Path(saved(name))).spec
    head = new_head(kind, spec, spec.vocab_size - 7, num_heads=3)
    rng = np.random.default_rng(7)
    tensors = {
        each: (rng.standard_normal(shape) * 0.02).astype(np.float32) + ("norm" in each)
        for each, shape in head_tensors(head)
    }
    known = np.sort(rng.permutation(spec.vocab_size)[: spec.vocab_size - 7])
    write_head(folder, HeadFiles(spec=head, tensors=tensors, to_target=known), spec, {})
    return json.dumps({"method": kind, "model": str(folder), "num_speculative_tokens": width})


def sampled(number: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=NUM_NEW, temperature=2.0, seed=index, ignore_eos=True)
        for index in range(number)
    ]


def all_tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    """Of all branches."""
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [list(branch.token_ids) for output in outputs for branch in output.outputs]


def verified(llm: LLM) -> tuple[int, int]:
    counters = llm.loaded.engine.scheduler.state.counters
    return counters.draft_tokens, counters.accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_guesses_change_no_token_where_numbers_are_exact(tmp_path: Path, name: str, kind: str) -> None:
    """In float32; with prefix hits, chunks of prompts, branches, and rows of every kind beside each other."""
    config, options = drafts_of(tmp_path, name, kind), {"dtype": "float32", "max_num_batched_tokens": 96}
    params = sampled(len(PROMPTS))
    params[0] = SamplingParams(max_tokens=30, temperature=1.5, seed=3, n=3, ignore_eos=True)
    params[1] = SamplingParams(max_tokens=30, temperature=1.5, seed=4, top_p=0.9, logit_bias={5: 2.0})
    params[2] = SamplingParams(max_tokens=30, temperature=1.5, seed=5, frequency_penalty=0.4, logprobs=2)
    found = []
    for each in ("off", config):
        with engine(name, speculative_config=each, **options) as llm:
            found.append([all_tokens_of(llm, params) for _ in range(2)])
            drafts, right = verified(llm)
    print(f"{name}, {kind}: {drafts} drafts, {right} right")
    assert found[0] == found[1] and found[0][0] == found[0][1]
    assert right > 50 and drafts > right


@pytest.mark.parametrize("kind", KINDS)
def test_how_steps_are_run_changes_no_byte(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_budget, "GAIN", 0.0)  # drafts, even where launching them takes longest
    config = drafts_of(tmp_path, "llama", kind)
    found = []
    for eager in (False, True):
        with engine("llama", speculative_config=config, enforce_eager=eager, max_num_seqs=1) as llm:
            found.append([tokens_of(llm, [prompt], sampled(1)[0])[0] for prompt in PROMPTS[:5]])
            assert verified(llm)[0] > 0
    assert found[0] == found[1]


def test_a_model_guesses_its_own_tokens() -> None:
    """What it knows of a row is complete: behind chunks of a prompt, in branches, behind beginnings in the cache."""
    params = sampled(len(PROMPTS))
    params[0] = SamplingParams(max_tokens=30, temperature=1.5, seed=3, n=3, ignore_eos=True)
    options = {
        "dtype": "float32",
        "max_num_batched_tokens": 96,
        "speculative_config": with_model(saved("qwen3")),
    }
    with engine("qwen3", **options) as llm:
        first = all_tokens_of(llm, params)
        assert all_tokens_of(llm, params) == first
        drafts, right = verified(llm)
    assert drafts > 200 and right > 0.97 * drafts, (drafts, right)


def interrupted(llm: LLM, params: SamplingParams, *, swap: bool) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, and how many rows were preempted: all of them in every fourth step. No step is in flight
    then: drafts of a result that comes too late count as verified, and never as right."""
    engine = llm.loaded.engine
    tokens: dict[int, list[int]] = {number: [] for prompt in PROMPTS for number in engine.add(prompt, params)}
    steps = preempted = 0
    while engine.has_requests:
        events = engine.step()
        assert engine.last_error is None, repr(engine.last_error)
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                tokens[number].append(token)
        steps += 1
        assert steps < 5_000, "the run does not end"
        if steps % 4 == 0:
            for number in list(engine.scheduler.state.requests):
                preempted += engine.scheduler.preempt(number, swap=swap)
    return list(tokens.values()), preempted


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_a_model_knows_all_of_preempted_rows(kind: str) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=2.0, seed=3, ignore_eos=True)
    options = {"num_host_blocks": 64, "preemption": kind, "max_preemptions": 0, "dtype": "float32"}
    found = []
    for config in ("off", with_model(saved("qwen3"))):
        with engine("qwen3", speculative_config=config, **options) as llm:
            tokens, preempted = interrupted(llm, params, swap=kind == "swap")
            found.append(tokens)
            drafts, right = verified(llm)
    assert found[0] == found[1] and preempted > len(PROMPTS)
    assert drafts > 50 and right > 0.97 * drafts, (drafts, right)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = json.loads((Path(saved("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 500}))
    with pytest.raises(
        ConfigError, match="has 500 tokens, the model has 512: a draft model must have the same"
    ):
        LLM(saved("llama"), load_format="dummy", speculative_config=with_model(str(tmp_path)), **ENGINE)
