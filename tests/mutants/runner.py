"""Applies a mutant to a copy of the project, runs the simulation there and judges how it died.

A mutant counts as killed when the first seed that fails does so by one of the invariants named for it: a crash,
a hang or another invariant is a problem, and so is a patch that no longer applies. Only the copy is mutated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
TABLE = HERE / "mutants.toml"
TIMEOUT_S = 600.0  # for all seeds of one mutant; longer is a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    patch: Path
    invariants: tuple[str, ...]  # any of them may kill it
    breaks: str  # what the patch does, in one sentence
    seeds: tuple[int, ...]  # tried first: known to kill it quickly
    fallback: tuple[int, ...]  # tried when these do not
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one seed ended."""

    seed: int
    invariant: str
    crash: str
    message: str
    seconds: float

    @property
    def failed(self) -> bool:
        return bool(self.invariant or self.crash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one mutant; `problem` is "" when it died as it should."""

    mutant: Mutant
    outcomes: tuple[Outcome, ...]
    problem: str

    @property
    def killer(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.failed), None)


class PatchFailed(Exception):
    """A patch does not fit the source any more."""


def load(table: Path = TABLE) -> dict[str, Mutant]:
    """The mutants by name, in the order of the table."""
    entries: dict[str, Any] = tomllib.loads(table.read_text())
    steps, (first, end) = entries.pop("steps"), entries.pop("fallback")
    return {
        name: Mutant(
            name=name,
            patch=table.parent / entry["patch"],
            invariants=tuple(entry["invariants"]),
            breaks=entry["breaks"],
            seeds=tuple(entry["seeds"]),
            fallback=tuple(seed for seed in range(first, end) if seed not in entry["seeds"]),
            steps=steps,
        )
        for name, entry in entries.items()
    }


def first_of_each(names: Iterable[str], family: Callable[[str], str]) -> list[Any]:
    """Names as parameters of a test; all but the first of each family are left to the campaign."""
    seen: set[str] = set()
    found = []
    for name in names:
        is_first = family(name) not in seen
        seen.add(family(name))
        found.append(pytest.param(name, marks=() if is_first else pytest.mark.campaign))
    return found


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """A verdict per mutant, in order, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(judge, mutants)


def judge(mutant: Mutant) -> Verdict:
    """Run a mutant's own seeds, then the fallback, until one fails."""
    outcomes: tuple[Outcome, ...] = ()
    try:
        with mutated_copy(mutant.patch) as copy:
            for seeds in (mutant.seeds, mutant.fallback):
                outcomes += run_seeds(Path(copy), mutant.steps, seeds)
                if any(outcome.failed for outcome in outcomes):
                    break
    except PatchFailed as error:
        return Verdict(mutant=mutant, outcomes=(), problem=str(error))
    except subprocess.TimeoutExpired:
        return Verdict(mutant=mutant, outcomes=outcomes, problem=f"hung: no verdict within {TIMEOUT_S:g} s")
    return Verdict(mutant=mutant, outcomes=outcomes, problem=_problem(mutant, outcomes))


def check_unmutated(seeds: Sequence[int], steps: int) -> list[Outcome]:
    """The seeds on which the unmutated copy fails: none, when all is well."""
    with mutated_copy(None) as copy:
        outcomes = run_seeds(Path(copy), steps, seeds, all_seeds=True)
    return [outcome for outcome in outcomes if outcome.failed]


def mutated_copy(patch: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A temporary copy of src with the patch applied, beside the tests. What is compiled comes along, so that only
    changed modules are compiled again."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-mutant-")
    try:
        shutil.copytree(PROJECT / "src", Path(folder.name) / "src")
        (Path(folder.name) / "tests").symlink_to(PROJECT / "tests")  # no patch changes them
        if patch is not None:
            apply_patch(patch, Path(folder.name))
    except BaseException:
        folder.cleanup()
        raise
    return folder


def run_seeds(
    copy: Path, steps: int, seeds: Sequence[int], *, all_seeds: bool = False
) -> tuple[Outcome, ...]:
    """Run seeds in a process that imports only the copy, up to the first that fails unless `all_seeds`."""
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
    how = "all" if all_seeds else "first"
    command = [sys.executable, "-m", "tests.mutants.victim", how, str(steps), *map(str, seeds)]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:  # not even the import worked, or the interpreter died
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        outcomes.append(Outcome(seed=-1, invariant="", crash="the process", message=last, seconds=0.0))
    return tuple(outcomes)


def _problem(mutant: Mutant, outcomes: Sequence[Outcome]) -> str:
    killer = next((outcome for outcome in outcomes if outcome.failed), None)
    wanted = " or ".join(mutant.invariants)
    if killer is None:
        return f"survived {len(outcomes)} seeds; {wanted} should have killed it"
    if killer.crash:
        return f"crashed at seed {killer.seed} instead of dying by {wanted}: {killer.message}"
    if killer.invariant not in mutant.invariants:
        return f"died at seed {killer.seed} by another invariant than {wanted}: {killer.message}"
    return ""


def apply_patch(patch: Path, folder: Path) -> None:
    # The folder is no repository; git must not find one around it, or it would look for the files there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    command = ["git", "apply", "-C1", "--whitespace=nowarn", str(patch)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PatchFailed(f"{patch.name} does not apply: {done.stderr.strip()}")
