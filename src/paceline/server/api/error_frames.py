"""Errors inside a stream that has begun: one frame each, in the shape of its API."""

from __future__ import annotations

import msgspec

from paceline.server.errors import anthropic_body, openai_body, problem_of


def openai_error_frame(error: BaseException) -> bytes:
    return b"data: %b\n\n" % openai_body(problem_of(error))


def anthropic_error_frame(error: BaseException) -> bytes:
    return b"event: error\ndata: %b\n\n" % anthropic_body(problem_of(error))


def responses_error_frame(error: BaseException, sequence_number: int) -> bytes:
    problem = problem_of(error)
    event = {
        "type": "error",
        "sequence_number": sequence_number,
        "code": problem.code,
        "message": problem.message,
        "param": problem.param,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
