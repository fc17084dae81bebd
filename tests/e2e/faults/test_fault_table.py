"""The table of faults is complete, and every test it names exists."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((Path(__file__).parent / "table.toml").read_text())
GROUPS = {"E": 10, "G": 2, "D": 9, "K": 6, "T": 5, "R": 6}
IDS = {f"{group}{number}" for group, most in GROUPS.items() for number in range(1, most + 1)}
IDS |= {"Q1", "Q3", "Q4", "L3x"}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_fault_is_in_the_table() -> None:
    assert set(TABLE) == IDS
    for entry in TABLE.values():
        assert set(entry) == {"fault", "then", "tests"} and entry["tests"]


@pytest.mark.parametrize("name", sorted({test for entry in TABLE.values() for test in entry["tests"]}))
def test_a_test_of_the_table_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions_of(file)


def test_every_test_of_this_folder_is_in_the_table() -> None:
    named = {test for entry in TABLE.values() for test in entry["tests"]}
    for path in Path(__file__).parent.glob("test_fault_*.py"):
        if path.name != Path(__file__).name:
            file = f"e2e/faults/{path.name}"
            missing = {name for name in functions_of(file) if name.startswith("test_")} - {
                name.partition("::")[2] for name in named if name.startswith(file)
            }
            assert not missing, f"{file}: the table does not name {missing}"
