"""How large a prompt is before it is tokenised, and whether its messages can be read.

Cheap checks only: what is too large, or holds what no text model takes, is rejected before work is done for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.blend_quality import Blending
from paceline.errors import InvalidRequest, UnsupportedModality
from paceline.llm.pairs import PooledInput, TextPair
from paceline.models.media.sources import PARTS
from paceline.server.api.openai_requests import ParsedBody, PooledBody
from paceline.server.api.route import RequestLimits
from paceline.server.errors import BlendUnavailable, ContextTooLong
from paceline.text.messages import TEXT_PARTS

NAMES = ("name", "tool_call_id")
# Every template spends at least a token on a message, and time: a thousand empty ones are not a small prompt.
CHARS_PER_MESSAGE = 8


def check_prompt(body: ParsedBody, max_model_len: int, limits: RequestLimits, *, sees: bool = False) -> int:
    """Characters of all texts, four for each token id. Raises InvalidRequest for what is too much.

    `sees`: the model takes pictures, whose price is known later.
    """
    if body.messages is not None:
        size = messages_size(body.messages, limits, sees=sees)
        size += 0 if body.placed is None else body.placed.num_chars
        size += sum(len(str(tool.for_template())) for tool in (body.tools.tools if body.tools else ()))
        _check_chars(size, "messages", max_model_len, limits)
        return size
    if body.pooled is not None:
        return _inputs_size(body.prompts, body.pooled, max_model_len, limits)
    total = 0
    for index, prompt in enumerate(body.prompts):
        name = f"prompt[{index}]" if len(body.prompts) > 1 else "prompt"
        if not prompt:
            raise InvalidRequest("the prompt is empty", param=name)
        if isinstance(prompt, str):
            _check_chars(len(prompt), name, max_model_len, limits)
        else:
            check_length(len(prompt), max_model_len, name)
        total += len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
    return total


def check_length(num_tokens: int, max_model_len: int, name: str) -> None:
    """Raises ContextTooLong for a prompt that leaves no room for an answer."""
    if num_tokens >= max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has {num_tokens} "
            f"and leaves no room for an answer",
            param=name,
        )


def _inputs_size(
    inputs: Sequence[PooledInput], pooled: PooledBody, max_model_len: int, limits: RequestLimits
) -> int:
    """How many tokens one has is checked when they are known; what is to be cut is never too long."""
    total = 0
    for index, given in enumerate(inputs):
        if not given:
            raise InvalidRequest("the input is empty", param=pooled.name(index))
        size = len(given.first) + len(given.second) if isinstance(given, TextPair) else len(given)
        is_text = isinstance(given, str | TextPair)
        if is_text and not pooled.cut.is_cut and pooled.cut.document_tokens is None:
            _check_chars(size, pooled.name(index), max_model_len, limits)
        total += size if is_text else 4 * size
    return total


def check_blend(body: ParsedBody, known: Blending, names: Sequence[str], *, sees: bool) -> None:
    """Raises BlendUnavailable where contexts are to be placed and cannot be, for this model or this request.

    `names`: of the model itself; `sees`: the prompt has pictures.
    """
    if not body.blends:
        return
    reasons = {
        "what blending keeps was measured without adapters; name the model itself": body.model not in names,
        "a prompt with pictures has no placed texts": sees,
        "kv_keep drops tokens of a prompt by their place": body.sampling.kv_keep is not None,
        "prompt_logprobs need all tokens of a prompt computed": body.sampling.prompt_logprobs is not None,
        "a search computes its prompts where they stand": body.search is not None,
    }
    reason = known.refusal or next((reason for reason, holds in reasons.items() if holds), "")
    if reason:
        raise BlendUnavailable(f"{reason}; leave context_reuse out", param="context_reuse")


def messages_size(messages: Sequence[Any], limits: RequestLimits, *, sees: bool = False) -> int:
    """Characters of a conversation's contents, and some for each message itself."""
    total = CHARS_PER_MESSAGE * len(messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{index}] must be an object with role and content", param="messages"
            )
        place = f"messages[{index}]"
        for name in NAMES:
            value = message.get(name)
            if isinstance(value, str) and len(value) > limits.name_chars:
                raise InvalidRequest(
                    f"{place}.{name} has more than {limits.name_chars} characters", param="messages"
                )
        total += _content_size(message.get("content"), f"{place}.content", sees)
        total += sum(len(str(message.get(name) or "")) for name in ("tool_calls", "reasoning_content"))
    return total


def takes(sees: bool) -> str:
    """What a model reads, for errors."""
    return "this model takes text and pictures" if sees else "this server reads text only"


def _content_size(content: Any, place: str, sees: bool) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0  # what is no content at all is refused where messages are read
    if not content:
        raise InvalidRequest(f"{place} must not be an empty list", param="messages")
    total = 0
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS and not (sees and kind in PARTS):
            message = f"{place} holds a part of type {kind!r:.40}; {takes(sees)}"
            raise UnsupportedModality(message, param="messages")
        text = part.get("text") if isinstance(part, Mapping) else part
        total += len(text) if isinstance(text, str) else 0
    return total


def _check_chars(size: int, name: str, max_model_len: int, limits: RequestLimits) -> None:
    most = max_model_len * limits.prompt_chars_per_token
    if size > most:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens; a prompt of {size} characters is "
            f"refused unread, at most {most} are accepted",
            param=name,
        )
