"""One line of a batch as a request: handled by the route it names, as if it had come over HTTP.

The same checks, the same generation, the same errors; only the limits by the minute and the number of requests at
once of its key do not count, and its class is `batch`. Knows neither files nor the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from paceline.core.service_class import BATCH
from paceline.server.access.caller import Caller
from paceline.server.batches.batch_records import CANCELLED, EXPIRED, Batch, BatchLine, LineResult
from paceline.server.call import Answer, Call, Events, Handler
from paceline.server.errors import Problem, UnsupportedParameter, openai_body, problem_of
from paceline.server.generate.request_record import Observer, RequestRecord
from paceline.server.http.request_headers import new_id

# Lines under way, and which of them the engine has begun to answer: those that only wait can be taken back.
#
# Listens to generations beside the earlier observer. A line that is taken back has lost nothing but its place in the
# queue, and the next line behind it follows.


class Withdrawn(Exception):
    """The line was withdrawn because another request waits; it has to be run again."""


class _Attempt:
    __slots__ = ("has_begun", "is_withdrawn", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.has_begun = False
        self.is_withdrawn = False


class Attempts:
    """An observer of generations that knows lines by the ids of their requests."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self._under_way: dict[str, _Attempt] = {}
        # Every update passes these checks, without a pause.
        self.started = inner.started
        self.tokens = inner.tokens
        self.finished = inner.finished
        self.call_ended = inner.call_ended
        self.call_failed = inner.call_failed

    def first_token(self, record: RequestRecord) -> None:
        if record.batch_id and record.id in self._under_way:
            self._under_way[record.id].has_begun = True
        self._inner.first_token(record)

    @contextmanager
    def attempt(self, request_id: str) -> Iterator[None]:
        """A line under way in this task. Raises Withdrawn in it when it is taken back."""
        task = asyncio.current_task()
        assert task is not None
        own = self._under_way[request_id] = _Attempt(task)
        try:
            yield
        except asyncio.CancelledError:
            if own.is_withdrawn and task.uncancel() == 0:  # and nothing else has cancelled it
                raise Withdrawn from None
            raise
        finally:
            del self._under_way[request_id]

    def withdraw(self, *, keep: int) -> int:
        """Withdraw lines that have not begun, the newest first, until `keep` are left; returns how many."""
        left, withdrawn = len(self._under_way), 0
        for attempt in reversed(self._under_way.values()):
            if left - withdrawn <= keep:
                break
            if not attempt.has_begun and not attempt.is_withdrawn:
                attempt.is_withdrawn = True
                attempt.task.cancel()
                withdrawn += 1
        return withdrawn


# Lines of output and error files, in the shape of the OpenAI Batch API.
#
# A line holds the answer as the route gave it, or the error a client would have been sent, or says why a request
# was never run.


OK = 200
NOT_RUN = {
    EXPIRED: ("batch_expired", "This request was not run before the completion window ended."),
    CANCELLED: ("batch_cancelled", "This request was not run before the batch was cancelled."),
}
NEVER_RUN = ("batch_failed", "This request was not run; the batch failed.")
_encode = msgspec.json.encode


class _UsageDetails(msgspec.Struct):
    cached_tokens: int = 0


class _AnswerUsage(msgspec.Struct):
    """The usage of any endpoint: completions and responses call the same things differently."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _UsageDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _UsageDetails | None = None


class _Answered(msgspec.Struct):
    usage: _AnswerUsage | None = None


_read_answer = msgspec.json.Decoder(_Answered).decode


def result_id(batch_id: str, number: int) -> str:
    """The id of a line's result: the same whenever it is made."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(batch_id: str, line: BatchLine, request_id: str, body: bytes) -> LineResult:
    """A request that got its answer."""
    usage = _read_answer(body).usage or _AnswerUsage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _UsageDetails()
    return LineResult(
        batch_id=batch_id,
        number=line.number,
        is_ok=True,
        data=_data(batch_id, line, _response(OK, request_id, body)),
        prompt_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
    )


def refused(batch_id: str, line: BatchLine, request_id: str, problem: Problem) -> LineResult:
    """A request that got an error."""
    response = _response(problem.status, request_id, openai_body(problem))
    data = _data(batch_id, line, response)
    return LineResult(batch_id=batch_id, number=line.number, is_ok=False, data=data)


def not_run(batch_id: str, line: BatchLine, status: str) -> bytes:
    """A request that was not run before the batch ended with that status."""
    code, message = NOT_RUN.get(status, NEVER_RUN)
    return _data(batch_id, line, None, {"code": code, "message": message})


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}


def _data(
    batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    result = {
        "id": result_id(batch_id, line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return bytes(_encode(result)) + b"\n"


AGAIN = (429, 503)  # not the request's fault: it is run again
ENGINE_LOST = "engine_unavailable"


class RunAgain(Exception):
    """There was no room for the request, or the engine was lost; it has to be run again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.code)
        self.problem = problem

    @property
    def is_loss(self) -> bool:
        """Whether the engine was lost while it worked on this, and perhaps by it."""
        return self.problem.code == ENGINE_LOST


def line_caller(caller: Caller, batch_id: str) -> Caller:
    """A key on whose behalf a batch asks."""
    return replace(
        caller,
        service_class=BATCH,
        requests_per_minute=None,
        tokens_per_minute=None,
        max_concurrency=None,
        lowest_priority_number=None,
        is_admin=False,
        batch_id=batch_id,
    )


class LineRunner:
    """Runs lines through the routes of the server."""

    def __init__(self, handlers: Mapping[str, Handler], attempts: Attempts) -> None:
        self._handlers = handlers
        self.attempts = attempts

    async def run(self, batch: Batch, line: BatchLine, body: Mapping[str, Any], caller: Caller) -> LineResult:
        """The result of a line. Raises RunAgain and Withdrawn. Cancelling it stops the generation."""
        call = Call(
            id=new_id(),
            route=batch.endpoint,
            body=body,
            headers={},
            caller=line_caller(caller, batch.id),
            received_s=time.monotonic(),
        )
        status, code, is_again = 499, "", True  # unless it ends in another way, it is cancelled
        try:
            with self.attempts.attempt(call.id):
                data = await self._answer(call)
            status, is_again = OK, False
            return answered(batch.id, line, call.id, data)
        except Withdrawn:
            raise
        except Exception as error:
            problem = problem_of(error)
            status, code, is_again = problem.status, problem.code, problem.status in AGAIN
            if problem.is_ours:
                self.attempts.call_failed(call, error)
            if is_again:
                raise RunAgain(problem) from error
            return refused(batch.id, line, call.id, problem)
        finally:
            self.attempts.call_ended(call, status, code, line=line.number, is_again=is_again)

    async def _answer(self, call: Call) -> bytes:
        answer = await self._handlers[call.route](call)
        if isinstance(answer, Events):
            await answer.frames.aclose()
        if not isinstance(answer, Answer):
            raise UnsupportedParameter(
                "the answers of a batch are not streamed; leave stream out", param="stream"
            )
        return answer.body
