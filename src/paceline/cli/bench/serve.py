"""`paceline bench serve`: one run of load against a server, the block of figures, the file.

Owns the order of things and the sentences beside the figures: what makes them mean less than they seem to.
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import uvloop

from paceline.cli.bench.view import FORMAT, note
from paceline.cli.doctor import machine_facts
from paceline.cli.flags import command_line, writable, write_json
from paceline.cli.remote import UNKNOWN_LENGTH, Connection, Remote, ServerRefused, admin_connection
from paceline.config.options import from_values
from paceline.errors import InputError, PacelineError
from paceline.lab.bench.bench_options import LoadOptions, LoadRunOptions
from paceline.lab.bench.load.figures import ServeFigures, block_lines, figures, result_json
from paceline.lab.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.lab.bench.load.pool import Pool, Target
from paceline.lab.bench.load.prompt_source import BACKENDS, PATHS, BodyForm, RandomSource
from paceline.lab.bench.load.reader import EventKind, ObservedAnswer
from paceline.lab.bench.load.requested import (
    LoadPoint,
    RequestedLoad,
    parse_bounds,
    parse_percentiles,
    parse_ramp,
    requested_load,
)
from paceline.lab.bench.machine import source_commit

# The server that `paceline bench` puts load on: where it is, what it serves, what it tells about itself.
#
# Asked once, before anything is timed. What a server does not tell is left out; only a model's name is needed.


class BenchServer:
    """A server, with the model that is measured."""

    def __init__(self, url: str, model: str | None, api: str) -> None:
        self._remote = remote = Remote(url, model)
        # As results may show it: without a password in the address.
        self.url = f"http{'s' if remote.is_https else ''}://{remote.address}{remote.base_path}"
        self.model = self._remote.model
        self.key = self._remote.key
        known = self._remote.max_model_len
        self.max_model_len = None if known == UNKNOWN_LENGTH else known
        self._api = api

    @property
    def target(self) -> Target:
        remote = self._remote
        parts = urlsplit(f"//{remote.address}")
        try:
            port = parts.port or (443 if remote.is_https else 80)
        except ValueError:
            raise InputError(f"--url {self.url}: the port is no number between 1 and 65535") from None
        assert parts.hostname is not None
        return Target(
            host=parts.hostname,
            port=port,
            is_https=remote.is_https,
            path=remote.base_path + PATHS[self._api],
        )

    def facts(self) -> dict[str, Any]:
        """For the record: version, longest sequence, and for an operator the engine and its device."""
        facts: dict[str, Any] = {"url": self.url, "model": self.model, "max_model_len": self.max_model_len}
        version = server_values(self._remote, "/version")
        if version is not None:
            facts["version"] = version.get("version")
        about = server_values(admin_connection(self.url), "/v1/admin/about")
        if about is not None and "engine" in about:
            facts["engine"] = about["engine"]
        return facts


def server_values(connection: Connection, path: str) -> dict[str, Any] | None:
    """What a server answers; None where it does not, or not to this key."""
    try:
        found: dict[str, Any] = connection.ask("GET", path)
    except ServerRefused:
        return None
    return found


# Running load from a command: the event loop, Ctrl-C and the bar that shows how far it is.
#
# Owns what happens around a run. A first Ctrl-C ends it with what there is; a second one ends the command.


REFRESH_S = 0.5  # drawing takes a millisecond in which no bytes are taken in


class NoAnswers(PacelineError):
    """The server does not answer these requests."""


@dataclass(slots=True, kw_only=True)
class LoadSession:
    """Runs against one server, one after the other; requests are numbered through all of them, so that none finds
    its prompt in the server's cache because an earlier run had the same."""

    server: BenchServer
    load: RequestedLoad
    next_index: int = 0
    is_warm: bool = False

    def run(self, point: LoadPoint) -> LoadRun:
        plan = self.load.plan(point, first_index=self.next_index)
        if self.server.key and "" not in plan.keys:
            plan = replace(plan, keys={"": self.server.key, **plan.keys})
        _allow_sockets()
        gc.collect()
        gc.freeze()  # a collection among many requests would be time that no server took
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                run = runner.run(self._run(plan, point.label))
        finally:
            gc.unfreeze()
        self.next_index += len(run.seen)
        return run

    async def _run(self, plan: LoadPlan, label: str) -> LoadRun:
        pool = Pool(self.server.target)
        form: BodyForm = self.load.form(self.server.model)
        bar = _LoadBar(label, plan)
        with bar.progress or nullcontext():
            generator = LoadGenerator(pool, self.load.sent, form, plan, on_end=bar.take)
            loop = asyncio.get_running_loop()
            try:
                if not self.is_warm:
                    _check(await generator.warm_up(self.load.options.num_warmups))
                    self.is_warm = True
                bar.start(loop)
                loop.add_signal_handler(signal.SIGINT, self._interrupt, loop, generator)
                return await generator.run()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
                bar.stop()
                pool.close()

    @staticmethod
    def _interrupt(loop: asyncio.AbstractEventLoop, generator: LoadGenerator) -> None:
        loop.remove_signal_handler(signal.SIGINT)
        generator.stop()


