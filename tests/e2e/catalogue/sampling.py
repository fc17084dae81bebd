"""Entries 83 to 103 but 96: fields of sampling, streaming and the rest, on every route whose own schema has them."""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.core.sampling import MAX_OBJECTIVE_MS
from paceline.server.api.anthropic import messages_table
from paceline.server.api.openai_fields import chat_table, completions_table
from paceline.server.api.responses import responses_table
from paceline.server.api.route import SERVER_LIMITS
from tests.e2e.catalogue.entry import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OK,
    RESPONSES,
    UNSUPPORTED,
    VALUE,
    Entry,
    asking,
    asking_each,
    posting,
)
from tests.e2e.catalogue.served import VOCAB_SIZE
from tests.e2e.http_server import Reply
from tests.model_folder import EOS

LIMITS = SERVER_LIMITS
TABLES = {
    CHAT: chat_table(LIMITS),
    COMPLETIONS: completions_table(LIMITS),
    MESSAGES: messages_table(LIMITS),
    RESPONSES: responses_table(LIMITS),
}
FIELDS = {route: set(table.schema()["properties"]) for route, table in TABLES.items()}

ALL_DOWN = {str(number): -100 for number in range(LIMITS.biases)}
# Number, field, values that are refused, values that are accepted: at the limit, and one above it.
RANGES: list[tuple[int, str, list[Any], list[Any]]] = [
    (83, "temperature", [-0.1, 2.1, "1", True, 10**400, 1e308, [], {}], [None, 0, 2, 1e-300]),
    (84, "top_p", [0, -1, 1.1, "0.5", 1e-10], [None, 1, 0.5, 1e-9]),
    (85, "top_k", [-2, 2**31, 2**40, 1.5, True], [None, -1, 0, 1, 2**31 - 1]),
    (86, "min_p", [-1, -0.001, 1.001, 2], [None, 0, 1]),
    (87, "presence_penalty", [-2.1, 2.1], [-2, 2]),
    (87, "frequency_penalty", [-2.1, 2.1], [-2, 2]),
    (87, "repetition_penalty", [0, -1, 0.0009, 100.1, 1e30], [0.001, 100]),
    (
        88,
        "max_tokens",
        [-1, LIMITS.answer_tokens + 1, 2**31, 10**400, 1e9, 1.0, True, "5"],
        [LIMITS.answer_tokens, 1],
    ),
    (88, "max_completion_tokens", [0, -1, LIMITS.answer_tokens + 1], [3]),
    (88, "max_output_tokens", [0, -1, LIMITS.answer_tokens + 1, 2**31], [1]),
    (89, "min_tokens", [-1, 10**12, LIMITS.answer_tokens + 1, 1.0], [0, 3]),
    (90, "n", [0, -1, LIMITS.branches + 1, 10**9, 2**63, 1.0, True], [LIMITS.branches]),
    (91, "seed", [2**63, 2**64, -(2**63) - 1, "x", 10**100], [-1, 2**63 - 1, -(2**63)]),
    (
        92,
        "stop",
        [
            *(
                ["a"] * (LIMITS.stops + 1),
                [""],
                "",
                "x" * 10_000,
                [1],
                ["a"] * 2**16,
                [None],
                "a\0b",
                {},
                5,
                True,
            ),
            *("x" * (LIMITS.stop_bytes + 1), ["\u00fc" * 129]),
        ],
        [["ab", "b", "abc", "bc"], [], "x" * LIMITS.stop_bytes, ["\u00fc" * 128]],
    ),
    (
        93,
        "stop_token_ids",
        [[-1], [VOCAB_SIZE], [2**31], [2**63], ["5"], [True], 5, [5] * (LIMITS.stop_ids + 1)],
        [[0], [VOCAB_SIZE - 1], [5] * LIMITS.stop_ids],
    ),
    (
        93,
        "bad_words",
        [[1], "x", [""], ["x" * 257], ["x"] * (LIMITS.bad_words + 1)],
        [["x" * 256], ["\u00e9"], ["x"] * LIMITS.bad_words, list("abcdefghijklmnopqrstuvwxyz")],
    ),
    (
        93,
        "allowed_token_ids",
        [[], [-1], [VOCAB_SIZE], [1.0], "5", [5] * (LIMITS.allowed_ids + 1)],
        [[5], [EOS], [5] * LIMITS.allowed_ids],
    ),
    (
        94,
        "logit_bias",
        [
            *({"a": 1}, {str(VOCAB_SIZE): 1}, {"-1": 1}, {"5": 101}, {"5": -100.5}, {"5": "x"}, {"5": True}),
            *(
                {"5": None},
                {"05": 1},
                {"\u0665": 1},
                {"1.5": 1},
                {"": 1},
                {"9" * 12: 1},
                {"9" * 200: 1},
                [],
                [[5, 1]],
            ),
            {str(number): 1 for number in range(LIMITS.biases + 1)},
        ],
        [{}, {"5": 100}, {"5": -100}, {str(number): -100 for number in range(LIMITS.biases)}],
    ),
    (92, "stop_sequences", [["a"] * (LIMITS.stops + 1)], []),
    (97, "stream", ["yes", 1, 0, []], [False, True, None]),
    (97, "stream_options", ["x", 5, []], []),
    (98, "user", ["x" * (LIMITS.name_chars + 1), "x" * 1_000_000, {"a": 1}, 5], ["x" * LIMITS.name_chars]),
    (
        98,
        "metadata",
        [
            *({"a": {"b": 1}}, {"a": 5}, "x", {"k" * 65: "v"}, {"a": "x" * (LIMITS.metadata_chars + 1)}),
            {str(number): "x" for number in range(LIMITS.metadata_entries + 1)},
        ],
        [{"a": "x" * LIMITS.metadata_chars}, {str(number): "x" for number in range(LIMITS.metadata_entries)}],
    ),
    (
        99,
        "cache_salt",
        ["", "x" * (LIMITS.cache_salt_chars + 1), "a/b", "..\\x", "a\nb", "a\0", "\x1f", "x" * 1_000_000, 5],
        ["x" * LIMITS.cache_salt_chars, "tenant b"],
    ),
    (100, "priority", [2**31, 2**70, -(2**70), "high", 1.5, True], [0, 5, -5]),
    (102, "ignore_eos", ["yes", 1, {}], [True]),
    (103, "prompt_logprobs", [-1, LIMITS.top_logprobs + 1, True, "x"], [0, LIMITS.top_logprobs]),
    (103, "return_token_ids", [1, "x"], [True]),
]
# 0 is for completions that echo, and a separate case.
NOT_ON = {"max_tokens": {0}}


