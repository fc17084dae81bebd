"""`paceline doctor`: what this machine and installation offer, and what is wrong with them.

Gathers facts as plain values, judges them, prints both and sets the exit code.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cli.command import Command
from paceline.cli.terminal import columns
from paceline.config.options import option
from paceline.errors import ConfigError, PacelineError
from paceline.models.files.fetch import (
    DEFAULT_MODEL,
    MINILM,
    ROOT_VARIABLE,
    PackagedModel,
    fetch_packaged,
    models_folder,
)
from paceline.runner.device import driver_gpus, why_no_gpu
from paceline.runner.machine_load import REFRESH_S, MachineLoad, busy_sentence, cores_allowed
from paceline.runner.native.isa import VARIABLE as ISA_VARIABLE
from paceline.runner.native.isa import host_isa, missing_flags
from paceline.version import __version__

HELP = """
Check this installation and machine for problems.

Prints versions, cores, memory, disk, the default model, GPU and environment variables, then problems with what to do
about them. Exits with 1 only if something is broken.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What `paceline doctor` takes."""

    json: bool = option(False, "print one JSON object")


def doctor(given: Mapping[str, Any]) -> None:
    facts = gather()
    problems = find_problems(facts)
    if given["json"]:
        found = [{"problem": one.text, "is_broken": one.is_broken} for one in problems]
        print(json.dumps({**facts, "problems": found}, indent=2))
    else:
        _print(facts)
        for one in problems:
            print(f"{'BROKEN' if one.is_broken else 'Note'}: {one.text}")
        if not problems:
            print("No problems found.")
    if any(one.is_broken for one in problems):
        raise SystemExit(1)


def _print(facts: dict[str, Any]) -> None:
    cpu, memory, disk, model = facts["cpu"], facts["memory"], facts["cache"], facts["default_model"]
    lines = [
        ("versions", ", ".join(f"{name} {text or 'missing'}" for name, text in facts["versions"].items())),
        ("system", facts["system"]),
        ("cores", f"{cpu['cores']} to use, {cpu['threads']} threads for a step; {cpu['name']}"),
        ("instructions", _instructions(cpu["instructions"])),
        ("CPU kernels", _kernels_line(cpu["kernels"])),
        ("memory", f"{_gib(memory['available_bytes'])} free of {_gib(memory['total_bytes'])}"),
        ("cache", f"{disk['path']}, {_gib(disk['free_bytes'])} free on its disk"),
        ("default model", model["path"] or "not downloaded; paceline pull fetches it"),
        (
            "for vectors",
            facts["embedding_model"]["path"] or "not downloaded; paceline pull minilm fetches it",
        ),
        ("GPU", ", ".join(facts["gpus"]) or "none"),
        *(("environment", f"{name}={value}") for name, value in facts["environment"].items()),
    ]
    print(*columns(lines, 2), "", sep="\n")


def _instructions(found: dict[str, bool]) -> str:
    here = [name for name, is_there in found.items() if is_there]
    absent = [name for name, is_there in found.items() if not is_there]
    return f"{' '.join(here) or 'none that matter'}{f' (not: {chr(32).join(absent)})' if absent else ''}"


def _kernels_line(found: dict[str, Any]) -> str:
    if found["error"]:
        return "cannot be used"
    if found["gops_per_core"] is None:
        return f"{found['title']}; not compiled yet: paceline warm compiles them, else the first start does"
    return f"{found['title']}, {found['gops_per_core']:.0f} GOPS per core in a 4-bit product"


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


# Facts about this machine and installation, as plain values. Judges nothing, changes nothing, asks no network.
#
# What cannot be found out is None: a machine that hides something is not broken.


PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "gguf", "huggingface-hub", "tqdm")
EXTRAS = ("torch", "triton")  # for GPUs, and for models that the CPU kernels do not cover
# What the arithmetic is much faster with, by the kind of machine.
INSTRUCTIONS = {
    "aarch64": ("asimddp", "i8mm", "bf16", "sve"),
    "x86_64": ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
}
# ARM machines name their cores by number only.
ARM_PARTS = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}
KV_SPACE = "PACELINE_CPU_KVCACHE_SPACE"
CHECK_VARIABLE = "PACELINE_NATIVE_CHECK"
VARIABLES = (
    *(ISA_VARIABLE, CHECK_VARIABLE),
    *(ROOT_VARIABLE, KV_SPACE, "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR"),
)
SECRET = ("HF_TOKEN",)

Facts = dict[str, Any]


def machine_facts() -> Facts:
    """What is known without loading anything."""
    machine = platform.machine()
    return {
        "versions": {"paceline": __version__, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.release()} {machine}",
        "cpu": {
            "name": processor_name() or machine,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory": {"total_bytes": _memory("MemTotal"), "available_bytes": _memory("MemAvailable")},
    }


def gather() -> Facts:
    load = MachineLoad()
    base, gpus = machine_facts(), driver_gpus()
    kernels = _kernels()
    others = _others(load)
    return {
        **base,
        "versions": {**base["versions"], **_versions()},
        "cpu": {
            **base["cpu"],
            "used_by_others": others,
            "is_busy": load.is_busy,
            "threads": cores_allowed(),
            "instructions": _instructions_found(platform.machine()),
            "kernels": kernels,
        },
        "cache": _cache(),
        "default_model": _packaged(DEFAULT_MODEL),
        "embedding_model": _packaged(MINILM),
        "gpus": gpus,
        "gpu_error": _gpu_error() if gpus else None,
        "environment": _environment(),
    }


def _others(load: MachineLoad) -> float | None:
    """Cores that other processes use; looks for a quarter of a second if nothing took so long before."""
    time.sleep(max(0.0, REFRESH_S - load.age_s))
    load.refresh()
    return None if load.others is None else round(load.others, 2)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in (*PACKAGES, *EXTRAS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in PACKAGES:
                found[name] = None
    return found


def _kernels() -> Facts:
    """What steps on the CPU are computed with, and how fast; nothing is compiled for it."""
    from paceline.runner.native.code import has_host_code, host_code
    from paceline.runner.native.speed import core_gops

    found: Facts = {"isa": None, "title": "none", "missing": [], "gops_per_core": None, "error": None}
    try:
        isa = host_isa()
        found |= {"isa": isa.name, "title": isa.title, "missing": sorted(missing_flags())}
        if has_host_code():
            found["gops_per_core"] = round(core_gops(host_code(lambda stage: None)), 1)
    except ConfigError as error:
        found["error"] = str(error)
    except Exception as error:  # a broken installation fails in many ways
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _gpu_error() -> str | None:
    try:
        return why_no_gpu() or None
    except Exception as error:
        return f"torch is installed but cannot be used ({type(error).__name__}: {error}); install it again"


def _cpu_field(name: str) -> str | None:
    for line in _lines(Path("/proc/cpuinfo")):
        label, _, value = line.partition(":")
        if label.strip() == name:
            return value.strip()
    return None


def processor_name() -> str | None:
    """As its maker calls it."""
    part = _cpu_field("CPU part")
    return _cpu_field("model name") or (part and ARM_PARTS.get(part, f"ARM part {part}"))


def _instructions_found(machine: str) -> dict[str, bool]:
    known = INSTRUCTIONS.get({"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine), ())
    present = set((_cpu_field("Features") or _cpu_field("flags") or "").split())
    return {name: name in present for name in known}


def _memory(name: str) -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _cache() -> Facts:
    folder = models_folder()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return {
        "path": str(folder),
        "free_bytes": shutil.disk_usage(existing).free,
        "is_writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    }


def _packaged(model: PackagedModel) -> Facts:
    try:
        return {"path": str(fetch_packaged(local_only=True, model=model))}
    except (PacelineError, OSError):
        return {"path": None}


def _environment() -> dict[str, str]:
    """Those of the variables we read that are set; a secret is only said to be there."""
    return {
        name: "(set, not shown)" if name in SECRET else os.environ[name]
        for name in VARIABLES
        if name in os.environ
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


# What is wrong with a machine or an installation, and what to do about it


GIB = 2**30
LITTLE_MEMORY_BYTES = 1 * GIB


class MachineProblem(NamedTuple):
    """Something to know. What is broken keeps models from running."""

    text: str
    is_broken: bool = False


def find_problems(facts: Facts) -> list[MachineProblem]:
    return [*_installation(facts), *_arithmetic(facts), *_room(facts), *_settings(facts)]


def _installation(facts: Facts) -> Iterator[MachineProblem]:
    for name, version in facts["versions"].items():
        if version is None:
            text = f"{name} is not installed; install paceline again: pip install --force-reinstall paceline"
            yield MachineProblem(text, is_broken=True)


def _arithmetic(facts: Facts) -> Iterator[MachineProblem]:
    cpu = facts["cpu"]
    kernels = cpu["kernels"]
    if kernels["error"] and kernels["error"].startswith(ISA_VARIABLE):
        text = f"{kernels['error']}; set it to one of these, or remove it"
        yield MachineProblem(text, is_broken=True)
    elif kernels["error"]:
        yield MachineProblem(
            f"the CPU kernels cannot be used ({kernels['error']}); models run on a GPU or with paceline[torch] only"
        )
    elif kernels["isa"] == "plain":
        lacks = f"this processor has no {', '.join(kernels['missing'])}"
        why = lacks if kernels["missing"] else f"{ISA_VARIABLE} asks for plain"
        yield MachineProblem(f"{why}: the CPU kernels run without dot products, several times slower")
    if cpu["is_busy"]:
        yield MachineProblem(busy_sentence(cpu["used_by_others"], cpu["cores"]))
    if facts["gpu_error"]:
        yield MachineProblem(f"the GPU is not used: {facts['gpu_error']}")


def _room(facts: Facts) -> Iterator[MachineProblem]:
    free = facts["memory"]["available_bytes"]
    if free is not None and free < LITTLE_MEMORY_BYTES:
        yield MachineProblem(
            "less than 1 GiB of memory is free: close other programs, or give --kv-cache-memory-bytes"
        )
    if facts["default_model"]["path"] is not None:
        return
    cache = facts["cache"]
    needed = DEFAULT_MODEL.wheel_bytes + DEFAULT_MODEL.file_bytes
    if not cache["is_writable"]:
        text = f"{cache['path']} cannot be written to; set PACELINE_CACHE_ROOT to a folder that can"
        yield MachineProblem(text, is_broken=True)
    elif cache["free_bytes"] < needed:
        text = f"the disk of {cache['path']} has no room for the default model ({needed / 1e6:.0f} MB); make room"
        yield MachineProblem(f"{text}, or set PACELINE_CACHE_ROOT to another disk", is_broken=True)


def _settings(facts: Facts) -> Iterator[MachineProblem]:
    asked, free = facts["environment"].get(KV_SPACE), facts["memory"]["available_bytes"]
    if not asked:
        return
    try:
        value = float(asked)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        text = f"{KV_SPACE} is {asked!r}; set it to a number of GiB above 0, or remove it"
        yield MachineProblem(text, is_broken=True)
    elif free is not None and value * GIB > free:
        yield MachineProblem(f"{KV_SPACE} asks for {value:g} GiB, more than the free memory; make it smaller")


DOCTOR = Command(name="doctor", help=HELP, run=doctor, takes=(DoctorOptions,))
