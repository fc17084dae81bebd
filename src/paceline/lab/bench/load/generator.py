"""Sends requests when they are due, whatever the server does, and notes what each of them saw.

Open loop: the times are given beforehand, and a request that has to wait for a place, or for this process, has been due
all the same: its clock runs. Closed loop: each user sends again when its last answer is whole. Owns tasks,
timeouts and the end of a run; knows neither measures nor files.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.lab.bench.load.pool import ConnectFailed, ConnectionEnded, Pool
from paceline.lab.bench.load.prompt_source import BodyForm, Source
from paceline.lab.bench.load.reader import EventKind, ObservedAnswer, ResponseReader

# Requests are made before they are due, in idle time, up to these limits.
AHEAD_REQUESTS, AHEAD_BYTES = 4096, 16 * 2**20
DEFAULT_RETRY_S = 1.0  # of a refusal that names no time
AFTER_FAILURE_S = 0.1  # a user of a closed loop whose request failed rests this long, or would only hammer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How much is sent, and when. `due_s` makes it an open loop; without it `max_concurrency` users ask in turn."""

    due_s: Sequence[float] | None = None
    max_concurrency: int | None = None
    num_requests: int | None = None  # of a closed loop
    duration_s: float | None = None  # of a closed loop: no user sends again after it
    timeout_s: float = 600.0
    retries: int = 0  # of a request that is refused
    first_index: int = 0  # the number of the first request
    keys: Mapping[str, str] = field(default_factory=dict)  # by tenant; "" for all others

    @property
    def num_expected(self) -> int | None:
        return len(self.due_s) if self.due_s is not None else self.num_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """What came of a plan."""

    seen: Sequence[ObservedAnswer]
    started_s: float
    ended_s: float
    is_interrupted: bool = False

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    payload: bytes
    seen: ObservedAnswer


