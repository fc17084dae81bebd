"""`paceline tune`: the settings that keep an SLO, found in the simulator, as flags of `paceline serve`.

Owns the meaning of the options together, the knobs that are turned and what is printed. The search is in `sim.tune`.
Heavy imports happen when the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from paceline.cli.flags import add_command
from paceline.cli.tune.flags import HELP, PANELS, TuneOptions


def add_tune(app: typer.Typer) -> None:
    add_command(app, "tune", _run, PANELS, HELP)


def _run(values: Mapping[str, Any]) -> None:
    options = TuneOptions(**values)

    from paceline.cli.tune.run import run_tune

    run_tune(options)
