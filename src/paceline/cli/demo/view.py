"""What `paceline demo` shows while it runs: the rows of the batch as lanes, and the figures as they grow.

On a terminal a picture that is drawn anew a few times a second; in a pipe a line when a mode begins and one when it
ends. It costs the engine some of its core, so it draws seldom. It measures nothing.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.engine.trace import Watch
from paceline.lab.bench.demo_runs import Driver, ModeRun, Traffic
from paceline.lab.report.lanes import DECODE, EMPTY, HELD, PADDING, PROMPT
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.report.table import format_number

if TYPE_CHECKING:
    from paceline.server.live.recording import Race

FRAME_S = 0.25
LOOKS = {
    EMPTY: ("·", "grey30"),
    HELD: ("-", "grey50"),
    PROMPT: ("█", "orange3"),
    DECODE: ("█", "blue"),
    PADDING: ("░", "grey50"),
}
EDGE = 4  # columns left of the lanes


class DemoView:
    """Shows a demonstration; enter it while it runs."""

    def __init__(self, console: Console, race: Race | None = None) -> None:
        """`race`: what a page shows of the same runs."""
        self._console = console
        self._race = race
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._done: list[Text] = []
        self._mode = ""
        self._next_frame_s = 0.0

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(Group(*self._done), refresh=True)
            self._live.stop()

    def warming_up(self, num_requests: int) -> None:
        self._mode = "warm-up"
        self._print(f"Warming up with {num_requests} requests at once, continuous batching.")

    def begins(self, mode: str, traffic: Traffic) -> None:
        if not self._mode or self._mode == "warm-up":
            line = (
                f"{len(traffic.workload)} requests in bursts over about {traffic.span_s:.3g} s "
                f"(the last after {traffic.workload.duration_s:.3g} s), the same for every mode:"
            )
            self._done.append(Text(line))
            self._print(self._done[-1].plain)
        self._mode = mode
        self._next_frame_s = 0.0
        if self._race is not None:
            self._race.num_requests = len(traffic.workload)
        self._print(f"{mode} begins")

    def watching(self, mode: str) -> Watch | None:
        return None if self._race is None else self._race.recording(mode).watch

    def stepped(self, driver: Driver) -> None:
        now_s = time.monotonic()
        if self._live is not None and now_s >= self._next_frame_s:
            self._next_frame_s = now_s + FRAME_S
            self._live.update(Group(*self._done, *self._picture(driver)), refresh=True)

    def ended(self, run: ModeRun) -> None:
        line = Text.assemble((f"{run.mode:>10}  ", "bold"), _figures(summarize(run.record)))
        self._done.append(line)
        self._print(line.plain)

    def _print(self, line: str) -> None:
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _picture(self, driver: Driver) -> list[RenderableType]:
        count = max(8, self._console.width - EDGE - 1)
        steps = driver.watcher.latest(count)
        lines: list[RenderableType] = [Text(""), Text(self._headline(driver), style="bold")]
        for row in range(steps.shape[1] if steps.size else 0):
            lane = Text.assemble((f"{row + 1:>{EDGE - 1}} ", "dim"), no_wrap=True)
            for code in steps[:, row].tolist():
                lane.append(*LOOKS[code])
            lines.append(lane)
        lines.append(_legend())
        lines.append(_figures(summarize(driver.record())))
        return lines

    def _headline(self, driver: Driver) -> str:
        ended, total = driver.meter.num_ended, len(driver.workload)
        return (
            f"{self._mode}: {driver.now_s:.0f} s, {ended} of {total} answered, {driver.num_waiting} waiting. "
            "A lane is a row of the batch, a column a step."
        )


def _legend() -> Text:
    parts = [
        (DECODE, "decode"),
        (PROMPT, "prompt"),
        (PADDING, "padding: ended, still computed"),
        (HELD, "held, waits for its prompt"),
        (EMPTY, "free"),
    ]
    legend = Text(" " * EDGE)
    for code, name in parts:
        legend.append(*LOOKS[code])
        legend.append(f" {name}   ", style="dim")
    return legend


def _figures(summary: Summary) -> Text:
    """What a mode has reached so far."""
    e2e = summary.e2e_s
    parts = [
        f"{format_number(summary.output_tokens_per_s or 0.0)} tokens/s",
        f"answer p50 {_seconds(e2e.p50)}, p99 {_seconds(e2e.p99)}",
        f"first token p50 {_seconds(summary.ttft_s.p50)}",
        f"{100 * (summary.padded_share or 0.0):.0f} % padding",
        f"{summary.duration_s:.1f} s",
    ]
    return Text(" · ".join(parts))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{format_number(value)} s"
