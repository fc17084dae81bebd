"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from paceline.llm.outputs import RequestOutput
from paceline.server.api.generation_route import DONE, GenerationRoute
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.openai_requests import BodyParser, ParsedBody
from paceline.server.api.openai_responses import (
    ChatDeltas,
    Entry,
    LogprobLists,
    chat_body,
    chat_logprob_entries,
    completion_body,
    finish_reason,
    usage_body,
)
from paceline.server.api.route import Route, described
from paceline.server.call import Call
from paceline.server.errors import openai_error_frame
from paceline.server.generate.generation import Delta, ForkStart, Generation, Usage
from paceline.server.generate.searching import Found
from paceline.server.generate.service import Service
from paceline.text.tokenizer import Tokenizer

# Chunks of /v1/chat/completions and /v1/completions.
#
# Almost every chunk of a stream differs from the one before in its text alone: what stands before and behind it is
# made once for each branch. Chunks with logprobs, token ids or running usage are put together from their parts.


_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """What chat and completions share: one id for all chunks, usage, the end."""

    prefix = ""
    kind = ""
    before_text = b""
    after_text = b""  # closes what `before_text` opened
    nothing = b""  # in the place of text, where a choice ends

    def __init__(self, generation: Generation, body: ParsedBody, tokenizer: Tokenizer, id: str) -> None:
        self._generation = generation
        self._body = body
        self._tokenizer = tokenizer
        fork = generation.fork
        head = {
            "id": f"{self.prefix}-{id if fork is None else fork.request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": body.model,
        }
        self._head = b'data: %b,"choices":[' % _encode(head)[:-1]
        self._tail = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"
        self._runs_usage = body.runs_usage
        num_top = body.sampling.logprobs
        self._num_top = num_top
        self._is_plain = num_top is None and not body.shows_token_ids and not self._runs_usage
        self._before = {
            index: b'%b{"index":%d,%b' % (self._head, index, self.before_text) for index in generation.indexes
        }
        self._after = b'%b,"logprobs":null,"finish_reason":null}%b' % (self.after_text, self._tail)
        self._has_begun = False
        self._echoes = body.echoes_prompt

    def write(self, deltas: list[Delta]) -> bytes:
        frames: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            if self._generation.fork is not None:
                shown = _encode(fork_body(self._generation.fork, self._generation.begin_text))
                frames.append(b'%b],"fork":%b%b' % (self._head, shown, self._end_of_chunk()[1:]))
            self._begin(frames)
        for delta in deltas:
            if self._echoes:
                self._echo_before(delta, frames)
            if delta.is_injected and delta.events is None:
                frames.append(self._injected_chunk(delta))
            elif delta.events is not None:
                self._write_parts(delta, frames)
            elif self._is_plain:
                if delta.text:
                    frames += (self._before[delta.index], _encode(delta.text), self._after)
            elif delta.text or delta.tokens:
                frames.append(self._full_chunk(delta))
            if delta.held is not None:
                frames.append(self._held_chunk(delta))
            if delta.has_ended:
                frames.append(self._last_chunk(delta))
        return b"".join(frames)

    def end(self) -> bytes:
        if not self._body.includes_usage:
            return DONE
        usage = _encode(usage_body(self._usage()))
        return b'%b],"usage":%b}\n\n%b' % (self._head, usage, DONE)

    def error_frame(self, error: BaseException) -> bytes:
        return openai_error_frame(error)

    def _begin(self, frames: list[bytes]) -> None:
        """What comes before the first delta."""

    def _echo_before(self, delta: Delta, frames: list[bytes]) -> None:
        """The prompt of a choice that begins with it."""

    def _write_parts(self, delta: Delta, frames: list[bytes]) -> None:
        """An answer that may be more than text."""
        raise NotImplementedError

    def _full_chunk(self, delta: Delta) -> bytes:
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = self._logprobs(delta)
        ids = b',"token_ids":%b' % _encode(delta.tokens) if self._body.shows_token_ids else b""
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}%b' % (
            *(self._before[delta.index], _encode(delta.text), self.after_text),
            *(logprobs, ids, self._end_of_chunk()),
        )

    def _last_chunk(self, delta: Delta) -> bytes:
        output = delta.output
        reasons = b'"finish_reason":%b,"stop_reason":%b' % (
            _encode(finish_reason(output)),
            _encode(output.stop_reason),
        )
        return b'%b{"index":%d,%b,"logprobs":null,%b}%b' % (
            *(self._head, delta.index, self.nothing, reasons),
            self._end_of_chunk(),
        )

    def _injected_chunk(self, delta: Delta) -> bytes:
        """Text that was put in from outside."""
        ids = b',"token_ids":%b' % _encode(delta.tokens) if self._body.shows_token_ids else b""
        return b'%b%b%b,"logprobs":null,"finish_reason":null,"injected":true%b}%b' % (
            *(self._before[delta.index], _encode(delta.text), self.after_text),
            *(ids, self._end_of_chunk()),
        )

    def _held_chunk(self, delta: Delta) -> bytes:
        """The branch has come to its end and is kept there."""
        reasons = b'"finish_reason":null,"held":%b,"stop_reason":%b' % (
            _encode(delta.held),
            _encode(delta.output.stop_reason),
        )
        return b'%b{"index":%d,%b,"logprobs":null,%b}%b' % (
            *(self._head, delta.index, self.nothing, reasons),
            self._end_of_chunk(),
        )

    def _end_of_chunk(self) -> bytes:
        if not self._runs_usage:
            return self._tail
        return b'],"usage":%b}\n\n' % _encode(usage_body(self._usage()))

    def _usage(self) -> Usage:
        return self._generation.usage

    def _logprobs(self, delta: Delta) -> bytes:
        raise NotImplementedError


