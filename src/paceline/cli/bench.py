"""`paceline bench throughput | latency` on the command line. What they do is in `bench_plan`."""

from __future__ import annotations

import typer

from paceline.cli.bench_options import HELP, LATENCY_HELP, LATENCY_PANELS, THROUGHPUT_HELP, THROUGHPUT_PANELS
from paceline.cli.bench_plan import latency, throughput
from paceline.cli.options import add_command


def add_bench(app: typer.Typer) -> None:
    bench = typer.Typer(name="bench", help=HELP, no_args_is_help=True, rich_markup_mode=None)
    add_command(bench, "throughput", throughput, THROUGHPUT_PANELS, THROUGHPUT_HELP)
    add_command(bench, "latency", latency, LATENCY_PANELS, LATENCY_HELP)
    app.add_typer(bench)
