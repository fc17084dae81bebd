"""Requests in the form of an API: the JSON of chat completions and completions.

Fields beyond OpenAI's are sent only where somebody asked for them, so that any server takes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.bench.load.source import LoadRequest

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
BACKENDS = {CHAT: "openai-chat", COMPLETIONS: "openai"}  # as other tools call them


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyForm:
    """What all requests of a run have in common."""

    api: str  # chat or completions
    model: str
    ignore_eos: bool
    temperature: float | None = None  # None: the server's own
    output_len: int | None = None  # instead of a request's own
    more: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, request: LoadRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, **self._prompt(request)}
        num_output = self.output_len or request.num_output
        if num_output is not None:
            body["max_tokens"] = num_output
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        body |= {"stream": True, "stream_options": {"include_usage": True}, **request.fields, **self.more}
        return msgspec.json.encode(body)

    def _prompt(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        if self.api == CHAT:
            return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message.get("content", "")) for message in prompt)
        return {"prompt": prompt}
