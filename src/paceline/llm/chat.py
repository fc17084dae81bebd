"""Conversations as prompts: the model's chat template, or one the caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class ChatPrompts:
    """Renders conversations for one model."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Messages,
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt as text and as token ids."""
        raise InvalidRequest("chat needs a tokenizer", param="messages")
