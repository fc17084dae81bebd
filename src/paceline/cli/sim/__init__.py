"""`paceline sim`: from a command line to simulated runs, a table and files.

Owns the order of things: check everything that can be checked, run, print, write. What the runs are is in
`sim_plan`, how results are shown in `sim_output`. Heavy imports happen when the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import typer

from paceline.cli.flags import add_command
from paceline.cli.show import ShowOptions, page_port, show_options, show_page
from paceline.cli.sim.flags import HELP, PANELS, SimOptions


def add_sim(app: typer.Typer) -> None:
    add_command(app, "sim", _run, PANELS, HELP)


def _run(values: Mapping[str, Any]) -> None:
    own, shown = ({spec.name for spec in fields(config)} for config in (SimOptions, ShowOptions))
    options = SimOptions(**{name: value for name, value in values.items() if name in own})
    engine = {name: value for name, value in values.items() if name not in own | shown and value is not None}

    if options.calibrate or options.compare:
        from paceline.cli.sim.calibrate import run_calibration

        run_calibration(options, engine)
        return

    from paceline.cli.sim.run import plan_runs, recordings_of, run_all
    from paceline.cli.sim.view import Outputs, print_results, write_files

    outputs = Outputs.checked(options)
    runs = plan_runs(options, engine)
    with page_port(show_options(values)) as bound:
        recordings = None if bound is None else recordings_of(runs)
        results = run_all(runs, outputs.log, recordings)
        print_results(results, options)
        write_files(results, options, outputs)
        if bound is not None and recordings is not None:
            show_page(list(recordings.values()), bound)
