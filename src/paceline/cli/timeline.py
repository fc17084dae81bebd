"""`paceline trace`: a run log as a timeline that Perfetto shows.

Owns the flags and what is printed; the timeline is made in `audit.chrome_trace`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.command import Command
from paceline.config.options import option
from paceline.errors import InputError

HELP = """
Draw a run log as a timeline, for Perfetto.

Writes a Chrome trace: one track for each row with prefill, decode and preemption, one for each request with its
waiting, and counters for rows, waiting requests and KV blocks.

  paceline serve --run-log run.jsonl.gz
  paceline trace run.jsonl.gz -o trace.json.gz

Open it in https://ui.perfetto.dev, which runs in the browser and uploads nothing, or in chrome://tracing. The log of a
server that is still running, or was killed, is drawn as far as it goes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What `paceline trace` takes."""

    log: str = option("", "run log to draw", argument=True, metavar="LOG")
    output: str = option("trace.json.gz", "file to write; .gz: compressed", also=("-o",), metavar="FILE")


def _run(values: Mapping[str, Any]) -> None:
    options = TraceOptions(**values)
    if not options.log:
        raise InputError("say which log to draw: paceline trace run.jsonl.gz -o trace.json.gz")

    from paceline.audit.chrome_trace import write_trace
    from paceline.audit.runlog import read_run_log

    log = read_run_log(options.log, allow_cut=True)
    log.check_decisions()
    if Path(options.output).resolve() == Path(options.log).resolve():
        raise InputError(f"{options.output} is the log itself; write the trace to another file")
    count = write_trace(log, options.output)
    print(f"Wrote {count:,} events to {options.output}; open it in https://ui.perfetto.dev")
    if log.is_unfinished:
        print(
            "The log has no end yet: its server is still running or was killed, or the log reached --run-log-bytes. "
            "The trace has all steps so far."
        )
    elif log.damage is not None:
        print(f"The trace ends where the log is damaged: {log.damage}", file=sys.stderr)


TRACE = Command(name="trace", help=HELP, run=_run, takes=(TraceOptions,))
