"""Running load from a command: the event loop, Ctrl-C and the bar that shows how far it is.

Owns what happens around a run. A first Ctrl-C ends it with what there is; a second one ends the command.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import uvloop

from paceline.bench.load.asked import AskedLoad, LoadPoint
from paceline.bench.load.bodies import BodyForm
from paceline.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.bench.load.pool import Pool
from paceline.bench.load.seen import Kind, Seen
from paceline.cli.bench_server import BenchServer
from paceline.errors import PacelineError

REFRESH_S = 0.5  # drawing takes a millisecond in which no bytes are taken in


class LoadFailed(PacelineError):
    """The server does not answer these requests."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Runs against one server, one after the other; requests are numbered through all of them, so that none finds
    its prompt in the server's cache because an earlier run had the same."""

    server: BenchServer
    asked: AskedLoad
    next_index: int = 0
    is_warm: bool = False

    def run(self, point: LoadPoint) -> LoadRun:
        plan = self.asked.plan(point, first_index=self.next_index)
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
        form: BodyForm = self.asked.form(self.server.model)
        with _bar(label, plan) as bar:
            generator = LoadGenerator(pool, self.asked.source, form, plan, on_end=bar.take)
            loop = asyncio.get_running_loop()
            try:
                if not self.is_warm:
                    _check(await generator.warm_up(self.asked.options.num_warmups))
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


def _check(warmed: list[Seen]) -> None:
    """The first request tells whether the others have a chance."""
    if warmed and warmed[0].kind in (Kind.REJECTED, Kind.NO_CONNECTION, Kind.BROKEN, Kind.SERVER_ERROR):
        first = warmed[0]
        status = f" with {first.status}" if first.status else ""
        raise LoadFailed(
            f"the first request came to nothing ({first.kind}{status}): {first.message}; mend that first, or "
            "skip the warm-up with --num-warmups 0"
        )


class _NoBar:
    """For whoever does not look."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def take(self, seen: Seen) -> None: ...

    def stop(self) -> None: ...


class _Bar(_NoBar):
    """Requests that have ended, drawn a few times a second and never by a thread of its own."""

    def __init__(self, label: str, plan: LoadPlan) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task(label, total=plan.num_expected, news="warming up")
        self._ended = self._failed = self._tokens = 0
        self._is_counting = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_counting = True
        self._refresh(loop)

    def take(self, seen: Seen) -> None:
        if self._is_counting:
            self._ended += 1
            self._failed += not seen.is_finished
            self._tokens += seen.num_output

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _refresh(self, loop: asyncio.AbstractEventLoop) -> None:
        news = f"{self._tokens:,} tokens" + (f", {self._failed:,} failed" if self._failed else "")
        self._progress.update(self._task, completed=self._ended, news=news)
        self._progress.refresh()
        self._timer = loop.call_later(REFRESH_S, self._refresh, loop)

    @contextmanager
    def shown(self) -> Iterator[_Bar]:
        with self._progress:
            yield self


@contextmanager
def _bar(label: str, plan: LoadPlan) -> Iterator[_NoBar]:
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    with _Bar(label, plan).shown() as bar:
        yield bar
