"""`paceline dial`, `paceline policy` and `paceline fleet`: see and change how a running server schedules, and which of
its engines are in service.

Owns the flags and what is printed; the changes are made by the server's admin routes. The key comes from the
environment, PACELINE_ADMIN_KEY or else PACELINE_API_KEY, never from the command line, which others can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.command import Command
from paceline.config.engine import LEAST_TARGET_MS, MOST_TARGET_MS, POLICIES, SchedulerConfig
from paceline.config.options import CheckedOptions, from_values, option, options_of, panel_of
from paceline.errors import InputError, InvalidRequest

LOCAL = "http://127.0.0.1:8000"
POLICY_ROUTE, FLEET_ROUTE = "/v1/admin/policy", "/v1/admin/fleet"
DIAL_HELP = """
Move a running server between latency and throughput.

  paceline dial                       # show the setting
  paceline dial 0.3                   # 0: least latency, 1: most throughput
  paceline dial --itl-p99-ms 40       # hold the p99 between tokens at 40 ms
  paceline dial --ttft-p99-ms 800     # hold the p99 of first tokens at 800 ms
  paceline dial --off                 # the limits the server was started with

Needs an admin key in PACELINE_ADMIN_KEY, or none for a server without keys on the same machine.
"""
POLICY_HELP = """
Show or change the scheduling policy of a running server.

  paceline policy
  paceline policy fair --tenant-weights alice=2,bob=0.5
  paceline policy priority --ageing-s 10 --url http://gpu-3:8000

Running and waiting requests stay and are ordered anew from the next step on. Options that are not given keep their
values. --tenant-weights replaces all weights, also those of the keys file; tenants it does not name have 1. The answer
shows the weights before and after. Needs an admin key in PACELINE_ADMIN_KEY.
"""
FLEET_WORDS = ("ls", "drain", "resume")
FLEET_HELP = """
See the engines behind a server, and take one out of service.

  paceline fleet ls
  paceline fleet drain 1                  # nothing new comes to it
  paceline fleet drain 1 --timeout-s 0    # what it has goes on elsewhere now
  paceline fleet resume 1

Needs an admin key in PACELINE_ADMIN_KEY, or none for a server without keys on the same machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server, and how the answer looks."""

    url: str = option(LOCAL, "address of the server", metavar="URL")
    json: bool = option(False, "print the server's answer as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class DialOptions(CheckedOptions):
    """What the dial is to be."""

    position: float | None = option(
        None,
        "0: least latency, 1: most throughput",
        low=0.0,
        high=1.0,
        flag="VALUE",
        argument=True,
        metavar="VALUE",
    )
    itl_p99_ms: float | None = option(
        None, "p99 between tokens to hold, in milliseconds", low=LEAST_TARGET_MS, high=MOST_TARGET_MS
    )
    ttft_p99_ms: float | None = option(
        None, "p99 to the first token to hold, in milliseconds", low=LEAST_TARGET_MS, high=MOST_TARGET_MS
    )
    off: bool = option(False, "use the limits the server was started with")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The scheduling policy to use."""

    scheduling_policy: str | None = option(
        None, "policy to use", choices=POLICIES, argument=True, metavar="NAME"
    )


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


POLICY_PANEL = SchedulerConfig.PANEL
POLICY_OPTIONS = tuple(
    spec.name
    for spec in options_of(SchedulerConfig)
    if panel_of(SchedulerConfig, spec) == POLICY_PANEL and spec.name != "scheduling_policy"
)


def _dial(given: Mapping[str, Any]) -> None:
    options = from_values(DialOptions, given)
    found = _ask(given, "/v1/admin/dial", dial_body(options))
    _show(given, found, found.get("sentences", []))


def dial_body(options: DialOptions) -> dict[str, Any] | None:
    """What is asked of the server; None: nothing is to change."""
    from paceline.core.dial import chosen_setting

    try:
        setting = chosen_setting(options.position, options.itl_p99_ms, options.ttft_p99_ms)
    except InvalidRequest:
        raise InputError("give one of VALUE, --itl-p99-ms, --ttft-p99-ms and --off") from None
    if options.off:
        if setting is not None:
            raise InputError("give one of VALUE, --itl-p99-ms, --ttft-p99-ms and --off")
        return {"off": True}
    return None if setting is None else {setting.kind.value: setting.value}


