"""Finished outputs as the bodies of OpenAI responses, and errors as its error bodies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from paceline.llm.outputs import CompletionOutput, Logprob, RequestOutput
from paceline.server.api.openai_requests import Echo
from paceline.text.tokenizer import Tokenizer

SMALLEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]
Entry = dict[int, Logprob] | None
NO_ECHO = Echo()


def chat_body(model: str, output: RequestOutput, tokenizer: Tokenizer, num_top: int | None) -> Json:
    choices = [
        {
            "index": part.index,
            "message": {"role": "assistant", "content": part.text},
            "logprobs": None if num_top is None else _chat_logprobs(part, tokenizer, num_top),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        for part in output.outputs
    ]
    return _body("chatcmpl", "chat.completion", model, choices, [output])


def completion_body(
    model: str,
    outputs: Sequence[RequestOutput],
    num_top: int | None,
    tokenizer: Tokenizer,
    *,
    echo: Echo = NO_ECHO,
) -> Json:
    """The branches of every prompt, one prompt after the other."""
    choices: list[Json] = []
    for output in outputs:
        prompt = _prompt_tokens(output, tokenizer) if echo.prompt else []
        for part in output.outputs:
            shown = [] if echo.nothing_else else list(zip(part.token_ids, part.logprobs or [], strict=False))
            text = (_prompt_text(output, tokenizer) if echo.prompt else "") + (
                "" if echo.nothing_else else part.text
            )
            choices.append(
                {
                    "index": len(choices),
                    "text": text,
                    "logprobs": None
                    if num_top is None
                    else _completion_logprobs([*prompt, *shown], num_top, tokenizer),
                    "finish_reason": "length" if echo.nothing_else else part.finish_reason,
                    "stop_reason": None if echo.nothing_else else part.stop_reason,
                }
            )
    return _body("cmpl", "text_completion", model, choices, outputs)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _body(prefix: str, kind: str, model: str, choices: list[Json], outputs: Sequence[RequestOutput]) -> Json:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


def _chat_logprobs(part: CompletionOutput, tokenizer: Tokenizer, num_top: int) -> Json:
    def entry(token: int, found: Logprob) -> Json:
        value = tokenizer.token_bytes(token)
        return {"token": found.decoded_token, "logprob": _finite(found.logprob), "bytes": list(value)}

    content = []
    for token, found in zip(part.token_ids, part.logprobs or [], strict=True):
        top = [entry(other, value) for other, value in _top(found, num_top)]
        content.append({**entry(token, found[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _prompt_text(output: RequestOutput, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt


def _prompt_tokens(output: RequestOutput, tokenizer: Tokenizer) -> list[tuple[int, Entry]]:
    known = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    return list(zip(output.prompt_token_ids, known, strict=True))


def _completion_logprobs(tokens: Sequence[tuple[int, Entry]], num_top: int, tokenizer: Tokenizer) -> Json:
    """Four lists, one entry for each token; nothing is known of how likely a first token was."""
    texts: list[str] = []
    values: list[float | None] = []
    tops: list[Json | None] = []
    offsets: list[int] = []
    at = 0
    for token, found in tokens:
        texts.append(tokenizer.token_text(token))
        values.append(None if found is None else _finite(found[token].logprob))
        tops.append(
            None
            if found is None
            else {value.decoded_token or "": _finite(value.logprob) for _, value in _top(found, num_top)}
        )
        offsets.append(at)
        at += len(texts[-1])
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _top(found: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest; the chosen token is among `found` whatever its rank."""
    ranked = [(token, value) for token, value in found.items() if value.rank is not None]
    return sorted(ranked, key=lambda item: item[1].rank or 0)[:count]


def _finite(value: float) -> float:
    return max(value, SMALLEST_LOGPROB)
