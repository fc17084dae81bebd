"""`paceline bench serve | sweep | compare | throughput | latency` on the command line.

What they do is in files of their own, imported when one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer

from paceline.cli.bench_load_options import (
    COMPARE_HELP,
    COMPARE_PANELS,
    SERVE_HELP,
    SERVE_PANELS,
    SWEEP_HELP,
    SWEEP_PANELS,
)
from paceline.cli.bench_options import HELP, LATENCY_HELP, LATENCY_PANELS, THROUGHPUT_HELP, THROUGHPUT_PANELS
from paceline.cli.bench_plan import latency, throughput
from paceline.cli.options import add_command, command_group


def add_bench(app: typer.Typer) -> None:
    bench = command_group("bench", HELP)
    add_command(bench, "serve", _later("serve"), SERVE_PANELS, SERVE_HELP)
    add_command(bench, "sweep", _later("sweep"), SWEEP_PANELS, SWEEP_HELP)
    add_command(bench, "compare", _later("compare"), COMPARE_PANELS, COMPARE_HELP)
    add_command(bench, "throughput", throughput, THROUGHPUT_PANELS, THROUGHPUT_HELP)
    add_command(bench, "latency", latency, LATENCY_PANELS, LATENCY_HELP)
    app.add_typer(bench)


def _later(name: str) -> Callable[[Mapping[str, Any]], None]:
    """A command whose file is imported when it runs."""

    def run(values: Mapping[str, Any]) -> None:
        getattr(import_module(f"paceline.cli.bench_{name}"), name)(values)

    return run
