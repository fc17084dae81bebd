"""An answer as it comes, whoever gives it: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ANSWER_TOKENS = 1024  # an answer on a terminal is no longer, unless the user or the model says so
Show = Callable[[str], None]
Conversation = list[dict[str, str]]


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer as far as it came, and how it went."""

    text: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    finish_reason: str | None = None
    error: str | None = None
    ttft_s: float = 0.0  # from asking to the first token
    decode_s: float = 0.0  # from the first token to the last
    is_interrupted: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens behind the first one."""
        return (self.num_output - 1) / self.decode_s if self.num_output > 1 and self.decode_s > 0 else 0.0

    @property
    def failure(self) -> str:
        """Why it ended early, in words where there are more than a code."""
        from paceline.core.events import NOT_FINITE, Rule  # loads numpy, which help pages do without

        return NOT_FINITE if self.error == Rule.NUMERICAL_ERROR else str(self.error)

    def describe(self) -> str:
        cached = f" ({self.num_cached} cached)" if self.num_cached else ""
        return (
            f"prompt {self.num_prompt} tokens{cached}, first token after {self.ttft_s:.2f} s, "
            f"{self.num_output} tokens at {self.tokens_per_s:.1f} tokens/s"
        )


class Answering(Protocol):
    """What a conversation needs of whoever answers it."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling that holds where none is given, as far as it is known, under the names of `SamplingParams`."""

    def count(self, messages: Conversation) -> int:
        """Tokens of a conversation as a prompt."""

    def reply(self, messages: Conversation, given: Mapping[str, Any], show: Show) -> Answer:
        """`given` is the sampling that was asked for; the rest is the default."""
