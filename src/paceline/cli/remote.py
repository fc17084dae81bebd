"""Talking to a server that speaks the OpenAI API, ours or another, with nothing but the standard library.

Sampling is sent only where the user gave it: the server knows its model's defaults. The key comes from the
environment, never from the command line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from paceline.cli.answering import ChatAnswer, Conversation, Show
from paceline.errors import InputError, PacelineError
from paceline.models.files.sampling_defaults import ANSWER_TOKENS

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 600.0
UNKNOWN_LENGTH = 10**9
ADMIN_KEYS = ("PACELINE_ADMIN_KEY", "PACELINE_API_KEY")  # the first that is set
OFF: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "stop": ()}


class ServerRefused(PacelineError):
    """The server answered with an error, or not at all; `status` is 0 then."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """A server, and the key it is asked with."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"--url {url} is not an address; use one like http://localhost:8000")
        self.is_https = parts.scheme == "https"
        self.address = parts.netloc.rpartition("@")[2]
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        self.key = key

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A request and its whole answer; raises `ServerRefused` with what the server says."""
        connection, response = self._open(method, path, body)
        try:
            found = json.loads(response.read())
        except ValueError:
            found = None
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise ServerRefused(f"what answers at {self.address} is no server of the OpenAI API")
        return found

    def follow(self, path: str, *, silence_s: float) -> Iterator[dict[str, Any]]:
        """The events of a stream without an end; raises `ServerRefused` when it breaks off, or when
        nothing arrives for `silence_s` seconds."""
        connection, response = self._open("GET", path, timeout_s=silence_s)
        try:
            yield from _events(response)
        finally:
            connection.close()

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> tuple[HTTPConnection, HTTPResponse]:
        make = HTTPSConnection if self.is_https else HTTPConnection
        connection = make(self.address, timeout=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request(method, self.base_path + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ServerRefused(
                f"the server at {self.address} cannot be reached ({reason}); start one with paceline serve"
            ) from error
        if response.status != 200:
            message = _error_text(response)
            connection.close()
            raise ServerRefused(f"the server answered {response.status}: {message}", response.status)
        return connection, response


def admin_connection(url: str) -> Connection:
    """A server, asked with the operator's key."""
    return Connection(url, next((os.environ[name] for name in ADMIN_KEYS if os.environ.get(name)), ""))


class Remote(Connection):
    """A server that answers a conversation."""

    def __init__(self, url: str, model: str | None) -> None:
        super().__init__(url, os.environ.get("PACELINE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "")
        self._counts = True
        cards = self.ask("GET", "/v1/models").get("data") or []
        card: dict[str, Any] = next((card for card in cards if model in (None, card.get("id"))), {})
        if not card and model is None:
            raise ServerRefused(f"the server at {url} serves no model")
        self.model: str = model or card["id"]
        self.max_model_len: int = card.get("max_model_len") or UNKNOWN_LENGTH
        own = (card.get("paceline") or {}).get("default_sampling") or {}  # other servers do not say
        self.defaults: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, **OFF, **own}

    def count(self, messages: Conversation) -> int:
        """Tokens of a conversation; 0 where the server cannot tell."""
        if not self._counts:
            return 0
        try:
            return int(self.ask("POST", "/tokenize", {"model": self.model, "messages": messages})["count"])
        except (PacelineError, KeyError):
            self._counts = False
            return 0

    def reply(self, messages: Conversation, given: Mapping[str, Any], show: Show) -> ChatAnswer:
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": ANSWER_TOKENS,
            **given,
        }
        answer = ChatAnswer()
        started_s = first_s = last_s = time.perf_counter()
        connection, response = self._open("POST", "/v1/chat/completions", body)
        try:
            for event in _events(response):
                new = _take(answer, event)
                if new:
                    last_s = time.perf_counter()
                    first_s = first_s if answer.text else last_s
                    answer.text += new
                    answer.num_output += 1
                    show(new)
        except KeyboardInterrupt:  # what there is stays; the server notices that the client has gone
            answer.is_interrupted = True
        finally:
            connection.close()
        answer.ttft_s, answer.decode_s = first_s - started_s, last_s - first_s
        return answer

    def explain(self, request_id: str) -> dict[str, Any]:
        """What the server tells about one of this key's requests."""
        return self.ask("GET", f"/v1/requests/{quote(request_id, safe='')}/explain")


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end; a stream that breaks off is an error."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerRefused(f"the answer ended early: {_message(event)}")
                yield event
    except (OSError, HTTPException, ValueError) as error:
        raise ServerRefused(f"the server's answer broke off ({type(error).__name__})") from error
    raise ServerRefused("the server's answer broke off")


def _take(answer: ChatAnswer, event: Mapping[str, Any]) -> str:
    """Note what an event tells; returns new text."""
    usage = event.get("usage")
    if usage:
        answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    new = ""
    for choice in event.get("choices") or ():
        new += (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return new


def _error_text(response: HTTPResponse) -> str:
    try:
        return _message(json.loads(response.read(65_536)))
    except (OSError, HTTPException, ValueError):
        return response.reason


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "no reason given").split())[:500]
