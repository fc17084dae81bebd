"""`paceline demo`: static, dynamic and continuous batching on the same bursts of traffic, on this machine.

Owns the flags, the table at the end and the files. The runs are in `lab.bench.demo_runs`, the live picture in
`view`. Heavy imports happen when the command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.cli.command import Command
from paceline.cli.flags import command_line, writable_folder, write_json
from paceline.cli.show import RacePage, ShowOptions, page_port
from paceline.config.options import CheckedOptions, from_values, option
from paceline.errors import InputError
from paceline.lab.bench.shapes import SHAPES

if TYPE_CHECKING:
    from paceline.lab.bench.demo_runs import ModeRun
    from paceline.server.live.recording import Race, Recording

HELP = """
Compare static, dynamic and continuous batching on this machine.

The default model gets the same bursts of requests in each mode, on the CPU. Static and dynamic batches compute their
padding, and a row that has finished is held until its whole batch is done.

  paceline demo                # at most five minutes
  paceline demo --quick        # about a minute
  paceline demo --shape qwen3-0.6b --device cuda --rows 64    # on a GPU

Prints a table, with published figures beside it, and writes a picture (PNG and SVG), the figures and a run log of each
mode to --out. Ctrl-C shows the results so far.

  paceline demo --ui                     # the modes as a race on a page, live
  paceline demo --replay paceline-demo   # the race of an earlier demo again
