"""What this processor offers to the kernels, read from the system and never guessed.

`PACELINE_CPU_ISA` can ask for less than the processor has, to compare or to test; it cannot ask for more: LLVM ends
the process on an instruction that its target lacks.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.errors import ConfigError

VARIABLE = "PACELINE_CPU_ISA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """A set of instructions that kernels are compiled for."""

    name: str
    lanes: int  # 32-bit lanes of a register
    machine: str  # aarch64 or x86_64; "" for any
    cpu: str  # as LLVM calls it
    features: str
    needs: frozenset[str]  # flags of /proc/cpuinfo
    title: str  # what a start card says
    # The processor, as LLVM calls it, whose order of instructions is taken; that of `cpu` if empty.
    tune: str = ""


_V3 = "+avx2,+fma,+f16c,+bmi2,+popcnt,+sse4.2"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
# Best first, for each kind of machine.
ISAS = (
    Isa(
        name="neon",
        lanes=4,
        machine="aarch64",
        cpu="generic",
        features="+neon,+dotprod,+fullfp16,+lse",
        needs=frozenset({"asimddp", "asimdhp", "atomics"}),
        title="neon dotprod",
        # A small processor that does not reorder: LLVM then keeps products in the kernels' order, in which the fewest
        # registers are alive. Its orders for larger ones store sums and load them again; they are 4 to 17 % slower.
        tune="cortex-a55",
    ),
    Isa(
        name="avx512",
        lanes=16,
        machine="x86_64",
        cpu="x86-64-v4",
        features=_V3 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni",
        needs=_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        title="AVX-512 VNNI",
    ),
    Isa(
        name="avxvnni",
        lanes=8,
        machine="x86_64",
        cpu="x86-64-v3",
        features=_V3 + ",+avxvnni",
        needs=_AVX2 | {"avx_vnni"},
        title="AVX-VNNI",
    ),
    Isa(
        name="avx2",
        lanes=8,
        machine="x86_64",
        cpu="x86-64-v3",
        features=_V3,
        needs=_AVX2,
        title="AVX2",
    ),
    Isa(name="plain", lanes=4, machine="", cpu="generic", features="", needs=frozenset(), title="plain"),
)
BY_NAME = {isa.name: isa for isa in ISAS}


def host_isa() -> Isa:
    """The best set this processor has, or the one `PACELINE_CPU_ISA` names. Raises ConfigError."""
    offered = [isa for isa in ISAS if isa.machine in ("", _machine()) and isa.needs <= processor_flags()]
    asked = os.environ.get(VARIABLE)
    if not asked:
        return offered[0]
    names = ", ".join(isa.name for isa in offered)
    for isa in offered:
        if isa.name == asked:
            return isa
    raise ConfigError(f"{VARIABLE}={asked}: this processor can take {names}")


def missing_flags() -> frozenset[str]:
    """What the best set for this kind of machine needs and the processor does not have."""
    best = next(isa for isa in ISAS if isa.machine in ("", _machine()))
    return best.needs - processor_flags()


@cache
def processor_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The features every core reports."""
    found: list[frozenset[str]] = []
    try:
        text = Path(path).read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("Features", "flags"):
            found.append(frozenset(values.split()))
    return frozenset.intersection(*found) if found else frozenset()


def _machine() -> str:
    machine = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)
