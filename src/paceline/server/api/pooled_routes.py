"""Routes that end with vectors: /v1/embeddings, rerank, score, classify, and those of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.llm.outputs import RequestOutput
from paceline.server.api.generation_route import GenerationRoute
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.api.pooled_forms import PooledForm, pooled_forms
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Events
from paceline.server.generate.generation import Generation
from paceline.server.generate.service import Service


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
