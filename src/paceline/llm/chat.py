"""Conversations as prompts: the model's chat template, or one the caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.text.chat_template import ChatTemplate
from paceline.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class ChatPrompts:
    """Renders conversations for one model."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._own = None if tokenizer is None else ChatTemplate.for_tokenizer(tokenizer)

    def render(
        self,
        messages: Messages,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        switches: Mapping[str, object] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt as text and as token ids."""
        if self._tokenizer is None or self._own is None:
            raise InvalidRequest(
                "chat needs a tokenizer; the engine was started without one", param="messages"
            )
        chosen = self._own
        if template is not None:
            chosen = ChatTemplate.for_tokenizer(self._tokenizer, source=template)
        prompt = chosen.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            switches=switches,
        )
        return prompt.text, self._tokenizer.encode_template(prompt)
