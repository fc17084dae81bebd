"""Vectors of a decoder: against transformers, and the same in any batch, order and cut of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from paceline import LLM, SamplingParams
from paceline.audit.codec import unpack
from paceline.audit.runlog import read_run_log
from paceline.audit.story import explain_from_log
from paceline.core.events import Finished
from paceline.core.parameters import PoolingParams
from paceline.errors import ConfigError, InvalidRequest
from paceline.lab.sim.replayer import replay
from paceline.scheduler.policy.fair import FairShare
from tests.torch.embeddings.tiny_encoders import write_pooling
from tests.torch.llm_helpers import is_at_rest
from tests.torch.tiny_models import VOCAB, save

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 8, "num_blocks": 64, "check_every": 1}
LENGTHS = (1, 2, 15, 16, 17, 40, 3, 90)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save("qwen3", folder)


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["last", "mean"])
def llm(saved: tuple[Path, Any], backend: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    kind = str(request.param)
    made = LLM(str(saved[0]), pooling=kind, cpu_backend=backend, max_num_batched_tokens=24, **OPTIONS)
    with made as llm:
        yield llm


def texts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]


@torch.inference_mode()
def expected(model: Any, ids: list[int], kind: str) -> np.ndarray:
    states = model.model(torch.tensor([ids])).last_hidden_state[0]
    vector = states[-1] if kind == "last" else states.mean(dim=0)
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def vectors(llm: LLM, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack([output.outputs.data for output in llm.embed(prompts, use_tqdm=False, **options)])


def kind_of(llm: LLM) -> str:
    assert llm.loaded.embedding is not None
    return llm.loaded.embedding.kind


def test_vectors_are_those_of_transformers(llm: LLM, saved: tuple[Path, Any]) -> None:
    found = vectors(llm, texts())
    wanted = np.stack([expected(saved[1], ids, kind_of(llm)) for ids in texts()])
    assert np.abs(found - wanted).max() < 2e-5
    assert is_at_rest(llm.loaded.engine)


def test_files_of_qwen3_embedding_name_its_prompts_and_what_ends_a_text(tmp_path: Path) -> None:
    """Its tokenizer puts an end behind a text, whose state is the vector; queries have an instruction before them."""
    model, end = save("qwen3", tmp_path), "<|endoftext|>"
    tokens = [end, "[UNK]", *map(chr, range(32, 127))]
    backend = Backend(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:1 {end}:1", special_tokens=[(end, 0)]
    )
    backend.add_special_tokens([end])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "pad_token": end}))
    query = "Instruct: retrieve\nQuery:"
    write_pooling(tmp_path, "last", prompts={"query": query, "document": ""}, default_prompt_name=None)
    with LLM(str(tmp_path), max_num_seqs=4, num_blocks=64) as llm:
        for name, text in (("query", query + "a fox"), ("document", "a fox"), (None, "a fox")):
            (found,) = llm.embed("a fox", prompt_name=name, use_tqdm=False)
            ids = [*backend.encode(text, add_special_tokens=False).ids, 0]
            assert found.prompt_token_ids == ids
            assert np.abs(found.outputs.data - expected(model, ids, "last")).max() < 2e-5
        (cut,) = llm.embed("fox " * 2000, truncate=True, use_tqdm=False)
        assert len(cut.prompt_token_ids) == llm.max_model_len and cut.prompt_token_ids[-1] == 0


def test_vectors_do_not_depend_on_the_batch_or_the_order(llm: LLM) -> None:
    together = vectors(llm, texts())
    backwards = vectors(llm, texts()[::-1])[::-1]
    llm.reset_prefix_cache()
    alone = np.concatenate([vectors(llm, [ids]) for ids in texts()])
    assert np.abs(together - backwards).max() < 1e-6
    assert np.abs(together - alone).max() < 1e-6


def test_chunks_change_nothing(saved: tuple[Path, Any], backend: str) -> None:
    folder = str(saved[0])
    for kind in ("last", "mean"):
        found = []
        for budget in (8, 24, 256):
            with LLM(
                folder, pooling=kind, cpu_backend=backend, max_num_batched_tokens=budget, **OPTIONS
            ) as llm:
                found.append(vectors(llm, texts()))
        assert np.abs(found[0] - found[2]).max() < 1e-6
        assert np.abs(found[1] - found[2]).max() < 1e-6


def test_only_what_looks_at_the_last_token_uses_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = texts()[-1]
    first, second = (llm.embed([ids], use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (80 if kind_of(llm) == "last" else 0)
    assert np.abs(first.outputs.data - second.outputs.data).max() < 1e-6


def test_dimensions_are_cut_before_the_length_is_made_one(llm: LLM) -> None:
    ids = texts()[5]
    plain = vectors(llm, [ids], normalize=False)[0]
    short = vectors(llm, [ids], dimensions=8)[0]
    assert short.shape == (8,)
    assert np.allclose(short, plain[:8] / np.linalg.norm(plain[:8]), atol=1e-6)


def test_texts_are_generated_and_embedded_in_the_same_steps(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    ids = texts()
    alone = [output.outputs[0].token_ids for output in llm.generate(ids, params, use_tqdm=False)]
    engine, pooled = (
        llm.loaded.engine,
        SamplingParams(pooling=PoolingParams(kind=kind_of(llm), normalize=True)),
    )
    numbers = [engine.add(tokens, params)[0] for tokens in ids]
    ends = [engine.add(tokens, pooled)[0] for tokens in ids]
    generated: dict[int, list[int]] = {number: [] for number in numbers}
    ended: dict[int, Finished] = {}
    while engine.has_requests:
        events = engine.step()
        for batch in events.tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                generated[request].append(token)
        ended |= {ending.request: ending for ending in events.finished}
    assert [generated[number] for number in numbers] == alone
    found = np.stack([np.frombuffer(ended[number].vector, "<f4") for number in ends])
    assert np.abs(found - vectors(llm, ids)).max() < 1e-6
    assert all(ended[number].num_output == 0 for number in ends)
    assert not any(ended[number].vector for number in numbers)


def test_the_fair_policy_counts_both(saved: tuple[Path, Any]) -> None:
    """A vector costs its tenant its tokens, as a prompt does; a chat its output too."""
    ids = texts()
    with LLM(str(saved[0]), pooling="mean", scheduling_policy="fair", **OPTIONS) as llm:
        engine, pooled = llm.loaded.engine, SamplingParams(pooling=PoolingParams(kind="mean"))
        chat = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, detokenize=False)
        for tokens in ids:
            engine.add(tokens, pooled, tenant="vectors")
        engine.add(ids[5], chat, tenant="chat")
        while engine.has_requests:
            engine.step()
        state = engine.scheduler.state
        state.accounting.settle()
        policy = state.policy
        assert isinstance(policy, FairShare)
        counted = {name: policy.counter(state.tenant_index(name)) for name in ("vectors", "chat")}
    assert counted == {"vectors": sum(LENGTHS), "chat": len(ids[5]) + 2 * 5.0}


def test_a_choice_is_the_softmax_of_its_tokens(llm: LLM, saved: tuple[Path, Any]) -> None:
    ids, choice = texts()[5], (11, 30)
    engine = llm.loaded.engine
    (number,) = engine.add(ids, SamplingParams(pooling=PoolingParams(kind="choice", token_ids=choice)))
    (ending,) = [ending for _ in range(40) for ending in engine.step().finished]
    with torch.inference_mode():
        logits = saved[1](torch.tensor([ids])).logits[0, -1, list(choice)]
    assert ending.request == number
    assert np.abs(np.frombuffer(ending.vector, "<f4") - logits.softmax(-1).numpy()).max() < 2e-5


def test_a_preempted_row_begins_its_sum_again(saved: tuple[Path, Any], backend: str) -> None:
    with LLM(str(saved[0]), pooling="mean", cpu_backend=backend, max_num_batched_tokens=8, **OPTIONS) as llm:
        wanted, engine = vectors(llm, [texts()[-1]])[0], llm.loaded.engine
        pooled = SamplingParams(pooling=PoolingParams(kind="mean", normalize=True))
        (number,) = engine.add(texts()[-1], pooled)
        endings: list[Finished] = []
        for step in range(60):
            endings += engine.step().finished
            if step in (3, 7):
                engine.scheduler.pause(number)
                engine.scheduler.resume(number)
        (ending,) = endings
    assert np.abs(np.frombuffer(ending.vector, "<f4") - wanted).max() < 1e-6
    assert ending.cost.redone > 0


def test_scores_and_ranks_follow_cosines(folder: Path) -> None:
    words = ["hello there", "a", "the quick brown fox", "hello there"]
    with LLM(str(folder), load_format="dummy", pooling="mean", num_blocks=64) as llm:
        found = [output.outputs.data for output in llm.embed(words, use_tqdm=False)]
        scores = llm.score(words[0], words[1:], use_tqdm=False)
        ranked = llm.rerank(words[0], words[1:], top_n=2, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="2 texts and 3"):
            llm.score(words[:2], words[1:], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="top_n must be at least 1"):
            llm.rerank("a", words, top_n=0)
    assert np.allclose(scores, [float(found[0] @ other) for other in found[1:]], atol=1e-6)
    assert (ranked[0].index, len(ranked)) == (2, 2)
    assert ranked[0].relevance_score == pytest.approx(1.0, abs=1e-6)
    assert ranked[0].relevance_score >= ranked[1].relevance_score == pytest.approx(sorted(scores)[-2])


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_run_with_vectors_replays_and_has_none_of_their_numbers(
    saved: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    log = tmp_path / "run.jsonl"
    options = {**OPTIONS, "max_num_batched_tokens": 24, "run_log": str(log)}
    with LLM(str(saved[0]), pooling=kind, **options) as llm:
        vectors(llm, texts() + texts())
        llm.generate(texts(), SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
    assert replay(read_run_log(log)).is_equal
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [line["result"]["vectors"] for line in lines if "vectors" in line.get("result", {})]
    assert sum(len(unpack(each)) for each in rows) == 2 * len(LENGTHS)
    assert any(
        each[2].get("pooling") == [kind, []]
        for line in lines
        for each in line.get("inputs", [])
        if each[0] == "add"
    )
    story = explain_from_log(read_run_log(log), 1).sentences()
    assert f"asked for a vector ({kind})" in story[0] and "has its vector" in story[-1]


def test_a_vector_that_only_encoders_have_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--pooling cls: this model generates text.*; use last, mean"):
        LLM(str(folder), load_format="dummy", pooling="cls", num_blocks=64)


def test_what_cannot_be_is_refused_with_its_place(llm: LLM, saved: tuple[Path, Any]) -> None:
    with pytest.raises(InvalidRequest, match="input 1: token id 999"):
        llm.embed([[5], [999]], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="input 0: the prompt is empty"):
        llm.embed([{"prompt_token_ids": []}], use_tqdm=False)
    with pytest.raises(
        InvalidRequest, match="input 0: This model's maximum context length is 256 tokens; the input has 257"
    ):
        llm.embed([[5] * 257], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="dimensions must be"):
        llm.embed([[5]], dimensions=0, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="n: a request with pooling"):
        SamplingParams(n=2, pooling=PoolingParams(kind="last"))
    with pytest.raises(InvalidRequest, match="pooling: this engine makes last, mean, choice, not cls"):
        llm.loaded.engine.add([5], SamplingParams(pooling=PoolingParams(kind="cls")))
    assert vectors(llm, [[5] * 256]).shape == (1, 64)
    assert is_at_rest(llm.loaded.engine)


def test_a_model_whose_files_say_nothing_of_vectors_makes_none(saved: tuple[Path, Any]) -> None:
    with (
        LLM(str(saved[0]), **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="load it with pooling='last'"),
    ):
        llm.embed([[5]], use_tqdm=False)