def _allow_sockets() -> None:
    """Every request under way has a socket; the usual limit of 1,024 is only a default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check(warmed: list[ObservedAnswer]) -> None:
    """The first request tells whether the others have a chance."""
    if warmed and warmed[0].kind in (
        EventKind.REJECTED,
        EventKind.NO_CONNECTION,
        EventKind.BROKEN,
        EventKind.SERVER_ERROR,
    ):
        first = warmed[0]
        status = f" with {first.status}" if first.status else ""
        raise NoAnswers(
            f"the first request came to nothing ({first.kind}{status}): {first.message}; mend that first, or "
            "skip the warm-up with --num-warmups 0"
        )


class _LoadBar:
    """Requests that have ended, drawn a few times a second and never by a separate thread; only on a terminal."""

    def __init__(self, label: str, plan: LoadPlan) -> None:
        self._ended = self._failed = self._tokens = 0
        self._is_counting = False
        self._timer: asyncio.TimerHandle | None = None
        self.progress: Any = None
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self.progress.add_task(label, total=plan.num_expected, note="warming up")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_counting = True
        if self.progress is not None:
            self._refresh(loop)

    def take(self, seen: ObservedAnswer) -> None:
        if self._is_counting:
            self._ended += 1
            self._failed += not seen.is_finished
            self._tokens += seen.num_output

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _refresh(self, loop: asyncio.AbstractEventLoop) -> None:
        note = f"{self._tokens:,} tokens" + (f", {self._failed:,} failed" if self._failed else "")
        self.progress.update(self._task, completed=self._ended, note=note)
        self.progress.refresh()
        self._timer = loop.call_later(REFRESH_S, self._refresh, loop)


LATE_MS = 5.0
CACHED_SHARE = 0.5  # of all prompt tokens; the beginning that a chat template gives every prompt is less


def serve(values: Mapping[str, Any]) -> None:
    options = from_values(LoadRunOptions, with_bounds(_finite(values)))
    target = writable("--json", options.json)
    bounds, percentiles = parse_bounds(options.goodput), parse_percentiles(options.percentiles)
    point = LoadPoint(
        rate=options.rate,
        ramp=None if options.ramp is None else parse_ramp(options.ramp),
        max_concurrency=options.max_concurrency,
    )
    server, load = open_load(options, [point])
    facts = server.facts()
    note(f"{server.model} at {server.url}: {load.sent.name}, {_sentence(load, point)}")
    run = LoadSession(server=server, load=load).run(point)
    found = figures(run, percentiles=percentiles, bounds=bounds)
    print("\n".join(block_lines(found, rate=point.rate, max_concurrency=point.max_concurrency)))
    for line in remarks(found, run, load, point):
        note(line)
    if target is not None:
        value = {
            **environment("serve", options, facts),
            **settings(load, point, bounds),
            **result_json(found, run),
        }
        write_json(target, value)
        print(f"Wrote {target}")
    end(run, found)


def open_load(options: LoadOptions, points: Sequence[LoadPoint]) -> tuple[BenchServer, RequestedLoad]:
    """The server and what it will be sent. Mistakes that need no server are found before one is contacted."""
    load = requested_load(options)
    load.form("")
    for point in points:
        load.plan(point)
    server = BenchServer(options.url, options.model, options.api)
    load = load.fitted(server.max_model_len)
    if load.touched:
        note(f"{load.touched:,} requests are longer than the model takes; they are shortened or left out")
    return server, load


def end(run: LoadRun, found: ServeFigures) -> None:
    """Leave with an error where there is nothing to show for it."""
    if run.is_interrupted:
        raise KeyboardInterrupt
    if not found.completed:
        first = next((seen for seen in run.seen if seen.message), None)
        raise NoAnswers(
            "no request was answered" + (f"; the first one: {first.message}" if first is not None else "")
        )


def environment(kind: str, options: LoadOptions, server: Mapping[str, Any]) -> dict[str, Any]:
    """What a result must carry to mean anything later."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(),
        "commit": source_commit(),
        "client": machine_facts(),
        "server": dict(server),
        "endpoint_type": BACKENDS[options.api],
        "backend": BACKENDS[options.api],
        "model_id": server["model"],
        "seed": options.seed,
    }


