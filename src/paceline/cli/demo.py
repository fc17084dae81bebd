"""`paceline demo`: static, dynamic and continuous batching on the same bursts of traffic, on this machine.

Owns the flags, the table at the end and the files. The runs are `bench.demo`'s business, the live picture
`demo_view`'s. Heavy imports happen when the command runs.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.bench.shapes import SHAPES
from paceline.cli.options import Flag, Panel, add_command
from paceline.cli.show import SHOW, page_port, show_options, show_page
from paceline.config import check_options, option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.bench.demo.run import ModeRun
    from paceline.server.recording import Recording

HELP = """
Compare static, dynamic and continuous batching on this machine.

The default model gets the same bursts of requests in each mode, on the CPU. Static and dynamic batches compute their
padding, and a row that has finished is held until its whole batch is done.

\b
  paceline demo                # at most five minutes
  paceline demo --quick        # about a minute
  paceline demo --shape qwen3-0.6b --device cuda --rows 64    # on a GPU

Prints a table, with published figures beside it, and writes a picture (PNG and SVG), the figures and a run log of each
mode to --out. Ctrl-C shows the results so far. --ui then plays the runs on the live page.
"""
FORMAT = "paceline-demo"
QUICK_SECONDS, QUICK_WARM_UP = 8.0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `paceline demo` takes."""

    model: str | None = option(None, "folder, GGUF file or name on the Hugging Face hub", kind=str)
    shape: str | None = option(
        None, "random weights of this shape, instead of --model", choices=tuple(SHAPES), kind=str
    )
    device: str = option(
        "cpu", "where to compute; cuda: with the lengths of whole chats", choices=("cpu", "cuda")
    )
    quick: bool = option(False, "take about a minute; less precise")
    seconds: float | None = option(
        None, "seconds over which requests arrive, in each mode", low=0.1, high=3600.0, kind=float
    )
    rows: int = option(8, "requests in a batch, in every mode", low=1, high=256)
    rate: float | None = option(None, "mean requests per second", low=0.01, high=10_000.0, kind=float)
    seed: int = option(0, "seed of lengths, arrivals and token ids", low=0)
    out: str = option("paceline-demo", "folder for the picture, the figures and the run logs")

    def __post_init__(self) -> None:
        check_options(self)


PANELS = (
    Panel(
        title="Demonstration",
        config=DemoOptions,
        flags=(
            Flag(name="quick"),
            Flag(name="model", default="SmolLM2-135M-Instruct"),
            Flag(name="shape"),
            Flag(name="device"),
            Flag(name="seconds", default="40, or 8 with --quick"),
            Flag(name="rows"),
            Flag(name="rate", default="measured: 1.1 times what continuous batching can serve"),
            Flag(name="seed"),
            Flag(name="out", metavar="FOLDER"),
        ),
    ),
    SHOW,
)


def add_demo(app: typer.Typer) -> None:
    add_command(app, "demo", _run, PANELS, HELP)


def _run(values: Mapping[str, Any]) -> None:
    options = DemoOptions(**{spec.name: values[spec.name] for spec in fields(DemoOptions)})
    folder = _folder(options.out)
    with page_port(show_options(values)) as bound:
        runs = _run_modes(options, folder)
        if bound is not None:
            show_page([_recorded(run.mode, folder) for run in runs], bound)


def _recorded(mode: str, folder: Path) -> Recording:
    """A run from its log, for the page."""
    from paceline.audit.runlog import read_run_log
    from paceline.server.recording import Recording
    from paceline.sim.replay import replay

    log = read_run_log(_log_of(mode, folder))
    recording = Recording(mode, num_rows=log.config.scheduler.max_num_seqs, device="recorded")
    replay(log, watch=recording.watch)
    return recording


def _log_of(mode: str, folder: Path) -> Path:
    return folder / f"{mode}.jsonl.gz"


def _run_modes(options: DemoOptions, folder: Path) -> list[ModeRun]:
    from rich.console import Console

    from paceline.bench.demo.session import DemoPlan, run_demo
    from paceline.cli.demo_view import DemoView

    defaults = DemoPlan()
    plan = DemoPlan(
        model=options.model,
        shape=options.shape,
        device=options.device,
        rows=options.rows,
        seconds=options.seconds or (QUICK_SECONDS if options.quick else defaults.seconds),
        warm_up=QUICK_WARM_UP if options.quick else defaults.warm_up,
        rate=options.rate,
        seed=options.seed,
        log_folder=folder,
    )
    runs: list[ModeRun] = []
    try:
        with DemoView(Console()) as view:
            for run in run_demo(plan, view):
                runs.append(run)
    finally:  # after Ctrl-C too: what had ended is shown
        if runs:
            _finish(runs, folder)
    return runs


def _finish(runs: Sequence[ModeRun], folder: Path) -> None:
    from paceline.bench.demo.result import demo_table, figures_of, to_json
    from paceline.bench.machine import source_commit
    from paceline.cli.doctor_facts import gather
    from paceline.cli.sim_output import show_table

    figures = [figures_of(run) for run in runs]
    show_table(
        "The same requests in every mode, beside what is claimed for continuous batching", demo_table(figures)
    )
    written = [*_pictures(runs, folder), folder / "demo.json"]
    value = {
        "format": FORMAT,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "commit": source_commit(),
        "machine": gather(),
        "modes": [to_json(each) for each in figures],
    }
    _write(written[-1], json.dumps(value, indent=1, allow_nan=False) + "\n")
    written += [_log_of(run.mode, folder) for run in runs]
    print("Wrote " + ", ".join(str(path) for path in written))


def _pictures(runs: Sequence[ModeRun], folder: Path) -> list[Path]:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print("The picture needs matplotlib: pip install matplotlib", file=sys.stderr)
        return []
    from paceline.report.lane_plot import LaneRun, plot_lanes
    from paceline.report.summary import summarize

    drawn = [
        LaneRun(lanes=run.lanes, summary=summarize(run.record), arrival_s=run.record.arrival_s.tolist())
        for run in runs
    ]
    paths = [folder / "demo.png", folder / "demo.svg"]
    for path in paths:
        plot_lanes(drawn, path, title="The same requests, three ways to batch them")
    return paths


def _folder(name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(
            f"--out {name}: the folder cannot be made ({problem.strerror or problem})"
        ) from problem
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise InputError(f"cannot write {path}: {problem.strerror or problem}") from problem
