"""`paceline bench serve`: one run of load against a server, the block of figures, the file.

Owns the order of things and the sentences beside the figures: what makes them mean less than they seem to.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from paceline.bench.load.asked import AskedLoad, LoadPoint, ask_load, parse_bounds, parse_percentiles
from paceline.bench.load.block import LoadShape, block_lines
from paceline.bench.load.bodies import BACKENDS
from paceline.bench.load.figures import ServeFigures, figures
from paceline.bench.load.generator import LoadRun
from paceline.bench.load.pacing import parse_ramp
from paceline.bench.load.results import result_json
from paceline.bench.load.source import RandomSource
from paceline.bench.machine import source_commit
from paceline.bench.serve_options import LoadOptions, ServeOptions
from paceline.cli.bench_output import FORMAT, note, write_json
from paceline.cli.bench_plan import own_options
from paceline.cli.bench_server import BenchServer
from paceline.cli.bench_session import LoadFailed, Session
from paceline.cli.doctor_facts import machine_facts
from paceline.cli.targets import writable
from paceline.errors import InputError

LATE_MS = 5.0
CACHED_SHARE = 0.5  # of all prompt tokens; the beginning that a chat template gives every prompt is less


def serve(values: Mapping[str, Any]) -> None:
    options = own_options(ServeOptions, with_bounds(_finite(values)))
    target = writable("--json", options.json)
    bounds, percentiles = parse_bounds(options.goodput), parse_percentiles(options.percentiles)
    point = LoadPoint(
        rate=options.rate,
        ramp=None if options.ramp is None else parse_ramp(options.ramp),
        max_concurrency=options.max_concurrency,
    )
    server, asked = open_load(options, [point])
    facts = server.facts()
    note(f"{server.model} at {server.url}: {asked.source.name}, {_sentence(asked, point)}")
    run = Session(server=server, asked=asked).run(point)
    found = figures(run, percentiles=percentiles, bounds=bounds)
    shape = LoadShape(rate=point.rate, max_concurrency=point.max_concurrency)
    print("\n".join(block_lines(found, shape)))
    for line in remarks(found, run, asked, point):
        note(line)
    if target is not None:
        value = {
            **environment("serve", options, facts),
            **settings(asked, point, bounds),
            **result_json(found, run),
        }
        write_json(value, target)
        print(f"Wrote {target}")
    end(run, found)


def open_load(options: LoadOptions, points: Sequence[LoadPoint]) -> tuple[BenchServer, AskedLoad]:
    """The server and what is asked of it. Mistakes that need no server are told before one is asked."""
    asked = ask_load(options)
    asked.form("")
    for point in points:
        asked.plan(point)
    server = BenchServer(options.url, options.model, options.api)
    asked = asked.fitted(server.max_model_len)
    if asked.touched:
        note(f"{asked.touched:,} requests are longer than the model takes; they are shortened or left out")
    return server, asked


def end(run: LoadRun, found: ServeFigures) -> None:
    """Leave with an error where there is nothing to show for it."""
    if run.is_interrupted:
        raise KeyboardInterrupt
    if not found.completed:
        first = next((seen for seen in run.seen if seen.message), None)
        raise LoadFailed(
            "no request was answered" + (f"; the first one: {first.message}" if first is not None else "")
        )


def environment(kind: str, options: LoadOptions, server: Mapping[str, Any]) -> dict[str, Any]:
    """What a result must carry to mean anything later."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "commit": source_commit(),
        "client": machine_facts(),
        "server": dict(server),
        "endpoint_type": BACKENDS[options.api],
        "backend": BACKENDS[options.api],
        "model_id": server["model"],
        "seed": options.seed,
    }


def settings(asked: AskedLoad, point: LoadPoint, bounds: Mapping[str, float]) -> dict[str, Any]:
    """The load of one run."""
    options = asked.options
    ramp = point.ramp
    value: dict[str, Any] = {
        "workload": asked.source.name,
        "num_prompts": options.num_prompts,
        "max_duration_s": options.duration,
        "request_rate": "inf" if point.rate is None else point.rate,
        "ramp": None if ramp is None else f"{ramp.start:g}:{ramp.end:g}:{ramp.seconds:g}",
        "arrivals": asked.arrivals(point),
        "max_concurrency": point.max_concurrency,
        "num_warmups": options.num_warmups,
        "ignore_eos": asked.ignore_eos,
        "output_len": options.output_len,
        "temperature": options.temperature,
        "extra_body": options.extra_body,
        "goodput": dict(bounds) or None,
    }
    if isinstance(asked.source, RandomSource):
        names = ("input_len", "output_len", "spread", "prefix_share", "num_prefixes")
        value |= {name: getattr(asked.source, name) for name in names}
    return value


def remarks(found: ServeFigures, run: LoadRun, asked: AskedLoad, point: LoadPoint) -> list[str]:
    """What to know before the figures are believed."""
    lines = []
    waits = point.max_concurrency is not None or asked.options.retries > 0  # then being late was asked for
    for kind in found.failures:
        message = next(seen.message for seen in run.seen if seen.kind == kind)
        lines.append(f"{found.failures[kind]:,} {kind}; the first: {message}")
    if run.is_interrupted:
        lines.append(f"Interrupted: {found.unfinished:,} requests were under way and are not counted.")
    late = dict(found.lateness.percentiles).get(99.0) or max(
        (value for _, value in found.lateness.percentiles if value is not None), default=0.0
    )
    if late > LATE_MS and not waits:
        lines.append(
            f"This client sent requests up to {late:.0f} ms after they were due; the latencies hold that time. Use "
            "a machine that is less busy."
        )
    if found.early_stops and asked.ignore_eos:
        lines.append(
            f"{found.early_stops:,} answers are shorter than asked for: the server does not know ignore_eos."
        )
    is_own = isinstance(asked.source, RandomSource) and asked.source.prefix_share == 0
    if is_own and (found.cached_input_tokens or 0) > CACHED_SHARE * found.total_input_tokens:
        lines.append(
            "Most tokens of the prompts were found in the server's prefix cache, where an earlier run with this seed "
            "may have left them; another --seed gives others."
        )
    return lines


def _sentence(asked: AskedLoad, point: LoadPoint) -> str:
    options = asked.options
    parts = ["as many requests as there is time for"]
    if asked.num_requests is not None:
        parts = [f"{asked.num_requests:,} requests"]
    if point.ramp is not None:
        parts.append(f"from {point.ramp.start:g} to {point.ramp.end:g} a second")
    elif point.rate is not None:
        parts.append(f"{point.rate:g} a second")
    elif point.max_concurrency is None:
        parts.append("at once" if asked.recorded_s is None else "as they were recorded")
    if point.max_concurrency is not None:
        parts.append(f"{point.max_concurrency:,} at a time")
    if options.duration is not None:
        parts.append(f"for {options.duration:g} s")
    return ", ".join(parts)


def with_bounds(values: Mapping[str, Any]) -> dict[str, Any]:
    """All bounds of --goodput in one text, whether they came as one argument or as several."""
    more, first = values.get("more_bounds") or (), values.get("goodput")
    if more and not first:
        raise InputError(f"'{more[0]}' belongs to no flag; see paceline bench serve --help")
    return {**values, "goodput": " ".join([first, *more]) if first else None}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`--rate inf` is how other tools say that all are sent at once."""
    rate = values.get("rate")
    return {**values, "rate": None if isinstance(rate, float) and math.isinf(rate) else rate}
