"""Draft heads on the card: tokens of an engine without, and the same bytes however steps are run.

Random heads with weak logits, at a temperature at which noise, which head and model have in common, makes many drafts
right.
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

from paceline.models.files.head_folder import HeadFiles, head_tensors, new_head, write_head
from paceline.models.files.open import open_checkpoint
from paceline.scheduler import sized_drafts
from tests.gpu.engine_cases import PROMPTS, engine, saved, tokens_of

NUM_NEW = 50


def drafts_of(folder: Path, name: str, kind: str, width: int = 4) -> str:
    """The config that uses a random head for a model, which is written to `folder`."""
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


def verified(llm: LLM) -> tuple[int, int]:
    counters = llm.loaded.engine.scheduler.state.counters
    return counters.draft_tokens, counters.accepted_tokens


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_heads_change_no_token_where_numbers_are_exact(tmp_path: Path, name: str, kind: str) -> None:
    """In float32; with prefix hits, chunks of prompts, branches, and rows of every kind beside each other."""
    config, options = drafts_of(tmp_path, name, kind), {"dtype": "float32", "max_num_batched_tokens": 96}
    params = sampled(len(PROMPTS))
    params[0] = SamplingParams(max_tokens=30, temperature=1.5, seed=3, n=3, ignore_eos=True)
    params[1] = SamplingParams(max_tokens=30, temperature=1.5, seed=4, top_p=0.9, logit_bias={5: 2.0})
    params[2] = SamplingParams(max_tokens=30, temperature=1.5, seed=5, frequency_penalty=0.4, logprobs=2)
    found = []
    for each in ("off", config):
        with engine(name, speculative_config=each, **options) as llm:
            found.append([tokens_of(llm, PROMPTS, params) for _ in range(2)])
            drafts, right = verified(llm)
    print(f"{name}, {kind}: {drafts} drafts, {right} right")
    assert found[0] == found[1] and found[0][0] == found[0][1]
    assert right > 50 and drafts > right


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_how_steps_are_run_changes_no_byte(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sized_drafts, "GAIN", 0.0)  # drafts, even where launching them takes longest
    config = drafts_of(tmp_path, "llama", kind)
    found = []
    for eager in (False, True):
        with engine("llama", speculative_config=config, enforce_eager=eager, max_num_seqs=1) as llm:
            found.append([tokens_of(llm, [prompt], sampled(1)[0])[0] for prompt in PROMPTS[:5]])
            assert verified(llm)[0] > 0
    assert found[0] == found[1]
