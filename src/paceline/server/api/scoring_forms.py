"""Bodies that ask how texts score, and the shape of their answers: rerank, score, classify and predict.

Rerank is read as Cohere (1 and 2), Jina and text-embeddings-inference send it; score and classify as vLLM does. Which
way a model scores a pair is decided in `llm.pairs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.parameters import CLASSIFY
from paceline.errors import InvalidRequest
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import STRATEGIES, PairPlan, PooledInput, TextPair, pair_up, plan_pairs
from paceline.llm.vectors import Ranked, pooled_sampling, ranked
from paceline.server.api.fields import FLAG, Field, choice, shaped, unsupported, whole
from paceline.server.api.openai_fields import LARGEST
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.api.openai_responses import Json
from paceline.server.api.pooled_forms import (
    CUT_FIELDS,
    PooledForm,
    inputs_field,
    name_of,
    read_inputs,
    read_text,
    read_texts,
    refuse_media,
    shown_usage,
    text_kind,
    vectors_of,
)
from paceline.server.generate.generation import Usage

RERANK, RERANK_2, TEI_RERANK = "/v1/rerank", "/v2/rerank", "/rerank"
SCORE, VLLM_SCORE = "/v1/score", "/score"
VLLM_CLASSIFY, PREDICT = "/classify", "/predict"
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
