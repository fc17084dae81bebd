"""Vectors on the card against transformers in float32, and the same bytes however steps are run.

Weights are such as bfloat16 can hold. Vectors have a length of 1; a number of one may be 2e-2 off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.core.parameters import PoolingParams
from paceline.runner.gpu.compile import late_compilations
from tests.gpu.engine_cases import ENGINE, PROMPTS, exact, saved
from tests.torch.embeddings.tiny_encoders import CONFIGS, VOCAB, save_encoder

CLOSE = 2e-2
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 64}
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "initializer_range": 0.06}
Vectors = list[np.ndarray]


def texts(count: int = 40, longest: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@cache
def encoder(name: str, labels: int = 0) -> tuple[str, Any]:
    folder = Path(mkdtemp())
    model = save_encoder(name, folder, labels=labels, **WIDE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return str(folder), model


@torch.inference_mode()
def expected(model: Any, prompts: Sequence[list[int]], kind: str) -> Vectors:
    found = []
    for ids in prompts:
        states = model(torch.tensor([ids])).last_hidden_state[0]
        vector = {"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[kind]
        found.append(torch.nn.functional.normalize(vector, dim=0).numpy())
    return found


def vectors(folder: str, prompts: Sequence[list[int]], kind: str, **options: Any) -> Vectors:
    with LLM(folder, pooling=kind, **{**OPTIONS, **options}) as llm:
        assert llm.loaded.hardware.runner["name"] == "gpu"
        late_compilations.clear()
        found = [output.outputs.data for output in llm.embed(list(prompts), normalize=True, use_tqdm=False)]
        assert llm.loaded.engine.last_error is None and not late_compilations
        return found


def assert_close(found: Vectors, wanted: Vectors) -> None:
    errors = [float(np.abs(one - right).max()) for one, right in zip(found, wanted, strict=True)]
    likeness = min(float(one @ right) for one, right in zip(found, wanted, strict=True))
    print(f"at most {max(errors):.2g} apart, cosines at least {likeness:.5f}")
    assert max(errors) < CLOSE


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_encoders_vectors_are_those_of_transformers(name: str, kind: str) -> None:
    folder, model = encoder(name)
    assert_close(vectors(folder, texts(), kind), expected(model, texts(), kind))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_how_an_encoders_steps_are_run_changes_no_byte(name: str) -> None:
    folder = encoder(name)[0]
    graphs = vectors(folder, texts(), "mean")
    for options in ({"enforce_eager": True}, {"depth": 0}, {"depth": 2}):
        assert all(map(np.array_equal, vectors(folder, texts(), "mean", **options), graphs))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_texts_vector_stays_close_in_any_batch(name: str) -> None:
    folder = encoder(name)[0]
    together = vectors(folder, texts(), "mean")
    assert_close(vectors(folder, texts()[::-1], "mean")[::-1], together)
    assert_close(vectors(folder, texts(), "mean", max_num_batched_tokens=70), together)
    many = texts(300, longest=3)  # more texts than a step that is replayed has room for
    assert_close(vectors(folder, many, "mean"), expected(encoder(name)[1], many, "mean"))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_classifiers_score_their_labels(name: str, labels: int) -> None:
    folder, model = encoder(name, labels)
    with LLM(folder, **OPTIONS) as llm:
        found = np.stack([output.outputs.data for output in llm.classify(texts(), use_tqdm=False)])
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits for ids in texts()])
    wanted = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    print(f"at most {np.abs(found - wanted.numpy()).max():.2g} apart")
    assert np.abs(found - wanted.numpy()).max() < 5 * CLOSE


@cache
def of_decoder(kind: str) -> Vectors:
    return expected(exact("qwen3").model, PROMPTS, kind)


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 64}], ids=["whole", "chunks"])
def test_a_decoders_vectors_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    assert_close(vectors(saved("qwen3"), PROMPTS, kind, **{**ENGINE, **more}), of_decoder(kind))


def test_how_a_decoders_steps_are_run_changes_no_byte() -> None:
    plain = {**ENGINE, "enable_prefix_caching": False}
    graphs = vectors(saved("qwen3"), PROMPTS, "mean", **plain)
    for options in ({"enforce_eager": True}, {"depth": 0}, {"depth": 2}):
        assert all(map(np.array_equal, vectors(saved("qwen3"), PROMPTS, "mean", **plain, **options), graphs))


def test_choices_beside_rows_that_decode() -> None:
    ids = (5, 9, 300)
    with LLM(saved("qwen3"), pooling="last", **ENGINE) as llm:
        engine = llm.loaded.engine
        greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        (alone,) = llm.generate([PROMPTS[4]], greedy, use_tqdm=False)
        choice = SamplingParams(pooling=PoolingParams(kind="choice", token_ids=ids), temperature=0.0)
        (decoding,) = engine.add(PROMPTS[4], greedy)
        numbers = [engine.add(prompt, choice)[0] for prompt in PROMPTS]
        shares: dict[int, np.ndarray] = {}
        tokens: list[int] = []
        while engine.has_requests or not engine.is_idle:
            events = engine.step_overlapped()
            for batch in events.tokens:
                tokens += batch.tokens[batch.requests == decoding].tolist()
            shares |= {
                each.request: np.frombuffer(each.vector, "<f4") for each in events.finished if each.vector
            }
    assert len(tokens) == len(alone.outputs[0].token_ids)
    with torch.inference_mode():
        logits = [exact("qwen3")(torch.tensor([prompt])).logits[0, -1, list(ids)] for prompt in PROMPTS]
    for number, right in zip(numbers, logits, strict=True):
        assert np.abs(shares[number] - right.softmax(-1).numpy()).max() < CLOSE
