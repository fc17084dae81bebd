"""Every mutant dies in an assertion of a test named for it, and tests are green in a copy without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.by_tests.judge import HERE, TestedMutant, load, problem_of, run_tests
from tests.mutants.runner import first_of_each

MUTANTS = load()


def family(name: str) -> str:
    """The folder of the tests that notice it. Mutants of the native kernels are left to the campaign, all of them:
    kernels are compiled for each mutant, which takes longer than its tests."""
    folder = MUTANTS[name].tests[0].rpartition("/")[0]
    return "tests/torch" if folder == "tests/native" else folder


FAMILIES = first_of_each(MUTANTS, family)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mutant_is_noticed(name: str) -> None:
    assert problem_of(MUTANTS[name]) == "", MUTANTS[name].breaks


@pytest.mark.campaign
def test_a_copy_without_a_mutant_is_green() -> None:
    """One test of each file, which shows that copying breaks nothing: all of them also run in the project itself."""
    tests = sorted({test for mutant in MUTANTS.values() for test in mutant.tests})
    endings = run_tests(list({test.partition("::")[0]: test for test in tests}.values()), None)
    assert endings and not any(endings.values())


def test_table_and_patches_belong_together() -> None:
    assert {mutant.patch for mutant in MUTANTS.values()} == set(HERE.glob("*.patch"))


def test_a_survivor_is_told(tmp_path: Path) -> None:
    harmless = tmp_path / "harmless.patch"
    harmless.write_text(
        "--- a/src/paceline/text/stream.py\n+++ b/src/paceline/text/stream.py\n@@ -1,1 +1,2 @@\n"
        + "+# A comment changes nothing.\n"
        + f" {(HERE.parents[2] / 'src/paceline/text/stream.py').read_text().splitlines()[0]}\n"
    )
    mutant = TestedMutant(
        name="harmless", patch=harmless, breaks="Nothing.", tests=MUTANTS["stop_prefix_emitted"].tests
    )
    assert "survived" in problem_of(mutant)
