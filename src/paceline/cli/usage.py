"""`paceline usage`: sums over a ledger, from its file or from the server that writes it, for people, JSON and CSV.

Owns the flags and what is printed; the sums are `server.billing.usage_report`'s.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from paceline.cli.command import Command
from paceline.cli.terminal import columns
from paceline.config.options import option
from paceline.errors import InputError

HELP = """
Sum up usage and cost by key, class, model or day.

  paceline usage --ledger ledger.db --by key --since 24h
  paceline usage --ledger ledger.db --by day,class --since 2026-01-01 --csv
  paceline usage --url http://localhost:8000 --by key --json

The file can be read while a server writes it. For a server, the key is read from PACELINE_ADMIN_KEY, or from
PACELINE_API_KEY if that is an admin key. Days and times are UTC; a request counts when it was admitted.
"""
HEADS = {
    "requests": "requests",
    "incomplete": "incomplete",
    "open": "open",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "recomputed_tokens": "recomputed",
    "preemptions": "preempted",
    "kv_block_us": "KV block s",
    "billed_nano_units": "billed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """What `paceline usage` takes."""

    by: str = option(
        "key", "what to sum by: key, class, model, day; several: separated by commas", metavar="NAMES"
    )
    since: str = option(
        "", "start: a time ago (90m, 24h, 7d) or a date, with or without a time", metavar="WHEN"
    )
    until: str = option("", "end, in the same form", metavar="WHEN")
    ledger: str = option("", "ledger file", metavar="FILE")
    url: str = option("", "server to ask instead", metavar="URL")
    json: bool = option(False, "print one JSON object")
    csv: bool = option(False, "print CSV with a header line")


def _run(given: Mapping[str, Any]) -> None:
    options = UsageOptions(**given)
    if bool(options.ledger) == bool(options.url):
        raise InputError("say where to look: --ledger FILE names a ledger, --url URL a server")
    if options.json and options.csv:
        raise InputError("give --json or --csv, not both")

    from paceline.server.billing.usage_report import read_by

    by = read_by(options.by)
    values = _from_server(options) if options.url else _from_file(options, by)
    rows: list[dict[str, Any]] = values["data"]
    if options.json:
        print(json.dumps(values))
    elif options.csv:
        print(_csv(rows, by), end="")
    elif not rows:
        print("nothing was used in that time")
    else:
        _table(rows, by)


def _from_file(options: UsageOptions, by: Sequence[str]) -> dict[str, Any]:
    from paceline.server.billing.usage_report import read_time, read_usage

    since, until = (
        read_time(text, name) if text else None
        for name, text in (("--since", options.since), ("--until", options.until))
    )
    rows = read_usage(options.ledger, by, since, until)
    return {"object": "usage", "by": list(by), "since_ms": since, "until_ms": until, "data": rows}


def _from_server(options: UsageOptions) -> dict[str, Any]:
    from paceline.cli.remote import admin_connection

    given = {"by": options.by, "since": options.since, "until": options.until}
    query = urlencode({name: text for name, text in given.items() if text})
    return admin_connection(options.url).ask("GET", f"/v1/admin/usage?{query}")


def _csv(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> str:
    from paceline.server.billing.usage_report import SUMS

    text = io.StringIO()
    writer = csv.DictWriter(text, [*by, *SUMS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    lines = [[*by, *HEADS.values()]]
    lines += [[*(str(row[name]) for name in by), *_figures(row)] for row in rows]
    if len(rows) > 1:
        total = {name: sum(row[name] for row in rows) for name in HEADS}
        lines.append(["all", *("" for _ in by[1:]), *_figures(total)])
    print(*columns(lines, len(by)), sep="\n")


def _figures(row: Mapping[str, Any]) -> list[str]:
    from paceline.server.billing.pricing import shown

    exact = {"kv_block_us": 6, "billed_nano_units": 9}
    return [shown(row[name], exact[name]) if name in exact else f"{row[name]:,}" for name in HEADS]


USAGE = Command(name="usage", help=HELP, run=_run, takes=(UsageOptions,))
