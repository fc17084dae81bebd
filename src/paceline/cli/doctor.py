"""`paceline doctor`: what this machine and installation offer, and what is wrong with them.

Owns what is printed and the exit code; facts are gathered in `doctor_facts`, judged in `doctor_problems`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from paceline.cli.options import Flag, Panel, add_command
from paceline.config import option

HELP = """
Check this installation and machine for problems.

Prints versions, cores, memory, disk, the default model, GPU and environment variables, then problems with what to do
about them. Exits with 1 only if something is broken.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What `paceline doctor` takes."""

    json: bool = option(False, "print one JSON object")


PANELS = (Panel(title="Result", config=DoctorOptions, flags=(Flag(name="json"),)),)


def add_doctor(app: typer.Typer) -> None:
    add_command(app, "doctor", doctor, PANELS, HELP)


def doctor(given: Mapping[str, Any]) -> None:
    from paceline.cli.doctor_facts import gather
    from paceline.cli.doctor_problems import find_problems

    facts = gather()
    problems = find_problems(facts)
    if given["json"]:
        found = [{"problem": one.text, "is_broken": one.is_broken} for one in problems]
        typer.echo(json.dumps({**facts, "problems": found}, indent=2))
    else:
        _print(facts)
        for one in problems:
            typer.echo(f"{'BROKEN' if one.is_broken else 'Note'}: {one.text}")
        if not problems:
            typer.echo("No problems found.")
    if any(one.is_broken for one in problems):
        raise typer.Exit(1)


def _print(facts: dict[str, Any]) -> None:
    cpu, memory, disk, model = facts["cpu"], facts["memory"], facts["cache"], facts["default_model"]
    lines = [
        ("versions", ", ".join(f"{name} {text or 'missing'}" for name, text in facts["versions"].items())),
        ("system", facts["system"]),
        ("cores", f"{cpu['cores']} to use, {cpu['threads'] or '?'} threads for arithmetic; {cpu['name']}"),
        ("instructions", _instructions(cpu["instructions"])),
        ("4-bit product", cpu["fast_4bit_product"] or "none that is fast"),
        ("memory", f"{_gib(memory['available_bytes'])} free of {_gib(memory['total_bytes'])}"),
        ("cache", f"{disk['path']}, {_gib(disk['free_bytes'])} free on its disk"),
        ("default model", model["path"] or "not downloaded; paceline pull fetches it"),
        ("GPU", ", ".join(facts["gpus"]) or "none"),
        *(("environment", f"{name}={value}") for name, value in facts["environment"].items()),
    ]
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        typer.echo(f"{label:<{width}}  {text}")
    typer.echo("")


def _instructions(found: dict[str, bool]) -> str:
    here = [name for name, is_there in found.items() if is_there]
    absent = [name for name, is_there in found.items() if not is_there]
    return f"{' '.join(here) or 'none that matter'}{f' (not: {chr(32).join(absent)})' if absent else ''}"


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
