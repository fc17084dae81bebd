"""`paceline explain`: the story of one request, from a run log.

Owns the flags and what is printed; what a log knows is in `audit.explain`, the sentences in `audit.story`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from paceline.cli.options import Flag, Panel, add_command
from paceline.config import option
from paceline.errors import InputError

HELP = """
Say why a request waited, gave way or was refused: its decisions as sentences, each with the figures it was made from.

\b
  paceline sim --rate 20 --log run.jsonl.gz
  paceline explain 17 --log run.jsonl.gz
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What `paceline explain` takes."""

    request: str = option("", "number of the request")
    log: str = option("", "run log it is in")
    json: bool = option(False, "print one JSON object: the sentences, and every decision by name")


PANELS = (
    Panel(
        title="Request",
        config=ExplainOptions,
        flags=(
            Flag(name="request", metavar="ID", is_argument=True),
            Flag(name="log", metavar="FILE"),
            Flag(name="json"),
        ),
    ),
)


def add_explain(app: typer.Typer) -> None:
    add_command(app, "explain", _run, PANELS, HELP)


def _run(values: Mapping[str, Any]) -> None:
    options = ExplainOptions(**values)
    if not options.request:
        raise InputError("say which request: paceline explain 17 --log run.jsonl.gz")
    if not options.log:
        raise InputError("say where the request is: --log FILE names a run log")
    if not options.request.isascii() or not options.request.isdigit():
        raise InputError(f"{options.request} is no number; a run log numbers its requests")

    from paceline.audit.explain import explain_from_log
    from paceline.audit.runlog import read_run_log

    found = explain_from_log(read_run_log(options.log), int(options.request))
    if options.json:
        typer.echo(json.dumps(found.values(), indent=2))
    else:
        for sentence in found.sentences():
            typer.echo(sentence)
