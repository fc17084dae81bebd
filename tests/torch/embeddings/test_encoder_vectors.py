"""Vectors of encoders: against transformers, and the same in any batch, order and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, InvalidRequest
from paceline.models.files.config_fields import CheckpointError
from tests.torch.embeddings.tiny_encoders import CONFIGS, VOCAB, save_encoder, write_pooling
from tests.torch.llm_helpers import is_at_rest

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "check_every": 1}
LENGTHS = (1, 2, 5, 5, 40, 17, 5, 64, 3)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


@torch.inference_mode()
def expected(model: Any, ids: list[int], kind: str) -> np.ndarray:
    states = model(torch.tensor([ids])).last_hidden_state[0]
    vector = {"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[kind]
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def vectors(llm: LLM, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack([output.outputs.data for output in llm.embed(prompts, use_tqdm=False, **options)])


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_encoder(request.param, folder)


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_vectors_are_those_of_transformers(saved: tuple[Path, Any], kind: str, backend: str) -> None:
    folder, model = saved
    write_pooling(folder, kind)
    with LLM(str(folder), cpu_backend=backend, **OPTIONS) as llm:
        assert llm.loaded.hardware.runner["name"] == backend
        found = vectors(llm, texts())
        assert is_at_rest(llm.loaded.engine)
    wanted = np.stack([expected(model, ids, kind) for ids in texts()])
    assert np.abs(found - wanted).max() < 2e-5


@pytest.mark.parametrize("more", [{}, {"cpu_backend": "torch"}, {"quantization": "int8"}], ids=str)
def test_vectors_do_not_depend_on_the_batch_the_order_or_chunks(
    saved: tuple[Path, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved[0]
    if more == {"quantization": "int8"}:  # inputs in groups of 32
        save_encoder(folder.name.rstrip("0123456789"), folder := tmp_path, num_attention_heads=1)
    write_pooling(folder, "mean")
    found = []
    for budget in (7, 64, 512):
        with LLM(str(folder), max_num_batched_tokens=budget, **more, **OPTIONS) as llm:
            found += [vectors(llm, texts()), vectors(llm, texts()[::-1])[::-1]]
            found.append(np.concatenate([vectors(llm, [ids]) for ids in texts()]))
    assert max(np.abs(each - found[0]).max() for each in found) < 1e-6


@pytest.mark.parametrize(
    "more, labels",
    [({}, 1), ({}, 3), ({"classifier_pooling": "mean", "classifier_activation": "tanh"}, 3)],
    ids=["one", "three", "mean"],
)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_classifiers_score_their_labels(name: str, more: dict[str, Any], labels: int, tmp_path: Path) -> None:
    model = save_encoder(name, tmp_path, labels=labels, **more)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = np.stack([output.outputs.data for output in llm.classify(texts(), use_tqdm=False)])
        with pytest.raises(InvalidRequest, match="do not say what the vector of a text is"):
            llm.embed([[5]], use_tqdm=False)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits for ids in texts()])
    wanted = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    assert np.abs(found - wanted.numpy()).max() < 2e-5


def test_an_encoder_makes_no_text_and_a_model_without_labels_no_scores(saved: tuple[Path, Any]) -> None:
    with LLM(str(saved[0]), **OPTIONS) as llm:
        (output,) = llm.generate([5, 6], SamplingParams(detokenize=False), use_tqdm=False)
        assert output.outputs[0].error == "this model makes vectors, not text; use embed or /v1/embeddings"
        with pytest.raises(InvalidRequest, match="no labels"):
            llm.classify([[5]], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="input 0: This model's maximum context length is 6"):
            llm.embed([[5] * 67], use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "static"},
        {"speculative_config": "ngram"},
        {"quantization": "int4"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_an_encoder_does_not_have_are_refused(
    saved: tuple[Path, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="this model is an encoder"):
        LLM(str(saved[0]), **{**OPTIONS, **options})


def test_a_prompt_by_its_name_stands_before_the_text(saved: tuple[Path, Any]) -> None:
    write_pooling(saved[0], "mean", prompts={"query": "find: "}, default_prompt_name="query")
    with LLM(str(saved[0]), **OPTIONS) as llm:
        assert llm.loaded.embedding is not None and llm.loaded.embedding.default_prompt == "query"
        with pytest.raises(
            InvalidRequest, match=r"prompt_name: 'other' is not among this model's prompts \(query\)"
        ):
            llm.embed([[5]], prompt_name="other", use_tqdm=False)
    write_pooling(saved[0], "mean")


def test_parts_that_are_not_computed_are_refused(saved: tuple[Path, Any]) -> None:
    write_pooling(saved[0], "mean")
    path = saved[0] / "modules.json"
    path.write_text(path.read_text().replace("st.models.Normalize", "st.models.Dense"))
    with pytest.raises(CheckpointError, match="has a part 'Dense', which is not computed here"):
        LLM(str(saved[0]), **OPTIONS)
    write_pooling(saved[0], "mean")