class ChatChunks(ChunkWriter):
    """Chunks of a chat: the role, text, then why it ended."""

    prefix = "chatcmpl"
    kind = "chat.completion.chunk"
    before_text = b'"delta":{"content":'
    after_text = b"}"
    nothing = b'"delta":{}'

    def __init__(self, generation: Generation, body: ParsedBody, tokenizer: Tokenizer, id: str) -> None:
        super().__init__(generation, body, tokenizer, id)
        self._deltas = {index: ChatDeltas(body.tools) for index in generation.indexes}

    def _begin(self, frames: list[bytes]) -> None:
        ids = b""
        if self._body.shows_token_ids:
            ids = b',"prompt_token_ids":%b' % _encode(self._generation.prompts[0].token_ids)
        for index in self._generation.indexes:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            frames.append(b'%b{"index":%d,%b}' % (self._head, index, role))
            end = self._end_of_chunk()
            frames.append(end if not ids else b"]%b%b" % (ids, end[1:]))

    def _write_parts(self, delta: Delta, frames: list[bytes]) -> None:
        """A chunk for each part; what is known of the tokens goes with the first."""
        shown = map(self._deltas[delta.index].of, delta.parts)
        parts = [_encode(each) for each in shown if each is not None]
        if not parts and not self._is_plain and delta.tokens:
            parts = [b"{}"]
        for number, part in enumerate(parts):
            more = b',"logprobs":null,"finish_reason":null'
            if number == 0 and not self._is_plain:
                logprobs = b"null" if delta.logprobs is None else self._logprobs(delta)
                ids = b',"token_ids":%b' % _encode(delta.tokens) if self._body.shows_token_ids else b""
                more = b',"logprobs":%b,"finish_reason":null%b' % (logprobs, ids)
            if delta.is_injected:
                more += b',"injected":true'
            chunk = b'%b{"index":%d,"delta":%b%b}' % (self._head, delta.index, part, more)
            frames += (chunk, self._end_of_chunk())

    def _logprobs(self, delta: Delta) -> bytes:
        entries = chat_logprob_entries(delta.tokens, delta.logprobs or [], self._tokenizer, self._body)
        return _encode({"content": entries, "refusal": None})