class LoadGenerator:
    """Runs one plan against one server."""

    def __init__(
        self,
        pool: Pool,
        source: Source,
        form: BodyForm,
        plan: LoadPlan,
        on_end: Callable[[ObservedAnswer], object] = lambda seen: None,
    ) -> None:
        self._pool = pool
        self._source = source
        self._form = form
        self._plan = plan
        self._on_end = on_end
        self._next_index = plan.first_index
        self._ahead: deque[_Prepared] = deque()
        self._ahead_bytes = 0
        self._seen: list[ObservedAnswer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_stopped = False
        self._failure: BaseException | None = None
        self._places = (
            None if plan.max_concurrency is None else asyncio.Semaphore(max(1, plan.max_concurrency))
        )

    async def warm_up(self, count: int) -> list[ObservedAnswer]:
        """Requests that are not counted, with separate prompts: one alone, then the others at once."""
        prepared = [self._prepare(-1 - number) for number in range(count)]
        for group in (prepared[:1], prepared[1:]):
            now_s = time.perf_counter()
            for each in group:
                each.seen.due_s = now_s
            await asyncio.gather(*(self._follow(each) for each in group))
        return [each.seen for each in prepared]

    async def run(self) -> LoadRun:
        while self._prepare_ahead():
            pass
        started_s = time.perf_counter()
        sending = self._send_when_due if self._plan.due_s is not None else self._send_in_turn
        self._start(sending(started_s))
        await self._is_idle.wait()
        if self._failure is not None:
            raise self._failure
        ends_s = (seen.ended_s for seen in self._seen if not math.isnan(seen.ended_s))
        ended_s = max(ends_s, default=started_s)
        return LoadRun(
            seen=self._seen,
            started_s=started_s,
            ended_s=time.perf_counter() if self._is_stopped else ended_s,
            is_interrupted=self._is_stopped,
        )

    def stop(self) -> None:
        """Send nothing more, and leave what is under way."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def _send_when_due(self, started_s: float) -> None:
        assert self._plan.due_s is not None
        for offset_s in self._plan.due_s:
            prepared = self._take()
            prepared.seen.due_s = due_s = started_s + offset_s
            while (left_s := due_s - time.perf_counter()) > 0:
                # A prompt takes a while to make, and none is made where it would make another one late.
                is_busy = left_s > 0.005 and self._prepare_ahead()
                await asyncio.sleep(0 if is_busy else left_s)
            self._seen.append(prepared.seen)
            self._start(self._follow(prepared))

    async def _send_in_turn(self, started_s: float) -> None:
        plan = self._plan
        assert plan.max_concurrency is not None
        left = plan.num_requests
        until_s = None if plan.duration_s is None else started_s + plan.duration_s

        async def ask_in_turn() -> None:
            nonlocal left
            while left is None or left > 0:
                if until_s is not None and time.perf_counter() >= until_s:
                    return
                left = None if left is None else left - 1
                prepared = self._take()
                self._seen.append(prepared.seen)
                prepared.seen.due_s = time.perf_counter()
                await self._follow(prepared)
                if not prepared.seen.is_finished:
                    await asyncio.sleep(AFTER_FAILURE_S)

        users = plan.max_concurrency if left is None else min(plan.max_concurrency, left)
        for _ in range(users):
            self._start(ask_in_turn())

    async def _follow(self, prepared: _Prepared) -> None:
        """One request to its end, whatever that is."""
        seen = prepared.seen
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                if self._places is None:
                    await self._ask(prepared)
                else:
                    async with self._places:
                        await self._ask(prepared)
        except TimeoutError:
            _end(seen, EventKind.TIMEOUT, f"no whole answer within {self._plan.timeout_s:g} s")
        self._on_end(seen)

    async def _ask(self, prepared: _Prepared) -> None:
        seen = prepared.seen
        while True:
            seen.sent_s = time.perf_counter()
            seen.piece_s.clear()
            seen.kind = EventKind.UNFINISHED
            try:
                await self._pool.post(prepared.payload, ResponseReader(seen))
            except ConnectFailed as error:
                _end(seen, EventKind.NO_CONNECTION, str(error))
            except ConnectionEnded as error:
                _end(seen, EventKind.BROKEN, str(error))
            if seen.kind is not EventKind.REFUSED or seen.retries >= self._plan.retries:
                return
            seen.retries += 1
            await asyncio.sleep(DEFAULT_RETRY_S if seen.retry_after_s is None else seen.retry_after_s)

    def _start(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        self._is_idle.clear()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._is_idle.set()
        if not task.cancelled() and task.exception() is not None and not self._is_stopped:
            self.stop()  # a mistake of ours must not look like a slow server
            self._failure = task.exception()

    def _take(self) -> _Prepared:
        if not self._ahead:
            self._prepare_ahead()
        prepared = self._ahead.popleft()
        self._ahead_bytes -= len(prepared.payload)
        return prepared

    def _prepare_ahead(self) -> bool:
        """Make one more request; whether there was a need for it."""
        made = self._next_index - self._plan.first_index
        expected = self._plan.num_expected
        if expected is not None and made >= expected:
            return False
        if len(self._ahead) >= AHEAD_REQUESTS or self._ahead_bytes >= AHEAD_BYTES:
            return False
        prepared = self._prepare(self._next_index)
        self._next_index += 1
        self._ahead.append(prepared)
        self._ahead_bytes += len(prepared.payload)
        return True

    def _prepare(self, index: int) -> _Prepared:
        request = self._source.make(index)
        body = self._form.encode(request)
        keys = self._plan.keys
        key = keys.get(request.tenant, keys.get("", ""))
        payload = self._pool.target.head(body, key, f"bench-{index}") + body
        wanted = self._form.output_len or request.num_output
        seen = ObservedAnswer(index=index, tenant=request.tenant, due_s=0.0, wanted_tokens=wanted)
        return _Prepared(payload=payload, seen=seen)


def _end(seen: ObservedAnswer, kind: EventKind, message: str) -> None:
    seen.kind, seen.message, seen.ended_s = kind, message, time.perf_counter()
