"""The command lines of `paceline keys`: which options they take and their help pages."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.cli.options import Flag, Panel
from paceline.config import check_options, option
from paceline.server.tenant import (
    BOUNDS,
    CLASSES,
    CONCURRENCY,
    DEFAULT_CLASS,
    LARGEST_PRICE,
    LARGEST_WEIGHT,
    LEAST_WEIGHT,
    PRIORITY,
    REQUESTS,
    TOKENS,
)

FILE_VARIABLE = "PACELINE_API_KEYS_FILE"
HELP = "Make, list and revoke the keys of a server."
ADD_HELP = f"""
Make a key and print it, once; only its hash goes to the file, which is made if there is none.

\b
  paceline keys add team-a --file keys.jsonl
  paceline keys add night --file keys.jsonl --class batch --tokens-per-minute 2m --max-concurrency 8

A name that was revoked can be added again. The file may also be named by {FILE_VARIABLE}. A running server reads it
again when it gets SIGHUP.
"""
LIST_HELP = "List the keys of a file, with their class and limits."
REVOKE_HELP = """
Let nobody in with a key any more. Its line stays in the file, so that its name still says whose the past is.

A running server goes on letting it in until it gets SIGHUP.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Which file, and how the answer looks."""

    file: str | None = option(None, f"the keys file; else {FILE_VARIABLE} says", kind=str)
    json: bool = option(False, "answer with one JSON object")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """Which key."""

    name: str | None = option(None, "name of the key: letters, digits, dots, dashes, underscores", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """What a new key may do and what it pays."""

    admin: bool = option(False, "may use the admin routes: dial, policy, usage of all keys")
    service_class: str = option(DEFAULT_CLASS, "class of service", choices=CLASSES, flag="--class")
    weight: float = option(
        1.0,
        "share beside other keys where they are shared between fairly",
        low=LEAST_WEIGHT,
        high=LARGEST_WEIGHT,
    )
    requests_per_minute: int | None = option(
        None, "requests it may send in a minute", low=BOUNDS[REQUESTS][0], high=BOUNDS[REQUESTS][1], kind=int
    )
    tokens_per_minute: int | None = option(
        None,
        "tokens of prompts and answers it may use in a minute",
        low=BOUNDS[TOKENS][0],
        high=BOUNDS[TOKENS][1],
        kind=int,
    )
    max_concurrency: int | None = option(
        None,
        "requests it may have under way",
        low=BOUNDS[CONCURRENCY][0],
        high=BOUNDS[CONCURRENCY][1],
        kind=int,
    )
    lowest_priority_number: int | None = option(
        None,
        "smallest priority it may ask for; smaller goes first",
        low=BOUNDS[PRIORITY][0],
        high=BOUNDS[PRIORITY][1],
        kind=int,
    )
    price_prompt: float | None = option(
        None, "price of a million prompt tokens", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_cached_prompt: float | None = option(
        None, "price of a million prompt tokens from the cache", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_output: float | None = option(
        None, "price of a million generated tokens", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_kv_block_second: float | None = option(
        None, "price of a KV block for a second", low=0.0, high=LARGEST_PRICE, kind=float
    )

    def __post_init__(self) -> None:
        check_options(self)


_NAME = Panel(
    title="Key",
    config=NameOptions,
    optional=True,
    flags=(Flag(name="name", metavar="NAME", is_argument=True),),
)
_FILE = Panel(title="File", config=FileOptions, flags=(Flag(name="file", metavar="FILE"), Flag(name="json")))
_DEFAULTS = {"price_prompt": "0", "price_cached_prompt": "--price-prompt", "price_output": "0"}
_DEFAULTS["price_kv_block_second"] = "0"
_RIGHTS = Panel(
    title="Key",
    config=KeyOptions,
    flags=tuple(
        Flag(
            name=spec.name, default=_DEFAULTS.get(spec.name, None if spec.default is not None else "no limit")
        )
        for spec in fields(KeyOptions)
    ),
)
ADD_PANELS = (_NAME, _RIGHTS, _FILE)
LIST_PANELS = (_FILE,)
REVOKE_PANELS = (_NAME, _FILE)
