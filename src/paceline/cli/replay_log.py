"""`paceline replay`: run a recorded schedule again and say whether it comes out the same.

Owns the flags, what is printed and the exit code: 0 when every plan is identical, 1 when one is not, 2 when the
file is no log that can be replayed. The replay itself is in `lab.sim.replayer`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.command import Command
from paceline.cli.show import ShowOptions, page_port, show_options, show_page
from paceline.config.options import option, pick
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.audit.runlog import RunLog
    from paceline.lab.sim.replayer import ReplayReport
    from paceline.policy import Policy
    from paceline.server.live.recording import Recording

PROGRESS_STEPS = 200
HELP = """
Replay a run log and check that every decision is the same.

The scheduler gets every input and result of the log at its recorded time. Prints "identical", or the first difference
between its plans and decisions and the recorded ones.

  paceline sim --rate 20 --log run.jsonl.gz
  paceline serve --run-log run.jsonl.gz
  paceline replay run.jsonl.gz
  paceline replay run.jsonl.gz --ui

--ui plays the run on the live page, step by step, as far as it is identical.

The log of a server that was killed can end in the middle of a line: --allow-cut replays everything before it.
Exits with 0 if everything is identical, 1 if something differs, 2 if the file cannot be replayed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What `paceline replay` takes."""

    log: str = option("", "run log to replay", argument=True, metavar="LOG")
    output: str = option(
        "", "write the log of the replay to this file; it is identical if nothing differs", metavar="FILE"
    )
    allow_cut: bool = option(False, "replay the steps before a broken or incomplete line")
    scheduling_policy: str = option(
        "",
        "module:Class of the policy, for runs with a policy of your own; a log never decides what is imported",
        metavar="MODULE:CLASS",
    )
    json: bool = option(False, "print the result as one JSON object")


def _run(values: Mapping[str, Any]) -> None:
    options = ReplayOptions(**pick(ReplayOptions, values))
    if not options.log:
        raise InputError("say which log to replay: paceline replay run.jsonl.gz")

    from paceline.audit.runlog import read_run_log

    log = read_run_log(options.log, allow_cut=options.allow_cut)
    policy = None
    if options.scheduling_policy:
        from paceline.scheduler.policy import load_policy

        policy = load_policy(options.scheduling_policy, log.config.scheduler)
    with page_port(show_options(values)) as bound:
        recording = None if bound is None else _recording(log)
        report = _replayed(log, options, policy, recording)
        print(_as_json(log, report) if options.json else _sentence(log, report))
        if bound is not None and recording is not None:
            if not report.num_steps:
                raise InputError(f"{options.log} has no step that could be shown")
            show_page([recording], bound)
    if not report.is_equal:
        raise SystemExit(1)


def _recording(log: RunLog) -> Recording:
    from paceline.server.live.recording import Recording

    return Recording(log.path.name, num_rows=log.config.scheduler.max_num_seqs, device="recorded")


def _replayed(
    log: RunLog, options: ReplayOptions, policy: Policy | None, recording: Recording | None
) -> ReplayReport:
    from paceline.audit.runlog import CutLog
    from paceline.lab.sim.replayer import replay

    watch = None if recording is None else recording.watch
    try:
        with _progress() as on_step:
            return replay(log, output=options.output or None, policy=policy, watch=watch, on_progress=on_step)
    except CutLog as problem:
        raise InputError(f"{problem}; --allow-cut replays them") from problem


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Steps so far, on a terminal; their number is not known before the end."""
    if not sys.stderr.isatty():
        yield lambda num_steps: None
        return
    from rich.console import Console

    with Console(stderr=True).status("replaying") as status:

        def update(num_steps: int) -> None:
            if num_steps % PROGRESS_STEPS == 0:
                status.update(f"replaying: {num_steps:,} steps")

        yield update


def _sentence(log: RunLog, report: ReplayReport) -> str:
    steps = f"{report.num_steps:,} step{'' if report.num_steps == 1 else 's'}"
    if report.difference is not None:
        return f"different after {steps} that were identical: {report.difference}"
    if log.damage is not None:
        return f"identical: {steps}, up to the damage ({log.damage})"
    return f"identical: {steps}{'' if report.complete else '; the log was not closed'}"


def _as_json(log: RunLog, report: ReplayReport) -> str:
    difference = None if report.difference is None else asdict(report.difference)
    values = {
        "identical": report.is_equal,
        "num_steps": report.num_steps,
        "complete": report.complete,
        "difference": difference,
        "damage": None if log.damage is None else str(log.damage),
    }
    return json.dumps(values, indent=2)


REPLAY = Command(name="replay", help=HELP, run=_run, takes=(ReplayOptions, ShowOptions))
