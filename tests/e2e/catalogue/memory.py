"""Entry 117: what a request asks of memory, and what only an operator may."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.catalogue.entry import (
    BAD_KEY,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OK,
    RESPONSES,
    VALUE,
    Entry,
    asking,
    asking_each,
    entry,
)
from tests.e2e.catalogue.served import signed

BAD_KEEPS = [
    *("x", 5, [], {}, {"first": 16}, {"recent": 16}, {"first": -1, "recent": 16}),
    *({"first": 16, "recent": 0}, {"first": 1.5, "recent": 16}, {"first": True, "recent": 16}),
    *({"first": 2**40, "recent": 16}, {"first": 16, "recent": 16, "colour": 1}),
]
OPERATED = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/models/tiny/sleep",
    "/v1/models/tiny/wake",
)
LATER = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "9h"}}

ENTRIES: list[Entry] = [
    *(each for route in (CHAT, COMPLETIONS) for each in asking_each(117, route, "kv_keep", BAD_KEEPS, VALUE)),
    asking(117, COMPLETIONS, {"kv_keep": {"first": 16, "recent": 16}, "prompt_logprobs": 1}, VALUE),
    asking(117, COMPLETIONS, {"kv_keep": {"first": 16, "recent": 16}}, OK),
    *(
        each
        for route in (CHAT, COMPLETIONS, RESPONSES)
        for each in asking_each(117, route, "prompt_cache_retention", ["48h", 3, [], {}], VALUE)
    ),
    asking(117, CHAT, {"prompt_cache_retention": "24h"}, OK),
    replace(
        asking(117, MESSAGES, {"messages": [{"role": "user", "content": [LATER]}]}, VALUE),
        fields=("cache_control",),
    ),
    *(
        entry(117, f"{path}, {name}", signed("POST", path, {}, key=key), answer)
        for path in OPERATED
        for name, key, answer in (
            ("no key", None, BAD_KEY),
            ("no admin key", "alpha", (403, "admin_only")),
        )
    ),
]
