"""Bodies that ask for vectors of texts or for scores, and the shape of their answers: /v1/embeddings and TEI's /embed;
rerank, score, classify and predict.

A form belongs to one path and one model. It knows what the model makes of texts, and neither a server nor an engine:
routes, batches and files of requests read with the same forms. Rerank is read as Cohere (1 and 2), Jina and
text-embeddings-inference send it; score and classify as vLLM does. Which way a model scores a pair is decided in
`llm.pairs`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.core.parameters import CLASSIFY
from paceline.errors import InvalidRequest, UnsupportedModality
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import (
    STRATEGIES,
    Cut,
    PairPlan,
    PooledInput,
    PooledModel,
    TextPair,
    pair_up,
    plan_pairs,
)
from paceline.llm.vectors import FLOAT, Ranked, Vector, pooled_sampling, prompted, ranked
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
from paceline.server.api.openai_fields import (
    LARGEST,
    PROMPT_MUST,
    TOKEN_IDS,
    salt_field,
    service_level_fields,
)
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
RERANK, RERANK_2, TEI_RERANK = "/v1/rerank", "/v2/rerank", "/rerank"
SCORE, VLLM_SCORE = "/v1/score", "/score"
VLLM_CLASSIFY, PREDICT = "/classify", "/predict"
FORMATS = ("float", "base64")
LEFT = ("left", "Left")
CUT_SIDES = ("right", "left", "Right", "Left")  # TEI's own spelling, and that of its clients
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
    Field("truncation_direction", choice(CUT_SIDES), "which end of a text is cut (default: right)"),
)
# What an object in the place of a text holds, if it is no text.
MEDIA = ("image", "audio", "video", "file", "document")
TEXT, TEXTS = "a text that is not empty", "a list of texts"
SIDES = (("text_1", "queries"), ("text_2", "documents"))
RAW = Field("raw_scores", FLAG, "scores without sigmoid or softmax")
PAIR_FIELDS = (
    *CUT_FIELDS,
    Field(
        "truncation_strategy",
        choice(STRATEGIES),
        "of pairs that are cut: the longer text first (default), or the second only",
    ),
    RAW,
)
PREDICT_MUST = "a text, a pair of texts, or a list of lists of one or two texts"


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


class PairForm(PooledForm):
    """What routes share that score pairs."""

    def reason(self) -> str:
        return self.model.why_no_scores

    def of_pairs(
        self, given: Mapping[str, Any], sides: tuple[list[str], list[str]], names: tuple[str, str]
    ) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        """`names` of both sides, with their places where there are several."""
        ones, others = pair_up(*sides)
        plan = plan_pairs(self.model, ones, others, raw=given.get("raw_scores", False))
        of_side = [name_of(name, len(side)) for name, side in zip(names, sides, strict=True)]

        def name(index: int) -> str:
            is_first = plan.compared is not None and index < plan.num_first
            return of_side[0 if is_first else 1](plan.sources[index])

        return plan.inputs, {"sampling": plan.sampling, "pooled": self.pooled(given, name, plan)}


class RerankForm(PairForm):
    summary = "Rank documents by a query"

    def fields(self) -> Sequence[Field]:
        documents = text_kind(TEXTS, list)
        tei = (
            Field("texts", documents, "the documents, as text-embeddings-inference calls them"),
            Field("return_text", FLAG, "give the texts back (default: no)"),
        )
        return (
            Field("query", text_kind(TEXT), "what is looked for", required=True),
            Field("documents", documents, f"{TEXTS}, at most {self.limits.inputs}"),
            *(tei if self.path == TEI_RERANK else ()),
            Field("top_n", whole(1, LARGEST), "only the best"),
            Field("return_documents", FLAG, "give the documents back (default: yes; of /v2/rerank no)"),
            Field("max_tokens_per_doc", whole(1, LARGEST), "no more tokens of each document are read"),
            *PAIR_FIELDS,
            *unsupported("rank_fields", "max_chunks_per_doc"),
        )

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        query = read_text(given["query"], "query")
        field = "texts" if "texts" in given else "documents"
        if field == "texts" and "documents" in given:
            raise InvalidRequest("give documents or texts, not both", param="texts")
        documents = read_texts(given.get(field), self.limits, field)
        return self.of_pairs(given, ([query], documents), ("query", field))

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        given, scores = scored(body, outputs)
        field = "texts" if "texts" in given else "documents"
        documents = [read_text(each, field) for each in given[field]]
        found = ranked(documents, scores, given.get("top_n"))
        if field == "texts":
            shows = given.get("return_text", False)
            return [
                {"index": each.index, "score": each.relevance_score}
                | ({"text": each.document} if shows else {})
                for each in found
            ]
        shows = given.get("return_documents", self.path != RERANK_2)
        return {
            "id": f"rerank-{outputs[0].request_id}",
            "model": body.model,
            "results": [_result(each, shows=shows) for each in found],
            "usage": shown_usage(usage),
            "meta": {
                "api_version": {"version": "2" if self.path == RERANK_2 else "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": usage.num_prompt},
            },
        }


class ScoreForm(PairForm):
    summary = "Score pairs of texts"

    def fields(self) -> Sequence[Field]:
        either = text_kind("a text or a list of texts", list)
        helps = ("a text, or one for each of the other side", "texts it is compared with")
        return (
            *(Field(name, either, told) for names, told in zip(SIDES, helps, strict=True) for name in names),
            Field("max_tokens_per_doc", whole(1, LARGEST), "no more tokens of each second text are read"),
            *PAIR_FIELDS,
        )

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        chosen = []
        for names in SIDES:
            found = [name for name in names if name in given]
            if len(found) != 1:
                raise InvalidRequest(f"give {' or '.join(names)}", param=names[0])
            chosen += found
        first, second = (
            read_texts(given[name], self.limits, name)
            if isinstance(given[name], list)
            else [read_text(given[name], name)]
            for name in chosen
        )
        return self.of_pairs(given, (first, second), (chosen[0], chosen[1]))

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        _, scores = scored(body, outputs)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return _listed("score", body, outputs, data, usage)


class ClassifyForm(PooledForm):
    summary = "Score the labels of a classifier"

    def fields(self) -> Sequence[Field]:
        return (inputs_field("input", self.limits), *CUT_FIELDS, RAW)

    def reason(self) -> str:
        return self.model.why_no_labels

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        inputs = read_inputs(given["input"], self.limits, "input")
        sampling = pooled_sampling(None, kind=CLASSIFY, raw=given.get("raw_scores", False))
        pooled = self.pooled(given, name_of("input", len(inputs)))
        return inputs, {"sampling": sampling, "pooled": pooled}

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        labels = self.model.labels
        data = [
            {
                "index": index,
                "label": labels[int(vector.argmax())],
                "probs": vector.tolist(),
                "num_classes": len(labels),
            }
            for index, vector in enumerate(vectors_of(outputs))
        ]
        return _listed("classify", body, outputs, data, usage)


class PredictForm(PooledForm):
    summary = "Score the labels of a classifier, as text-embeddings-inference"

    def fields(self) -> Sequence[Field]:
        return (
            Field("inputs", shaped((str, list, dict), PREDICT_MUST), PREDICT_MUST, required=True),
            *PAIR_FIELDS,
        )

    def reason(self) -> str:
        return self.model.why_no_labels

    def read(self, given: Mapping[str, Any]) -> tuple[Sequence[PooledInput], dict[str, Any]]:
        value = given["inputs"]
        if isinstance(value, Mapping):
            refuse_media(value, "inputs")
        if is_batch(value):
            most = self.limits.inputs
            if len(value) > most:
                raise InvalidRequest(f"inputs takes at most {most} inputs, not {len(value)}", param="inputs")
            inputs = [_one_or_pair(each, f"inputs[{place}]") for place, each in enumerate(value)]
        else:
            inputs = [_one_or_pair(value, "inputs")]
        sampling = pooled_sampling(None, kind=CLASSIFY, raw=given.get("raw_scores", False))
        pooled = self.pooled(given, name_of("inputs", len(inputs)))
        return inputs, {"sampling": sampling, "pooled": pooled}

    def shape(self, body: ParsedBody, outputs: Sequence[RequestOutput], usage: Usage) -> Any:
        assert body.pooled is not None
        found = [
            sorted(
                (
                    {"score": score, "label": label}
                    for score, label in zip(vector.tolist(), self.model.labels, strict=True)
                ),
                key=lambda each: -each["score"],
            )
            for vector in vectors_of(outputs)
        ]
        return found if is_batch(body.pooled.given["inputs"]) else found[0]


def scored(body: ParsedBody, outputs: Sequence[RequestOutput]) -> tuple[Mapping[str, Any], list[float]]:
    """What a body gave, and the scores of its pairs."""
    assert body.pooled is not None and body.pooled.plan is not None
    plan: PairPlan = body.pooled.plan
    return body.pooled.given, plan.scores(vectors_of(outputs))


def is_batch(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _one_or_pair(value: Any, name: str) -> str | TextPair:
    texts = value if isinstance(value, list) else [value]
    if len(texts) not in (1, 2):
        raise InvalidRequest(f"{name} must be {PREDICT_MUST}", param=name)
    read = [read_text(each, name) for each in texts]
    return read[0] if len(read) == 1 else TextPair(*read)


def _result(found: Ranked, *, shows: bool) -> Json:
    result: Json = {"index": found.index, "relevance_score": found.relevance_score}
    return result | ({"document": {"text": found.document}} if shows else {})


def _listed(
    kind: str, body: ParsedBody, outputs: Sequence[RequestOutput], data: list[Json], usage: Usage
) -> Json:
    return {
        "id": f"{kind}-{outputs[0].request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": shown_usage(usage),
    }


FORMS: Mapping[str, type[PooledForm]] = {
    EMBEDDINGS: OpenAIEmbeddings,
    EMBED: TeiEmbeddings,
    **dict.fromkeys((RERANK, RERANK_2, TEI_RERANK), RerankForm),
    **dict.fromkeys((SCORE, VLLM_SCORE), ScoreForm),
    VLLM_CLASSIFY: ClassifyForm,
    PREDICT: PredictForm,
}
IN_BATCHES = (EMBEDDINGS, RERANK, SCORE)  # whose lines files of requests may hold


def pooled_forms(model: PooledModel, limits: RequestLimits) -> dict[str, PooledForm]:
    """By path."""
    return {path: form(path, model, limits) for path, form in FORMS.items()}
