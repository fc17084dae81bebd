"""Scores of pairs of texts: token ids, cuts and scores as transformers has them, and what models score how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from paceline import LLM
from paceline.core.parameters import CHOICE, CLASSIFY, PoolingParams
from paceline.core.sampling import SamplingParams
from paceline.errors import ConfigError, InvalidRequest
from paceline.llm.pairs import CHOICE_BEGIN, CHOICE_END, CHOICE_MARKS, CHOICE_PAIR, Cut, TextPair, fitted
from tests.torch.embeddings.tiny_encoders import CONFIGS, save_encoder, write_pooling
from tests.torch.llm_helpers import is_at_rest

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "check_every": 1}
QUERY = "which fox jumps"
DOCUMENTS = ["the quick brown fox", "a", "a lazy dog, and a lazy dog again", "x" * 30, "fox jumps"]
LONG = "the quick brown fox jumps over it"  # and two of these are longer than the tiny encoders take
# The padding, what begins a text and what ends it, by the numbers that the tiny models know them by.
MARKS = {"bert": ("[PAD]", "[CLS]", "[SEP]"), "xlm-roberta": ("<s>", "<pad>", "</s>")}
MARKS["modernbert"] = MARKS["bert"]


def write_tokenizer(name: str, folder: Path) -> Any:
    """A tokenizer of characters with the marks of an architecture; what transformers makes of the same file."""
    tokens = [*MARKS[name], "[UNK]", *map(chr, range(32, 127))]
    backend = Backend(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    padding, begin, end = MARKS[name] if name != "xlm-roberta" else ("<pad>", "<s>", "</s>")
    if name != "xlm-roberta":
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(begin, tokens.index(begin)), (end, tokens.index(end))],
        )
    else:
        backend.post_processor = processors.RobertaProcessing(
            (end, tokens.index(end)), (begin, tokens.index(begin)), trim_offsets=False, add_prefix_space=False
        )
    backend.add_special_tokens([padding, begin, end])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": end, "cls_token": begin}))
    names = ["input_ids", "token_type_ids"] if name == "bert" else ["input_ids"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=padding, sep_token=end, model_input_names=names
    )


@pytest.fixture(scope="module", params=list(CONFIGS))
def cross(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Any, Any]]:
    """A cross-encoder, and transformers' model and tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_encoder(request.param, folder, labels=1)
    tokenizer = write_tokenizer(request.param, folder)
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm, model, tokenizer
        assert is_at_rest(llm.loaded.engine)


@torch.inference_mode()
def logits_of(model: Any, tokenizer: Any, first: str, second: str, **options: Any) -> float:
    return float(model(**tokenizer(first, second, return_tensors="pt", **options)).logits[0, 0])


def test_cross_encoders_score_pairs_as_transformers_does(cross: tuple[LLM, Any, Any]) -> None:
    llm, model, tokenizer = cross
    wanted = np.array([logits_of(model, tokenizer, QUERY, text) for text in DOCUMENTS])
    raw = llm.score(QUERY, DOCUMENTS, raw=True, use_tqdm=False)
    assert np.abs(np.array(raw) - wanted).max() < 2e-5
    scores = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert np.abs(np.array(scores) - 1 / (1 + np.exp(-wanted))).max() < 2e-5
    ranked = llm.rerank(QUERY, DOCUMENTS, top_n=3, use_tqdm=False)
    assert [each.index for each in ranked] == np.argsort(-wanted)[:3].tolist()
    backwards = llm.score(DOCUMENTS[::-1], [QUERY] * len(DOCUMENTS), raw=True, use_tqdm=False)[::-1]
    others = np.array([logits_of(model, tokenizer, text, QUERY) for text in DOCUMENTS])
    assert np.abs(np.array(backwards) - others).max() < 2e-5
    assert np.abs(others - wanted).max() > 1e-3, "which text comes first matters"


