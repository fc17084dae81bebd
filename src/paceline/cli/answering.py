"""An answer as it is generated, by a model in this process or by a server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed
from paceline.models.files.sampling_defaults import ANSWER_TOKENS, chat_sampling

if TYPE_CHECKING:
    from paceline.llm.outputs import RequestOutput

Show = Callable[[str], None]
Conversation = list[dict[str, Any]]
INTERRUPTED = 130  # the exit code


@dataclass(slots=True, kw_only=True)
class ChatAnswer:
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
    def _failure(self) -> str:
        """Why it ended early, in words where there are more than a code."""
        from paceline.core.events import NOT_FINITE, Rule  # loads numpy, which help pages do without

        return NOT_FINITE if self.error == Rule.NUMERICAL_ERROR else str(self.error)

    def check(self) -> None:
        """Leave the command where the answer is not whole."""
        if self.is_interrupted:
            raise SystemExit(INTERRUPTED)
        if self.error is not None:
            raise EngineFailed(f"the answer ended early: {self._failure}")

    def describe(self) -> str:
        cached = f" ({self.num_cached} cached)" if self.num_cached else ""
        return (
            f"prompt {self.num_prompt} tokens{cached}, first token after {self.ttft_s:.2f} s, "
            f"{self.num_output} tokens at {self.tokens_per_s:.1f} tokens/s"
        )


# One answer at a time needs one row; a budget that is given is not measured, which saves a second at the start.
FOR_ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 64}


class Talker:
    """A model in this process that is ready to answer, one request at a time. Leaving it stops the engine.

    The engine runs in its own thread, so that Ctrl-C in the main one stops an answer and nothing else.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from paceline.llm.async_llm import AsyncLLM

        # Without a seed of the user's, asking again gives another answer.
        self.llm = AsyncLLM(**{"seed": secrets.randbits(32), **FOR_ONE, **options})
        self._runner = asyncio.Runner()

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()
        self.llm.shutdown()

    @property
    def has_template(self) -> bool:
        tokenizer = self.llm.get_tokenizer()
        return tokenizer is not None and tokenizer.chat_template is not None

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def defaults(self) -> Mapping[str, Any]:
        sampling = self._sampling({})
        return {spec.name: getattr(sampling, spec.name) for spec in fields(sampling)}

    def count(self, messages: Conversation) -> int:
        return self.llm.count_chat_tokens(messages)

    def complete(self, prompt: str, given: Mapping[str, Any], show: Show) -> ChatAnswer:
        return self._runner.run(_follow(self.llm.generate(prompt, self._sampling(given)), show))

    def reply(self, messages: Conversation, given: Mapping[str, Any], show: Show) -> ChatAnswer:
        return self._runner.run(_follow(self.llm.chat(messages, self._sampling(given)), show))

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        return chat_sampling(self.llm.loaded.checkpoint.generation, ANSWER_TOKENS, **given)


async def _follow(outputs: AsyncGenerator[RequestOutput, None], show: Show) -> ChatAnswer:
    answer = ChatAnswer()
    started_s = first_s = last_s = time.perf_counter()
    try:
        async with aclosing(outputs):
            async for output in outputs:
                last_s = time.perf_counter()
                first_s = first_s if answer.num_output else last_s
                _take(answer, output, show)
    except asyncio.CancelledError:  # Ctrl-C: what there is stays
        answer.is_interrupted = True
    answer.ttft_s, answer.decode_s = first_s - started_s, last_s - first_s
    return answer


def _take(answer: ChatAnswer, output: RequestOutput, show: Show) -> None:
    (part,) = output.outputs
    new, answer.text = part.text[len(answer.text) :], part.text
    answer.num_prompt, answer.num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    answer.num_output = len(part.token_ids)
    answer.finish_reason, answer.error = part.finish_reason, part.error
    if new:
        show(new)
