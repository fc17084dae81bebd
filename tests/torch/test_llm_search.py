"""Searches: beam equals transformers; the others do what they say with a model whose answers are known."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.search import make_search
from paceline.llm.search.base import AnswerReading
from paceline.llm.search.searches import certainty_of
from tests.cases import first
from tests.model_folder import EOS, write_model
from tests.torch.llm_helpers import OPTIONS, is_at_rest

PROMPT = "hello there"
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)


def test_best_of_with_halving_takes_fewer_tokens_and_finds_a_likely_answer(llm: LLM) -> None:
    whole = llm.search("best_of", PROMPT, DRAWN, n=8, checkpoints=())
    halved = llm.search("best_of", PROMPT, DRAWN, n=8)
    assert len(whole.candidates) == 8 and whole.num_generated == 8 * 16
    scores = [each.score for each in whole.candidates]
    assert scores == sorted(scores, reverse=True)
    # 8 to a quarter, 4 to half, 2 to the end.
    assert (len(halved.candidates), halved.num_generated) == (2, 8 * 4 + 4 * 4 + 2 * 8)
    known = {tuple(each.token_ids): each.score for each in whole.candidates}
    for each in halved.candidates:
        assert each.score == pytest.approx(known[tuple(each.token_ids)])
    assert is_at_rest(llm.loaded.engine)


def test_a_beam_needs_no_tokenizer(folder: Path, llm: LLM) -> None:
    """The same tokens as with one, none of them a text."""
    prompt, asked = [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(EOS,))
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as bare:
        found = bare.search("beam", prompt, asked, width=3)
        assert is_at_rest(bare.loaded.engine)
        with bare.tree(prompt, asked) as tree, pytest.raises(InvalidRequest, match="needs a tokenizer"):
            tree.root.fork(1, append="text")
    known = llm.search("beam", prompt, asked, width=3)
    assert [each.token_ids for each in found.candidates] == [each.token_ids for each in known.candidates]
    assert {each.text for each in found.candidates} == {""}
    assert found.num_generated <= 6 * 3 * 2, "a beam that was left goes on for a token at most"


def test_beams_wait_for_rows(folder: Path, llm: LLM) -> None:
    """With no more rows than beams."""
    prompt, asked = [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(str(folder), **OPTIONS | {"max_num_seqs": 3}) as narrow:
        found = narrow.search("beam", prompt, asked, width=3)
        assert is_at_rest(narrow.loaded.engine) and found.num_generated <= 6 * 3 * 3
    known = llm.search("beam", prompt, asked, width=3)
    assert [each.token_ids for each in found.candidates] == [each.token_ids for each in known.candidates]


def test_the_posterior_of_a_leader() -> None:
    assert certainty_of(0, 0, 10) == pytest.approx(0.5) and certainty_of(5, 5, 6) == pytest.approx(0.5)
    assert certainty_of(9, 7, 0) == 1.0 and certainty_of(8, 8, 0) == 0.5 and certainty_of(9, 0, 7) == 1.0
    assert certainty_of(1, 0, 1) == pytest.approx(2 / 3 + 1 / 3 / 2)  # the next is the same with 2 in 3
    assert certainty_of(3, 0, 13) > 0.95 > certainty_of(2, 0, 14)
    assert certainty_of(3, 0, 10**3) == pytest.approx(1 - 1 / 16, abs=2e-3), "the likelier of the two"


def test_self_consistency_stops_when_it_is_certain(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = llm.search("self_consistency", PROMPT, greedy, n=16, pattern="(?s).*")
    assert (found.num_branches, found.score) == (4, 1.0) and found.answer == found.text.strip()
    drawn = llm.search("self_consistency", PROMPT, DRAWN, n=6, pattern="(?s).+")
    assert drawn.num_branches == 6 and len(drawn.candidates) == 6
    none = llm.search("self_consistency", PROMPT, DRAWN, n=5, pattern="(never said)")
    assert none.answer is None and none.score == 0
    assert is_at_rest(llm.loaded.engine)


def test_answers_are_read_by_pattern_and_pointer() -> None:
    assert AnswerReading.of(r"answer is (\d+)").read_here("answer is 3, no, the answer is 12.") == "12"
    pointer = AnswerReading.of(None, "/result/1/a~1b")
    assert pointer.read_here('{"result": [0, {"a/b": " yes "}]}') == "yes"
    assert pointer.read_here("no JSON") is None and pointer.read_here('{"result": [0]}') is None
    after = AnswerReading.of(after="Answer:")
    assert after.read_here("Answer: 1\nno, Answer:\n 42.\nmore") == "42" and after.read_here("none") is None
    for pattern, place in ((None, None), ("(", None), ("a", "/b"), (None, "b")):
        with pytest.raises(InvalidRequest):
            AnswerReading.of(pattern, place)


def test_a_probe_ends_an_answer_that_has_settled(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    found = llm.search("probe", PROMPT, params, every=8, answer_tokens=2, pattern="(?s)(.*)", ask=" so")
    whole = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert whole.token_ids[: len(found.token_ids)] == found.token_ids
    assert len(found.token_ids) % 8 == 0 and found.num_branches == 1 + len(found.token_ids) // 8
    assert is_at_rest(llm.loaded.engine)


@pytest.mark.parametrize("score", ["logprob", "vote", "judge"])
def test_tree_of_thought_keeps_the_best_steps(llm: LLM, score: str) -> None:
    found = llm.search(
        "tree_of_thought", PROMPT, DRAWN, width=3, keep=2, depth=2, step_tokens=5, step_end="~~", score=score
    )
    assert len(found.candidates) == 2 and all(len(each.token_ids) == 10 for each in found.candidates)
    extra = {"logprob": 0, "vote": 2 * 3, "judge": 3 + 6}[score]
    assert found.num_branches == 3 + 6 + extra
    assert found.candidates[0].score >= found.candidates[1].score
    assert is_at_rest(llm.loaded.engine)


def test_bad_options_are_refused_by_name(llm: LLM) -> None:
    for kind, options, says in (
        ("best", {}, "there is no search 'best'; there are best_of"),
        ("best_of", {"m": 3}, "the search best_of has no option m"),
        ("best_of", {"n": 0}, "n must be between 1 and 128"),
        ("best_of", {"checkpoints": (0.5, 0.25)}, "checkpoints must rise"),
        ("beam", {"width": 11}, "width must be between 1 and 10"),
        ("self_consistency", {}, "give one of pattern"),
        ("tree_of_thought", {"score": "luck"}, "score must be one of"),
        ("probe", {"ask": ""}, "ask must be a text"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            make_search(kind, options)
    with pytest.raises(InvalidRequest, match="not at texts"):
        llm.search("beam", PROMPT, SamplingParams(stop=("a",)))


def test_an_async_search_finds_the_same(folder: Path, llm: LLM) -> None:
    async def run() -> list[int]:
        async with AsyncLLM(str(folder), **OPTIONS) as other:
            found = await other.search("beam", PROMPT, SamplingParams(max_tokens=8), width=3)
            return found.token_ids

    expected = llm.search("beam", PROMPT, SamplingParams(max_tokens=8), width=3).token_ids
    assert asyncio.run(asyncio.wait_for(run(), 120)) == expected


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of transformers whose answers are not all equally likely, and end by themselves at times."""
    folder = write_model(tmp_path_factory.mktemp("sharp"), model_type="llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
        model.lm_head.weight[EOS] *= 2.5
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("count", first(1, [15, 50]))
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beam_search_equals_transformers(sharp: tuple[Path, Any], width: int, count: int) -> None:
    folder, model = sharp
    options = {**OPTIONS, "load_format": "auto", "dtype": "float32", "num_blocks": 256}
    prompts = [f"{number * 7919} is a number, {'and' * (number % 4)}" for number in range(count)]
    ends, exact = Counter[str](), 0
    with LLM(str(folder), **options) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        for number, prompt in enumerate(prompts):
            penalty = (1.0, 0.0, 2.0)[number % 3]
            found = llm.search(
                "beam", prompt, SamplingParams(max_tokens=10), width=width, length_penalty=penalty
            )
            ids = torch.tensor([tokenizer.encode(prompt)])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=10,
                num_beams=width,
                length_penalty=penalty,
                do_sample=False,
                eos_token_id=sorted(tokenizer.eos_token_ids),
                pad_token_id=1,
                return_dict_in_generate=True,
                output_scores=True,
            )
            tokens = expected.sequences[0, ids.shape[1] :].tolist()
            end = next((place for place, token in enumerate(tokens) if token in tokenizer.eos_token_ids), 10)
            tokens = tokens[: end + 1]  # padding behind
            score = float(expected.sequences_scores[0])
            assert found.score == pytest.approx(score, abs=1e-4), (number, found.token_ids, tokens)
            exact += found.token_ids == tokens
            ends[found.best.finish_reason] += 1
            assert is_at_rest(llm.loaded.engine)
    few = count // 10
    assert exact >= count - 1 and ends["stop"] >= few and ends["length"] >= few, (exact, ends)
