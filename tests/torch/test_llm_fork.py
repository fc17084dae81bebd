"""`fork` and `prune` of a generation under way: branches share what there is, and each goes its own way."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.errors import UnknownRequest
from tests.torch.llm_helpers import OPTIONS, is_at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


def alone(llm: LLM, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate("hello there", params, use_tqdm=False)
    return output


def test_a_stream_ends_as_generate_does(llm: LLM) -> None:
    seen = list(llm.stream("hello there", GREEDY))
    lengths = [len(output.outputs[0].token_ids) for output in seen]
    assert (
        len(seen) > 10
        and lengths == sorted(lengths)
        and [output.finished for output in seen[:-1]] == [False] * (len(seen) - 1)
    )
    expected = alone(llm, GREEDY).outputs[0]
    assert (seen[-1].outputs[0].token_ids, seen[-1].outputs[0].text) == (expected.token_ids, expected.text)
    assert is_at_rest(llm.loaded.engine)


def test_a_greedy_branch_has_the_tokens_text_and_logprobs_of_its_parent(llm: LLM) -> None:
    stream = llm.stream("hello there", GREEDY)
    for _ in range(6):
        output = next(stream)
    assert llm.fork(output.request_id, count=2) == [1, 2]
    *_, output = stream
    first, *others = output.outputs
    assert len(others) == 2 and len(first.token_ids) == 24
    for branch in others:
        assert (branch.token_ids, branch.text) == (first.token_ids, first.text)
        assert branch.logprobs is not None and first.logprobs is not None
        assert [list(each) for each in branch.logprobs] == [list(each) for each in first.logprobs]
        assert branch.cumulative_logprob == pytest.approx(first.cumulative_logprob)
        assert branch.finish_reason == "length"
    assert is_at_rest(llm.loaded.engine)


def test_drawn_branches_part_after_the_fork_and_a_fork_can_be_forked(llm: LLM) -> None:
    stream = llm.stream("hello there", DRAWN)
    for _ in range(6):
        output = next(stream)
    (child,) = llm.fork(output.request_id)
    for _ in range(3):
        output = next(stream)
    (grandchild,) = llm.fork(output.request_id, child)
    common = len(output.outputs[child].token_ids)
    *_, output = stream
    tokens = [part.token_ids for part in output.outputs]
    assert (child, grandchild) == (1, 2) and len({tuple(each) for each in tokens}) == 3
    assert tokens[1][:common] == tokens[2][:common] and tokens[0] == alone(llm, DRAWN).outputs[0].token_ids


def test_a_pruned_branch_ends_and_the_others_continue(llm: LLM) -> None:
    stream = llm.stream("hello there", DRAWN)
    for _ in range(5):
        output = next(stream)
    llm.fork(output.request_id)
    llm.prune(output.request_id, 0)
    with pytest.raises(UnknownRequest, match="branch 7 of request"):
        llm.prune(output.request_id, 7)
    *_, output = stream
    assert [part.finish_reason for part in output.outputs] == ["abort", "length"]
    assert len(output.outputs[0].token_ids) < 24 == len(output.outputs[1].token_ids)
    with pytest.raises(UnknownRequest, match="no request under way has the id"):
        llm.fork(output.request_id)
    assert is_at_rest(llm.loaded.engine)


def test_a_stop_string_ends_a_branch_where_it_ends_its_parent(llm: LLM) -> None:
    text = alone(llm, GREEDY).outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(text[-3:],))
    stream = llm.stream("hello there", params)
    output = next(stream)
    llm.fork(output.request_id)
    *_, output = stream
    first, other = output.outputs
    assert first.finish_reason == other.finish_reason == "stop"
    assert (first.text, first.token_ids) == (other.text, other.token_ids)
    assert is_at_rest(llm.loaded.engine)


def test_leaving_a_stream_ends_its_branches(llm: LLM) -> None:
    with closing(llm.stream("hello there", DRAWN)) as stream:
        output = next(stream)
        llm.fork(output.request_id, count=3)
    assert is_at_rest(llm.loaded.engine)


def test_branches_of_an_async_request_arrive_in_its_iterator(folder: Path) -> None:
    async def run() -> RequestOutput:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            forked = False
            params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
            async with aclosing(llm.generate("hello there", params, "a")) as outputs:
                async for output in outputs:
                    last = output
                    if not forked:
                        forked = True
                        assert await llm.fork("a", count=2) == [1, 2]
                        await llm.prune("a", 2)
            with pytest.raises(UnknownRequest, match="no request under way has the id a"):
                await llm.fork("a")
            return last

    output = asyncio.run(asyncio.wait_for(run(), 120))
    assert [part.finish_reason for part in output.outputs] == ["length", "length", "abort"]
    assert [len(part.token_ids) for part in output.outputs[:2]] == [200, 200]
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
