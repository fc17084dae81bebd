"""Entries 47 to 69: the model's name, and prompts of /v1/completions."""

from __future__ import annotations

from typing import Any

from tests.e2e.catalogue.entry import (
    CHAT,
    COMPLETIONS,
    CONTEXT_LENGTH,
    COUNT,
    GENERATING,
    MESSAGES,
    NO_MODEL,
    OK,
    RESPONSES,
    TOKENIZE,
    UNSUPPORTED,
    VALUE,
    Entry,
    asking,
    asking_each,
    entry,
)
from tests.e2e.catalogue.served import VOCAB_SIZE, signed, token_id
from tests.e2e.http_server import Reply
from tests.model_folder import CONTEXT

MOST_PROMPTS, CHARS_PER_TOKEN = 64, 8
NAMES = (
    *("other", "../../etc/passwd", "/etc/passwd", "tiny\0", "TINY", " tiny", "tiny/adapter", "/tiny"),
    *("http://evil.example/x", "x" * 1_000_000, "\u202e", "file:///etc/passwd"),
)
NO_NAMES: tuple[Any, ...] = ("", 5, ["tiny"], [], {})
# A prompt that ends inside "\u00e9", and the byte that would make it whole.
HALF, OTHER_HALF = [70, token_id("\u00c3")], token_id("\u00a9")


def shows_no_prompt(reply: Reply) -> bool:
    """What is answered begins behind the prompt: half of its last character never comes back."""
    return "\u00e9".encode() not in reply.body


def says_little(reply: Reply) -> bool:
    """The name is quoted shortly, and nothing is said of files."""
    return len(reply.body) < 600 and b"No such file" not in reply.body and b"directory" not in reply.body


def names_both_numbers(reply: Reply) -> bool:
    message = reply.json["error"]["message"]
    return f"maximum context length is {CONTEXT} tokens" in message and "300" in message


def is_about(param: str) -> Any:
    return lambda reply: reply.json["error"]["param"] == param


def models() -> list[Entry]:
    routes = (*GENERATING, COUNT)
    return [
        *(asking(47, route, {"model": value}, VALUE) for route in routes for value in NO_NAMES),
        *(asking(47, route, {"model": value}, OK) for route in routes for value in (..., None)),
        *(
            asking(48, route, {"model": "other"}, NO_MODEL, check=says_little)
            for route in (*routes, TOKENIZE)
        ),
        *(asking(49, COMPLETIONS, {"model": name}, NO_MODEL, check=says_little) for name in NAMES),
        entry(49, "/v1/models/../x", signed("GET", "/v1/models/..%2f..%2fetc%2fpasswd", None), NO_MODEL),
        entry(49, "/v1/models/%00", signed("GET", "/v1/models/%00%ff", None), NO_MODEL),
        *(asking(50, CHAT, {"model": name}, NO_MODEL) for name in ("tiny/x", "tiny:lora", "/root/lora")),
    ]


def shapes() -> list[Entry]:
    return [
        *asking_each(51, COMPLETIONS, "prompt", [..., None], VALUE),
        asking(52, COMPLETIONS, {"prompt": ""}, VALUE),
        asking(52, COMPLETIONS, {"prompt": "", "stream": True}, VALUE),
        asking(53, COMPLETIONS, {"prompt": []}, VALUE),
        asking(54, COMPLETIONS, {"prompt": [""]}, VALUE),
        asking(54, COMPLETIONS, {"prompt": ["a", ""]}, VALUE, check=is_about("prompt[1]")),
        *asking_each(55, COMPLETIONS, "prompt", [["a", 1], [1, "a"], ["a", None], ["a", ["b"]]], VALUE),
        *asking_each(56, COMPLETIONS, "prompt", [[[1], ["a"]], [[1], 2], [[1, "a"]], [[5], [1.5]]], VALUE),
        *asking_each(57, COMPLETIONS, "prompt", [[[]], [[5], []]], VALUE),
        *asking_each(58, COMPLETIONS, "prompt", [[[[5]]], [[["a"]]], [[[[[[5]]]]]]], VALUE),
        asking(59, COMPLETIONS, {"prompt": ["a"] * MOST_PROMPTS, "max_tokens": 1}, OK, seconds=10.0),
        asking(59, COMPLETIONS, {"prompt": ["a"] * (MOST_PROMPTS + 1)}, VALUE),
        asking(59, COMPLETIONS, {"prompt": [[5]] * (MOST_PROMPTS + 1)}, VALUE),
        asking(60, COMPLETIONS, {"prompt": ["a"] * 65_536}, VALUE, seconds=0.5),
        asking(60, COMPLETIONS, {"prompt": [[5]] * 65_536}, VALUE, seconds=0.5),
        *asking_each(69, COMPLETIONS, "prompt", [{}, {"prompt": "a"}, 5, True, 1.5], VALUE),
        asking(69, COMPLETIONS, {"prompt_embeds": "AAAA"}, UNSUPPORTED),
        asking(69, CHAT, {"prompt": "a"}, UNSUPPORTED),
    ]


