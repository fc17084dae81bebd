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
HELP = "Create, list and revoke the API keys of a server."
ADD_HELP = f"""
Create a key and print it once.

The file gets only its hash, and is created if it does not exist.

\b
  paceline keys add team-a --file keys.jsonl
  paceline keys add night --file keys.jsonl --class batch --max-concurrency 8

A revoked name can be added again. {FILE_VARIABLE} can name the file as well. A running server reads the file again on
SIGHUP.
"""
LIST_HELP = "List the keys of a file with their class and limits."
REVOKE_HELP = """
Revoke a key.

Its line stays in the file, so that past usage keeps its name. A running server accepts the key until it gets SIGHUP.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Which file, and how the answer looks."""

    file: str | None = option(None, "keys file; default: PACELINE_API_KEYS_FILE", kind=str)
    json: bool = option(False, "print one JSON object")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """Which key."""

    name: str | None = option(None, "name of the key: letters, digits, dots, dashes, underscores", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """What a new key may do and what it pays."""

    admin: bool = option(False, "allow the admin routes: dial, policy, usage of all keys")
    service_class: str = option(
        DEFAULT_CLASS, "service class of its requests", choices=CLASSES, flag="--class"
    )
    weight: float = option(
        1.0,
        "share of this key under the fair policy",
        low=LEAST_WEIGHT,
        high=LARGEST_WEIGHT,
    )
    requests_per_minute: int | None = option(
        None, "most requests per minute", low=BOUNDS[REQUESTS][0], high=BOUNDS[REQUESTS][1], kind=int
    )
    tokens_per_minute: int | None = option(
        None,
        "most prompt and output tokens per minute",
        low=BOUNDS[TOKENS][0],
        high=BOUNDS[TOKENS][1],
        kind=int,
    )
    max_concurrency: int | None = option(
        None,
        "most requests at once",
        low=BOUNDS[CONCURRENCY][0],
        high=BOUNDS[CONCURRENCY][1],
        kind=int,
    )
    lowest_priority_number: int | None = option(
        None,
        "smallest priority it may ask for; smaller runs first",
        low=BOUNDS[PRIORITY][0],
        high=BOUNDS[PRIORITY][1],
        kind=int,
    )
    price_prompt: float | None = option(
        None, "price of a million prompt tokens", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_cached_prompt: float | None = option(
        None, "price of a million cached prompt tokens", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_output: float | None = option(
        None, "price of a million output tokens", low=0.0, high=LARGEST_PRICE, kind=float
    )
    price_kv_block_second: float | None = option(
        None, "price of a KV block per second", low=0.0, high=LARGEST_PRICE, kind=float
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