"""
FORMAT, FIGURES = "paceline-demo", "demo.json"
QUICK_SECONDS, QUICK_WARM_UP = 8.0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(CheckedOptions):
    """What `paceline demo` takes."""

    PANEL: ClassVar = "Demonstration"

    model: str | None = option(
        None, "folder, GGUF file or name on the Hugging Face hub", default_text="SmolLM2-135M-Instruct"
    )
    shape: str | None = option(
        None, "random weights of this shape, instead of --model", choices=tuple(SHAPES)
    )
    device: str = option(
        "cpu", "where to compute; cuda: with the lengths of whole chats", choices=("cpu", "cuda")
    )
    quick: bool = option(False, "take about a minute; less precise")
    seconds: float | None = option(
        None,
        "seconds over which requests arrive, in each mode",
        low=0.1,
        high=3600.0,
        default_text="40, or 8 with --quick",
    )
    rows: int = option(8, "requests in a batch, in every mode", low=1, high=256)
    rate: float | None = option(
        None,
        "mean requests per second",
        low=0.01,
        high=10_000.0,
        default_text="measured: 1.1 times what continuous batching can serve",
    )
    seed: int = option(0, "seed of lengths, arrivals and token ids", low=0)
    out: str = option(
        "paceline-demo", "folder for the picture, the figures and the run logs", metavar="FOLDER"
    )
    replay: str | None = option(
        None,
        "play the race recorded in this --out folder on a page, without running",
        basic=True,
        metavar="FOLDER",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions(ShowOptions):
    """`--ui` of this command: the runs can be watched while they are made."""

    ui: bool = option(
        False, "show the modes as a race on a page, live and again afterwards; Ctrl-C ends it", basic=True
    )


def _run(values: Mapping[str, Any]) -> None:
    options = from_values(DemoOptions, values)
    shown = from_values(RaceOptions, values)
    if options.replay is not None:
        _play(Path(options.replay), replace(shown, ui=True))
        return
    folder = writable_folder("--out", options.out)
    with page_port(shown) as bound:
        if bound is None:
            _run_modes(options, folder)
            return
        race = _live_race(options)
        with RacePage(race, bound) as page:
            page.announce("The race is on")
            _run_modes(options, folder, race)
            page.wait("The race is over. Race again on")


def _play(folder: Path, shown: ShowOptions) -> None:
    """The race of an earlier run."""
    with page_port(shown) as bound:
        assert bound is not None
        with RacePage(_recorded_race(folder), bound) as page:
            page.wait("The race is on")


def _live_race(options: DemoOptions) -> Race:
    from paceline.lab.bench.demo_runs import MODES
    from paceline.server.live.recording import Race, Recording

    recordings = [Recording(mode, num_rows=options.rows, device=options.device) for mode in MODES]
    return Race(recordings, what=_what(options.model, options.shape, options.device), is_live=True)


def _recorded_race(folder: Path) -> Race:
    """The race of the files that an earlier run wrote."""
    from paceline.server.live.recording import Race

    figures = _figures_in(folder)
    starts = {str(each["mode"]): each["origin_s"] for each in figures["modes"] if "origin_s" in each}
    recordings = [_recorded(str(each["mode"]), folder) for each in figures["modes"]]
    race = Race(recordings, what=str(figures.get("what", "")), is_live=False, starts=starts)
    race.num_requests = max((len(each.answers) for each in recordings), default=0)
    return race


def _figures_in(folder: Path) -> dict[str, Any]:
    path = folder / FIGURES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not JSON"
        raise InputError(
            f"--replay {folder}: cannot read {path} ({reason}); give the --out folder of a finished demo"
        ) from problem
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("modes"):
        raise InputError(f"--replay {folder}: {path} was not written by `paceline demo`")
    return found


def _what(model: str | None, shape: str | None, device: str) -> str:
    """What runs, for the page."""
    from paceline.models.files.fetch import DEFAULT_MODEL

    name = f"made-up weights, {shape}" if shape else model or DEFAULT_MODEL.title
    return f"{name} on {device}"


def _recorded(mode: str, folder: Path) -> Recording:
    """A run from its log, for the page."""
    from paceline.audit.runlog import read_run_log
    from paceline.lab.sim.replayer import replay
    from paceline.server.live.recording import Recording

    log = read_run_log(_log_of(mode, folder))
    recording = Recording(mode, num_rows=log.config.scheduler.max_num_seqs, device="recorded")
    replay(log, watch=recording.watch)
    return recording


def _log_of(mode: str, folder: Path) -> Path:
    return folder / f"{mode}.jsonl.gz"


def _run_modes(options: DemoOptions, folder: Path, race: Race | None = None) -> None:
    from rich.console import Console

    from paceline.cli.demo.view import DemoView
    from paceline.lab.bench.demo_runs import DemoPlan, run_demo

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
        with DemoView(Console(), race) as view:
            for run in run_demo(plan, view):
                runs.append(run)
    finally:  # after Ctrl-C too: what had ended is shown
        if runs:
            _finish(runs, folder, _what(options.model, options.shape, options.device))


def _finish(runs: Sequence[ModeRun], folder: Path, what: str) -> None:
    from paceline.cli.doctor import gather
    from paceline.cli.sim.view import show_table
    from paceline.lab.bench.demo_runs import demo_table, figures_of, to_json
    from paceline.lab.bench.machine import source_commit

    figures = [figures_of(run) for run in runs]
    show_table(
        "The same requests in every mode, beside what is claimed for continuous batching", demo_table(figures)
    )
    value = {
        "format": FORMAT,
        "what": what,
        "command": command_line(),
        "commit": source_commit(),
        "machine": gather(),
        "modes": [to_json(each) for each in figures],
    }
    write_json(folder / FIGURES, value)
    written = [folder / FIGURES, *(_log_of(run.mode, folder) for run in runs), *_pictures(runs, folder)]
    print("Wrote " + ", ".join(str(path) for path in written))


def _pictures(runs: Sequence[ModeRun], folder: Path) -> list[Path]:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print("The picture needs matplotlib: pip install matplotlib", file=sys.stderr)
        return []
    from paceline.lab.report.lanes import LaneRun, plot_lanes
    from paceline.lab.report.summary import summarize

    drawn = [
        LaneRun(lanes=run.lanes, summary=summarize(run.record), arrival_s=run.record.arrival_s.tolist())
        for run in runs
    ]
    paths = [folder / "demo.png", folder / "demo.svg"]
    for path in paths:
        plot_lanes(drawn, path, title="The same requests, three ways to batch them")
    return paths


DEMO = Command(name="demo", help=HELP, run=_run, takes=(DemoOptions, RaceOptions))
