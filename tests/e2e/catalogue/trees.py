"""Entry 116: live trees and searches. What needs an answer under way is in `tests/e2e/test_serve_trees.py`."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.catalogue.entry import CHAT, COMPLETIONS, GOOD, OK, VALUE, Answer, Entry, asking, entry
from tests.e2e.catalogue.served import signed

NO_REQUEST, UNKNOWN_FIELD = (404, "request_not_found"), (400, "unknown_parameter")
NAMES = ("nothing", "chatcmpl-0", "1", "999999999999999999", "a%2fb", "%00", "x" * 500)


def posting_to(path: str, body: dict[str, Any], *answers: Answer) -> Entry:
    name = f"/v1/requests/{path} {json.dumps(body):.60}"
    return entry(116, name[:120], signed("POST", f"/v1/requests/{path}", body), *answers)


BAD_TREES: list[Any] = [5, [], {"max_rows": 0}, {"max_rows": "a"}, {"rows": 1}, {"max_branches": 257}]
BAD_SEARCHES: list[Any] = [5, [], {}, {"type": "luck"}, {"type": "beam", "width": 99}]
ENTRIES: list[Entry] = [
    *(
        posting_to(f"{name}/{what}", body, NO_REQUEST)
        for name in NAMES
        for what, body in (("fork", {}), ("extend", {"text": "a"}), ("prune", {}), ("3/fork", {}))
    ),
    *(
        entry(116, f"{name}/tree", signed("GET", f"/v1/requests/{name}/tree", None), NO_REQUEST)
        for name in NAMES
    ),
    *(
        posting_to("nothing/fork", {field: value}, VALUE)
        for field, values in {
            "n": (0, -1, 1.5, "2", 10**6),
            "at": (-1, 2**31, "0", 0.5, [1]),
            "append": (5, {}, True),
            "score": ("high", True, 1e300),
            "temperature": (-1, 3, "hot"),
            "max_tokens": (0, -1, "all"),
            "stream": (1, "yes"),
            "on_stop": ("wait", True),
            "hold_s": (0, -1, 10**6),
        }.items()
        for value in values
    ),
    posting_to("nothing/fork", {"prompt": "a"}, UNKNOWN_FIELD),
    posting_to("nothing/extend", {}, VALUE),
    posting_to("nothing/extend", {"text": "a", "tokens": [5]}, VALUE),
    posting_to("nothing/extend", {"tokens": [-1]}, VALUE),
    posting_to("nothing/prune", {"branches": []}, VALUE),
    posting_to("nothing/prune", {"branches": ["a"]}, VALUE),
    *(asking(116, route, {"tree": value}, VALUE) for route in (CHAT, COMPLETIONS) for value in BAD_TREES),
    *(
        asking(116, route, fields, VALUE)
        for route in (CHAT, COMPLETIONS)
        for fields in (
            *({"search": value} for value in BAD_SEARCHES),
            {"search": {"type": "best_of", "n": 0}},
            {"search": {"type": "best_of", "colour": 1}},
            {"search": {"type": "self_consistency"}},
            {"search": {"type": "self_consistency", "pattern": "(a"}},
            {"search": {"type": "best_of"}, "best_of": 3},
            {"best_of": 2, "n": 3},
            {"best_of": 3, "stream": True},
            {"length_penalty": 2.0},
            {"use_beam_search": "yes"},
        )
    ),
    *(asking(116, route, {"on_stop": "hold"}, VALUE) for route in (CHAT, COMPLETIONS)),
    asking(116, COMPLETIONS, {"tree": {"max_rows": 1, "max_tokens": 3, "max_branches": 1}}, OK),
    # The engine finds out, so that this is no body for a server without one.
    entry(
        116,
        "more tokens than its tree may have",
        signed("POST", COMPLETIONS, GOOD[COMPLETIONS] | {"tree": {"max_tokens": 2}}),
        (429, "tree_limit_exceeded"),
    ),
]
