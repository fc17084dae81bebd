"""`AsyncLLM`: streams side by side, and what happens to a request when its reader goes, stays or is let down."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from paceline.errors import EngineFailed, InvalidRequest
from tests.torch.llm_helpers import OPTIONS, is_at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=240)
TIMEOUT_S = 60


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(folder), **OPTIONS)
    yield llm
    llm.shutdown()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


async def collect(llm: AsyncLLM, prompt: str, sampling: SamplingParams, **more: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, sampling, **more)]


async def at_rest(llm: AsyncLLM) -> None:
    """Wait until the engine holds nothing; fails by the test's timeout."""
    while not is_at_rest(llm.loaded.engine):
        await asyncio.sleep(0.01)


class Steps:
    """Counts the engine's steps and can hold them up. Set up before the first request."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self._step = llm.loaded.engine.step
        self.error: Exception | None = None
        self.one_by_one = False
        monkeypatch.setattr(llm.loaded.engine, "step", self._counted)

    def _counted(self) -> Any:
        self.may_go.wait(TIMEOUT_S)
        if self.one_by_one:
            self.may_go.clear()
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._step()


# ---------------------------------------------------------------- streams


def test_a_stream_grows_to_the_whole_answer(
    llm: AsyncLLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = LLM(str(folder), **OPTIONS).generate("hello", GREEDY, use_tqdm=False)
    steps = Steps(llm, monkeypatch)
    steps.one_by_one = True

    async def test() -> None:
        outputs = []
        async for output in llm.generate("hello", GREEDY, request_id="mine"):
            outputs.append(output)
            steps.may_go.set()
        assert {output.request_id for output in outputs} == {"mine"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        assert [len(text) for text in texts] == list(range(1, 25)), "a character in each step"
        assert texts[-1] == expected.outputs[0].text
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        await at_rest(llm)

    run(test())


def test_streams_side_by_side_do_not_touch_each_other(llm: AsyncLLM) -> None:
    prompts = [f"prompt {index}" for index in range(24)]

    async def test() -> None:
        alone = [(await collect(llm, prompt, GREEDY))[-1].outputs[0].text for prompt in prompts[:4]]
        together = await asyncio.gather(*[collect(llm, prompt, GREEDY) for prompt in prompts])
        assert [outputs[-1].prompt for outputs in together] == prompts
        assert [outputs[-1].outputs[0].text for outputs in together[:4]] == alone
        assert all(outputs[-1].finished for outputs in together)
        await at_rest(llm)

    run(test())


def test_a_slow_reader_gets_the_newest_state_and_the_end(llm: AsyncLLM) -> None:
    async def test() -> None:
        outputs = []
        async for output in llm.generate("hello", GREEDY):
            outputs.append(output)
            await asyncio.sleep(0.2)  # the engine goes on meanwhile
        assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 24
        assert len(outputs) < 24

    run(test())


def test_time_counts_from_the_call_and_not_from_when_the_engine_looks_up(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(llm, monkeypatch)

    async def test() -> None:
        steps.may_go.clear()
        first = asyncio.create_task(collect(llm, "a long one", GREEDY))
        while not llm.loaded.engine.has_requests:
            await asyncio.sleep(0.01)
        called_s = llm.loaded.engine.now_s
        second = asyncio.create_task(collect(llm, "another", GREEDY))
        await asyncio.sleep(0.3)  # the engine is busy with a step and hears of nothing
        freed_s = llm.loaded.engine.now_s
        steps.may_go.set()
        metrics = [(await task)[-1].metrics for task in (first, second)]
        assert metrics[1] is not None
        assert called_s <= metrics[1].arrival_s < freed_s - 0.2

    run(test())


def test_a_stop_string_ends_a_stream(llm: AsyncLLM) -> None:
    async def test() -> None:
        whole = (await collect(llm, "hello", GREEDY))[-1].outputs[0].text
        outputs = await collect(llm, "hello", replace(GREEDY, stop=(whole[8:10],)))
        part = outputs[-1].outputs[0]
        assert (part.text, part.finish_reason) == (whole[: whole.index(whole[8:10])], "stop")
        assert part.stop_reason == whole[8:10]
        await at_rest(llm)

    run(test())


def test_outputs_already_given_do_not_change(llm: AsyncLLM) -> None:
    async def test() -> None:
        lengths = []
        outputs = []
        async for output in llm.generate("hello", replace(GREEDY, logprobs=1)):
            outputs.append(output)
            lengths.append(len(output.outputs[0].token_ids))
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        assert [len(output.outputs[0].logprobs or []) for output in outputs] == lengths

    run(test())


def test_a_conversation_streams_too(llm: AsyncLLM) -> None:
    async def test() -> None:
        messages = [{"role": "user", "content": "hi"}]
        outputs = [output async for output in llm.chat(messages, GREEDY)]
        assert outputs[-1].prompt == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        assert len(outputs[-1].prompt_token_ids) == llm.count_chat_tokens(messages)

    run(test())


# ---------------------------------------------------------------- leaving


def test_leaving_a_stream_frees_its_blocks_within_two_steps(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(llm, monkeypatch)

    async def test() -> None:
        task = asyncio.create_task(collect(llm, "hello", LONG))
        while steps.count < 5:
            await asyncio.sleep(0.001)
        steps.may_go.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = steps.count
        steps.may_go.set()
        await at_rest(llm)
        assert steps.count <= before + 2
        assert not llm._listeners and not llm._readers

    run(test())


def test_breaking_out_of_the_loop_aborts_at_once(llm: AsyncLLM) -> None:
    async def test() -> None:
        async with aclosing(llm.generate("hello", LONG)) as outputs:
            async for output in outputs:
                assert not output.finished
                break
        assert not llm._readers, "closed now, not when the garbage is collected"
        await at_rest(llm)

    run(test())


def test_many_come_and_go(llm: AsyncLLM) -> None:
    async def visit(index: int) -> bool:
        task = asyncio.create_task(collect(llm, f"visitor {index}", LONG if index % 3 else GREEDY))
        if index % 3 == 0:
            return (await task)[-1].finished
        await asyncio.sleep(0.002 * index)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def test() -> None:
        assert all(await asyncio.gather(*[visit(index) for index in range(40)]))
        await at_rest(llm)
        assert not llm._listeners and not llm._readers

    run(test())


def test_abort_ends_a_stream_with_what_there_is(llm: AsyncLLM) -> None:
    async def test() -> None:
        outputs = []
        async for output in llm.generate("hello", replace(LONG, n=2, temperature=1.0), "mine"):
            outputs.append(output)
            await llm.abort("mine")
        assert outputs[-1].finished
        assert {part.finish_reason for part in outputs[-1].outputs} == {"abort"}
        assert len(outputs[-1].outputs[0].token_ids) < 240
        await llm.abort("mine")  # and an unknown one is left alone
        await at_rest(llm)

    run(test())


def test_a_name_may_be_used_again_when_its_request_is_over(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(llm, monkeypatch)

    async def test() -> None:
        first = asyncio.create_task(collect(llm, "hello", LONG, request_id="mine"))
        while steps.count < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidRequest, match="'mine' is in use"):
            await collect(llm, "other", GREEDY, request_id="mine")
        steps.may_go.clear()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(collect(llm, "other", GREEDY, request_id="mine"))
        await asyncio.sleep(0.05)  # its addition waits behind the abort of the first, in the same turn
        steps.may_go.set()
        outputs = await second
        assert [part.finish_reason for part in outputs[-1].outputs] == ["length"]
        assert outputs[-1].prompt == "other"

    run(test())


# ---------------------------------------------------------------- being let down


def test_a_bad_request_is_the_callers_business_alone(llm: AsyncLLM) -> None:
    async def test() -> None:
        good = asyncio.create_task(collect(llm, "hello", GREEDY))
        with pytest.raises(InvalidRequest, match="empty"):
            await collect(llm, "", GREEDY)
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            await collect(llm, "hello", replace(GREEDY, stop_token_ids=(10_000,)))
        assert (await good)[-1].finished and llm.is_running

    run(test())


def test_a_refusal_by_the_engine_reaches_its_caller(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> Any:
        raise InvalidRequest("no room", param="prompt")

    monkeypatch.setattr(llm.loaded.engine, "add", refuse)

    async def test() -> None:
        with pytest.raises(InvalidRequest, match="no room"):
            await collect(llm, "hello", GREEDY)
        assert llm.is_running and not llm._readers

    run(test())


def test_shutdown_answers_every_waiting_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(llm, monkeypatch)

    async def test() -> None:
        tasks = [asyncio.create_task(collect(llm, f"waits {index}", LONG)) for index in range(5)]
        while steps.count < 3:
            await asyncio.sleep(0.001)
        llm.shutdown()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in found] == [EngineFailed] * 5
        assert not llm.is_running
        with pytest.raises(EngineFailed, match="has stopped"):
            await collect(llm, "late", GREEDY)
        llm.shutdown()  # twice is fine

    run(test())


@pytest.mark.parametrize("error", [EngineFailed("lost"), RuntimeError("a bug")], ids=["lost", "bug"])
def test_a_failure_of_the_engine_reaches_every_waiter(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    steps = Steps(llm, monkeypatch)

    async def test() -> None:
        tasks = [asyncio.create_task(collect(llm, f"waits {index}", LONG)) for index in range(20)]
        while steps.count < 3:
            await asyncio.sleep(0.001)
        steps.error = error
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in found} == {type(error)}
        with pytest.raises(EngineFailed):
            await collect(llm, "late", GREEDY)

    run(test())


def test_steps_that_fail_for_good_end_the_engine_with_every_request_answered(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = llm.loaded.engine._runner

    def broken(seq: int) -> Any:
        raise MemoryError

    async def test() -> None:
        stream = llm.generate("hello", LONG)
        assert not (await anext(stream)).finished
        monkeypatch.setattr(runner, "finish_until", broken)
        waiting = asyncio.create_task(collect(llm, "other", LONG))
        outcomes = await asyncio.gather(_last(stream), waiting, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, list):  # ended for itself, before the engine gave up
                assert outcome[-1].outputs[0].finish_reason == "error"
            else:
                assert isinstance(outcome, EngineFailed)
        assert not llm.loaded.engine.has_requests

    run(test())


async def _last(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


# ---------------------------------------------------------------- kinds of output, the end of a block


def test_deltas_add_up_to_the_whole(llm: AsyncLLM) -> None:
    sampling = replace(GREEDY, temperature=1.0, seed=3, n=2, logprobs=1)

    async def test() -> None:
        whole = (await collect(llm, "in parts", sampling))[-1]
        items = await collect(llm, "in parts", replace(sampling, output_kind=RequestOutputKind.DELTA))
        assert len(items) > 2 and items[-1].finished
        for branch in whole.outputs:
            parts = [part for item in items for part in item.outputs if part.index == branch.index]
            assert "".join(part.text for part in parts) == branch.text
            assert list(itertools.chain.from_iterable(part.token_ids for part in parts)) == branch.token_ids
            assert sum(len(part.logprobs or ()) for part in parts) == len(branch.token_ids)
            assert [part.finish_reason for part in parts].count("length") == 1
            assert max(len(part.token_ids) for part in parts) < len(branch.token_ids)

    run(test())


def test_final_only_gives_one_whole_output(llm: AsyncLLM) -> None:
    async def test() -> None:
        (item,) = await collect(llm, "at once", replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY))
        assert item.finished and len(item.outputs[0].token_ids) == 24
        assert item.outputs[0].text == (await collect(llm, "at once", GREEDY))[-1].outputs[0].text

    run(test())


def test_it_is_shut_down_at_the_end_of_async_with_and_says_what_it_holds(folder: Path) -> None:
    async def test() -> None:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            assert (await collect(llm, "x", GREEDY))[-1].finished
            told = f"AsyncLLM(model={folder.name!r}, device='cpu', dtype='float32', rows=16, blocks=96"
            assert repr(llm) == f"{told})"
        assert repr(llm) == f"{told}, closed)" and not llm.is_running
        with pytest.raises(EngineFailed, match="was shut down"):
            await collect(llm, "x", GREEDY)
        with pytest.raises(InvalidRequest, match="prompt_adapter_request is not supported"):
            llm.generate("x", GREEDY, prompt_adapter_request=object())

    run(test())
