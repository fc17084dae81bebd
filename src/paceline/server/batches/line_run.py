"""One line of a batch as a request: handled by the route it names, as if it had come over HTTP.

The same checks, the same generation, the same errors; only the limits by the minute and the number of requests at
once of its key do not count, and its class is `batch`. Knows neither files nor the database.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from paceline.core.service_class import BATCH
from paceline.server.access.caller import Caller
from paceline.server.batches.batch_records import CANCELLED, EXPIRED, Batch, BatchLine, LineError, LineResult
from paceline.server.call import Answer, Call, Events, Handler
from paceline.server.errors import Problem, Refusal, UnsupportedParameter, openai_body, problem_of
from paceline.server.generate.request_record import Observer, RequestRecord
from paceline.server.http.request_headers import new_id
from paceline.server.http.strict_json import MAX_KEYS, read_object

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


# The input of a batch, line by line: what is wrong with it before anything is run, and where each request is.
#
# A line's envelope is checked here (JSON, custom_id, method, url, body, model), as a batch that has one bad line runs
# none; the fields of a body are checked when it is run, as those of any request. Reads a bounded piece at a time.


MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # that are reported
PAGE_LINES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRules:
    """What the lines of a batch have to be."""

    endpoint: str
    models: tuple[str, ...]
    max_lines: int
    max_line_bytes: int


@dataclass(slots=True)
class Findings:
    """What came out of reading an input."""

    total: int = 0
    errors: list[LineError] = field(default_factory=list)
    num_errors: int = 0

    def add(self, error: LineError) -> None:
        self.num_errors += 1
        if self.num_errors <= MAX_ERRORS:
            self.errors.append(error)
        elif self.num_errors == MAX_ERRORS + 1:
            self.errors.append(
                LineError(code="too_many_errors", message="there are more errors than are reported")
            )


class BadLine(Exception):
    """Something is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def read_input(
    path: Path, rules: LineRules, findings: Findings, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[list[BatchLine]]:
    """Pages of good lines. What is wrong is added to `findings`; after a mistake no more pages come."""
    seen: set[bytes] = set()
    page: list[BatchLine] = []
    with path.open("rb") as file:
        for number, offset, raw in _raw_lines(file, rules.max_line_bytes):
            if is_stopped():
                return
            findings.total += 1
            if findings.total > rules.max_lines:
                message = f"the file has more than {rules.max_lines} requests; cut it into several batches"
                findings.add(LineError(code="too_many_requests", message=message, line=number))
                return
            try:
                page.append(_checked(number, offset, raw, rules, seen))
            except BadLine as bad:
                findings.add(LineError(code=bad.code, message=str(bad), line=number, param=bad.param))
            if len(page) >= PAGE_LINES:
                if not findings.num_errors:
                    yield page
                page = []
    if not findings.total:
        findings.add(
            LineError(code="empty_file", message="the file holds no request; give it one on each line")
        )
    if page and not findings.num_errors:
        yield page


def read_body(path: Path, line: BatchLine) -> dict[str, Any]:
    """The body of one request of an input that was checked."""
    with path.open("rb") as file:
        file.seek(line.offset)
        body = read_object(file.read(line.length))["body"]
    assert isinstance(body, dict)
    return body


def _raw_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and bytes of each line that is not blank; one that is too long comes cut, and just too long."""
    number = offset = 0
    while True:
        raw = file.readline(most + 2)
        if not raw:
            return
        number += 1
        size = len(raw)
        while not raw.endswith(b"\n") and size >= most + 2:
            rest = file.readline(1 << 16)
            size += len(rest)
            if not rest or rest.endswith(b"\n"):
                break
        if raw.strip():
            yield number, offset, raw.rstrip(b"\r\n")
        offset += size


def _checked(number: int, offset: int, raw: bytes, rules: LineRules, seen: set[bytes]) -> BatchLine:
    if len(raw) > rules.max_line_bytes:
        raise BadLine("line_too_long", f"a line may have {rules.max_line_bytes} bytes; shorten this one")
    try:
        given = read_object(raw)
    except Refusal as refusal:
        what = str(refusal).replace("The request body", "The line").replace("request body", "line")
        raise BadLine(
            "invalid_json_line", f"This line is not a JSON object as it should be: {what}"
        ) from None
    custom_id = _required(given, "custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        raise BadLine("invalid_custom_id", message, "custom_id")
    digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        message = "The custom_id of this line is that of an earlier one; each line needs its own."
        raise BadLine("duplicate_custom_id", message, "custom_id")
    seen.add(digest)
    _check_target(given, rules)
    return BatchLine(number=number, offset=offset, length=len(raw), custom_id=custom_id)


def _check_target(given: dict[str, Any], rules: LineRules) -> None:
    if _required(given, "method") != "POST":
        raise BadLine("invalid_method", "method must be POST", "method")
    if _required(given, "url") != rules.endpoint:
        message = f"url must be that of the batch, {rules.endpoint}"
        raise BadLine("mismatched_url", message, "url")
    body = _required(given, "body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object: what would be posted to the url", "body")
    if len(body) > MAX_KEYS:
        raise BadLine("invalid_body", f"body has more than {MAX_KEYS} keys", "body")
    if body.get("stream"):
        raise BadLine(
            "invalid_body", "the answers of a batch are not streamed; leave stream out", "body.stream"
        )
    model = body.get("model")
    if model is None:
        raise BadLine("missing_required_parameter", "Missing required parameter: body.model", "body.model")
    if model not in rules.models:
        message = f"the model {model!r:.128} is not loaded; there is {', '.join(rules.models)}"
        raise BadLine("model_not_found", message, "body.model")


def _required(given: dict[str, Any], name: str) -> Any:
    value = given.get(name)
    if value is None:
        raise BadLine("missing_required_parameter", f"Missing required parameter: {name}", name)
    return value
