"""The assembly of the kernels for every processor, made on any: the right instructions, and what is kept in registers.

What LLVM makes of a product's innermost loop decides its speed. No processor that runs these tests has all of the
instructions, so that nothing is executed here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.runner.native.compile import GROUPS
from paceline.runner.native.isa import BY_NAME, ISAS
from paceline.runner.native.layout import LIBC, LIBM, symbol_of


@dataclass(frozen=True, slots=True)
class Expected:
    """What the loops over groups of 32 inputs contain."""

    dot: str  # a pattern; empty: there is no such instruction
    never: str
    # Loads and stores of registers that there was no room for: in loops over groups of weights, and over keys in bytes.
    spills: tuple[int, int] = (0, 0)


EXPECTED = {
    "neon": Expected(r"sdot\tv", r"\bfmla\tz", (0, 24)),
    "avx512": Expected(r"vpdpbusd\t.*%zmm", r"vpmaddubsw|\{vex\}"),
    "avxvnni": Expected(r"\{vex\}\tvpdpbusd\t.*%ymm", r"zmm|vpmaddubsw", (2, 20)),
    "avx2": Expected(r"vpmaddubsw\t.*%ymm", r"zmm|vpdpbusd", (64, 64)),
    "plain": Expected("", r"ymm|zmm|sdot|vpdpbusd|vpmaddubsw|pmaddubsw"),
}
TARGETS = [(isa.name, isa.machine) for isa in ISAS if isa.machine] + [
    ("plain", "aarch64"),
    ("plain", "x86_64"),
]
STACK = re.compile(r"\[sp\b|\(%rsp\)")


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "machine"), TARGETS)
def test_the_loops_of_products_are_the_expected_ones(name: str, machine: str, tmp_path: Path) -> None:
    path, expected = tmp_path / "kernels.s", EXPECTED[name]
    module = "paceline.runner.native.compile"
    subprocess.run([sys.executable, "-m", module, name, machine, str(path), "assembly"], check=True)
    text = path.read_text()
    assert not re.search(expected.never, text)
    called = set(re.findall(r"^\t(?:callq?|bl|jmp)\t([A-Za-z]\w*)(?:@PLT)?$", text, re.MULTILINE))
    called -= {symbol_of(kernel) for group in GROUPS for kernel in group}
    # A processor with these instructions calls no function in their place.
    assert called <= {*LIBC, *(LIBM if (name, machine) == ("plain", "x86_64") else ())}
    if not expected.dot:
        return
    registers = 16 // BY_NAME[name].lanes
    # Three and four rows are computed in halves of the columns where a vector has several registers.
    half = max(1, registers // 2)
    products = {8 * registers, 16 * registers, 24 * half, 32 * half}
    found: dict[int, int] = {}
    for loop in (loop for part in text.split("\f") for loop in innermost_loops(part)):
        dots = sum(bool(re.search(expected.dot, line)) for line in loop)
        if dots:
            found[dots] = max(found.get(dots, 0), sum(bool(STACK.search(line)) for line in loop))
    assert products <= found.keys(), found
    of_products, of_keys = expected.spills
    assert max(found[dots] for dots in products) <= of_products, found
    assert max(found.values()) <= of_keys, found


def innermost_loops(text: str) -> list[list[str]]:
    """From a label to a jump back to it, where no other such loop lies between."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("\t.")]
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith(".LBB")}
    jump = re.compile(r"^\t(?:j\w+|b\.\w+|b|t?cbn?z|tbn?z)\t.*?(\.LBB\w+)$")
    loops = []
    for number, line in enumerate(lines):
        match = jump.match(line)
        if match and labels[match[1]] <= number:
            loops.append((labels[match[1]], number))
    inner = [
        one
        for one in loops
        if not any(one != other and one[0] <= other[0] <= other[1] <= one[1] for other in loops)
    ]
    return [lines[start : end + 1] for start, end in inner]


def test_loops_are_found_in_assembly() -> None:
    text = (
        ".LBB0_1:\n\tmov\tx\n.LBB0_2:\n\tsdot\ty\n\tb.hi\t.LBB0_2\n\tjne\t.LBB0_1\n\tjmp\t.LBB0_3\n.LBB0_3:\n"
    )
    assert innermost_loops(text) == [[".LBB0_2:", "\tsdot\ty", "\tb.hi\t.LBB0_2"]]