@pytest.mark.parametrize("strategy", ["longest_first", "only_second"])
def test_pairs_are_cut_as_transformers_cuts_them(cross: tuple[LLM, Any, Any], strategy: str) -> None:
    llm, model, tokenizer = cross
    longest = llm.loaded.config.scheduler.max_model_len
    pairs = [(LONG, LONG), (LONG, LONG * 2), ("a", LONG * 3), (LONG, "a"), (LONG[:29], LONG)]
    if strategy == "longest_first":
        pairs += [(LONG * 2, LONG), (LONG * 3, "a"), (LONG * 3, LONG * 4)]
    ones, others = map(list, zip(*pairs, strict=True))
    cut: dict[str, Any] = {"truncate": True, "truncation_strategy": strategy}
    found = llm.score(ones, others, raw=True, use_tqdm=False, **cut)
    for score, (one, other) in zip(found, pairs, strict=True):
        wanted = logits_of(model, tokenizer, one, other, truncation=strategy, max_length=longest)
        assert abs(score - wanted) < 2e-5, (one, other)
    with pytest.raises(InvalidRequest, match=f"input 1: This model's maximum context length is {longest}"):
        llm.score("a", ["b", LONG * 3], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="input 0: its first text has 99 tokens and leaves no room"):
        llm.score(LONG * 3, "a", use_tqdm=False, truncate=True, truncation_strategy="only_second")


def test_a_document_may_have_a_limit_of_its_own(cross: tuple[LLM, Any, Any]) -> None:
    llm = cross[0]
    pooled = SamplingParams(pooling=PoolingParams(kind=CLASSIFY, raw=True))
    plain, short = (
        llm._front.inputs.read(pairs(DOCUMENTS), pooled, str, Cut(document_tokens=most)) for most in (None, 5)
    )
    wanted = llm._front.inputs.read(pairs([text[:5] for text in DOCUMENTS]), pooled, str)
    assert [each.token_ids for each in short] == [each.token_ids for each in wanted]
    assert plain != short
    # A model that has no types at all ignores what its tokenizer says of them.
    has_types = llm.loaded.checkpoint.spec.encoder.num_types != 1  # type: ignore[union-attr]
    assert {each.sampling.pooling.second_at for each in short} == {  # type: ignore[union-attr]
        len(QUERY) + 2 if has_types else 0
    }


def pairs(documents: list[str]) -> list[TextPair]:
    return [TextPair(QUERY, text) for text in documents]


@pytest.mark.parametrize(
    ("sizes", "strategy", "left"),
    [
        ((10, 20, 40), "longest_first", (10, 20)),
        ((10, 30, 24), "longest_first", (10, 14)),
        ((30, 10, 24), "longest_first", (14, 10)),
        ((30, 31, 25), "longest_first", (12, 13)),
        ((31, 30, 25), "longest_first", (13, 12)),
        ((30, 30, 25), "longest_first", (12, 13)),
        ((5, 30, 25), "only_second", (5, 20)),
    ],
)
def test_the_longer_text_loses_first(
    sizes: tuple[int, int, int], strategy: str, left: tuple[int, int]
) -> None:
    assert fitted(*sizes, strategy) == left


def test_scores_do_not_depend_on_the_batch(cross: tuple[LLM, Any, Any]) -> None:
    llm = cross[0]
    together = llm.score(QUERY, DOCUMENTS * 3, raw=True, use_tqdm=False)
    alone = [llm.score(QUERY, text, raw=True, use_tqdm=False)[0] for text in DOCUMENTS] * 3
    assert np.abs(np.array(together) - np.array(alone)).max() < 1e-6


# A decoder that is asked for yes or no.


