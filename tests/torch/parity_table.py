"""Parity on demand: scenarios from the command line, a table of what they gave."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.torch.pairwise import product
from tests.torch.parity import BACKENDS, BY_BACKEND, Scenario, is_allowed, pairwise_scenarios, play
from tests.torch.tiny_models import NAMES


@dataclass(slots=True)
class Line:
    """What the scenarios of one architecture on one backend gave together."""

    runs: int = 0
    sequences: int = 0
    compared: int = 0
    worst: float = 0.0
    ties: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    lines: dict[str, Line] = {}
    for scenario in _scenarios(options):
        line = lines.setdefault(f"{scenario.architecture}, {scenario.backend}", Line())
        _run(scenario, line)
        if options.verbose:
            print(f"{line.seconds:8.1f} s  {scenario}", flush=True)
    _print(lines)
    wrong = [text for line in lines.values() for text in line.wrong]
    for text in wrong[:20]:
        print(text)
    sys.exit(bool(wrong))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the full product of the factors (hours)")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only these")
    parser.add_argument("--architecture", action="append", choices=NAMES, help="only these")
    parser.add_argument("--sample", type=int, help="number of scenarios, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the covering set and of the sample")
    parser.add_argument("--verbose", action="store_true", help="a line for each scenario")
    return parser.parse_args(arguments)


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    found: list[Scenario] = []
    for backend in options.backend or BACKENDS:
        if options.all:
            rows = product(BY_BACKEND[backend], is_allowed)
            found += [Scenario(backend=backend, **row) for row in rows]
        else:
            found += pairwise_scenarios(backend, options.seed)
    if options.architecture:
        found = [scenario for scenario in found if scenario.architecture in options.architecture]
    if options.sample is not None:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    return sorted(found, key=lambda scenario: NAMES.index(scenario.architecture))


def _run(scenario: Scenario, line: Line) -> None:
    started_s = time.process_time()
    line.runs += 1
    try:
        outcome = play(scenario)
        outcome.check()
    except Exception as error:
        line.wrong.append(f"{scenario}: {type(error).__name__}: {error}")
    else:
        line.sequences += len(outcome.sequences)
        line.compared += outcome.compared
        line.worst = max(line.worst, outcome.worst)
        line.ties += outcome.ties
        line.counts += outcome.counts
    line.seconds += time.process_time() - started_s


def _print(lines: dict[str, Line]) -> None:
    titles = (
        "architecture and backend",
        "runs",
        "sequences",
        "logit rows",
        "largest difference",
        "ties",
        "wrong",
        "CPU s",
    )
    print(" | ".join(titles))
    for name, line in lines.items():
        cells = (
            name,
            line.runs,
            line.sequences,
            line.compared,
            f"{line.worst:.1e}",
            line.ties,
            len(line.wrong),
        )
        print(" | ".join(str(cell) for cell in (*cells, f"{line.seconds:.0f}")))
    total: Counter[str] = sum((line.counts for line in lines.values()), Counter())
    print(", ".join(f"{count} {name}" for name, count in sorted(total.items())))
