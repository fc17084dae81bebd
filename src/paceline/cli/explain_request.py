"""`paceline explain`: the story of one request, from a run log or from a server.

Owns the flags and what is printed; what a log knows is in `audit.explanation`, the sentences in `audit.story`. A server
tells only the key that sent a request; the key comes from the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.command import Command
from paceline.config.options import option
from paceline.errors import InputError

HELP = """
Explain why a request waited, was preempted or was rejected.

  paceline sim --rate 20 --log run.jsonl.gz
  paceline explain 17 --log run.jsonl.gz
  paceline explain chatcmpl-3f2a... --url http://localhost:8000
  paceline explain 42 --url http://localhost:8000

A server takes the id of an answer or the number that the live page shows. It is asked with the key in PACELINE_API_KEY,
and tells only about requests of that key.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What `paceline explain` takes."""

    request: str = option(
        "",
        "number of the request, in a log or on a server's live page, or the id of a server's answer",
        argument=True,
        metavar="ID",
    )
    log: str = option("", "run log it is in", metavar="FILE")
    url: str = option("", "server it was sent to", metavar="URL")
    json: bool = option(False, "print one JSON object: the sentences, and every decision by name")


def _run(given: Mapping[str, Any]) -> None:
    options = ExplainOptions(**given)
    if not options.request:
        raise InputError("say which request: paceline explain 17 --log run.jsonl.gz")
    if bool(options.log) == bool(options.url):
        raise InputError("say where the request is: --log FILE names a run log, --url URL a server")
    values, sentences = _from_server(options) if options.url else _from_log(options)
    if options.json:
        print(json.dumps(values, indent=2))
    else:
        for sentence in sentences:
            print(sentence)


def _from_log(options: ExplainOptions) -> tuple[dict[str, Any], list[str]]:
    if not options.request.isascii() or not options.request.isdigit():
        raise InputError(f"{options.request} is no number; a run log numbers its requests")

    from paceline.audit.explanation import explain_from_log
    from paceline.audit.runlog import read_run_log

    # The log of a server that runs, or was killed, ends anywhere; the story then says that it may go on.
    found = explain_from_log(read_run_log(options.log, allow_cut=True), int(options.request))
    return found.values(), found.sentences()


def _from_server(options: ExplainOptions) -> tuple[dict[str, Any], list[str]]:
    from paceline.cli.remote import Remote

    values = Remote(options.url, None).explain(options.request)
    sentences: list[str] = []
    for branch in values["branches"]:
        own = f", branch {branch['index']}" if len(values["branches"]) > 1 else ""
        number = branch.get("number")  # a request refused on arrival has none
        sentences.append(
            f"request {number} of the engine{own}:" if number is not None else f"request {values['id']}:"
        )
        sentences += branch["sentences"]
    return values, sentences


EXPLAIN = Command(name="explain", help=HELP, run=_run, takes=(ExplainOptions,))