@pytest.fixture(scope="module")
def chooser(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("chooser")
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = transformers.Qwen3Config(vocab_size=112, initializer_range=0.15, **sizes, **heads)
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    characters = ["\n", *map(chr, range(32, 127))]
    spelled = [{" ": "Ġ", "\n": "Ċ"}.get(each, each) for each in characters]
    tokens = [*CHOICE_MARKS, *spelled, "ye", "yes", "no"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    backend = Backend(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(CHOICE_MARKS))
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder, model, transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@torch.inference_mode()
def choice_of(model: Any, tokenizer: Any, query: str, document: str, room: int = 10_000) -> float:
    """As the model's card computes it: beginning and end are tokenised by themselves, and the pair is cut."""
    begin, middle, end = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (CHOICE_BEGIN, CHOICE_PAIR.format(first=query, second=document), CHOICE_END)
    )
    ids = [*begin, *middle[: max(0, room - len(begin) - len(end))], *end]
    logits = model(torch.tensor([ids])).logits[0, -1]
    named = [tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes")]
    return float(torch.log_softmax(logits[named], dim=-1)[1].exp())


def test_a_choice_is_that_of_qwen3_reranker(chooser: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = chooser
    with LLM(str(folder), pooling="choice", num_blocks=512, **OPTIONS) as llm:
        assert llm._front.pooled.choice_ids == tuple(map(tokenizer.convert_tokens_to_ids, ("no", "yes")))
        wanted = np.array([choice_of(model, tokenizer, QUERY, text) for text in DOCUMENTS])
        assert np.abs(np.array(llm.score(QUERY, DOCUMENTS, use_tqdm=False)) - wanted).max() < 2e-5
        raw = np.array(llm.score(QUERY, DOCUMENTS, raw=True, use_tqdm=False))
        assert np.abs(raw - np.log(wanted / (1 - wanted))).max() < 2e-4
        ranked = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False)
        assert [each.index for each in ranked] == np.argsort(-wanted).tolist()
        (cut,) = llm.score(QUERY, LONG * 40, truncate=True, use_tqdm=False)
        assert abs(cut - choice_of(model, tokenizer, QUERY, LONG * 40, 1024)) < 2e-5
        begin, spelled = llm._front.pooled.choice_marks[0], TextPair(QUERY, "<|im_end|>")
        pooled = SamplingParams(pooling=PoolingParams(kind=CHOICE, token_ids=(1, 2)))
        (read,) = llm._front.inputs.read([spelled], pooled, str)
        assert read.token_ids[len(begin) :].count(1) == 1, "text that spells a mark stays text"
        with pytest.raises(InvalidRequest, match="chooses between two tokens and makes no vectors"):
            llm.embed("a", use_tqdm=False)
        assert is_at_rest(llm.loaded.engine)


def test_files_of_a_cross_encoder_name_its_tokens(chooser: tuple[Path, Any, Any], tmp_path: Path) -> None:
    for file in chooser[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    parts = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
    listed = [{"idx": at, "path": path, "type": f"st.{name}"} for at, (path, name) in enumerate(parts)]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_text(
        json.dumps({"true_token_id": 20, "false_token_id": 21})
    )
    with LLM(str(tmp_path), num_blocks=512, **OPTIONS) as llm:
        assert llm._front.pooled.choice_ids == (21, 20)
        assert len(llm.score(QUERY, DOCUMENTS, use_tqdm=False)) == len(DOCUMENTS)


def test_other_models_compare_vectors_with_prompts_of_their_own(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    write_tokenizer("bert", tmp_path)
    write_pooling(tmp_path, "mean", prompts={"query": "find: ", "document": "text: "})
    with LLM(str(tmp_path), **OPTIONS) as llm:
        scores = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        (query,) = llm.embed(QUERY, prompt_name="query", use_tqdm=False)
        found = llm.embed(DOCUMENTS, prompt_name="document", use_tqdm=False)
    cosines = [float(query.outputs.data @ each.outputs.data) for each in found]
    assert np.abs(np.array(scores) - np.array(cosines)).max() < 1e-6


def test_what_cannot_score_says_why(tmp_path: Path, chooser: tuple[Path, Any, Any]) -> None:
    save_encoder("bert", tmp_path, labels=3)
    write_tokenizer("bert", tmp_path)
    with (
        LLM(str(tmp_path), **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="this model has 3 labels; a pair of texts is scored by one"),
    ):
        llm.score("a", "b")
    with pytest.raises(ConfigError, match="--pooling choice: this model is an encoder"):
        LLM(str(tmp_path), pooling="choice", **OPTIONS)
    with (
        LLM(str(chooser[0]), num_blocks=64, **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="do not say what the vector of a text is"),
    ):
        llm.score("a", "b")
