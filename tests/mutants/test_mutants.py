"""Every mutant dies by its invariant, the unmutated engine is green on the same seeds, and the judge is honest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.runner import HERE, Mutant, check_unmutated, first_of_each, judge, load

MUTANTS = load()
# A family is the letter of an invariant: S safety, L liveness, F fairness and order, O outputs, ...
FAMILIES = first_of_each(MUTANTS, lambda name: MUTANTS[name].invariants[0][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mutant_dies_by_its_invariant(name: str) -> None:
    assert judge(MUTANTS[name]).problem == "", f"{name}: {MUTANTS[name].breaks}"


@pytest.mark.campaign
def test_the_unmutated_engine_is_green() -> None:
    seeds = sorted({seed for mutant in MUTANTS.values() for seed in mutant.seeds})
    steps = next(iter(MUTANTS.values())).steps
    assert check_unmutated(seeds, steps) == []


def test_table_and_patches_belong_together() -> None:
    assert {mutant.patch for mutant in MUTANTS.values()} == set(HERE.glob("*.patch"))
    for mutant in MUTANTS.values():
        assert mutant.patch.stem == mutant.name
        assert mutant.invariants and mutant.seeds and mutant.breaks.endswith(".")
        changed = [line for line in mutant.patch.read_text().splitlines() if line.startswith(("---", "+++"))]
        assert changed, f"{mutant.patch.name} changes nothing"
        assert all(line[4:].startswith(("a/src/paceline/", "b/src/paceline/")) for line in changed)


# -- the judge itself --------------------------------------------------------------------------------------


PATCH = "\n".join(
    (
        "--- a/src/paceline/core/clock.py",
        "+++ b/src/paceline/core/clock.py",
        "@@ -1,2 +1,2 @@",
        '-"""Time as a value that is passed in.',
        '+"""{text}',
        " ",
        "",
    )
)


def made_up(folder: Path, patch: str) -> Mutant:
    """A mutant of our own that runs on one short seed."""
    path = folder / "made_up.patch"
    path.write_text(patch)
    known = next(iter(MUTANTS.values()))
    return replace(known, name="made_up", patch=path, seeds=(0,), fallback=(), steps=20)


def test_a_patch_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    patch = PATCH.format(text="Time.").replace("passed in", "handed in")
    assert "made_up.patch does not apply" in judge(made_up(tmp_path, patch)).problem


def test_a_survivor_is_told(tmp_path: Path) -> None:
    assert "survived 1 seeds" in judge(made_up(tmp_path, PATCH.format(text="Time."))).problem


def test_a_crash_is_no_death_by_invariant(tmp_path: Path) -> None:
    # The new first line closes the docstring it opens, so that the module cannot be compiled.
    assert "crashed" in judge(made_up(tmp_path, PATCH.format(text='Time."""'))).problem


def test_another_invariant_is_not_good_enough() -> None:
    mutant = replace(MUTANTS["slot_off_by_one"], invariants=("O1",))
    assert "by another invariant than O1" in judge(mutant).problem
