"""POST /v1/embeddings: texts, or token ids, to vectors."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.errors import InvalidRequest
from paceline.llm.outputs import RequestOutput
from paceline.llm.vectors import FLOAT, pooled_sampling, prompted
from paceline.models.files.pooling import EmbeddingDefaults
from paceline.server.api.fields import FLAG, Field, FieldTable, choice, shaped, text, whole, without_effect
from paceline.server.api.generation_route import GenerationRoute
from paceline.server.api.limits import RequestLimits
from paceline.server.api.openai_fields import PROMPT_MUST, salt_field, service_level_fields
from paceline.server.api.openai_requests import ParsedBody, common_values, read_prompts
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnsupportedRoute
from paceline.server.generate.generation import Generation
from paceline.server.generate.service import Service

EMBEDDINGS = "/v1/embeddings"
FORMATS = ("float", "base64")
MAX_DIMENSIONS = 2**20


def embeddings_table(limits: RequestLimits) -> FieldTable:
    texts = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "integer"}]},
    }
    inputs = shaped((str, list), PROMPT_MUST, {"anyOf": [{"type": "string"}, texts]})
    return FieldTable(
        EMBEDDINGS,
        [
            Field("input", inputs, f"{PROMPT_MUST}; at most {limits.inputs}", required=True),
            Field("model", text(0, limits.name_chars), "the model's name"),
            Field("encoding_format", choice(FORMATS), "base64: little-endian float32 numbers"),
            Field("dimensions", whole(1, MAX_DIMENSIONS), "only the first numbers of each vector"),
            Field("normalize", FLAG, "vectors of length 1; by default as the model's files say"),
            Field(
                "prompt_name",
                text(0, limits.name_chars),
                "which of the model's prompts stands before each text",
            ),
            Field("truncate", FLAG, "cut inputs that are too long instead of refusing them"),
            *service_level_fields(),
            salt_field(limits),
            without_effect("user", text(0, limits.name_chars)),
        ],
    )


class EmbeddingRoute(GenerationRoute):
    """The route of one model."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, embeddings_table(service.settings.limits))

    async def answer(self, call: Call) -> Answer | Events:
        self._defaults()
        return await super().answer(call)

    def _defaults(self) -> EmbeddingDefaults:
        found = self.service.model.embedding
        if found is None:
            raise UnsupportedRoute(
                f"{EMBEDDINGS} is not offered: the files of {self.service.model.names[0]} do not say what the "
                "vector of a text is; start the server with --pooling last or mean"
            )
        return found

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        service, defaults = self.service, self._defaults()
        read = self.table.read(given, strict=service.settings.strict_fields)
        fields = read.fields
        inputs = read_prompts(fields["input"], service.settings.limits.inputs, "input")
        name = fields.get("prompt_name")
        sampling = pooled_sampling(
            defaults, dimensions=fields.get("dimensions"), normalize=fields.get("normalize")
        )
        return ParsedBody(
            sampling=sampling,
            prompts=tuple(prompted(each, defaults, name) for each in inputs),  # type: ignore[misc]
            encoding=fields.get("encoding_format", FORMATS[0]),
            is_cut=fields.get("truncate", False),
            **common_values(read, service.facts),
        )

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        usage = generation.usage
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _shown(output.outputs[0].vector, body.encoding),
            }
            for index, output in enumerate(outputs)
        ]
        counts: dict[str, Any] = {
            "prompt_tokens": usage.num_prompt,
            "total_tokens": usage.num_prompt,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        }
        return {"object": "list", "data": data, "model": body.model, "usage": with_receipt(counts, usage)}


def embedding_routes(service: Service) -> list[Route]:
    route = EmbeddingRoute(service)
    return [
        described("POST", EMBEDDINGS, route.answer, "Make vectors of texts", route.table, is_generation=True)
    ]


def _shown(vector: bytes, encoding: str) -> str | list[float]:
    if not vector:
        raise InvalidRequest("an input has no vector", param="input")
    if encoding == "base64":
        return base64.b64encode(vector).decode("ascii")
    values: list[float] = np.frombuffer(vector, FLOAT).tolist()
    return values
