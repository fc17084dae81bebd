"""Bodies that ask for vectors of texts, and the shape of their answers: /v1/embeddings and TEI's /embed.

A form belongs to one path and one model. It knows what the model makes of texts, and neither a server nor an engine:
routes, batches and files of requests read with the same forms. Those that score are in `scoring_forms`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.errors import InvalidRequest, UnsupportedModality
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import STRATEGIES, Cut, PairPlan, PooledInput, PooledModel
from paceline.llm.vectors import FLOAT, Vector, pooled_sampling, prompted
from paceline.models.files.pooling_config import EmbeddingDefaults
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    GivenFields,
    Kind,
    choice,
    shaped,
    text,
    unsupported,
    whole,
    without_effect,
)
from paceline.server.api.openai_fields import PROMPT_MUST, TOKEN_IDS, salt_field, service_level_fields
from paceline.server.api.openai_requests import (
    ModelFacts,
    ParsedBody,
    PooledBody,
    common_values,
    read_prompts,
)
from paceline.server.api.openai_responses import Json, with_receipt
from paceline.server.api.route import RequestLimits
from paceline.server.errors import UnsupportedRoute
from paceline.server.generate.generation import Usage

EMBEDDINGS, EMBED = "/v1/embeddings", "/embed"
FORMATS = ("float", "base64")
LEFT = ("left", "Left")
SIDES = ("right", "left", "Right", "Left")  # TEI's own spelling, and that of its clients
MAX_DIMENSIONS = 2**20
INPUTS = {
    "anyOf": [
        {"type": "string"},
        TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, TOKEN_IDS]}},
    ]
}
CUT_FIELDS = (
    Field("truncate", FLAG, "cut inputs that are too long instead of refusing them"),
    Field("truncation_direction", choice(SIDES), "which end of a text is cut (default: right)"),
)
# What an object in the place of a text holds, if it is no text.
MEDIA = ("image", "audio", "video", "file", "document")


class PooledForm:
    """One path of one model: what it reads (`parse`) and how it answers (`shape`)."""

    summary: ClassVar[str]

    def __init__(self, path: str, model: PooledModel, limits: RequestLimits) -> None:
        self.path = path
        self.model = model
        self.limits = limits
        own = [
            Field("model", text(0, limits.name_chars), "the model's name"),
            *service_level_fields(),
            salt_field(limits),
            without_effect("user", text(0, limits.name_chars)),
        ]
        self.table = FieldTable(path, [*self.fields(), *own])

    def fields(self) -> Sequence[Field]:
        raise NotImplementedError

    def reason(self) -> str:
        """Why this model has no such answers; "" where it has."""
        raise NotImplementedError

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        """The inputs, and what else a `ParsedBody` of them holds."""
        raise NotImplementedError

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        raise NotImplementedError

    def check(self) -> None:
        """Raises UnsupportedRoute where the model has no such answers."""
        if reason := self.reason():
            raise UnsupportedRoute(f"{self.path} is not offered: {reason}")

    def parse(self, body: Mapping[str, Any], facts: ModelFacts, *, strict: bool) -> ParsedBody:
        """Raises InvalidRequest whose `param` names the field."""
        self.check()
        read: GivenFields = self.table.read(body, strict=strict)
        inputs, more = self.read(read.fields)
        return ParsedBody(prompts=tuple(inputs), **more, **common_values(read, facts))

    def pooled(
        self, given: Mapping[str, Any], name: Callable[[int], str], plan: PairPlan | None = None
    ) -> PooledBody:
        cut = Cut(
            is_cut=given.get("truncate", False),
            strategy=given.get("truncation_strategy", STRATEGIES[0]),
            from_left=given.get("truncation_direction") in LEFT,
            document_tokens=given.get("max_tokens_per_doc"),
        )
        return PooledBody(given=given, name=name, cut=cut, plan=plan)


class EmbeddingForm(PooledForm):
    """What both routes of embeddings share; `field` is where their inputs stand."""

    field: ClassVar[str]
    normalizes: ClassVar[bool | None] = None  # None: as the model's files say

    def fields(self) -> Sequence[Field]:
        return (
            inputs_field(self.field, self.limits),
            Field("dimensions", whole(1, MAX_DIMENSIONS), "only the first numbers of each vector"),
            Field("normalize", FLAG, "vectors of length 1; by default as the model's files say"),
            Field(
                "prompt_name",
                text(0, self.limits.name_chars),
                "which of the model's prompts stands before each text",
            ),
            *CUT_FIELDS,
            *unsupported("messages"),
        )

    def reason(self) -> str:
        return self.model.why_no_vectors

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        defaults = self._defaults()
        inputs = read_inputs(given[self.field], self.limits, self.field)
        sampling = pooled_sampling(
            defaults,
            dimensions=given.get("dimensions"),
            normalize=given.get("normalize", self.normalizes),
        )
        pooled = self.pooled(given, name_of(self.field, len(inputs)))
        name = given.get("prompt_name")
        return [prompted(each, defaults, name) for each in inputs], {"sampling": sampling, "pooled": pooled}

    def _defaults(self) -> EmbeddingDefaults:
        assert self.model.embedding is not None
        return self.model.embedding


class OpenAIEmbeddings(EmbeddingForm):
    summary = "Make vectors of texts"
    field = "input"

    def fields(self) -> Sequence[Field]:
        formats = Field("encoding_format", choice(FORMATS), "base64: little-endian float32 numbers")
        return (*super().fields(), formats)

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        assert body.pooled is not None
        is_text = body.pooled.given.get("encoding_format") == FORMATS[1]
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode("ascii")
                if is_text
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors_of(outputs))
        ]
        return {"object": "list", "data": data, "model": body.model, "usage": shown_usage(usage)}


class TeiEmbeddings(EmbeddingForm):
    summary = "Make vectors of texts, as text-embeddings-inference"
    field = "inputs"
    normalizes = True

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        return [vector.tolist() for vector in vectors_of(outputs)]


def vectors_of(outputs: Sequence[RequestOutput]) -> list[Vector]:
    return [np.frombuffer(output.outputs[0].vector, FLOAT) for output in outputs]


def shown_usage(usage: Usage) -> Json:
    counts = {
        "prompt_tokens": usage.num_prompt,
        "total_tokens": usage.num_prompt,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }
    return with_receipt(counts, usage)


# Texts in bodies.


def inputs_field(name: str, limits: RequestLimits) -> Field:
    kind = shaped((str, list, dict), PROMPT_MUST, INPUTS)
    return Field(name, kind, f"{PROMPT_MUST}; at most {limits.inputs}", required=True)


def text_kind(expected: str, *types: type) -> Kind:
    """Texts whose parts `read_text` checks."""
    items = {"type": "array", "items": {"type": "string"}}
    return shaped((str, dict, *types), expected, {"anyOf": [{"type": "string"}, items]} if types else None)


def read_inputs(value: Any, limits: RequestLimits, name: str) -> tuple[str | list[int], ...]:
    """Texts or token ids."""
    for place, each in enumerate(value) if isinstance(value, list) else ((None, value),):
        if isinstance(each, Mapping):
            refuse_media(each, name if place is None else f"{name}[{place}]")
    return read_prompts(value, limits.inputs, name)


def read_text(value: Any, name: str) -> str:
    """A text that is not empty, or an object with one as its `text`."""
    if isinstance(value, Mapping):
        refuse_media(value, name)
        value = value.get("text")
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a text that is not empty", param=name)
    return value


def read_texts(value: Any, limits: RequestLimits, name: str) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a list of 1 to {limits.inputs} texts", param=name)
    if len(value) > limits.inputs:
        raise InvalidRequest(f"{name} takes at most {limits.inputs} texts, not {len(value)}", param=name)
    return [read_text(each, f"{name}[{place}]") for place, each in enumerate(value)]


def refuse_media(value: Mapping[str, Any], name: str) -> None:
    """Raises UnsupportedModality for an object that holds more than text."""
    parts = value.get("content")
    for part in parts if isinstance(parts, list) else [value]:
        kinds = [str(part.get("type", "")), *part] if isinstance(part, Mapping) else []
        found = next((kind for kind in kinds if any(media in kind for media in MEDIA)), None)
        if found is not None:
            message = f"{name} holds a part of type {found!r:.40}; this model takes text"
            raise UnsupportedModality(message, param=name)


def name_of(field: str, count: int) -> Callable[[int], str]:
    """What an input is called where it is wrong."""
    return lambda index: f"{field}[{index}]" if count > 1 else field
