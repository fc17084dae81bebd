"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import msgspec

from paceline.llm.outputs import RequestOutput
from paceline.server.api.describe import operation
from paceline.server.api.error_frames import openai_error_frame
from paceline.server.api.fields import ignored_header
from paceline.server.api.frames import stream_events
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.openai_frames import ChatChunks, CompletionChunks
from paceline.server.api.openai_requests import BodyParser, ParsedBody
from paceline.server.api.openai_responses import chat_body, completion_body
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.generation import Generation
from paceline.server.service import Service

INLINE_ENTRIES = 500  # logprobs of more tokens are written beside the event loop


class OpenAIRoute:
    """One of the two routes, over one service."""

    def __init__(self, service: Service, url: str) -> None:
        self._service = service
        self._url = url
        settings = service.settings
        self.parser = BodyParser(url, settings.limits, strict=settings.strict_fields)

    async def answer(self, call: Call) -> Answer | Events:
        service = self._service
        service.check_ready(call)
        body = self.parser.parse(call.body, service.facts)
        generation = await service.start(call, body)
        headers = ignored_header(body.ignored)
        if body.streaming.wanted:
            make = ChatChunks if self._url == CHAT else CompletionChunks
            return stream_events(
                generation,
                lambda: make(generation, body, service.tokenizer, call.id),
                lambda _: openai_error_frame,
                headers,
            )
        try:
            answer = await self._whole(call, body, generation)
            generation.release()
        finally:
            generation.close()
        return Answer(body=answer, headers=generation.headers(headers))

    async def _whole(self, call: Call, body: ParsedBody, generation: Generation) -> bytes:
        outputs = await generation.complete()
        sampling = body.sampling
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        usage = generation.usage
        is_short = not has_logprobs or usage.num_prompt + usage.num_output <= INLINE_ENTRIES
        return await self._service.work(lambda: self._bytes(call, body, generation, outputs), inline=is_short)

    def _bytes(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> bytes:
        for number, output in enumerate(outputs):
            output.prompt_logprobs = generation.prompt_logprobs(number)
        tokenizer, receipt = self._service.tokenizer, generation.usage.receipt
        if self._url == CHAT:
            return msgspec.json.encode(chat_body(body, outputs[0], tokenizer, id=call.id, receipt=receipt))
        return msgspec.json.encode(completion_body(body, outputs, tokenizer, id=call.id, receipt=receipt))


def openai_routes(service: Service) -> list[Route]:
    chat, completions = OpenAIRoute(service, CHAT), OpenAIRoute(service, COMPLETIONS)
    return [
        Route(
            methods=("POST",),
            path=CHAT,
            handler=chat.answer,
            takes_body=True,
            is_generation=True,
            openapi=operation("Answer a conversation", chat.parser.table.schema(), streams=True),
        ),
        Route(
            methods=("POST",),
            path=COMPLETIONS,
            handler=completions.answer,
            takes_body=True,
            is_generation=True,
            openapi=operation("Complete prompts", completions.parser.table.schema(), streams=True),
        ),
    ]
