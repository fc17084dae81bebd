"""Runs the tests named for a mutant in a mutated copy of the project and judges how they ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernels import CACHE
from tests.mutants.runner import PROJECT, TIMEOUT_S, PatchFailed, apply_patch

HERE = Path(__file__).parent
TABLE = HERE / "mutants.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedMutant:
    """A patch and the tests that must notice it."""

    __test__ = False  # not for pytest to collect

    name: str
    patch: Path
    breaks: str
    tests: tuple[str, ...]


def load() -> dict[str, TestedMutant]:
    return {
        name: TestedMutant(
            name=name, patch=HERE / f"{name}.patch", breaks=entry["breaks"], tests=tuple(entry["tests"])
        )
        for name, entry in tomllib.loads(TABLE.read_text()).items()
    }


def problem_of(mutant: TestedMutant) -> str:
    """What is wrong with a mutant's death; "" when a named test fails in an assertion and nothing else happens."""
    try:
        endings = run_tests(mutant.tests, mutant.patch)
    except PatchFailed as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"hung: no verdict within {TIMEOUT_S:g} s"
    if not endings:
        return "no test ran"
    crashed = {name: text for name, text in endings.items() if text and "AssertionError" not in text}
    if crashed:
        return f"crashed instead of failing an assertion: {crashed}"
    if not any(endings.values()):
        return f"survived {len(endings)} tests"
    return ""


def run_tests(tests: Sequence[str], patch: Path | None) -> dict[str, str]:
    """Each test that ran and "" or the last line of how it failed."""
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as folder:
        copy = Path(folder)
        for part in ("src", "tests", "benchmarks"):
            skipped = shutil.ignore_patterns("mutants", "dst")
            shutil.copytree(PROJECT / part, copy / part, ignore=skipped)
        shutil.copy(PROJECT / "pyproject.toml", copy)
        if patch is not None:
            apply_patch(patch, copy)
        # Kernels that a mutant compiles stay out of the user's cache.
        if CACHE.exists():
            shutil.copytree(CACHE, copy / "cache" / "kernels")
        report = copy / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *tests,
        ]
        environment = os.environ | {
            "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}",
            "OMP_NUM_THREADS": "1",
            "PACELINE_TEST_PATIENCE_S": "10",
            "PACELINE_CACHE_ROOT": str(copy / "cache"),
        }
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode not in (0, 1) or not report.exists():
            return {"pytest": (done.stdout.strip().splitlines() or ["nothing"])[-1]}
        return dict(_endings(report))


def _endings(report: Path) -> list[tuple[str, str]]:
    endings = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failed = case.find("failure")
        if failed is None:
            failed = case.find("error")
        text = "" if failed is None else f"{failed.get('message', '')}\n{failed.text or ''}"
        endings.append((case.get("name", "?"), text if len(text) < 20_000 else text[-20_000:]))
    return endings
