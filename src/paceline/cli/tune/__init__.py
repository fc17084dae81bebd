"""`paceline tune`: the settings that keep an SLO, found in the simulator, as flags of `paceline serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.cli.command import Command
from paceline.cli.tune.flags import HELP, TuneOptions


def _run(values: Mapping[str, Any]) -> None:
    options = TuneOptions(**values)

    if options.devices > 1:
        from paceline.cli.tune.split import run_split

        run_split(options)
        return

    from paceline.cli.tune.run import run_tune

    run_tune(options)


TUNE = Command(name="tune", help=HELP, run=_run, takes=(TuneOptions,))
