"""Finished outputs as the bodies of OpenAI responses, and errors as its error bodies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.llm.outputs import CompletionOutput, Logprob, RequestOutput
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.generate.generation import Usage
from paceline.text.answer import AnswerEvent
from paceline.text.reasoning import Reasoned
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said
from paceline.text.tools.use import ToolUse, text_input

SMALLEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]
Entry = dict[int, Logprob] | None
Receipt = Mapping[str, Any] | None  # of a server; a file of requests has none


def chat_body(
    parsed: ParsedBody,
    output: RequestOutput,
    tokenizer: Tokenizer,
    *,
    id: str | None = None,
    receipt: Receipt = None,
) -> Json:
    num_top = parsed.sampling.logprobs
    choices = []
    for part in output.outputs:
        choice: Json = {
            "index": part.index,
            "message": _message(part, parsed.tools),
            "logprobs": None,
            "finish_reason": finish_reason(part),
            "stop_reason": part.stop_reason,
        }
        if num_top is not None:
            entries = chat_logprob_entries(part.token_ids, part.logprobs or [], tokenizer, parsed)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if parsed.shows_token_ids:
            choice["token_ids"] = part.token_ids
        choices.append(choice)
    head = (f"chatcmpl-{id or uuid.uuid4().hex}", "chat.completion", parsed.model)
    body = _body(*head, choices, [output], receipt, has_prediction=bool(parsed.sampling.prediction))
    if parsed.shows_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    if parsed.shows_prompt_logprobs:
        body["prompt_logprobs"] = _prompt_logprobs(output)
    return body


def completion_body(
    parsed: ParsedBody,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    id: str | None = None,
    receipt: Receipt = None,
) -> Json:
    """The branches of every prompt, one prompt after the other."""
    choices: list[Json] = []
    for output in outputs:
        for number in range(len(output.outputs)):
            choice = _completion_choice(parsed, output, number, tokenizer)
            choice["index"] = len(choices)
            if parsed.shows_token_ids:
                choice["token_ids"] = output.outputs[number].token_ids
                choice["prompt_token_ids"] = output.prompt_token_ids
            if parsed.shows_prompt_logprobs:
                choice["prompt_logprobs"] = _prompt_logprobs(output)
            choices.append(choice)
    head = (f"cmpl-{id or uuid.uuid4().hex}", "text_completion", parsed.model)
    return _body(*head, choices, outputs, receipt)


def finish_reason(output: CompletionOutput) -> str | None:
    """An answer that ended with calls says so."""
    return "tool_calls" if output.tool_calls and output.finish_reason == "stop" else output.finish_reason


def _message(output: CompletionOutput, tools: ToolUse | None) -> Json:
    """The answer, with calls and reasoning where it has some."""
    message: Json = {"role": "assistant", "content": output.text, "refusal": None}
    if output.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = output.reasoning
    if output.tool_calls:
        message["content"] = output.text or None
        message["tool_calls"] = [
            {"id": call.id, **_called(tools, call.name, call.arguments)} for call in output.tool_calls
        ]
    return message


def _called(tools: ToolUse | None, name: str, arguments: str) -> Json:
    """What a call says of its tool: a custom one is called with a text."""
    if tools is not None and tools.is_custom(name):
        return {"type": "custom", "custom": {"name": name, "input": text_input(arguments)}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class ChatDeltas:
    """What the chunks of one choice say of the parts of its answer."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._custom: dict[int, str] = {}  # arguments of calls under way whose text is known at their end

    def of(self, part: AnswerEvent) -> Json | None:
        """None where there is nothing to say."""
        match part:
            case Said(text):
                return {"content": text}
            case Reasoned(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegin(index, id, name):
                called = _called(self._tools, name, "")
                if called["type"] == "custom":
                    self._custom[index] = ""
                return {"tool_calls": [{"index": index, "id": id, **called}]}
            case CallArguments(index, text) if index in self._custom:
                self._custom[index] += text
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd(index, _) if index in self._custom:
                given = text_input(self._custom.pop(index))
                return {"tool_calls": [{"index": index, "custom": {"input": given}}]}
        return None


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage_body(usage: Usage) -> Json:
    body: Json = {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_output,
        "total_tokens": usage.num_prompt + usage.num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached, **prompt_details(usage)},
    }
    details = {} if usage.num_reasoning is None else {"reasoning_tokens": usage.num_reasoning}
    if usage.predictions is not None:
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        details |= dict(zip(names, usage.predictions, strict=True))
    if details:
        body["completion_tokens_details"] = details
    return with_receipt(body, usage)


def prompt_details(usage: Usage) -> dict[str, int]:
    """Of a prompt with pictures, or with texts that were placed."""
    found = {"image_tokens": usage.num_image, "reused_tokens": usage.num_reused}
    return {name: count for name, count in found.items() if count}


