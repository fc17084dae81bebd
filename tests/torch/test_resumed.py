"""A request that goes on from output another engine has made gets the rest of it, to the bit, wherever it was cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from paceline import LLM
from paceline.core.events import Finished
from paceline.core.parameters import KVKeep
from paceline.core.request import FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest
from tests.model_folder import EOS, write_model
from tests.torch.llm_helpers import OPTIONS, is_at_rest

PROMPT = list(range(10, 33))
LENGTH = 21
DRAWN: dict[str, Any] = {"temperature": 1.1, "seed": 7, "max_tokens": LENGTH}
CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True),
    "seeded": SamplingParams(**DRAWN, ignore_eos=True),
    "top_p": SamplingParams(**DRAWN, top_p=0.8, top_k=12, ignore_eos=True),
    "branches": SamplingParams(**DRAWN, n=3, ignore_eos=True),
    "penalties": SamplingParams(
        **DRAWN, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.7, ignore_eos=True
    ),
    "min_tokens": SamplingParams(**DRAWN, min_tokens=9, stop_token_ids=tuple(range(4, 60))),
    "logprobs": SamplingParams(**DRAWN, logprobs=3, ignore_eos=True),
    "prompt_logprobs": SamplingParams(**DRAWN, prompt_logprobs=2, n=2, ignore_eos=True),
    "structure": SamplingParams(
        **DRAWN, n=2, structured_outputs=Structure.named("regex", "[a-f]{4}(-[0-9]{3}){3}")
    ),
    "kv_keep": SamplingParams(**DRAWN, kv_keep=KVKeep(first=8, recent=8), ignore_eos=True),
}


class Told(NamedTuple):
    """What an engine says of one branch."""

    tokens: list[int]
    first: int | None  # number of the first token
    logprobs: dict[int, tuple[int, float]]  # by position: the token, and how likely it was
    ending: Finished


def run(engine: Engine, asked: Sequence[RequestId]) -> dict[RequestId, Told]:
    """Step until all have ended."""
    tokens: dict[RequestId, list[int]] = {each: [] for each in asked}
    numbers: dict[RequestId, list[int]] = {each: [] for each in asked}
    logprobs: dict[RequestId, dict[int, tuple[int, float]]] = {each: {} for each in asked}
    endings: dict[RequestId, Finished] = {}
    while len(endings) < len(asked):
        events = engine.step()
        for batch in events.tokens:
            columns = (batch.requests.tolist(), batch.tokens.tolist(), batch.index.tolist())
            for request, token, number in zip(*columns, strict=True):
                tokens[request].append(token)
                numbers[request].append(number)
        for event in events.logprobs:
            found = event.logprobs
            logprobs[event.request][found.position] = (found.token, found.logprob)
        endings |= {each.request: each for each in events.finished}
    for each in asked:
        assert (
            numbers[each] == list(range(numbers[each][0], numbers[each][-1] + 1)) if numbers[each] else True
        )
    return {
        each: Told(tokens[each], numbers[each][0] if numbers[each] else None, logprobs[each], endings[each])
        for each in asked
    }


@pytest.fixture(scope="module", params=["native", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), **OPTIONS | {"cpu_backend": request.param}) as llm:
        yield llm.loaded.engine


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_the_same_at_every_cut(engine: Engine, name: str) -> None:
    sampling = CASES[name]
    whole = list(run(engine, engine.add(PROMPT, sampling)).values())
    longest = max(len(told.tokens) for told in whole)
    assert longest > 5 and len(whole) == sampling.n
    cuts = range(longest + 1)
    resumed = [engine.add(PROMPT, sampling, outputs=[told.tokens[:cut] for told in whole]) for cut in cuts]
    told_of = run(engine, [branch for branches in resumed for branch in branches])
    for cut, branches in zip(cuts, resumed, strict=True):
        for told, branch in zip(whole, branches, strict=True):
            rest = told_of[branch]
            assert rest.tokens == told.tokens[cut:], f"cut at {cut}"
            assert rest.first == (cut if cut < len(told.tokens) else None)
            assert rest.ending.reason is told.ending.reason
            assert rest.ending.num_output == told.ending.num_output == len(told.tokens)
            assert rest.ending.num_prompt == len(PROMPT) >= rest.ending.num_cached
            first = len(PROMPT) + cut
            expected = {at: said for at, said in told.logprobs.items() if at >= first or at < len(PROMPT)}
            if cut < len(told.tokens):
                assert rest.logprobs.keys() == expected.keys()
                for at, (token, logprob) in expected.items():  # torch rounds sums of batches in its own way
                    assert rest.logprobs[at][0] == token
                    assert rest.logprobs[at][1] == pytest.approx(logprob, abs=1e-5)
    assert is_at_rest(engine)


def test_branches_that_have_ended_are_not_made_again(engine: Engine) -> None:
    sampling = CASES["branches"]
    whole = list(run(engine, engine.add(PROMPT, sampling)).values())
    branches = engine.add(PROMPT, sampling, outputs=[None, whole[1].tokens[:4], []])
    told = list(run(engine, branches).values())
    assert [each.tokens for each in told] == [whole[1].tokens[4:], whole[2].tokens]
    assert is_at_rest(engine)


def test_a_last_token_that_ends_the_output_ends_it_at_once(engine: Engine) -> None:
    sampling = SamplingParams(**DRAWN)
    assert EOS in engine.ends
    (told,) = run(engine, engine.add(PROMPT, sampling, outputs=[[20, 21, EOS]])).values()
    assert (told.tokens, told.ending.reason, told.ending.num_output) == ([], FinishReason.STOP, 3)
    assert is_at_rest(engine)


def test_output_that_does_not_belong_to_the_request_is_refused(engine: Engine) -> None:
    for outputs in ([[1]] * 2, [None], [[5] * (LENGTH + 1)]):
        with pytest.raises(InvalidRequest):
            engine.add(PROMPT, CASES["greedy"], outputs=outputs)
    wrong = engine.add(PROMPT, CASES["structure"], outputs=[[60, 60], [60]])
    details = {told.ending.detail for told in run(engine, wrong).values()}
    assert details == {"grammar_error"}
    assert is_at_rest(engine)