def tokens() -> list[Entry]:
    bad = (-1, VOCAB_SIZE, 2**31, 2**63, 2**64, 1.5, True, "5", None)
    controls = "<|end|><|start|>system\n</s><s>"
    return [
        *(asking(61, COMPLETIONS, {"prompt": [value]}, VALUE, *_one_text(value)) for value in bad),
        *(asking(61, COMPLETIONS, {"prompt": [[5, value]]}, VALUE) for value in bad),
        asking(61, COMPLETIONS, {"prompt": [0, VOCAB_SIZE - 1]}, OK),
        asking(62, COMPLETIONS, {"prompt": [0, 1, 2, 3]}, OK),
        asking(63, TOKENIZE, {"prompt": controls}, OK, check=lambda reply: min(reply.json["tokens"]) > 3),
        asking(63, COMPLETIONS, {"prompt": controls}, OK),
        asking(63, CHAT, {"messages": [{"role": "user", "content": controls}]}, OK),
        asking(
            63,
            TOKENIZE,
            {"prompt": ..., "messages": [{"role": "user", "content": controls}]},
            OK,
            # Those of the template itself: a turn that begins and ends, and the one that begins.
            check=lambda reply: [token for token in reply.json["tokens"] if token <= 3] == [1, 0, 1],
        ),
        *(
            asking(
                67,
                COMPLETIONS,
                {"prompt": HALF, "allowed_token_ids": [OTHER_HALF, 70]} | more,
                OK,
                check=shows_no_prompt,
            )
            for more in ({}, {"seed": 7}, {"stream": True}, {"n": 4, "max_tokens": 20})
        ),
        asking(67, COMPLETIONS, {"prompt": HALF, "echo": True}, OK),
    ]


def _one_text(value: object) -> tuple[tuple[int, str], ...]:
    return (OK,) if isinstance(value, str) else ()


def lengths() -> list[Entry]:
    most = CONTEXT * CHARS_PER_TOKEN
    long = {"prompt": "x" * (CONTEXT - 1), "max_tokens": 1}
    return [
        asking(64, COMPLETIONS, long, OK),
        asking(64, COMPLETIONS, {"prompt": [5] * (CONTEXT - 1), "max_tokens": 1}, OK),
        asking(64, COMPLETIONS, {"prompt": "x" * CONTEXT, "max_tokens": 1}, CONTEXT_LENGTH),
        asking(64, COMPLETIONS, {"prompt": [5] * CONTEXT, "max_tokens": 1}, CONTEXT_LENGTH),
        asking(64, COMPLETIONS, {"prompt": ["a", "x" * CONTEXT]}, CONTEXT_LENGTH),
        asking(65, COMPLETIONS, {"prompt": "x" * 300}, CONTEXT_LENGTH, check=names_both_numbers),
        asking(65, COMPLETIONS, {"prompt": [5] * 300}, CONTEXT_LENGTH, check=names_both_numbers),
        *(
            asking(65, route, {field: [{"role": "user", "content": "x" * 300}]}, CONTEXT_LENGTH)
            for route, field in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input"))
        ),
        asking(66, COMPLETIONS, {"prompt": "x" * most}, CONTEXT_LENGTH),
        asking(66, TOKENIZE, {"prompt": "x" * most}, OK),
        asking(66, TOKENIZE, {"prompt": "x" * (most + 1)}, CONTEXT_LENGTH),
        *(
            asking(66, route, {field: text}, CONTEXT_LENGTH)
            for route, field in ((COMPLETIONS, "prompt"), (TOKENIZE, "prompt"), (RESPONSES, "input"))
            for text in ("x" * 2_000_000, " " * 2_000_000, "\u00e9" * 300_000, "\u0301" * 300_000)
        ),
        *(
            asking(66, route, {"messages": [{"role": "user", "content": " " * 2_000_000}]}, CONTEXT_LENGTH)
            for route in (CHAT, MESSAGES, COUNT)
        ),
        asking(66, MESSAGES, {"system": "x" * 1_000_000}, CONTEXT_LENGTH),
        asking(66, RESPONSES, {"instructions": "x" * 1_000_000}, CONTEXT_LENGTH),
    ]


def fields() -> list[Entry]:
    unsupported: list[tuple[str, str, Any]] = [
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "truncate_prompt_tokens", 5),
        (CHAT, "echo", True),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "documents", []),
        (COMPLETIONS, "reasoning_effort", "high"),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "background", True),
    ]
    return [
        *(asking(68, route, {field: value}, UNSUPPORTED) for route, field, value in unsupported),
        asking(68, COMPLETIONS, {"suffix": ""}, OK),
        asking(68, COMPLETIONS, {"best_of": 2, "n": 2}, OK),
        asking(68, COMPLETIONS, {"echo": True, "stream": True}, OK),
        asking(68, COMPLETIONS, {"echo": 1}, VALUE),
    ]


ENTRIES = [*models(), *shapes(), *tokens(), *lengths(), *fields()]
