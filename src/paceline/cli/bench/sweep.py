"""`paceline bench sweep`: several loads one after the other, a table, pictures and a page.

Owns the order of the points and the files of the folder. Results are written after every point, so that a run that is
killed leaves what it has; Ctrl-C ends the point under way and draws what there is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.bench.serve import LoadSession, environment, open_load, remarks, settings, with_bounds
from paceline.cli.bench.view import note, show
from paceline.cli.flags import split_list, writable_folder, write_json
from paceline.config.options import from_values
from paceline.errors import InputError
from paceline.lab.bench.bench_options import SWEEP_SECONDS, SweepOptions
from paceline.lab.bench.load.figures import ServeFigures, figures, result_json, run_record
from paceline.lab.bench.load.requested import LoadPoint, RequestedLoad, parse_bounds, parse_percentiles
from paceline.lab.bench.load.sweep_page import SweepFigure, make_page
from paceline.lab.bench.tables import Grid
from paceline.lab.report.plot_style import need_matplotlib
from paceline.lab.report.plots import (
    Curve,
    GoodputPoint,
    curve_point,
    plot_cdfs,
    plot_gantt,
    plot_goodput,
    plot_throughput_latency,
)
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.report.table import format_number

PAGE, RESULTS = "report.html", "sweep.json"
TIMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One point that was run."""

    point: LoadPoint
    found: ServeFigures
    record: RunRecord

    @property
    def load(self) -> float:
        load = self.point.rate if self.point.rate is not None else self.point.max_concurrency
        assert load is not None
        return float(load)


def sweep(values: Mapping[str, Any]) -> None:
    options = _options(values)
    points = _points(options)
    bounds, percentiles = parse_bounds(options.goodput), parse_percentiles(options.percentiles)
    need_matplotlib()
    folder = writable_folder("--output", options.output)
    server, load = open_load(options, points)
    plain: dict[str, Any] = {**environment("sweep", options, server.facts()), "results": []}
    session = LoadSession(server=server, load=load)
    measured: list[Measured] = []
    is_interrupted = False
    for point in points:
        note(f"{server.model} at {server.url}: {load.sent.name}, {point.label}")
        run = session.run(point)
        found = figures(run, percentiles=percentiles, bounds=bounds)
        for line in remarks(found, run, load, point):
            note(line)
        plain["results"].append({**settings(load, point, bounds), **result_json(found, run)})
        write_json(folder / RESULTS, plain)
        if found.completed:
            measured.append(Measured(point=point, found=found, record=run_record(run, label=point.label)))
        is_interrupted = run.is_interrupted
        if is_interrupted:
            break
    if not measured:
        raise InputError(f"no request of any load was answered; {folder / RESULTS} holds the errors")
    grid = sweep_grid(measured)
    title = options.title or f"{server.model} at {server.url}"
    show(title, grid)
    pictures = draw(measured, folder, has_bounds=bool(bounds))
    facts = page_facts(plain, load, bounds)
    page = make_page(title=title, lead=_lead(measured, bounds), grid=grid, pictures=pictures, facts=facts)
    (folder / PAGE).write_text(page, encoding="utf-8")
    print(f"Wrote {folder / PAGE}")
    if is_interrupted:
        raise KeyboardInterrupt


def _options(values: Mapping[str, Any]) -> SweepOptions:
    given = with_bounds(values)
    if given.get("duration") is None and given.get("num_prompts") is None:
        given["duration"] = SWEEP_SECONDS
    return from_values(SweepOptions, given)


def _points(options: SweepOptions) -> list[LoadPoint]:
    if bool(options.rates) == bool(options.concurrencies):
        raise InputError(
            "give --rates 1,2,4 (requests per second) or --concurrencies 1,4,16 (users), one of them"
        )
    if options.rates:
        rates = sorted(_positive(part, "--rates") for part in split_list(options.rates, "--rates"))
        return [LoadPoint(rate=rate) for rate in rates]
    parts = split_list(options.concurrencies, "--concurrencies")
    users = sorted(_positive(part, "--concurrencies") for part in parts)
    if any(count != int(count) for count in users):
        raise InputError("--concurrencies are whole numbers of users, such as 1,4,16")
    return [LoadPoint(max_concurrency=int(count)) for count in users]


