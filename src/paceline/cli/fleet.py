"""`paceline fleet`: see the engines behind a running server, and take one of them out of service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.command import Command
from paceline.cli.steer import ServerOptions
from paceline.config.options import option
from paceline.errors import InputError

ROUTE = "/v1/admin/fleet"
WORDS = ("ls", "drain", "resume")
HELP = """
See the engines behind a server, and take one out of service.

  paceline fleet ls
  paceline fleet drain 1                  # nothing new comes to it
  paceline fleet drain 1 --timeout-s 0    # what it has goes on elsewhere now
  paceline fleet resume 1

Needs an admin key in PACELINE_ADMIN_KEY, or none for a server without keys on the same machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What is to be done with which engine."""

    words: tuple[str, ...] | None = option(
        None, "ls, drain NUMBER or resume NUMBER", kind=tuple, argument=True, metavar="WHAT"
    )
    timeout_s: float = option(
        30.0,
        "seconds that its requests may take to end before they go on in other engines",
        low=0.0,
        high=600.0,
    )


def _fleet(given: Mapping[str, Any]) -> None:
    what, *numbers = given["words"] or ("ls",)
    if what not in WORDS or (what == "ls") != (not numbers) or len(numbers) > 1:
        raise InputError("say what to do: paceline fleet ls, drain NUMBER or resume NUMBER")
    if numbers and not numbers[0].isdigit():
        raise InputError(f"{numbers[0]} is no engine; paceline fleet ls has their numbers")

    from paceline.cli.remote import admin_connection

    connection = admin_connection(given["url"])
    if what == "ls":
        found = connection.ask("GET", ROUTE)
    else:
        query = f"?timeout_s={given['timeout_s']:g}" if what == "drain" else ""
        found = connection.ask("POST", f"{ROUTE}/{int(numbers[0])}/{what}{query}")
    if given["json"]:
        print(json.dumps(found, indent=2))
        return
    for line in lines(found.get("engines", [found])):
        print(line)
    if found.get("moved"):
        print(f"{found['moved']} requests go on in other engines")


def lines(engines: list[dict[str, Any]]) -> list[str]:
    """A table of engines."""
    found = [f"{'engine':>6}  {'state':9} {'running':>7} {'waiting':>7} {'KV':>5}  {'restarts':>8}  pid"]
    for each in engines:
        found.append(
            f"{each['number']:>6}  {each['state']:9} {each['running']:>7} {each['waiting']:>7} "
            f"{each['kv_usage']:>5.0%}  {each.get('restarts', 0):>8}  {each.get('pid') or ''}"
        )
    return found


FLEET = Command(name="fleet", help=HELP, run=_fleet, takes=(FleetOptions, ServerOptions))
