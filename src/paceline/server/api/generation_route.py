"""A generation as an answer: whole, or as a stream of server-sent events.

`GenerationRoute` is what the APIs share; `PooledRoute` is that of vectors and scores, one for each form. `EventStream`
is what leaves a route that streams: an async generator whose owner may close it before the first item was asked for,
which a plain generator would not notice. What the frames look like is a `FrameWriter`'s business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import msgspec

from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.server.api.fields import FieldTable, ignored_header
from paceline.server.api.openai_requests import ParsedBody, check_caller
from paceline.server.api.pooled_forms import PooledForm, pooled_forms
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Events
from paceline.server.generate.generation import Delta, Generation
from paceline.server.generate.prompt_size import check_blend
from paceline.server.generate.searching import Found
from paceline.server.generate.service import Service
from paceline.text.answer import AnswerEvent
from paceline.text.placed_texts import PlacedTexts, new_secret

DONE = b"data: [DONE]\n\n"
INLINE_ENTRIES = 500  # logprobs of more tokens are written beside the event loop


class FrameWriter(Protocol):
    """Makes frames of deltas; may give b"" where there is nothing to show."""

    def write(self, deltas: list[Delta]) -> bytes: ...

    def end(self) -> bytes:
        """What follows when every branch has ended well."""

    def error_frame(self, error: BaseException) -> bytes:
        """An error inside a stream that has begun."""


class PartsWriter:
    """What APIs share that show an answer as its parts, one after the other, and have one branch."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._has_begun = False
        self._output: CompletionOutput | None = None

    def write(self, deltas: list[Delta]) -> bytes:
        frames: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            self._write_head(frames)
        for delta in deltas:
            for part in delta.parts:
                self._write_part(part, frames)
            if delta.has_ended:
                self._output = delta.output
        return b"".join(frames)

    def _write_head(self, frames: list[bytes]) -> None:
        """What comes before the first part."""
        raise NotImplementedError

    def _write_part(self, part: AnswerEvent, frames: list[bytes]) -> None:
        raise NotImplementedError


class EventStream(AsyncGenerator[bytes, None]):
    """Frames of one generation, which is closed with it in every case."""

    def __init__(self, generation: Generation, writer: FrameWriter) -> None:
        self._generation = generation
        self._writer = writer
        self._write: Callable[[bytes], bool] | None = None
        self._kept = b""  # made while the reader of this stream waited, and not written
        self._frames = self._make_frames()

    def divert(self, write: Callable[[bytes], bool]) -> None:
        """From now on, frames that find the reader waiting go to `write`, until it says no."""
        self._write = write
        self._generation.divert(self._pass_on)

    def __anext__(self) -> Any:
        return self._frames.__anext__()

    async def asend(self, value: None) -> bytes:
        return await self._frames.asend(value)

    async def athrow(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> bytes:
        self._generation.close()
        return await self._frames.athrow(kind, value, traceback)

    async def aclose(self) -> None:
        try:
            await self._frames.aclose()
        finally:
            self._write = None
            self._generation.close()

    async def _make_frames(self) -> AsyncGenerator[bytes, None]:
        generation, writer = self._generation, self._writer
        try:
            while generation.is_open:
                deltas = await generation.next()
                data = self._kept + writer.write(deltas)
                self._kept = b""
                if not generation.is_open and not generation.must_settle:
                    data += self._end()
                if data:
                    yield data
                    generation.sent()
            if generation.must_settle:
                # What was made is out by now; the end is not before it is written down.
                await generation.settle()
                yield self._end()
        finally:
            generation.close()

    def _end(self) -> bytes:
        end = self._writer.end()
        self._generation.release()
        return end

    def _pass_on(self, deltas: list[Delta]) -> bool:
        assert self._write is not None
        data = self._writer.write(deltas)
        if self._generation.is_open:
            if not data:
                return True
            if self._write(data):
                self._generation.sent()
                return True
        self._kept = data
        return False


def read_body(service: Service, call: Call, parse: Callable[[Mapping[str, Any]], ParsedBody]) -> ParsedBody:
    """What a body asks for, which `parse` reads once texts stand in the place of its contexts, or marks of those that
    are to be placed."""
    secret = new_secret() if call.body.get("context_reuse") == "blend" else ""
    given, contexts = service.contexts.resolve(call.body, call.caller, secret)
    body = parse(given)
    if contexts:
        body = replace(body, contexts=contexts)
        if secret:
            placed = PlacedTexts(secret=secret, texts=tuple(context.text for context in contexts))
            body = replace(body, template={**body.template, "placed": placed})
    check_caller(call.caller, body.model, service.facts)
    check_blend(body, service.client.info.blending, service.model.names, sees=service.sees(body))
    return body


class GenerationRoute:
    """The handler of a route that generates: `answer` is the way of every request. A subclass reads bodies in the
    shape of its API (`parse`) and shapes answers: frame by frame (`writer`) or at once (`whole`)."""

    def __init__(self, service: Service, table: FieldTable) -> None:
        self.service = service
        self.table = table

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        raise NotImplementedError

    def writer(self, call: Call, body: ParsedBody, generation: Generation) -> FrameWriter:
        raise NotImplementedError

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> Any:
        raise NotImplementedError

    def found(self, call: Call, body: ParsedBody, found: Found) -> dict[str, Any]:
        """The answer that a search has found."""
        raise NotImplementedError

    async def start(self, call: Call, body: ParsedBody) -> Generation:
        return await self.service.start(call, body)

    async def answer(self, call: Call) -> Answer | Events:
        service = self.service
        service.check_ready(call)
        body = read_body(service, call, self.parse)
        if body.search is not None:
            found = await service.search(call, body)
            shown = self.found(call, body, found)
            return Answer(
                body=msgspec.json.encode(shown), headers=ignored_header((*body.ignored, *found.ignored))
            )
        generation = await self.start(call, body)
        own = ignored_header((*body.ignored, *generation.ignored))
        if body.is_stream:
            try:
                writer = self.writer(call, body, generation)
            except BaseException:
                generation.close()
                raise
            frames = EventStream(generation, writer)
            return Events(
                frames=frames,
                error_frame=writer.error_frame,
                headers=lambda: generation.headers(own),
                divert=frames.divert,
            )
        try:
            outputs = await generation.complete()
            usage, sampling = generation.usage, body.sampling
            is_large = (
                sampling.pooling is not None or not sampling.logprobs is sampling.prompt_logprobs is None
            )
            answer = await service.work(
                lambda: msgspec.json.encode(self.whole(call, body, generation, outputs)),
                inline=not is_large or usage.num_prompt + usage.num_output <= INLINE_ENTRIES,
            )
            generation.release()
        finally:
            generation.close()
        return Answer(body=answer, headers=generation.headers(own))


class PooledRoute(GenerationRoute):
    """The route of a form."""

    def __init__(self, service: Service, form: PooledForm) -> None:
        super().__init__(service, form.table)
        self._form = form

    async def answer(self, call: Call) -> Answer | Events:
        self._form.check()
        return await super().answer(call)

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        return self._form.parse(given, self.service.facts, strict=self.service.settings.strict_fields)

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> Any:
        return self._form.shape(body, outputs, generation.usage)


def pooled_routes(service: Service) -> list[Route]:
    forms = pooled_forms(service.model.pooled, service.settings.limits)
    return [
        described(
            "POST", path, PooledRoute(service, form).answer, form.summary, form.table, is_generation=True
        )
        for path, form in forms.items()
    ]
