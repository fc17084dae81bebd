"""Lines of output and error files, in the shape of the OpenAI Batch API.

A line holds the answer as the route gave it, or the error a client would have been sent, or says why a request was
never run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.server.batches.records import CANCELLED, EXPIRED, Line, LineResult
from paceline.server.errors import Problem, openai_body

OK = 200
NOT_RUN = {
    EXPIRED: ("batch_expired", "This request was not run before the completion window ended."),
    CANCELLED: ("batch_cancelled", "This request was not run before the batch was cancelled."),
}
NEVER_RUN = ("batch_failed", "This request was not run; the batch failed.")
_encode = msgspec.json.encode


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    """The usage of any endpoint: completions and responses call the same things differently."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


_read_answer = msgspec.json.Decoder(_Answered).decode


def result_id(batch_id: str, number: int) -> str:
    """The id of a line's result: the same whenever it is made."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(batch_id: str, line: Line, request_id: str, body: bytes) -> LineResult:
    """A request that got its answer."""
    usage = _read_answer(body).usage or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    return LineResult(
        batch_id=batch_id,
        number=line.number,
        is_ok=True,
        data=_data(batch_id, line, _response(OK, request_id, body)),
        prompt_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
    )


def refused(batch_id: str, line: Line, request_id: str, problem: Problem) -> LineResult:
    """A request that got an error."""
    response = _response(problem.status, request_id, openai_body(problem))
    data = _data(batch_id, line, response)
    return LineResult(batch_id=batch_id, number=line.number, is_ok=False, data=data)


def not_run(batch_id: str, line: Line, status: str) -> bytes:
    """A request nobody got to before the batch ended with that status."""
    code, message = NOT_RUN.get(status, NEVER_RUN)
    return _data(batch_id, line, None, {"code": code, "message": message})


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}


def _data(
    batch_id: str, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    result = {
        "id": result_id(batch_id, line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return bytes(_encode(result)) + b"\n"
