"""`paceline bench compare`: two result files in, a table of differences out, and an exit code for machines.

Owns reading the files and pairing their results. What a difference means is the bench part's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.bench.view import FORMAT, note, show
from paceline.cli.flags import split_list, writable, write_json
from paceline.config.options import from_values
from paceline.errors import InputError, PacelineError
from paceline.lab.bench.bench_options import CompareOptions
from paceline.lab.bench.compare import MeasureDifference, differing, worse_than
from paceline.lab.bench.compare import compare as compare_results
from paceline.lab.bench.tables import Grid, rounded
from paceline.lab.report.table import format_number

SERVE, SWEEP = "serve", "sweep"


class WorseThanAllowed(PacelineError):
    """A measure is worse by more than --fail-if-worse allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    value: Mapping[str, Any]
    kind: str

    def results(self) -> dict[str, Mapping[str, Any]]:
        """By what they measured. Each carries what the file says about all of them."""
        if self.kind == SERVE:
            return {"": self.value}
        shared = {name: entry for name, entry in self.value.items() if name != "results"}
        return {_label(result): {**shared, **result} for result in self.value["results"]}


def compare(values: Mapping[str, Any]) -> None:
    options = from_values(CompareOptions, values)
    allowed = _share(options.fail_if_worse)
    target = writable("--json", options.json)
    before, after = _read(options.before), _read(options.after)
    if before.kind != after.kind:
        raise InputError(
            f"{before.name} is of bench {before.kind} and {after.name} of bench {after.kind}; compare two of a kind"
        )
    _note_versions(before, after)
    pairs = _pairs(before, after)
    worse: list[str] = []
    plain: dict[str, Any] = {"format": FORMAT, "kind": "compare", "before": before.name, "after": after.name}
    plain["results"] = []
    for label, first, second in pairs:
        warnings = differing(first, second)
        for line in warnings:
            note(f"{label + ': ' if label else ''}{line}; the comparison may mean nothing")
        found = _wanted(compare_results(first, second, confidence=options.confidence), options.measures)
        title = f"{before.name} and {after.name}{f', {label}' if label else ''}"
        show(title, _grid(found, options.confidence))
        worse += [_worse(label, each) for each in worse_than(found, allowed or 0.0)]
        entry = [{**asdict(each), "verdict": each.verdict} for each in found]
        plain["results"].append({"label": label, "warnings": warnings, "differences": entry})
    if target is not None:
        write_json(target, rounded(plain))
        print(f"Wrote {target}")
    if allowed is not None and worse:
        raise WorseThanAllowed(f"worse by more than {allowed * 100:g} %: {'; '.join(worse)}")


def _worse(label: str, each: MeasureDifference) -> str:
    return f"{label + ' ' if label else ''}{each.name} {each.change:+.1%}"


def _grid(found: Sequence[MeasureDifference], confidence: float) -> Grid:
    rows = [
        (
            each.name,
            format_number(each.before),
            format_number(each.after),
            f"{each.change:+.1%}",
            "-" if each.low is None or each.high is None else f"{each.low:+.1%} to {each.high:+.1%}",
            each.verdict,
        )
        for each in found
    ]
    return Grid(
        headings=("measure", "before", "after", "change", f"{confidence:g} % interval", "verdict"), rows=rows
    )


def _read(name: str) -> _File:
    if not name:
        raise InputError("name two result files: paceline bench compare before.json after.json")
    try:
        value = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise InputError(f"{name}: is not valid JSON ({error})") from None
    if isinstance(value, dict) and "request_throughput" in value and "completed" in value:
        return _File(name=name, value=value, kind=SERVE)  # other tools write such files as well
    kind = value.get("kind") if isinstance(value, dict) and value.get("format") == FORMAT else None
    if kind not in (SWEEP, "throughput", "latency") or not isinstance(value.get("results"), list):
        raise InputError(f"{name}: is no result of paceline bench serve, sweep, throughput or latency")
    return _File(name=name, value=value, kind=kind)


def _pairs(before: _File, after: _File) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    one, two = before.results(), after.results()
    for name, own, other in ((before.name, one, two), (after.name, two, one)):
        lacking = [label for label in own if label not in other]
        if lacking:
            note(f"only {name} has {', '.join(lacking)}; left out")
    common = [label for label in one if label in two]
    if not common:
        raise InputError(f"{before.name} and {after.name} measured nothing in common")
    return [(label, one[label], two[label]) for label in common]


def _label(result: Mapping[str, Any]) -> str:
    if "request_rate" in result:
        rate, users = result["request_rate"], result.get("max_concurrency")
        return f"{users} users" if rate == "inf" else f"{rate:g}/s"
    return f"{result.get('workload')} {result.get('mode', '')}".strip()


def _note_versions(before: _File, after: _File) -> None:
    """Of what is usually compared: no reason to worry, and good to see."""

    def version(value: Mapping[str, Any]) -> str:
        server = value.get("server") or {}
        return str(server.get("version") or (value.get("versions") or {}).get("paceline") or "unknown")

    for name, file in (("before", before), ("after", after)):
        commit = file.value.get("commit")
        note(f"{name}: {file.name}, version {version(file.value)}, commit {commit or 'unknown'}")


def _wanted(found: list[MeasureDifference], measures: str | None) -> list[MeasureDifference]:
    if measures is None:
        return found
    names = split_list(measures, "--measures")
    there = {each.name: each for each in found}
    lacking = [name for name in names if name not in there]
    if lacking:
        raise InputError(f"--measures {', '.join(lacking)}: not in both files; there are {', '.join(there)}")
    return [there[name] for name in names]


def _share(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = float(text.rstrip("% ")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise InputError(f"--fail-if-worse '{text}' is no percentage; give one such as 10%")
    return share
