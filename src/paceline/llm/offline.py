"""Many requests through one engine in the caller's thread: fed as it drains, handed out as they finish.

Holds only what is under way, so that the requests may come from a file that does not fit into memory.
"""

from __future__ import annotations

import itertools
import math
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.core.adapter import NO_ADAPTER
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_CLASS, ServiceLevel
from paceline.errors import DeadlineInfeasible, InvalidRequest, PacelineError, QueueFull, UnknownRequest
from paceline.llm.frontend import Frontend
from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.llm.prompts import PreparedRequest
from paceline.llm.tree import FindPattern, now

# Ctrl-C between two steps, never inside one: an engine that is stopped halfway through its books is of no use.
#
# Acts only in the main thread and only where Python's own handler is in place. A second Ctrl-C does not wait.


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], None]]:
    """Inside, an interrupt is noted; the function that is given raises it, and so does the end."""
    is_noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_noted
        if is_noted:
            raise KeyboardInterrupt
        is_noted = True

    def check() -> None:
        nonlocal is_noted
        if is_noted:
            is_noted = False
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    is_installed = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_installed:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


# Steps' worth of prompt tokens that wait at least. One is enough to begin with, and few requests: the others are
# added, which takes the host tens of microseconds each, while the device computes. Where prompts begin alike few of
# their tokens are computed, and a step that has room left wants more.
FIRST_FED, STEPS_FED, MOST_FED = 1, 4, 256
FIRST_REQUESTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request under the name its output will have."""

    name: str
    request: PreparedRequest
    priority: int = 0
    service_class: str = DEFAULT_CLASS
    adapter: int = NO_ADAPTER


def run_requests(
    front: Frontend, submissions: Iterable[Submission], *, max_open: int
) -> Generator[RequestOutput, None, None]:
    """Finished outputs, in the order they finish; at most about `max_open` branches are under way.

    However it is left, nothing stays behind in the engine. Close the iterator when leaving it early.
    """
    engine, collector = front.engine, front.collector
    step = engine.step_overlapped if engine.depth else engine.step
    waiting, fed = iter(submissions), FIRST_FED
    mine: dict[str, int] = {}  # requests under way and their branches; those of a tree are its own
    with interrupts_noted() as check_interrupts:
        try:
            while True:
                refused, waiting = _feed(front, waiting, max_open, fed, mine)
                yield from refused
                if not mine and not refused:
                    collector.take(engine.drain())
                    return
                check_interrupts()
                changed = collector.take(step())
                if fed < STEPS_FED:
                    fed = STEPS_FED
                elif engine.scheduler.tokens_left > 0:
                    fed = min(2 * fed, MOST_FED)
                yield from [
                    output for output in changed if output.finished and mine.pop(output.request_id, 0)
                ]
        except BaseException:
            for name in mine:  # leave nothing behind
                for request_id in collector.ids_of(name):
                    engine.abort(request_id)
            collector.take(engine.drain())
            raise


def stream_request(front: Frontend, submission: Submission) -> Generator[RequestOutput, None, None]:
    """The output of one request after each step that changed it. However it is left, the request ends with it."""
    engine, collector = front.engine, front.collector
    step = engine.step_overlapped if engine.depth else engine.step
    output = _add(front, submission, only_whole=False)
    try:
        while not output.finished:
            with interrupts_noted():
                changed = collector.take(step())
            if any(each is output for each in changed):
                yield output.copied()
    finally:
        for request_id in collector.ids_of(submission.name):
            engine.abort(request_id)
        collector.take(engine.drain())


class TreeInPlace:
    """The backend of a tree: every command is done at once, and waiting is a step."""

    def __init__(self, front: Frontend, name: str, output: RequestOutput, sampling: SamplingParams) -> None:
        self._front, self._name = front, name
        self.output = output
        self.tokenizer, self.sampling = front.tokenizer, sampling
        self.find_pattern: FindPattern | None = None
        self.is_lockstep = not front.engine.depth  # no step is computed ahead

    async def ask(self, what: str, *args: Any, **options: Any) -> Any:
        front = self._front
        try:
            return getattr(front, what)(self._name, *args, **options)
        finally:
            front.collector.take(front.engine.scheduler.take_events())

    def tell(self, what: str, *args: Any, **options: Any) -> None:
        with suppress(UnknownRequest):  # it has ended meanwhile
            now(self.ask(what, *args, **options))

    async def settled(self) -> None:
        """What was told is done."""

    async def changed(self) -> None:
        engine, collector = self._front.engine, self._front.collector
        with interrupts_noted():
            if self.is_lockstep:
                collector.take(engine.drain())
            collector.take(engine.step() if self.is_lockstep else engine.step_overlapped())

    async def close(self) -> None:
        self._front.end_tree(self._name)
        self._front.collector.take(self._front.engine.drain())


def _feed(
    front: Frontend, waiting: Iterator[Submission], max_open: int, steps_fed: int, mine: dict[str, int]
) -> tuple[list[RequestOutput], Iterator[Submission]]:
    """Add requests while there is room; returns those the engine refused, and what still waits."""
    refused: list[RequestOutput] = []
    queue = front.engine.scheduler.state.queue
    config = front.loaded.config.scheduler
    enough = math.inf  # other orders and modes need to see all waiting requests
    if (config.mode, config.scheduling_policy) == ("continuous", "fcfs"):
        enough = steps_fed * config.max_num_batched_tokens
        if steps_fed == FIRST_FED:
            max_open = min(max_open, FIRST_REQUESTS)
    num_open = sum(mine.values())
    while num_open < max_open and queue.num_tokens < enough:
        submission = next(waiting, None)
        if submission is None:
            break
        try:
            _add(front, submission, only_whole=True)
            mine[submission.name] = submission.request.sampling.n
            num_open += submission.request.sampling.n
        except QueueFull as error:
            if mine:  # there is room once something has finished
                return refused, itertools.chain([submission], waiting)
            refused.append(_refused(submission, error))
        except (InvalidRequest, DeadlineInfeasible) as error:
            refused.append(_refused(submission, error))
    return refused, waiting


def _add(front: Frontend, submission: Submission, *, only_whole: bool) -> RequestOutput:
    request = submission.request
    ids = front.engine.add(
        request.token_ids,
        request.sampling,
        service_level=ServiceLevel(submission.service_class, submission.priority),
        adapter=submission.adapter,
        media=request.media,
    )
    arrival_s = front.engine.scheduler.state.now_s
    return front.collector.open(submission.name, request, ids, arrival_s, only_whole=only_whole)


def _refused(submission: Submission, error: PacelineError) -> RequestOutput:
    request = submission.request
    parts = [
        CompletionOutput(index=index, finish_reason="error", error=str(error))
        for index in range(request.sampling.n)
    ]
    return RequestOutput(
        request_id=submission.name,
        prompt=request.text,
        prompt_token_ids=request.token_ids,
        outputs=parts,
        finished=True,
    )