def with_receipt(body: Json, usage: Usage) -> Json:
    """Usage in the shape of an API, with what none of them has a name for."""
    if usage.dropped:
        body = {**body, "lossy": True, "kv_dropped_tokens": usage.dropped}
    return body if usage.receipt is None else {**body, "paceline": usage.receipt}


def chat_logprob_entries(
    tokens: Sequence[int], known: Sequence[dict[int, Logprob]], tokenizer: Tokenizer, parsed: ParsedBody
) -> list[Json]:
    """How likely each token was, with the likeliest at its place."""
    num_top = parsed.sampling.logprobs or 0

    def entry(token: int, found: Logprob) -> Json:
        value = tokenizer.token_bytes(token)
        return {"token": found.decoded_token, "logprob": finite(found.logprob), "bytes": list(value)}

    content = []
    for token, found in zip(tokens, known, strict=True):
        if not found:  # it was put in from outside
            continue
        top = [entry(other, value) for other, value in _top(found, num_top)]
        content.append({**entry(token, found[token]), "top_logprobs": top})
        if parsed.shows_drafted:
            content[-1]["drafted"] = found[token].is_drafted
    return content


class LogprobLists:
    """Logprobs of a completion: four lists, one entry for each token, that go on from piece to piece.

    Nothing is known of how likely a first token was.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._at = 0  # characters before the next token

    def take(self, tokens: Sequence[int], known: Sequence[Entry]) -> Json:
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[Json | None] = []
        offsets: list[int] = []
        for token, found in zip(tokens, known, strict=False):
            texts.append(self._tokenizer.token_text(token))
            # Of what was put in, nothing is known.
            values.append(finite(found[token].logprob) if found else None)
            tops.append(self._tops(found) if found else None)
            offsets.append(self._at)
            self._at += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._num_top else None,
            "text_offset": offsets,
        }

    def _tops(self, found: dict[int, Logprob]) -> Json:
        """By text: of two tokens that read the same, the likelier one is shown."""
        shown: Json = {}
        for _, value in _top(found, self._num_top):
            shown.setdefault(value.decoded_token or "", finite(value.logprob))
        return shown


def finite(value: float) -> float:
    return max(value, SMALLEST_LOGPROB)


def _completion_choice(parsed: ParsedBody, output: RequestOutput, number: int, tokenizer: Tokenizer) -> Json:
    num_top = parsed.sampling.logprobs
    part = output.outputs[number]
    text, tokens = "", []
    known: list[Entry] = []
    if parsed.echoes_prompt:
        text = tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt
        tokens += output.prompt_token_ids
        known += output.prompt_logprobs or [None] * len(tokens)
    if parsed.only_echoes:  # the one token it took to read the prompt is not part of the answer
        part.text, part.token_ids = "", []
        part.finish_reason, part.stop_reason = "length", None
    text += part.text
    tokens += part.token_ids
    known += part.logprobs or []
    return {
        "index": 0,
        "text": text,
        "logprobs": None if num_top is None else LogprobLists(tokenizer, num_top).take(tokens, known),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }


def _body(
    id: str,
    kind: str,
    model: str,
    choices: list[Json],
    outputs: Sequence[RequestOutput],
    receipt: Receipt,
    *,
    has_prediction: bool = False,
) -> Json:
    predictions = (outputs[0].accepted_prediction_tokens, outputs[0].rejected_prediction_tokens)
    usage = Usage(
        num_prompt=sum(len(output.prompt_token_ids) for output in outputs),
        num_output=sum(len(part.token_ids) for output in outputs for part in output.outputs),
        num_cached=sum(output.num_cached_tokens for output in outputs),
        num_image=sum(output.num_image_tokens for output in outputs),
        num_reused=sum(output.num_reused_tokens for output in outputs),
        num_reasoning=sum(part.num_reasoning_tokens for output in outputs for part in output.outputs) or None,
        predictions=predictions if has_prediction else None,
        receipt=receipt,
    )
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_body(usage),
    }


def _prompt_logprobs(output: RequestOutput) -> list[Json | None]:
    """vLLM's shape: for each token of the prompt, what was likely there by token id."""

    def shown(value: Logprob) -> Json:
        return {
            "logprob": finite(value.logprob),
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }

    return [
        None if found is None else {str(token): shown(value) for token, value in found.items()}
        for found in output.prompt_logprobs or []
    ]


def _top(found: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest; the chosen token is among `found` whatever its rank."""
    ranked = [(token, value) for token, value in found.items() if value.rank is not None]
    return sorted(ranked, key=lambda item: item[1].rank or 0)[:count]
