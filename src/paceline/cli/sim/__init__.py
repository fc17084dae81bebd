"""`paceline sim`: from a command line to simulated runs, a table and files: check, run, print, write.

Heavy imports happen when the command runs: help and mistakes are answered before numpy is loaded. What the runs are is
in `run`, how results look in `view`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.cli.command import Command
from paceline.cli.show import ShowOptions, page_port, show_page
from paceline.cli.sim.flags import HELP, SimOptions
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.options import from_values, pick


def _run(values: Mapping[str, Any]) -> None:
    options = from_values(SimOptions, values)
    configs = (KVConfig, SchedulerConfig, EngineConfig)
    given = {name: value for config in configs for name, value in pick(config, values).items()}
    engine = {name: value for name, value in given.items() if value is not None}

    if options.calibrate or options.compare:
        from paceline.cli.sim.calibrate import run_calibration

        run_calibration(options, engine)
        return

    if options.world:
        from paceline.cli.sim.world import run_world

        run_world(options)
        return

    from paceline.cli.sim.run import plan_runs, recordings_of, run_all
    from paceline.cli.sim.view import Outputs, print_results, write_files

    outputs = Outputs.checked(options)
    runs = plan_runs(options, engine)
    with page_port(from_values(ShowOptions, values)) as bound:
        recordings = None if bound is None else recordings_of(runs)
        results = run_all(runs, outputs.log, recordings, jobs=options.jobs)
        print_results(results, options)
        write_files(results, options, outputs)
        if bound is not None and recordings is not None:
            show_page(list(recordings.values()), bound)


SIM = Command(
    name="sim",
    help=HELP,
    run=_run,
    takes=(
        SimOptions,
        *("Step size", "Step timing", "Tuning", "KV cache"),
        *("Scheduling policy", "Batching", "Queue and preemption"),
        ShowOptions,
    ),
    # A simulated machine measures nothing: where others follow the machine, the declared defaults hold.
    defaults={
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "max_num_prompt_tokens": None,
        "step_target_ms": "none",
        "max_model_len": "what fits into the KV cache",
        "max_queue": "all",
        "max_queue_tokens": "all",
        "block_size": "64 on a GPU, 16 on a CPU",
        "num_blocks": "what fits into the device's memory",
        "num_host_blocks": "0; with --preemption swap as on the device",
        "enable_prefix_caching": "if the workload has prefixes",
    },
    also={"num_blocks": ("--num-blocks",)},
)
