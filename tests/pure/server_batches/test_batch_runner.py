"""Batches over a scripted engine: every line one result, whatever the engine, the disk and the clock do."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.service_class import BATCH
from paceline.errors import QueueFull
from paceline.process.client import BranchUpdate, EngineState, EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.api.admin_routes import TRAFFIC_ROUTE
from paceline.server.api.batch_routes import MAX_OPEN_BATCHES
from paceline.server.batches.batch_records import (
    FileInUse,
    LineResult,
    TooManyBatches,
    UnknownBatch,
    UnknownFile,
)
from paceline.server.batches.database import Database
from paceline.server.batches.work import MAX_LOSSES
from paceline.server.call import Events
from tests.pure.server_api.api_helpers import INFO, FakeStream, Script, says
from tests.pure.server_batches.batch_helpers import TENANT, LoadedClient, World, jsonl, request, until

LOST = EngineUnavailable("the engine is lost")


def run(
    folder: Path,
    test: Callable[[World], Awaitable[None]],
    script: Script | None = None,
    client: LoadedClient | None = None,
) -> None:
    async def go() -> None:
        async with World(folder, script or says("ok"), client) as world:
            await test(world)
        assert world.api.is_at_rest and world.batches.num_lines_under_way == 0
        assert world.api.service.admission.batch_places == world.api.service.admission.num_waiting == 0
        assert len(asyncio.all_tasks()) == 1, "a task was left"

    asyncio.run(go())


def silent(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
    return []


class HeldClient(LoadedClient):
    """Its requests say something and end when they are told to."""

    is_held = True

    def submit(self, tokens: Sequence[int], *given: Any, **named: Any) -> FakeStream:
        stream = super().submit(tokens, *given, **named)
        if self.is_held:
            self.streams[-1] = stream = HeldStream(stream.steps)
        return stream


class HeldStream(FakeStream):
    def __init__(self, steps: list[list[BranchUpdate] | Exception]) -> None:
        super().__init__(steps)
        self.go, self.end = asyncio.Event(), asyncio.Event()

    async def take(self) -> list[BranchUpdate]:
        await (self.end if len(self.steps) == 1 else self.go).wait()
        return await super().take()


class Told:
    """A script that goes by the number of the request, which its seed tells."""

    def __init__(self, by_seed: dict[int, list[Script]]) -> None:
        self._by_seed = by_seed
        self.asked: list[int] = []
        self.beside: list[int] = []  # how many others were under way
        self.world: World | None = None

    def __call__(
        self, prompt: Sequence[int], sampling: SamplingParams
    ) -> list[list[BranchUpdate] | Exception]:
        seed = sampling.seed or 0
        self.asked.append(seed)
        if self.world is not None:
            self.beside.append(self.world.batches.num_lines_under_way - 1)
        scripts = self._by_seed.get(seed, [])
        return (scripts.pop(0) if scripts else says("ok"))(prompt, sampling)


def fails(error: Exception) -> Script:
    return lambda prompt, sampling: [error]


def test_every_line_gets_its_result_and_the_engine_knows_them_as_the_lowest_class(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        keyed = Caller(
            requests_per_minute=1, tokens_per_minute=1, max_concurrency=1, lowest_priority_number=99
        )
        world.callers[TENANT] = keyed
        lines = [request(f"r{i}") for i in range(99)]
        batch = await world.wait(await world.begin(*lines, request("late", priority=500)))
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 100, 100, 0)
        found = await world.results(batch.output_file_id)
        assert list(found) == [*(f"r{i}" for i in range(99)), "late"]
        assert (batch.prompt_tokens, batch.output_tokens) == (
            sum_of(found, "prompt"),
            sum_of(found, "completion"),
        )
        given = [(told["service_class"], told["priority"]) for told in world.client.submitted]
        assert sorted(given) == [(BATCH, 0)] * 99 + [(BATCH, 500)]
        assert {submitted["timeout_s"] for submitted in world.client.submitted} == {None}
        records = world.api.listener.records
        assert {(record.service_class, record.batch_id) for record in records} == {("batch", batch.id)}
        assert {(status, call.caller.batch_id) for call, status, _ in world.log.calls} == {(200, batch.id)}
        assert len(world.log.calls) == 100

    def sum_of(found: dict[str, Any], kind: str) -> int:
        return sum(line["response"]["body"]["usage"][f"{kind}_tokens"] for line in found.values())

    run(tmp_path, test)


def test_a_refusal_for_lack_of_room_is_tried_again_and_a_mistake_is_not(tmp_path: Path) -> None:
    script = Told({1: [fails(QueueFull("full"))] * 3})

    async def test(world: World) -> None:
        lines = [request("again", seed=1), request("wrong", seed=2, temperature=9)]
        batch = await world.wait(await world.begin(*lines))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
        assert script.asked == [1, 1, 1, 1], "the mistake never got to the engine"
        (line,) = (await world.results(batch.error_file_id)).values()
        assert line["response"]["status_code"] == 400
        assert [is_again for _, status, is_again in world.log.calls if status == 429] == [True] * 3

    run(tmp_path, test, script)


def test_a_line_that_ends_engines_is_dropped_and_others_complete(tmp_path: Path) -> None:
    script = Told({7: [fails(LOST)] * MAX_LOSSES, 3: [fails(LOST)]})

    async def test(world: World) -> None:
        script.world = world
        batch = await world.wait(await world.begin(*(request(f"r{i}", seed=i) for i in range(20))))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 19, 1)
        errors = await world.results(batch.error_file_id)
        assert list(errors) == ["r7"] and errors["r7"]["response"]["status_code"] == 500
        assert script.asked.count(7) == MAX_LOSSES and script.asked.count(3) == 2
        first: set[int] = set()
        for seed, beside in zip(script.asked, script.beside, strict=True):
            assert seed not in first or beside == 0, "what may have ended an engine runs alone"
            first.add(seed)

    run(tmp_path, test, script)


def test_a_broken_answer_is_an_error_line(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        batch = await world.wait(await world.begin(request("a")))
        (line,) = (await world.results(batch.error_file_id)).values()
        assert line["response"]["status_code"] == 500 and "secret" not in str(line)
        assert len(world.log.errors) == 1

    run(tmp_path, test, fails(RuntimeError("secret")))


def test_while_others_wait_lines_step_back_and_one_stays(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        admission, runner = world.api.service.admission, world.batches
        batch_id = await world.begin(*(request(f"r{i}") for i in range(200)))
        most = INFO.max_num_seqs + 1
        await until(lambda: len(world.client.streams) == most)
        begun = 3
        for stream in world.client.streams[:begun]:
            begin(stream)
        await until(lambda: world.api.listener.events.count("first_token") == begun)
        permit = admission.reserve(Caller(), 1, 10)  # a request that waits for the first token
        world.client.waiting = 1
        await until(lambda: runner.pace.limit == 1 and runner.num_lines_under_way == begun)
        await asyncio.sleep(0.02)
        assert len(world.client.streams) == most, "no line goes while a request waits"
        assert [stream.is_closed for stream in world.client.streams] == [False] * begun + [True] * (
            most - begun
        ), "what the engine has begun goes on, and what only waits makes way"
        for stream in world.client.streams[:begun]:
            finish(stream)
        await until(lambda: len(world.client.streams) == most + 1)  # one is always there, to age in the queue
        await asyncio.sleep(0.02)
        assert runner.num_lines_under_way == 1 and len(world.client.streams) == most + 1
        permit.release()
        world.client.waiting = 0
        await until(lambda: len(world.client.streams) > most + 4)
        await world.batch_api.cancel(TENANT, batch_id)
        await world.wait(batch_id, "cancelled")

    def begin(stream: FakeStream) -> None:
        assert isinstance(stream, HeldStream)
        stream.go.set()

    def finish(stream: FakeStream) -> None:
        assert isinstance(stream, HeldStream)
        stream.end.set()

    run(tmp_path, test, client=HeldClient(says("o", "k")))


def test_nothing_is_run_while_the_engine_is_away(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.client.state = EngineState.LOST
        batch_id = await world.begin(request("a"))
        await world.wait(batch_id, "in_progress")
        await asyncio.sleep(0.02)
        assert world.client.submitted == []
        world.client.state = EngineState.READY
        assert (await world.wait(batch_id)).status == "completed"

    run(tmp_path, test)


def test_a_key_that_is_revoked_stops_its_batch_until_it_is_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        caller = world.callers.pop(TENANT)
        batch_id = await world.begin(request("a"))
        await world.wait(batch_id, "in_progress")
        await asyncio.sleep(0.02)
        assert world.client.submitted == []
        others = await world.wait(await world.begin(*(request(f"r{i}") for i in range(20)), tenant="other"))
        assert others.status == "completed", "an accepted batch does not wait for a rejected one"
        world.callers[TENANT] = replace(caller, weight=3.0)
        assert (await world.wait(batch_id)).status == "completed"

    run(tmp_path, test)


def test_a_key_that_is_revoked_in_the_middle_leaves_its_turns_to_others(tmp_path: Path) -> None:
    client = HeldClient(fails(QueueFull("full")))

    async def test(world: World) -> None:
        batch_id = await world.begin(*(request(f"r{i}") for i in range(50)))
        await until(lambda: len(client.streams) >= 4)
        caller = world.callers.pop(TENANT)
        # A line that is on its way to the engine is not held.
        client.script, client.is_held = (
            says("ok"),
            False,
        )
        for stream in client.streams:
            assert isinstance(stream, HeldStream)
            stream.end.set()
        await until(lambda: world.batches.num_lines_under_way == 0)
        others = await world.wait(await world.begin(*(request(f"r{i}") for i in range(20)), tenant="other"))
        assert others.status == "completed"
        world.callers[TENANT] = caller
        assert (await world.wait(batch_id)).completed == 50

    run(tmp_path, test, client=client)


def test_when_its_time_is_over_a_batch_ends_with_what_it_has(tmp_path: Path) -> None:
    script = Told({1: [silent]})

    async def test(world: World) -> None:
        batch_id = await world.begin(request("done", seed=0), request("never", seed=1))
        await until(lambda: done(world, batch_id))
        world.now_s += 24 * 3600 - 1
        await asyncio.sleep(0.03)
        assert (await world.state(batch_id)).status == "in_progress"
        world.now_s += 1
        batch = await world.wait(batch_id)
        assert batch.status == "expired" and batch.expired_at == batch.expires_at
        assert list(await world.results(batch.output_file_id)) == ["done"]
        errors = await world.results(batch.error_file_id)
        assert errors["never"]["error"]["code"] == "batch_expired"
        assert (batch.completed, batch.failed) == (1, 1)

    async def done(world: World, batch_id: str) -> bool:
        return (await world.state(batch_id)).completed == 1

    run(tmp_path, test, script)


def test_a_server_that_comes_after_goes_on(tmp_path: Path) -> None:
    first = Told({number: [silent] for number in range(5, 10)})
    second = Told({})

    async def go() -> None:
        async with World(tmp_path, first) as world:
            batch_id = await world.begin(*(request(f"r{i}", seed=i) for i in range(10)))
            waiting = await world.begin(request("b", seed=0), tenant="other")
            await until(lambda: set(first.asked) >= {0, 1, 2, 3, 4, 9} and done(world, batch_id))
        assert world.api.is_at_rest
        async with World(tmp_path, second) as world:
            batch = await world.wait(batch_id)
            assert batch.status == "completed" and sorted(set(second.asked) - {0}) == [5, 6, 7, 8, 9]
            assert list(await world.results(batch.output_file_id)) == [f"r{i}" for i in range(10)]
            assert (await world.wait(waiting)).status == "completed"

    async def done(world: World, batch_id: str) -> bool:
        return (await world.state(batch_id)).completed == 5

    asyncio.run(go())


@pytest.mark.parametrize("state", ["validating", "finalizing", "cancelling"])
def test_a_server_that_was_killed_in_any_state_is_gone_on_from(tmp_path: Path, state: str) -> None:
    async def go() -> None:
        async with World(tmp_path, silent) as world:
            batch_id = await world.begin(request("a"), request("b"))
            await until(lambda: len(world.client.streams) == 2)
        change(f"UPDATE batches SET status = '{state}'")
        if state == "validating":
            change("DELETE FROM lines WHERE number = 2")  # half of it was read
        (tmp_path / "files" / ("file-" + "0" * 32)).write_bytes(b"an output that is not known")
        (tmp_path / "incoming" / "file-half").write_bytes(b"half")
        async with World(tmp_path, says("ok")) as world:
            batch = await world.wait(batch_id)
            assert batch.status == ("cancelled" if state == "cancelling" else "completed")
            lines = await world.results(batch.output_file_id) | await world.results(batch.error_file_id)
            assert set(lines) == {"a", "b"}, "one line for every request"
            names = {path.name for path in (tmp_path / "files").iterdir()}
            known = await world.store.ask(lambda db: db.file_ids())
            assert names == known and list((tmp_path / "incoming").iterdir()) == []

    def change(statement: str) -> None:
        database = sqlite3.connect(tmp_path / "batches.sqlite3")
        with database:
            database.execute(statement)
        database.close()

    asyncio.run(go())


def test_conversations_of_the_live_page_are_logged_beside_batches(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer = await world.api.open(
            TRAFFIC_ROUTE, {"message": "hi", "count": 2}, caller=Caller(is_admin=True)
        )
        assert isinstance(answer, Events)
        async for _ in answer.frames:
            pass
        assert [status for _, status, _ in world.log.calls] == [200, 200]

    run(tmp_path, test)


def test_a_full_disk_stops_a_batch_and_does_not_end_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        def limit_pages(most: int) -> Callable[[Database], object]:
            return lambda db: db.connection.execute(f"PRAGMA max_page_count = {most}")

        def num_pages(db: Database) -> int:
            return int(db.connection.execute("PRAGMA page_count").fetchone()[0])

        pages = await world.store.ask(num_pages)
        await world.store.ask(limit_pages(pages + 40))  # room for the requests, not for their answers
        batch_id = await world.begin(*(request(f"r{i}", max_tokens=10) for i in range(100)))
        await until(lambda: len(world.client.submitted) >= 10)
        await asyncio.sleep(0.05)
        stuck = await world.state(batch_id)
        assert stuck.status in ("validating", "in_progress", "finalizing") and stuck.completed < 100
        await world.store.ask(limit_pages(2**30))
        batch = await world.wait(batch_id)
        assert (batch.status, batch.completed) == ("completed", 100)
        assert len(await world.results(batch.output_file_id)) == 100
        assert len(world.client.submitted) == 100, "what was computed is kept until it can be written"

    run(tmp_path, test, says("x" * 2000, "y" * 2000))


def test_files_and_batches_are_their_tenants_own(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        batch_id = await world.begin(request("a"))
        batch = await world.wait(batch_id)
        assert await world.store.ask(lambda db: db.file("other", batch.input_file_id)) is None
        with pytest.raises(UnknownBatch):
            await world.batch_api.batch("other", batch_id)
        with pytest.raises(UnknownFile):
            await world.batch_api.content("other", batch.output_file_id or "")
        with pytest.raises(UnknownFile):
            await world.batch_api.remove_file("other", batch.input_file_id)
        with pytest.raises(UnknownBatch):
            await world.batch_api.batches("other", after=batch_id, limit=1)
        assert await world.batch_api.files("other", after=None, limit=9, newest_first=True, purpose=None) == (
            [],
            False,
        )

    run(tmp_path, test)


def test_the_number_of_open_batches_is_bounded_and_files_in_use_stay(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.client.state = EngineState.LOST
        made = [await world.begin(request("a")) for _ in range(MAX_OPEN_BATCHES)]
        with pytest.raises(TooManyBatches):
            await world.begin(request("a"))
        await world.begin(request("a"), tenant="other")
        with pytest.raises(FileInUse):
            await world.batch_api.remove_file(TENANT, (await world.state(made[0])).input_file_id)
        for batch_id in made:
            await world.batch_api.cancel(TENANT, batch_id)
        for batch_id in made:
            assert (await world.wait(batch_id)).status == "cancelled"
        await world.begin(request("a"))

    run(tmp_path, test)


def test_files_whose_time_is_over_go(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        file_id = await world.upload(jsonl(request("a")))
        stored = await world.batch_api.file(TENANT, file_id)
        await world.store.remove(stored)
        await world.store.ask(lambda db: db.add_file(replace(stored, expires_at=world.store.now() + 10)))
        world.store.folder.path_of(file_id).write_bytes(b"x")
        await world.store.expire_files()
        assert world.store.folder.path_of(file_id).exists()
        world.now_s += 10
        await until(lambda: not world.store.folder.path_of(file_id).exists())
        with pytest.raises(UnknownFile):
            await world.batch_api.file(TENANT, file_id)

    run(tmp_path, test)


def test_batches_of_long_ago_are_forgotten_and_open_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.batches.database.MAX_KEPT_BATCHES", 3)

    async def test(world: World) -> None:
        world.client.state = EngineState.LOST
        first = await world.begin(request("stays open"))
        over = [await cancelled(world) for _ in range(5)]
        last = await world.begin(request("b"))
        found, _ = await world.batch_api.batches(TENANT, after=None, limit=20)
        assert [batch.id for batch in found] == [last, over[4], over[3], first]

    async def cancelled(world: World) -> str:
        batch_id = await world.begin(request("a"))
        await world.batch_api.cancel(TENANT, batch_id)
        await world.wait(batch_id)
        return batch_id

    run(tmp_path, test)


def test_a_line_has_the_first_result_that_was_recorded(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.client.state = EngineState.LOST
        batch_id = await world.begin(request("a"))
        await world.wait(batch_id, "in_progress")

        def record(db: Database) -> None:
            for data in (b"first\n", b"second\n"):
                db.record([LineResult(batch_id=batch_id, number=1, is_ok=True, data=data, output_tokens=1)])
            db.record([LineResult(batch_id=batch_id, number=2, is_ok=True, data=b"unknown\n")])

        await world.store.ask(record)
        batch = await world.state(batch_id)
        assert (batch.completed, batch.output_tokens) == (1, 1)
        found = await world.store.ask(lambda db: db.results(batch_id, after=0, limit=9))
        assert found == [(1, True, b"first\n")]
        await world.batch_api.cancel(TENANT, batch_id)
        await world.wait(batch_id)

    run(tmp_path, test)
