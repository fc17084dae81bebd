"""One line of a batch as a request: handled by the route it names, as if it had come over HTTP.

The same checks, the same generation, the same errors; only the limits by the minute and the number of requests at
once of its key do not count, and its class is `batch`. Knows neither files nor the database.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.server.batches.attempts import Attempts, Withdrawn
from paceline.server.batches.records import Batch, Line, LineResult
from paceline.server.batches.results import OK, answered, refused
from paceline.server.call import Answer, Call, Caller, Events, Handler
from paceline.server.errors import Problem, problem_of
from paceline.server.failures import UnsupportedParameter
from paceline.server.http.request import new_id
from paceline.server.tenant import BATCH_CLASS

AGAIN = (429, 503)  # not the request's fault: it is run again
ENGINE_LOST = "engine_unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLine:
    """What the log is told of a line that was run."""

    id: str  # of the request
    batch_id: str
    number: int
    route: str
    tenant: str
    status: int
    error_code: str
    received_s: float
    is_again: bool  # it will be run again


class LineLog(Protocol):
    """Who is told how lines ended. Called once for each time one was run."""

    def line_ended(self, line: EndedLine) -> None: ...

    def line_failed(self, request_id: str, batch_id: str, error: BaseException) -> None:
        """An error of ours, with everything the client is not told."""


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
        service_class=BATCH_CLASS,
        requests_per_minute=None,
        tokens_per_minute=None,
        max_concurrency=None,
        lowest_priority_number=None,
        is_admin=False,
        batch_id=batch_id,
    )


class LineRunner:
    """Runs lines through the routes of the server."""

    def __init__(self, handlers: Mapping[str, Handler], log: LineLog, attempts: Attempts) -> None:
        self._handlers = handlers
        self.attempts = attempts
        self._log = log

    async def run(self, batch: Batch, line: Line, body: Mapping[str, Any], caller: Caller) -> LineResult:
        """The result of a line. Raises RunAgain and Withdrawn. Who is cancelled here has stopped the generation."""
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
                self._log.line_failed(call.id, batch.id, error)
            if is_again:
                raise RunAgain(problem) from error
            return refused(batch.id, line, call.id, problem)
        finally:
            self._log.line_ended(
                EndedLine(
                    id=call.id,
                    batch_id=batch.id,
                    number=line.number,
                    route=call.route,
                    tenant=caller.tenant,
                    status=status,
                    error_code=code,
                    received_s=call.received_s,
                    is_again=is_again,
                )
            )

    async def _answer(self, call: Call) -> bytes:
        answer = await self._handlers[call.route](call)
        if isinstance(answer, Events):
            await answer.frames.aclose()
        if not isinstance(answer, Answer):
            raise UnsupportedParameter(
                "the answers of a batch are not streamed; leave stream out", param="stream"
            )
        return answer.body
