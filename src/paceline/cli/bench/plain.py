"""`python -m paceline.cli.bench.plain throughput | latency`: the same commands from the standard library alone.

For machines that have what the engine needs and no library for command lines or tables. Takes every option of the
engine, named as the keyword arguments of `LLM` are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from paceline.cli.bench.run import latency, throughput
from paceline.config.engine import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.config.options import flag_of
from paceline.errors import PacelineError
from paceline.lab.bench.options import LatencyOptions, ThroughputOptions

COMMANDS = {"throughput": (ThroughputOptions, throughput), "latency": (LatencyOptions, latency)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.cli.bench.plain", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (own, _) in COMMANDS.items():
        command = commands.add_parser(name, allow_abbrev=False)
        taken = {flag_of(spec) for spec in fields(own)}
        for spec in fields(own):
            _add(command, spec, spec.default)
        for config in (ModelConfig, KVConfig, SchedulerConfig, EngineConfig):
            for spec in fields(config):
                if "help" in spec.metadata and flag_of(spec) not in taken:
                    _add(command, spec, None)
    values = vars(parser.parse_args(arguments))
    _, run = COMMANDS[values.pop("command")]
    try:
        run(values)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _add(command: argparse.ArgumentParser, spec: Field[Any], default: Any) -> None:
    kind: type = spec.metadata["kind"]
    how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
    text = spec.metadata["help"].replace("%", "%%")
    command.add_argument(flag_of(spec), dest=spec.name, default=default, help=text, **how)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
