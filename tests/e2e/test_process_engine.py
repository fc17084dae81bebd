"""An engine in its own process: requests through the client, and faults that only some requests feel."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from paceline import LLM
from paceline.core.events import LogprobEvent
from paceline.core.request import RequestId
from paceline.errors import InvalidRequest, NeverFits
from paceline.process import frames
from paceline.process.channel import make_header
from paceline.process.client import EngineState, EngineUnavailable
from paceline.process.supervisor import EngineProcess
from tests.e2e.process_helpers import (
    GIVEN,
    GREEDY,
    LONG,
    PROMPT,
    TIMEOUT_S,
    ask,
    config,
    is_clean,
    read,
    running,
    until,
)
from tests.fake_engine import finished
from tests.model_folder import CONTEXT, VOCAB_SIZE, write_model
from tests.pure.process.test_process_frames import LOGPROBS

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fault") / "fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TEST_FAULT", str(path))
        yield path


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


@pytest.fixture
def run(loop: asyncio.Runner) -> Run:
    return lambda test: loop.run(asyncio.wait_for(test, TIMEOUT_S))


@pytest.fixture(scope="module")
def shared(loop: asyncio.Runner, folder: Path, fault: Path) -> Iterator[EngineProcess]:
    """One process for all tests of this file: each leaves it as it found it."""
    stack = AsyncExitStack()
    process = config(stuck_after_s=2.5, restart_after_s=50.0, max_restarts=0)
    engine = loop.run(stack.enter_async_context(running(folder, process, fault=fault)))
    yield engine
    loop.run(stack.aclose())


@pytest.fixture
def engine(shared: EngineProcess, run: Run) -> Iterator[EngineProcess]:
    pid = shared.pid
    yield shared
    run(is_clean(shared))
    assert shared.pid == pid and shared.num_restarts == 0


def test_tokens_are_those_of_the_same_engine_in_one_process(
    engine: EngineProcess, run: Run, folder: Path
) -> None:
    prompts = [[5, 6, 7], [9] * 20, [30, 31, 32, 33], [50, 51]]
    sampling = replace(GREEDY, temperature=1.0, seed=3)
    expected = [
        output.outputs[0].token_ids
        for output in LLM(str(folder), load_format="dummy", **GIVEN).generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
    ]

    async def test() -> None:
        assert await asyncio.gather(*[ask(engine, prompt, sampling) for prompt in prompts]) == expected

    run(test())


def test_branches_come_with_their_own_updates_and_logprobs(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        sampling = replace(GREEDY, n=3, seed=1, temperature=1.0, logprobs=2, prompt_logprobs=1)
        branches = await read(engine.client.submit(PROMPT, sampling, tenant="a"), 3)
        first = [entry for entry in branches[0].logprobs if entry.position < len(PROMPT)]
        assert {entry.position for entry in first} == set(range(1, len(PROMPT)))
        for branch in branches:
            own = [entry for entry in branch.logprobs if entry.position >= len(PROMPT)]
            assert [entry.token for entry in own] == branch.tokens
            assert all(len(entry.top_tokens) >= 2 for entry in own)
            assert branch.ending is not None and branch.ending.num_output == 24 == len(branch.tokens)
        assert len({tuple(branch.tokens) for branch in branches}) == 3

    run(test())


def test_an_ending_says_how_the_request_went(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        prompt = list(range(10, 50))
        await ask(engine, prompt)
        (branch,) = await read(engine.client.submit(prompt, GREEDY, tenant="test"))
        (other,) = await read(engine.client.submit(prompt, GREEDY, tenant="other"))
        for ending, num_cached in ((branch.ending, 32), (other.ending, 0)):  # tenants share nothing
            assert ending is not None
            assert (ending.reason.value, ending.detail, ending.num_prompt) == ("length", "", 40)
            assert (ending.num_output, ending.num_cached, ending.preemptions) == (24, num_cached, 0)
            assert 0 <= ending.queue_s < 5 and abs(ending.time_s - time.monotonic()) < 5

    run(test())


def test_what_is_refused_is_refused_alone(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        submit = engine.client.submit
        neighbour = submit(PROMPT, LONG, tenant="a")
        wrong = [
            (submit(PROMPT, replace(GREEDY, max_tokens=CONTEXT), tenant="a"), NeverFits, "max_tokens"),
            (submit([VOCAB_SIZE], GREEDY, tenant="a"), InvalidRequest, "prompt"),
            (submit([-1], GREEDY, tenant="a"), InvalidRequest, "prompt"),
            (submit([], GREEDY, tenant="a"), InvalidRequest, "prompt"),
            (submit(PROMPT, GREEDY, tenant="a", timeout_s=float("nan")), InvalidRequest, "timeout"),
            (
                submit(PROMPT, replace(GREEDY, stop_token_ids=(10**6,)), tenant="a"),
                InvalidRequest,
                "stop_token_ids",
            ),
            (submit(PROMPT, replace(GREEDY, logprobs=-1, n=4), tenant="a"), InvalidRequest, "logprobs"),
        ]
        for stream, kind, param in wrong:
            with pytest.raises(kind) as caught:
                await stream.take()
            assert caught.value.param == param
            stream.close()
        assert len((await read(neighbour))[0].tokens) == 200

    run(test())


def test_a_prompt_that_is_larger_than_a_frame_never_leaves(engine: EngineProcess) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        engine.client.submit([1] * (1 << 20), GREEDY, tenant="a")


def test_closing_a_stream_frees_what_it_held(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        streams = [engine.client.submit(PROMPT, replace(LONG, n=2), tenant="a") for _ in range(12)]
        await streams[0].take()
        await until(lambda: engine.client.stats.blocks_used > 0)
        for stream in streams:  # running and waiting ones
            stream.close()
            stream.close()
        await until(lambda: engine.client.stats.blocks_used == 0)
        assert engine.client.num_open == 0

    run(test())


def test_a_reader_may_be_cancelled_and_come_back(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        stream = engine.client.submit(PROMPT, GREEDY, tenant="a")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.take(), 0)
        assert len((await read(stream))[0].tokens) == 24

    run(test())


def test_a_stop_found_outside_ends_a_branch_there(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        stream = engine.client.submit(PROMPT, replace(LONG, n=2), tenant="a")
        tokens: list[int] = []
        while len(tokens) < 5:
            for update in await stream.take():
                tokens += update.tokens if update.branch == 1 else []
        stream.finish_at(1, 5)
        branches = await read(stream, 2)
        endings = [branch.ending for branch in branches]
        assert endings[0] is not None and (endings[0].reason.value, endings[0].num_output) == ("length", 200)
        assert endings[1] is not None and (endings[1].reason.value, endings[1].num_output) == ("stop", 5)
        stream.finish_at(0, 3)  # too late: nothing happens

    run(test())


def test_a_deadline_ends_a_request(engine: EngineProcess, run: Run, fault: Path) -> None:
    async def test() -> None:
        fault.write_text("slow 0.05")
        (branch,) = await read(engine.client.submit(PROMPT, LONG, tenant="a", timeout_s=0.3))
        fault.write_text("")
        assert branch.ending is not None
        assert (branch.ending.reason.value, branch.ending.detail) == ("abort", "deadline")
        assert 0 < len(branch.tokens) < 50

    run(test())


def test_a_slow_reader_finds_everything_in_one_piece(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        stream = engine.client.submit(PROMPT, LONG, tenant="a")
        await until(lambda: engine.client.num_open == 0)
        (update,) = await stream.take()
        assert len(update.tokens) == 200 and update.ending is not None

    run(test())


def test_e1_a_step_that_fails_once_is_noticed_by_no_client(
    engine: EngineProcess, run: Run, fault: Path
) -> None:
    async def test() -> None:
        expected = await ask(engine)
        failed = engine.client.stats.counters.failed_steps
        stream = engine.client.submit(PROMPT, GREEDY, tenant="a")
        fault.write_text("raise 1")
        assert (await read(stream))[0].tokens == expected
        engine.client.ping()
        await until(lambda: engine.client.stats.counters.failed_steps == failed + 1)

    run(test())


def test_e8_a_stopped_engine_is_noticed_and_may_come_back(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        assert engine.pid is not None
        stream = engine.client.submit(PROMPT, LONG, tenant="a")
        await stream.take()
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            await until(lambda: engine.client.state is EngineState.STUCK)
            with pytest.raises(EngineUnavailable):
                await read(stream)
            with pytest.raises(EngineUnavailable, match="does not answer"):
                engine.client.submit(PROMPT, GREEDY, tenant="a")
            assert engine.client.heartbeat_age_s > 2.5
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.client.state is EngineState.READY)

    run(test())


def test_e10_frames_that_make_no_sense_are_counted_by_the_engine(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        client = engine.client
        await ask(engine)  # so that number 1 is used, whichever test comes first
        before = client.stats.rejected_frames
        assert engine._life is not None
        link = engine._life.link
        assert link._transport is not None
        link.send(b"\xff no msgpack")
        link.send(frames.encode(frames.Update(1.0)))  # of the other direction
        link.send(b"")
        link._transport.write(make_header(bytes(5 << 20), link._incarnation) + bytes(5 << 20))
        link._transport.write(make_header(b"x", link._incarnation + 1) + b"x")
        link._transport.write(make_header(b"x", link._incarnation, client=3) + b"x")
        for payload in (
            frames.Abort((1, 10**9)),  # long gone, and not there yet
            frames.FinishAt(10**9, 5),
            frames.Add(1, b"\1\0\0\0", frames.Sampling(max_tokens=3), "a", 0, 0.0, None),  # used before
            frames.Add(10**9, b"\1\0\0", frames.Sampling(max_tokens=3), "a", 0, 0.0, None),
        ):
            link.send(frames.encode(payload))
        client.ping()
        await until(lambda: client.stats.rejected_frames == before + 6)
        assert client._numbers.next < 10**9

    run(test())


def test_e10_frames_that_make_no_sense_are_counted_by_the_client(engine: EngineProcess, run: Run) -> None:
    async def test() -> None:
        client = engine.client
        stream = client.submit(PROMPT, LONG, tenant="a")
        assert engine._life is not None
        link = engine._life.link
        before, unknown = client.rejects.total, client.rejects.unknown_branch
        ending = finished(10**9)
        odd = frames.Update(
            1.0,
            (10**9).to_bytes(8, "little"),
            bytes(4),
            [LogprobEvent(request=RequestId(10**9), logprobs=LOGPROBS)],
            [ending, ending],
            [frames.Rejected(10**9, "?", "?", None)],
        )
        payloads = [
            b"\xff",
            frames.encode(frames.Ping()),
            frames.encode(frames.Update(1.0, bytes(16), bytes(4))),
            frames.encode(odd),
        ]
        # Between two reads of the loop nothing of the engine's own is cut in half here: data comes in whole frames.
        await until(lambda: not link._reader._buffer)
        for payload in payloads:
            link.data_received(make_header(payload, link._incarnation) + payload)
        stale = frames.encode(frames.Update(1.0, stream.first.to_bytes(8, "little"), bytes(4)))
        link.data_received(make_header(stale, link._incarnation - 1) + stale)
        assert client.rejects.total == before + 4
        assert client.rejects.unknown_branch == unknown + 5
        assert len((await read(stream))[0].tokens) == 200

    run(test())


def test_an_engine_does_not_wait_for_a_process_that_does_not_read(folder: Path) -> None:
    async def test() -> None:
        process = config(stuck_after_s=40.0)
        async with running(folder, process, max_num_seqs=1, check_every=0) as engine:
            expected = await ask(engine, sampling=LONG)
            assert engine._life is not None and engine._life.link._transport is not None
            engine._life.link._transport.pause_reading()
            # One at a time: their updates are a thousand frames, several times as many as a socket holds.
            streams = [engine.client.submit(PROMPT, LONG, tenant="a") for _ in range(5)]
            await at_rest(engine)
            resumed_s = time.monotonic()
            engine._life.link._transport.resume_reading()
            answers = [(await read(stream))[0] for stream in streams]
            assert all(answer.tokens == expected for answer in answers)
            endings = [answer.ending for answer in answers if answer.ending is not None]
            assert max(ending.time_s for ending in endings) < resumed_s
            await is_clean(engine)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def at_rest(engine: EngineProcess) -> None:
    """Until the engine's process has used next to no processor time for a while."""
    used = [0] * 5
    while used[-1] - used[0] > 2 or not used[0]:
        await asyncio.sleep(0.2)
        times = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        used = [*used[1:], int(times[11]) + int(times[12])]  # hundredths of a second