def settings(load: RequestedLoad, point: LoadPoint, bounds: Mapping[str, float]) -> dict[str, Any]:
    """The load of one run."""
    options = load.options
    ramp = point.ramp
    value: dict[str, Any] = {
        "workload": load.sent.name,
        "num_prompts": options.num_prompts,
        "max_duration_s": options.duration,
        "request_rate": "inf" if point.rate is None else point.rate,
        "ramp": None if ramp is None else f"{ramp.start:g}:{ramp.end:g}:{ramp.seconds:g}",
        "arrivals": load.arrivals(point),
        "max_concurrency": point.max_concurrency,
        "num_warmups": options.num_warmups,
        "ignore_eos": load.ignore_eos,
        "output_len": options.output_len,
        "temperature": options.temperature,
        "extra_body": options.extra_body,
        "goodput": dict(bounds) or None,
    }
    if isinstance(load.source, RandomSource):
        names = ("input_len", "output_len", "spread", "prefix_share", "num_prefixes")
        value |= {name: getattr(load.source, name) for name in names}
    return value


def remarks(found: ServeFigures, run: LoadRun, load: RequestedLoad, point: LoadPoint) -> list[str]:
    """What to know before the figures are believed."""
    lines = []
    waits = point.max_concurrency is not None or load.options.retries > 0  # then being late was asked for
    for kind in found.failures:
        message = next(seen.message for seen in run.seen if seen.kind == kind)
        lines.append(f"{found.failures[kind]:,} {kind}; the first: {message}")
    if run.is_interrupted:
        lines.append(f"Interrupted: {found.unfinished:,} requests were under way and are not counted.")
    lateness = found.spreads["lateness"].percentiles
    late = dict(lateness).get(99.0) or max((value for _, value in lateness if value is not None), default=0.0)
    if late > LATE_MS and not waits:
        lines.append(
            f"This client sent requests up to {late:.0f} ms after they were due; the latencies hold that time. Use "
            "a machine that is less busy."
        )
    if found.early_stops and load.ignore_eos:
        lines.append(
            f"{found.early_stops:,} answers are shorter than asked for: the server does not know ignore_eos."
        )
    is_own = isinstance(load.source, RandomSource) and load.source.prefix_share == 0
    if is_own and (found.cached_input_tokens or 0) > CACHED_SHARE * found.total_input_tokens:
        lines.append(
            "Most tokens of the prompts were found in the server's prefix cache, where an earlier run with this seed "
            "may have left them; another --seed gives others."
        )
    return lines


def _sentence(load: RequestedLoad, point: LoadPoint) -> str:
    options = load.options
    parts = ["as many requests as there is time for"]
    if load.num_requests is not None:
        parts = [f"{load.num_requests:,} requests"]
    if point.ramp is not None:
        parts.append(f"from {point.ramp.start:g} to {point.ramp.end:g} a second")
    elif point.rate is not None:
        parts.append(f"{point.rate:g} a second")
    elif point.max_concurrency is None:
        parts.append("at once" if load.recorded_s is None else "as they were recorded")
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