class CompletionChunks(ChunkWriter):
    """Chunks of a completion: the prompt where it is echoed, text, then why it ended."""

    prefix = "cmpl"
    kind = "text_completion"
    before_text = b'"text":'
    nothing = b'"text":""'

    def __init__(self, generation: Generation, body: ParsedBody, tokenizer: Tokenizer, id: str) -> None:
        super().__init__(generation, body, tokenizer, id)
        self._lists: dict[int, LogprobLists] = {}  # of each choice: they go on where the last chunk ended
        self._echoed: set[int] = set()

    def write(self, deltas: list[Delta]) -> bytes:
        if not self._body.only_echoes:
            return super().write(deltas)
        frames: list[bytes] = []
        for delta in deltas:
            if delta.has_ended:  # the one token it took to read the prompt is not part of the answer
                self._echo(delta.index, frames)
                delta.output.finish_reason, delta.output.stop_reason = "length", None
                frames.append(self._last_chunk(delta))
        return b"".join(frames)

    def _echo_before(self, delta: Delta, frames: list[bytes]) -> None:
        # With the first token everything is known of the prompt; an update without a token is about a part of it.
        if delta.index not in self._echoed and (delta.tokens or delta.has_ended):
            self._echoed.add(delta.index)
            self._echo(delta.index, frames)

    def _echo(self, index: int, frames: list[bytes]) -> None:
        number = index // self._body.sampling.n
        prepared = self._generation.prompts[number]
        text = prepared.text
        if text is None:
            text = self._tokenizer.decode(prepared.token_ids)
        logprobs = b"null"
        if self._num_top is not None:
            entries: list[Entry] = list(self._generation.prompt_logprobs(number) or [])
            lists = self._lists_of(index)
            logprobs = _encode(lists.take(prepared.token_ids, entries))
        frames.append(
            b'%b%b,"logprobs":%b,"finish_reason":null}%b'
            % (self._before[index], _encode(text), logprobs, self._end_of_chunk())
        )

    def _usage(self) -> Usage:
        usage = self._generation.usage
        return replace(usage, num_output=0) if self._body.only_echoes else usage

    def _logprobs(self, delta: Delta) -> bytes:
        entries: list[Entry] = list(delta.logprobs or [])
        return _encode(self._lists_of(delta.index).take(delta.tokens, entries))

    def _lists_of(self, index: int) -> LogprobLists:
        if index not in self._lists:
            self._lists[index] = LogprobLists(self._tokenizer, self._num_top or 0)
        return self._lists[index]


def fork_body(fork: ForkStart, text: str) -> dict[str, Any]:
    """What a client has to know of the branches of a fork: their names, and the text they begin with."""
    indexes = range(fork.first_index, fork.first_index + fork.count)
    return {
        "parent": f"{fork.request_id}/{fork.parent_index}",
        "at": fork.at,
        "branches": [f"{fork.request_id}/{index}" for index in indexes],
        "text": text,
    }


class OpenAIRoute(GenerationRoute):
    """One of the two routes, over one service."""

    def __init__(self, service: Service, url: str) -> None:
        self._parser = BodyParser(url, service.settings.limits, strict=service.settings.strict_fields)
        super().__init__(service, self._parser.table)
        self._is_chat = url == CHAT

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        return self._parser.parse(given, self.service.facts)

    def writer(self, call: Call, body: ParsedBody, generation: Generation) -> ChunkWriter:
        make = ChatChunks if self._is_chat else CompletionChunks
        return make(generation, body, self.service.tokenizer, call.id)

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        for number, output in enumerate(outputs):
            output.prompt_logprobs = generation.prompt_logprobs(number)
        tokenizer, usage, fork = self.service.tokenizer, generation.usage, generation.fork
        id = call.id if fork is None else fork.request_id
        if self._is_chat:
            found = chat_body(body, outputs[0], tokenizer, id=id, receipt=usage.receipt)
        else:
            found = completion_body(body, outputs, tokenizer, id=id, receipt=usage.receipt)
        if fork is not None:
            for choice, index in zip(found["choices"], generation.indexes, strict=True):
                choice["index"] = index
            found["fork"] = fork_body(fork, generation.begin_text)
        if fork is not None or generation.record.cost.injected:
            found["usage"] = usage_body(usage)
        return found

    def found(self, call: Call, body: ParsedBody, found: Found) -> dict[str, Any]:
        shown, tokenizer = body, self.service.tokenizer
        if body.sampling.logprobs is not None:  # those of searches are not those of the asked number
            shown = replace(body, sampling=replace(body.sampling, logprobs=None))
        if self._is_chat:
            answer = chat_body(shown, found.output, tokenizer, id=call.id)
        else:
            answer = completion_body(shown, [found.output], tokenizer, id=call.id)
        answer["usage"] = usage_body(found.usage)
        answer["search"] = found.figures
        return answer


def openai_routes(service: Service) -> list[Route]:
    chat, completions = OpenAIRoute(service, CHAT), OpenAIRoute(service, COMPLETIONS)
    return [
        described("POST", CHAT, chat.answer, "Answer a conversation", chat.table, is_generation=True),
        described(
            "POST", COMPLETIONS, completions.answer, "Complete prompts", completions.table, is_generation=True
        ),
    ]