def _policy(given: Mapping[str, Any]) -> None:
    changed = {name: given[name] for name in POLICY_OPTIONS if given[name] is not None}
    name = given["scheduling_policy"]
    if name is None and changed:
        raise InputError("name the policy whose options are to change: paceline policy fair --ageing-s 10")
    before = _weights(_ask(given, POLICY_ROUTE, None)) if "tenant_weights" in changed else None
    found = _ask(given, POLICY_ROUTE, None if name is None else {"policy": name, "options": changed})
    options = found.get("options", {})
    sentences = [f"Requests are ordered by {found.get('policy')}."]
    sentences += [
        f"  {name} = {value}"
        for name, value in options.items()
        if value not in (None, "") and name != "tenant_weights"
    ]
    if _weights(found) or before or found.get("policy") == "fair":
        sentences += weight_sentences(_weights(found), before)
    _show(given, found, sentences)


def _weights(found: Mapping[str, Any]) -> str:
    return str(found.get("options", {}).get("tenant_weights") or "")


def weight_sentences(now: str, before: str | None) -> list[str]:
    """Which shares tenants have now, and those they had where others took their place; None: nothing was asked for."""
    sentences = [
        f"  tenant_weights = {now} (1 for all others)" if now else "  tenant_weights: 1 for all tenants"
    ]
    if before is not None and before != now:
        sentences.append(f"These replace the weights there were: {before or '1 for all tenants'}.")
    return sentences


def _fleet(given: Mapping[str, Any]) -> None:
    what, *numbers = given["words"] or ("ls",)
    if what not in FLEET_WORDS or (what == "ls") != (not numbers) or len(numbers) > 1:
        raise InputError("say what to do: paceline fleet ls, drain NUMBER or resume NUMBER")
    if numbers and not numbers[0].isdigit():
        raise InputError(f"{numbers[0]} is no engine; paceline fleet ls has their numbers")
    if what == "ls":
        found = _ask(given, FLEET_ROUTE, None)
    else:
        query = f"?timeout_s={given['timeout_s']:g}" if what == "drain" else ""
        found = _ask(given, f"{FLEET_ROUTE}/{int(numbers[0])}/{what}{query}", None, "POST")
    sentences = engine_lines(found.get("engines", [found]))
    if found.get("moved"):
        sentences.append(f"{found['moved']} requests go on in other engines")
    _show(given, found, sentences)


def engine_lines(engines: list[dict[str, Any]]) -> list[str]:
    """A table of engines."""
    found = [f"{'engine':>6}  {'state':9} {'running':>7} {'waiting':>7} {'KV':>5}  {'restarts':>8}  pid"]
    for each in engines:
        found.append(
            f"{each['number']:>6}  {each['state']:9} {each['running']:>7} {each['waiting']:>7} "
            f"{each['kv_usage']:>5.0%}  {each.get('restarts', 0):>8}  {each.get('pid') or ''}"
        )
    return found


def _ask(
    given: Mapping[str, Any], path: str, body: dict[str, Any] | None, method: str = ""
) -> dict[str, Any]:
    from paceline.cli.remote import admin_connection

    return admin_connection(given["url"]).ask(method or ("GET" if body is None else "PUT"), path, body)


def _show(given: Mapping[str, Any], found: dict[str, Any], sentences: list[str]) -> None:
    if given["json"]:
        print(json.dumps(found, indent=2))
        return
    for sentence in sentences:
        print(sentence)


DIAL = Command(name="dial", help=DIAL_HELP, run=_dial, takes=(DialOptions, ServerOptions))
POLICY = Command(
    name="policy",
    help=POLICY_HELP,
    run=_policy,
    takes=(PolicyOptions, POLICY_PANEL, ServerOptions),
    defaults={
        **dict.fromkeys(POLICY_OPTIONS, "unchanged"),
        "tenant_weights": "unchanged; if given, replaces all weights",
    },
)
FLEET = Command(name="fleet", help=FLEET_HELP, run=_fleet, takes=(FleetOptions, ServerOptions))
