"""Entries 118 and 119: routes that end with vectors."""

from __future__ import annotations

from typing import Any

from tests.e2e.catalogue.entry import (
    CONTEXT_LENGTH,
    EMBED,
    EMBEDDINGS,
    MODALITY,
    NO_MODEL,
    OK,
    RERANK,
    SCORE,
    UNSUPPORTED,
    VALUE,
    Check,
    Entry,
    asking,
    asking_each,
    entry,
)
from tests.e2e.catalogue.served import VOCAB_SIZE, signed
from tests.e2e.http_server import Reply

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NO_LABELS = (404, "unsupported_route")
PAIRS = ("/v1/rerank", "/v2/rerank", "/rerank")
LONG = "x" * 300  # for the model's 256 tokens
HUGE = "x" * 1_000_000


def says(param: str, *parts: str) -> Check:
    """The field, with the place of the input, and words of the message."""

    def check(reply: Reply) -> bool:
        error = reply.json["error"]
        return error["param"] == param and all(part in error["message"] for part in parts)

    return check


def wrong(route: str, changes: dict[str, Any], param: str, *parts: str, answer: Any = VALUE) -> Entry:
    return asking(118, route, changes, answer, check=says(param, *parts))


ENTRIES: list[Entry] = [
    *(asking(118, route, {}, OK) for route in (EMBEDDINGS, EMBED, RERANK, SCORE)),
    wrong(EMBEDDINGS, {"input": ...}, "input", "must be"),
    wrong(EMBEDDINGS, {"input": ["a"] * 2_049}, "input", "at most 2048 inputs, not 2049"),
    wrong(EMBEDDINGS, {"input": ["a", ""]}, "input[1]", "empty"),
    wrong(EMBEDDINGS, {"input": [[5], [VOCAB_SIZE]]}, "input[1]", "is not in"),
    wrong(EMBEDDINGS, {"input": ["a", LONG]}, "input[1]", "has 300", answer=CONTEXT_LENGTH),
    wrong(EMBEDDINGS, {"input": ["a", HUGE]}, "input[1]", "refused unread", answer=CONTEXT_LENGTH),
    wrong(EMBEDDINGS, {"dimensions": 65}, "dimensions", "has 64"),
    wrong(EMBEDDINGS, {"input": ["a", PICTURE]}, "input[1]", "takes text", answer=MODALITY),
    asking(118, EMBEDDINGS, {"input": HUGE, "truncate": True}, OK),
    asking(118, EMBEDDINGS, {"model": "other"}, NO_MODEL),
    asking(118, EMBEDDINGS, {"messages": [{"role": "user", "content": [PICTURE]}]}, UNSUPPORTED),
    *asking_each(
        118, EMBEDDINGS, "input", [[], 7, ["a", [5]], [5, "a"], [[5], []], [5, -1], {}, [[[5]]]], VALUE
    ),
    *asking_each(118, EMBEDDINGS, "dimensions", [0, -1, 1.5, "8", True], VALUE),
    *asking_each(118, EMBEDDINGS, "encoding_format", ["int8", 5], VALUE),
    *asking_each(118, EMBEDDINGS, "prompt_name", ["query", 5], VALUE),
    *asking_each(118, EMBED, "inputs", [..., [], 7, ["a", ""], ["a"] * 2_049], VALUE),
    *asking_each(118, EMBED, "truncation_direction", ["up", 5], VALUE),
    wrong(EMBED, {"inputs": [{"audio": "AAAA"}, "a"]}, "inputs[0]", "takes text", answer=MODALITY),
    wrong(RERANK, {"query": ...}, "query", "must be a text"),
    wrong(RERANK, {"query": ""}, "query", "must be a text"),
    wrong(RERANK, {"query": LONG}, "query", "has 300", answer=CONTEXT_LENGTH),
    wrong(RERANK, {"query": {"video": "AAAA"}}, "query", "takes text", answer=MODALITY),
    wrong(RERANK, {"documents": ...}, "documents", "a list of 1 to 2048 texts"),
    wrong(RERANK, {"documents": []}, "documents", "a list of 1 to 2048 texts"),
    wrong(RERANK, {"documents": ["a"] * 2_049}, "documents", "at most 2048 texts, not 2049"),
    wrong(RERANK, {"documents": ["a", 5]}, "documents[1]", "must be a text"),
    wrong(RERANK, {"documents": ["a", HUGE]}, "documents[1]", "refused unread", answer=CONTEXT_LENGTH),
    wrong(RERANK, {"documents": ["a", PICTURE]}, "documents[1]", "takes text", answer=MODALITY),
    asking(118, RERANK, {"documents": ["a", HUGE], "max_tokens_per_doc": 8}, OK),
    asking(118, RERANK, {"documents": ["a", LONG], "truncate": True}, OK),
    *asking_each(118, RERANK, "top_n", [0, -1, 1.5, "1", True], VALUE),
    *asking_each(118, RERANK, "max_tokens_per_doc", [0, "1"], VALUE),
    *asking_each(118, RERANK, "rank_fields", [["title"]], UNSUPPORTED),
    *(entry(118, path, signed("POST", path, {"query": "a"}), VALUE) for path in PAIRS),
    entry(
        118,
        "texts and documents",
        signed("POST", "/rerank", {"query": "a", "texts": ["a"], "documents": ["a"]}),
        VALUE,
    ),
    *asking_each(118, SCORE, "text_1", [..., "", [], 5, "x" * 300_000], VALUE, CONTEXT_LENGTH),
    *asking_each(118, SCORE, "text_2", [..., "", [], 5, ["a", ""], ["a"] * 2_049], VALUE),
    asking(118, SCORE, {"queries": "a", "text_1": "a"}, VALUE),
    asking(118, SCORE, {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}, VALUE),
    # A model that has vectors and no labels.
    *(
        found
        for path in ("/classify", "/predict")
        for found in (
            entry(119, path, signed("GET", path, None), (405, "method_not_allowed")),
            entry(119, path, signed("POST", path, b"\xff no JSON"), (400, "invalid_encoding")),
            entry(119, path, signed("POST", path, {"input": "a", "inputs": "a"}), NO_LABELS),
        )
    ),
]