def ranges() -> list[Entry]:
    found = []
    for number, field, bad, good in RANGES:
        seconds = 0.2 if field == "n" else 2.0
        for route, known in FIELDS.items():
            if field in known:
                found += [asking(number, route, {field: value}, VALUE, seconds=seconds) for value in bad]
                found += [
                    asking(number, route, _accepted(route, field, value), OK, seconds=5.0) for value in good
                ]
    return found


def _accepted(route: str, field: str, value: Any) -> dict[str, Any]:
    """A value in a request that is quickly answered."""
    if field in ("max_tokens", "max_output_tokens") and value and value > 100:
        return {field: value, "stop_token_ids": list(range(60)), "min_tokens": 0}
    if field == "max_completion_tokens":
        return {field: value, "max_tokens": ...}
    return {field: value}


def all_finite(reply: Reply) -> bool:
    numbers = reply.json["choices"][0]["logprobs"]["token_logprobs"]
    return bool(numbers) and all(isinstance(number, float) and math.isfinite(number) for number in numbers)


def is_interleaved(reply: Reply) -> bool:
    frames = [line[6:] for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
    indices = [choice["index"] for frame in frames for choice in json.loads(frame)["choices"]]
    return set(indices) == set(range(8)) and reply.body.endswith(b"data: [DONE]\n\n")


def together() -> list[Entry]:
    """What only several fields together get wrong, or do not."""
    return [
        asking(88, CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, VALUE),
        asking(88, CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, OK),
        asking(88, COMPLETIONS, {"max_tokens": 0}, VALUE),
        asking(88, CHAT, {"max_tokens": 0}, VALUE),
        asking(88, MESSAGES, {"max_tokens": 0}, VALUE),
        asking(88, MESSAGES, {"max_tokens": ...}, VALUE),
        asking(89, CHAT, {"min_tokens": 4}, VALUE),
        asking(89, RESPONSES, {"min_tokens": 4}, VALUE),
        asking(90, CHAT, {"n": 8, "stream": True}, OK, check=is_interleaved, seconds=5.0),
        asking(
            90, COMPLETIONS, {"n": 8, "prompt": ["a"] * 64}, VALUE, (400, "kv_capacity"), (429, "queue_full")
        ),
        # Rules that leave no token: the answer ends or goes on, it does not fail (found here).
        asking(93, COMPLETIONS, {"allowed_token_ids": [EOS], "min_tokens": 3}, OK),
        asking(
            93,
            COMPLETIONS,
            {"allowed_token_ids": [70, 71], "bad_words": [chr(i) for i in range(33, 127)]},
            OK,
        ),
        asking(93, CHAT, {"allowed_token_ids": [EOS], "min_tokens": 3, "stream": True, "logprobs": True}, OK),
        asking(
            93,
            CHAT,
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3, "ignore_eos": True},
            OK,
        ),
    ]


