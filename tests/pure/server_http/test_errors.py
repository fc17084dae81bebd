"""The error catalogue is closed: every exception has one answer, and nothing from inside is in it."""

from __future__ import annotations

import json

import pytest

from paceline.errors import ConfigError, EngineFailed, InvalidRequest, NeverFits, QueueFull
from paceline.process.client import EngineUnavailable
from paceline.server import errors
from paceline.server.errors import CATALOGUE, Refusal, anthropic_body, openai_body, problem_of


@pytest.mark.parametrize(
    "error, status, kind, code",
    [
        (InvalidRequest("x", param="n"), 400, "invalid_request_error", "invalid_value"),
        (NeverFits("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (QueueFull("x"), 429, "rate_limit_error", "queue_full"),
        (EngineFailed("x"), 503, "server_error", "engine_unavailable"),
        (EngineUnavailable("x", code="starting"), 503, "server_error", "starting"),
        (EngineUnavailable("x", code="made-up"), 503, "server_error", "engine_unavailable"),
        (errors.UnknownRequestId("x"), 404, "not_found_error", "request_not_found"),
        (errors.UnknownModel("x"), 404, "not_found_error", "model_not_found"),
        (errors.ConcurrencyExceeded("x"), 429, "rate_limit_error", "concurrency_exceeded"),
        (errors.QueueTimeout("x"), 503, "server_error", "queue_timeout"),
        (errors.DeadlineExceeded("x"), 504, "server_error", "deadline_exceeded"),
        (errors.GenerationFailed("x", code="numerical_error"), 500, "server_error", "numerical_error"),
        (errors.NotPermitted("x"), 403, "permission_error", "not_permitted"),
        (ConfigError("x"), 500, "server_error", "internal_error"),
        (RuntimeError("x"), 500, "server_error", "internal_error"),
        (MemoryError(), 503, "server_error", "out_of_memory"),
    ],
)
def test_every_error_has_its_answer(error: Exception, status: int, kind: str, code: str) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.type, problem.code) == (status, kind, code)


def test_every_failure_of_the_server_is_in_the_catalogue() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = [vars(kind)["code"] for kind in kinds if "code" in vars(kind)]
    assert codes
    assert set(codes) <= set(CATALOGUE)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("/home/me/secret"), EngineUnavailable("/home/me/secret"), ConfigError("/home/me/secret")],
)
def test_words_from_inside_do_not_leave(error: Exception) -> None:
    assert "secret" not in openai_body(problem_of(error)).decode()


def test_words_for_the_client_are_kept_and_bounded() -> None:
    error = json.loads(openai_body(problem_of(InvalidRequest("n must be 1", param="n"))))["error"]
    assert error == {
        "message": "n must be 1",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_value",
    }
    long = json.loads(openai_body(problem_of(InvalidRequest("é" * 9999, param="p" * 999))))["error"]
    assert len(long["message"]) == 512
    assert len(long["param"]) == 128
    assert json.loads(openai_body(problem_of(InvalidRequest("\ud800"))))["error"]["message"] == "?"


def test_busy_answers_say_when_to_come_back() -> None:
    for code, entry in CATALOGUE.items():
        is_busy = entry.status in (429, 503) or code == "request_busy"
        # Their owner makes room by pruning or deleting, time does not.
        is_busy &= code not in ("tree_limit_exceeded", "context_limit_exceeded", "pin_limit_exceeded")
        assert (entry.retry_after_s is not None) == is_busy, code
        assert len(entry.message) <= 512
    assert problem_of(errors.QueueTimeout("x")).retry_after_s == 5
    assert problem_of(errors.TooBusy("x")).retry_after_s == 1


def test_anthropic_errors_have_their_shape() -> None:
    assert (
        json.loads(anthropic_body(problem_of(Refusal("invalid_api_key"))))["error"]["type"]
        == "authentication_error"
    )
    assert json.loads(anthropic_body(problem_of(Refusal("starting"))))["error"]["type"] == "overloaded_error"
    body = json.loads(anthropic_body(problem_of(RuntimeError("x"))))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
