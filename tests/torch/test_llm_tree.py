"""`LLM.tree` and `AsyncLLM.tree`: branches equal fresh requests with the same tokens, and leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import InvalidRequest, TreeFull
from tests.torch.llm_helpers import OPTIONS, is_at_rest

PROMPT = "hello there"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


def continued(llm: LLM, tokens: list[int], params: SamplingParams) -> list[int]:
    """What a fresh request makes of these tokens."""
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    return output.outputs[0].token_ids


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_the_root_generates_nothing_and_branches_of_it_equal_fresh_requests(llm: LLM) -> None:
    with llm.tree(PROMPT, GREEDY) as tree:
        assert tree.root.state == "prompt" and tree.branches == []
        branches = tree.root.fork(3)
        held = list(tree.held())
        assert sorted(branch.index for branch in held) == [1, 2, 3] and tree.root.token_ids == []
        prompt = tree.output.prompt_token_ids
        expected = continued(llm, prompt, greedy(24))
        for branch in branches:
            assert (branch.token_ids, branch.held, branch.state) == (expected, "length", "held")
            assert branch.logprob == pytest.approx(branches[0].logprob) and branch.logprob < 0
    assert is_at_rest(llm.loaded.engine)


def test_drawn_branches_differ_and_a_seed_makes_one_equal_a_fresh_request(llm: LLM) -> None:
    with llm.tree(PROMPT, GREEDY) as tree:
        drawn = tree.root.fork(4, temperature=1.0)
        (seeded,) = tree.root.fork(1, temperature=1.0, seed=3)
        assert len(list(tree.held())) == 5
        assert len({tuple(branch.token_ids) for branch in drawn}) == 4
        assert seeded.token_ids == continued(llm, tree.output.prompt_token_ids, DRAWN)


def test_a_branch_of_an_earlier_token_continues_from_there(llm: LLM) -> None:
    with llm.tree(PROMPT, GREEDY) as tree:
        (first,) = tree.root.fork(1)
        list(tree.held())
        prompt, ids = tree.output.prompt_token_ids, first.token_ids
        append = [ids[3], ids[1]]
        (child,) = first.fork(1, at=10, append=append, max_tokens=6)
        list(tree.held())
        begin = [*ids[:10], *append]
        assert child.token_ids == begin + continued(llm, prompt + begin, greedy(6))
        # Of tokens that the child has from its parent: the parent is branched.
        (other,) = child.fork(1, at=5, max_tokens=4)
        (within,) = child.fork(1, at=11, max_tokens=4)
        list(tree.held())
        assert other.token_ids == ids[:9]
        assert within.token_ids == begin[:11] + continued(llm, prompt + begin[:11], greedy(4))
        first.prune()
        with pytest.raises(InvalidRequest, match="branch 1, which has ended: branch at 12 or later"):
            child.fork(1, at=5)
        with pytest.raises(InvalidRequest, match="between 0 and the 18 tokens"):
            child.fork(1, at=19)
    assert is_at_rest(llm.loaded.engine)


def test_extending_puts_text_in_and_goes_on(llm: LLM) -> None:
    with llm.tree(PROMPT, GREEDY) as tree:
        (branch,) = tree.root.fork(1, max_tokens=5)
        list(tree.held())
        prompt, ids, text = tree.output.prompt_token_ids, list(branch.token_ids), branch.text
        branch.extend(" and so", max_tokens=4)
        assert [each.index for each in tree.held()] == [1]
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        inserted = tokenizer.encode(" and so", add_special_tokens=False)
        begin = [*ids, *inserted]
        assert branch.token_ids == begin + continued(llm, prompt + begin, greedy(4))
        assert branch.text.startswith(text) and branch.text == tokenizer.decode(branch.token_ids)
        assert branch.output.logprobs is not None and len(branch.output.logprobs) == len(branch.token_ids)
        assert [bool(each) for each in branch.output.logprobs] == [True] * 5 + [False] * len(inserted) + [
            True
        ] * 4
        # Nothing put in: it goes on as if it had not been held.
        branch.extend(max_tokens=3)
        list(tree.held())
        assert branch.token_ids[-7:] == continued(llm, prompt + begin, greedy(7))
    assert is_at_rest(llm.loaded.engine)


def test_until_holds_at_a_text_and_what_follows_has_it(llm: LLM) -> None:
    whole = llm.generate(PROMPT, greedy(24), use_tqdm=False)[0].outputs[0].text
    stop = whole[8:11]
    before = whole[: whole.index(stop)]
    with llm.tree(PROMPT, GREEDY) as tree:
        (branch,) = tree.root.fork(1)
        branch.until(stop)
        assert [each.text for each in tree.held()] == [before] and branch.held == "stop"
        assert branch.output.stop_reason == stop
        (child,) = branch.fork(1, max_tokens=4)
        branch.until(max_tokens=6)
        list(tree.held())
        for each in (branch, child):
            assert whole.startswith(each.text) and each.text.startswith(before + stop)
        # A text that has gone by already: it is held where that stood.
        (late,) = tree.root.fork(1)
        llm.generate("other", greedy(30), use_tqdm=False)
        late.until(stop, max_tokens=20)
        list(tree.held())
        assert late.text == before and late.held == "stop"
        late.until(stop, max_tokens=20)  # the next one
        list(tree.held())
        assert late.text == before + stop and late.held == "stop"
    assert is_at_rest(llm.loaded.engine)


def test_scores_rank_and_limits_refuse(llm: LLM) -> None:
    with llm.tree(PROMPT, GREEDY, max_branches=5, max_rows=2) as tree:
        branches = tree.root.fork(4, temperature=1.0, max_tokens=4)
        for number, branch in enumerate(branches):
            branch.score = number
        assert [tree.rank(branch) for branch in branches] == [3, 2, 1, 0]
        with pytest.raises(TreeFull, match="0 are left, 1 are asked for"):
            tree.root.fork(1)
        for branch in tree.held():
            if tree.rank(branch) >= 2:
                branch.prune()
        list(tree.held())
        assert {branch.index for branch in tree.branches} == {3, 4}
        with pytest.raises(InvalidRequest, match="n of a branch cannot differ"):
            tree.root.fork(1, n=2)
    assert is_at_rest(llm.loaded.engine)


def test_a_held_answer_is_not_for_generate(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="use LLM.tree"):
        llm.generate(PROMPT, SamplingParams(on_stop="hold"), use_tqdm=False)


def test_an_async_tree_has_the_same_names(folder: Path) -> None:
    async def run() -> list[tuple[str, str]]:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            async with llm.tree(PROMPT, GREEDY, max_rows=4) as tree:
                branches = await tree.root.fork(4, temperature=1.0, seed=5)
                for branch in branches:
                    branch.until("e", max_tokens=12)
                seen = 0
                async for branch in tree.held():
                    seen += 1
                    branch.score = -len(branch.token_ids)
                    if seen > 4:
                        continue
                    if tree.rank(branch) >= 3:
                        branch.prune()
                    else:
                        await branch.extend(" so", max_tokens=3)
                found = [(branch.state, branch.text) for branch in branches]
            engine = llm._engine
            await asyncio.sleep(0.05)
            assert not engine.has_requests
            with pytest.raises(InvalidRequest, match="cannot differ"):
                async with llm.tree(PROMPT, GREEDY) as tree:
                    await tree.root.fork(1, n=3)
            return found

    found = asyncio.run(asyncio.wait_for(run(), 120))
    assert len(found) == 4 and any(" so" in text for _, text in found)
    assert {state for state, _ in found} <= {"held", "ended"}