def predictions() -> list[Entry]:
    """What an answer is expected to say."""
    no_texts: list[Any] = [5, None, {}, ["x"], [{}], [5]]
    return [
        *asking_each(
            98,
            CHAT,
            "prediction",
            [
                *("x", [], {}, {"type": "content"}, {"content": "x"}, {"type": "text", "content": "x"}),
                *({"type": "content", "content": content} for content in no_texts),
                {"type": "content", "content": [{"type": "image", "text": "x"}]},
                {"type": "content", "content": [{"type": "text", "text": 5}]},
                {"type": "content", "content": "x" * 100_000},
            ],
            VALUE,
        ),
        *asking_each(
            98,
            CHAT,
            "prediction",
            [
                {"type": "content", "content": "hello there"},
                {"type": "content", "content": ""},
                {
                    "type": "content",
                    "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": ""}],
                },
            ],
            OK,
        ),
        posting(98, "half a pair", CHAT, b'{"prediction": {"content": "\\ud800"}}', (400, "invalid_unicode")),
        asking(98, COMPLETIONS, {"prediction": {"type": "content", "content": "x"}}, UNSUPPORTED),
    ]


def outputs() -> list[Entry]:
    """Log probabilities, streams and whatever else changes what is shown."""
    nan = b'{"model":"tiny","prompt":"hi","logit_bias":{"5":NaN}}'
    return [
        posting(94, "bias of NaN", COMPLETIONS, nan, (400, "invalid_number")),
        asking(
            94,
            CHAT,
            {"logit_bias": ALL_DOWN, "allowed_token_ids": list(range(LIMITS.biases)), "max_tokens": 20},
            OK,
        ),
        *asking_each(95, CHAT, "logprobs", [1, "x", 5], VALUE),
        *(
            asking(95, CHAT, {"logprobs": True, "top_logprobs": value}, VALUE)
            for value in (21, -1, "x", True)
        ),
        asking(95, CHAT, {"logprobs": True, "top_logprobs": 20}, OK),
        asking(95, CHAT, {"top_logprobs": 3}, VALUE),
        asking(95, CHAT, {"logprobs": True, "return_drafted": True}, OK),
        asking(95, CHAT, {"logprobs": True, "return_drafted": 1}, VALUE),
        asking(95, CHAT, {"return_drafted": True}, VALUE),
        asking(95, CHAT, {"logprobs": False, "top_logprobs": 3}, VALUE),
        *asking_each(95, COMPLETIONS, "logprobs", [6, -1, True, "x", 10**9], VALUE),
        asking(95, COMPLETIONS, {"logprobs": 5, "temperature": 0}, OK, check=all_finite),
        asking(
            95,
            COMPLETIONS,
            {"logprobs": 0, "allowed_token_ids": [5], "ignore_eos": True},
            OK,
            check=all_finite,
        ),
        *(
            asking(97, route, {"stream_options": {"include_usage": True}}, VALUE)
            for route in (CHAT, COMPLETIONS)
        ),
        asking(97, CHAT, {"stream": True, "stream_options": {"other": True}}, VALUE),
        asking(97, CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, VALUE),
        asking(
            97,
            CHAT,
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            OK,
        ),
        posting(99, "200 MB salt", CHAT, b'{"cache_salt": "' + b"x" * 3_000_000, (413, "body_too_large")),
        asking(100, CHAT, {"priority": -1}, (403, "not_permitted"), key="low"),
        asking(100, CHAT, {"priority": 0}, OK, key="low"),
        asking(103, COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}, OK),
        asking(103, COMPLETIONS, {"echo": True, "logprobs": 5, "max_tokens": 0, "n": 8, "stream": True}, OK),
        asking(
            103, CHAT, {"ignore_eos": True, "stop": ["a", "b"], "min_tokens": 3, "stop_token_ids": [5]}, OK
        ),
        *(
            asking(103, route, {"prompt_logprobs": 1, "stream": True}, UNSUPPORTED)
            for route in (CHAT, COMPLETIONS)
        ),
        asking(102, CHAT, {"ignore_eos": True, "max_tokens": ...}, OK, seconds=20.0),
    ]


def formats() -> list[Entry]:
    return [
        # What a client calls a timeout is an unknown field; a deadline is a whole number of milliseconds.
        *(asking(101, CHAT, {"timeout": value}, OK) for value in (0, -1, 10**9)),
        *(
            asking(101, route, {name: value}, VALUE)
            for route in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
            for name in ("deadline_ms", "ttft_slo_ms", "itl_slo_ms")
            for value in (0, -1, 1.5, "100", MAX_OBJECTIVE_MS + 1)
        ),
        *(
            asking(101, CHAT, {name: MAX_OBJECTIVE_MS}, OK)
            for name in ("deadline_ms", "ttft_slo_ms", "itl_slo_ms")
        ),
        asking(101, CHAT, {"on_infeasible": "hope"}, VALUE),
    ]


ENTRIES = [*ranges(), *together(), *predictions(), *outputs(), *formats()]
