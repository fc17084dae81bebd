"""What `paceline bench` leaves behind: a table on standard output and, where asked for, a JSON file.

Owns the layout of the file and the sentence above the table. The destination is checked before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.cli.doctor import gather
from paceline.cli.flags import command_line, write_json
from paceline.cli.terminal import columns
from paceline.config.engine import MADE_ON_LOADING
from paceline.lab.bench.machine import accelerator, source_commit, triton_version
from paceline.lab.bench.tables import Grid, rounded, split_grid

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "paceline-bench"
EDGES, GAP = 1, 3  # characters a table has beside its columns, and beside the text of each


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything one command found out, in the order it becomes known."""

    kind: str  # throughput or latency
    model: str
    startup_s: float
    engine: dict[str, Any]
    seed: int = 0
    facts: dict[str, Any] = field(default_factory=gather)
    gpu: dict[str, Any] | None = field(default_factory=accelerator)
    commit: str | None = field(default_factory=source_commit)
    results: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    # Engines behind the first: start-up and sizes.
    further: list[dict[str, Any]] = field(default_factory=list)
    recheck: dict[str, Any] | None = None
    error: str | None = None  # what ended the command early

    @property
    def title(self) -> str:
        where = self.gpu["name"] if self.gpu is not None else self.facts["cpu"]["name"]
        # Such figures stand beside others only with a word that says so.
        is_own = self.engine["kv_cache_dtype"] == self.engine["dtype"]
        kv = "" if is_own else f", KV cache in {self.engine['kv_cache_dtype']}"
        if self.engine.get("quantization") in MADE_ON_LOADING:
            kv = f", weights in {self.engine['quantization']}{kv}"
        starts = [self.startup_s, *(engine["startup_s"] for engine in self.further)]
        seconds = " / ".join(f"{start:.2f}" for start in starts)
        return f"{self.model} on {where}{kv}, ready after {seconds} s"

    def plain(self) -> dict[str, Any]:
        facts = self.facts
        hardware = {
            "gpu": self.gpu,
            "cpu": facts["cpu"],
            "memory": facts["memory"],
            "system": facts["system"],
        }
        value = {
            "format": FORMAT,
            "kind": self.kind,
            "command": command_line(),
            "commit": self.commit,
            "versions": {**facts["versions"], "triton": triton_version()},
            "hardware": hardware,
            "model": self.model,
            "engine": self.engine,
            "seed": self.seed,
            "startup_s": self.startup_s,
            "results": self.results,
            "skipped": self.skipped,
        }
        if self.further:
            value["further_engines"] = self.further
        for name in ("recheck", "error"):
            if getattr(self, name) is not None:
                value[name] = getattr(self, name)
        return rounded(value)


def show(title: str, grid: Grid) -> None:
    """On standard output, with the library for tables where it is installed."""
    try:
        _show_rich(title, grid)
    except ModuleNotFoundError:
        print(title, *plain_lines(grid), sep="\n")


def plain_lines(grid: Grid) -> list[str]:
    cells = [grid.headings, *grid.rows]
    rule = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
    return columns([grid.headings, rule, *grid.rows], 1)


def _show_rich(title: str, grid: Grid) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: lose nothing
        console = Console(width=max(80, len(title), _natural_width(_rich_table(grid))))
    console.print(Text(title, style="bold"))
    for part in split_grid(grid, console.width, edge=EDGES, gap=GAP):
        table = _rich_table(part)
        is_wide = _natural_width(table) > console.width
        console.print(_rich_table(part, is_narrow=True) if is_wide else table)


def _natural_width(table: Table) -> int:
    from rich.console import Console

    return Console(width=10_000).measure(table).maximum


def _rich_table(grid: Grid, *, is_narrow: bool = False) -> Table:
    """Numbers are never broken; headings are, between words, where the table has to be narrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for column, heading in enumerate(grid.headings):
        justify: Literal["left", "right"] = "left" if column == 0 else "right"
        width = grid.least_width(column) if is_narrow else None
        table.add_column(heading, justify=justify, width=width, overflow="fold")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table


def note(text: str) -> None:
    """A sentence beside the results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def write(report: Report, target: Path | None) -> Iterator[Callable[[], None]]:
    """Write the report when this is left, also by an error, which it then names; and whenever what it gives is called,
    since a long run may be killed."""

    def save() -> None:
        if target is not None:
            write_json(target, report.plain())

    try:
        yield save
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise
    finally:
        save()
        if target is not None:
            print(f"Wrote {target}")
