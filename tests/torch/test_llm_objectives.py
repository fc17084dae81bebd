"""`LLM` and `AsyncLLM` with requests that want something of their times: endings, refusals, and trying anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.errors import DeadlineImpossible
from tests.torch.llm_helpers import OPTIONS, is_at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TOO_SOON = replace(GREEDY, max_tokens=200, deadline_ms=1)
TRYING = replace(TOO_SOON, on_infeasible="try")
PROMPTS = ["one two three", "four five six", "seven"]


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), **OPTIONS)
    for prompt in PROMPTS:  # until it is known how long steps take
        made.generate(prompt, GREEDY, use_tqdm=False)
    yield made
    assert is_at_rest(made.loaded.engine)


def test_what_cannot_be_had_is_refused_and_the_others_are_answered(llm: LLM) -> None:
    refused, good = llm.generate(PROMPTS[:2], [TOO_SOON, GREEDY], use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error" and "deadline_ms" in (refused.outputs[0].error or "")
    assert good.outputs[0].finish_reason == "length"


def test_a_request_that_tries_ends_at_its_deadline_with_what_there_is(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], TRYING, use_tqdm=False)
    (branch,) = output.outputs
    assert (branch.finish_reason, branch.stop_reason) == ("abort", "deadline")
    assert len(branch.token_ids) < 200


def test_the_same_of_streams(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **OPTIONS)

    async def last(prompt: str, sampling: SamplingParams) -> RequestOutput:
        outputs = [output async for output in llm.generate(prompt, sampling)]
        return outputs[-1]

    async def check() -> None:
        for prompt in PROMPTS:
            await last(prompt, GREEDY)
        with pytest.raises(DeadlineImpossible, match="deadline_ms"):
            await last(PROMPTS[0], TOO_SOON)
        tried = await last(PROMPTS[0], TRYING)
        assert tried.outputs[0].stop_reason == "deadline"
        while not is_at_rest(llm.loaded.engine):
            await asyncio.sleep(0.01)

    try:
        asyncio.run(asyncio.wait_for(check(), 60))
    finally:
        llm.shutdown()