def _positive(text: str, flag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise InputError(f"{flag} '{text}' is no load; give numbers above 0, such as {flag} 1,2,4,8")
    return number


def sweep_grid(measured: Sequence[Measured]) -> Grid:
    """One row for each load: what was served, then how long it took."""
    has_goodput = any(each.found.request_goodput is not None for each in measured)
    served = ["load", "completed", "failed", "req/s", "output tok/s", *(["goodput/s"] * has_goodput)]
    times = [f"{name.upper()} median / P{_highest(measured):g} ms" for name in TIMES]
    rows = [[*_served(each)[: len(served)], *_times(each)] for each in measured]
    return Grid(headings=[*served, *times], rows=rows, breaks=(len(served),))


def _served(each: Measured) -> list[str]:
    found = each.found
    return [
        each.point.label,
        f"{found.completed:,}",
        f"{found.failed:,}",
        format_number(found.request_throughput),
        format_number(found.output_throughput),
        format_number(found.request_goodput),
    ]


def _times(each: Measured) -> list[str]:
    spreads = [each.found.spreads[name] for name in TIMES]
    return [
        f"{format_number(spread.median)} / {format_number(max(spread.percentiles)[1])}" for spread in spreads
    ]


def _highest(measured: Sequence[Measured]) -> float:
    return max(measured[0].found.spreads["ttft"].percentiles)[0]


def draw(measured: Sequence[Measured], folder: Path, *, has_bounds: bool) -> list[SweepFigure]:
    """The pictures of the page, as files of the folder."""
    is_rate = measured[0].point.rate is not None
    load = "offered requests/s" if is_rate else "users"
    curve = _curve(measured)
    pictures = [
        SweepFigure(
            path=folder / "throughput-latency.png",
            heading="Throughput and latency",
            caption="Where p99 TTFT doubles, a ring marks the highest load before it: the knee.",
        ),
        SweepFigure(
            path=folder / "cdfs.png",
            heading="Distributions",
            caption="Share of requests (of gaps, for ITL) that took at most so long, for each load.",
        ),
    ]
    plot_throughput_latency([curve], pictures[0].path, load=load)
    plot_cdfs([each.record for each in measured], pictures[1].path)
    if has_bounds:
        goodput = [
            GoodputPoint(
                load=each.load,
                completed=each.found.request_throughput,
                good=each.found.request_goodput or 0.0,
            )
            for each in measured
        ]
        caption = "Requests that kept every bound, beside all that were answered."
        pictures.append(SweepFigure(path=folder / "goodput.png", heading="Goodput", caption=caption))
        plot_goodput(goodput, pictures[-1].path, load=load, is_rate=is_rate)
    chosen = dict.fromkeys(each.load for each in measured if each.load == curve.knee or each is measured[-1])
    for each in (each for each in measured if each.load in chosen):
        name = f"requests-{each.load:g}.png"
        caption = "A line for each request, from when it was due to its last token."
        heading = f"Requests over time, {each.point.label}"
        pictures.append(SweepFigure(path=folder / name, heading=heading, caption=caption))
        plot_gantt(each.record, pictures[-1].path)
    return pictures


def _curve(measured: Sequence[Measured]) -> Curve:
    points = [curve_point(each.load, summarize(each.record)) for each in measured]
    return Curve(label="measured", points=points)


def _lead(measured: Sequence[Measured], bounds: Mapping[str, float]) -> list[str]:
    knee = _curve(measured).knee
    unit = "requests per second" if measured[0].point.rate is not None else "users"
    best = max(measured, key=lambda each: each.found.output_throughput)
    lines = [
        f"Most output: {format_number(best.found.output_throughput)} tokens per second at {best.point.label}.",
        f"Knee: {knee:g} {unit}; beyond it p99 TTFT has doubled."
        if knee is not None
        else "No knee was seen: p99 TTFT never doubled over these loads.",
    ]
    if bounds:
        good = max(measured, key=lambda each: each.found.request_goodput or 0.0)
        named = ", ".join(f"{name.upper()} {bound:g} ms" for name, bound in bounds.items())
        lines.append(
            f"Most goodput: {format_number(good.found.request_goodput)} requests per second at {good.point.label} "
            f"(within {named})."
        )
    else:
        lines.append("No bounds were given, so there is no goodput: --goodput ttft:1000 tpot:50 names some.")
    return lines


def page_facts(plain: Mapping[str, Any], load: RequestedLoad, bounds: Mapping[str, float]) -> dict[str, str]:
    """What the page says about how it was measured."""
    first = plain["results"][0]
    client, server = plain["client"], plain["server"]
    warm_up = load.options.num_warmups
    return {
        "Command": plain["command"],
        "Date": plain["date"],
        "Server": ", ".join(
            f"{name} {value}" for name, value in server.items() if not isinstance(value, dict)
        ),
        "Engine": json.dumps(server["engine"]) if "engine" in server else "not reported",
        "Client": f"{client['cpu']['name']}, {client['cpu']['cores']} cores, {client['system']}",
        "Versions": ", ".join(f"{name} {value}" for name, value in client["versions"].items()),
        "Commit": plain["commit"] or "unknown",
        "Workload": f"{first['workload']}, seed {plain['seed']}, arrivals {first['arrivals']}",
        "Bounds": ", ".join(f"{name}:{bound:g}" for name, bound in bounds.items()) or "none",
        "Latencies": f"from when a request was due; warm-up requests, not counted: {warm_up}",
    }
