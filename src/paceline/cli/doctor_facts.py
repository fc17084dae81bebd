"""Facts about this machine and installation, as plain values. Judges nothing, changes nothing, asks no network.

What cannot be found out is None: a machine that hides something is not broken.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.checkpoint.cache import ROOT_VARIABLE, models_folder
from paceline.checkpoint.default_model import default_model
from paceline.errors import PacelineError
from paceline.runner.machine_load import LOOK_S, MachineLoad

PACKAGES = ("torch", "numpy", "tokenizers", "jinja2", "gguf", "huggingface-hub", "tqdm", "typer")
# What the arithmetic is much faster with, by the kind of machine.
INSTRUCTIONS = {
    "aarch64": ("asimddp", "i8mm", "bf16", "sve"),
    "x86_64": ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
}
# ARM machines name their cores by number only.
ARM_PARTS = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}
KV_SPACE = "PACELINE_CPU_KVCACHE_SPACE"
VARIABLES = (
    *(ROOT_VARIABLE, KV_SPACE, "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR"),
)
SECRET = ("HF_TOKEN",)

Facts = dict[str, Any]


def machine_facts() -> Facts:
    """What can be told without loading anything."""
    machine = platform.machine()
    return {
        "versions": {"paceline": __version__, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.release()} {machine}",
        "cpu": {
            "name": _cpu_name() or machine,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory": {"total_bytes": _memory("MemTotal"), "available_bytes": _memory("MemAvailable")},
    }


def gather() -> Facts:
    load = MachineLoad()
    torch, torch_error = _torch()  # takes a second: long enough to see what other processes do
    base = machine_facts()
    others = _others(load)
    return {
        **base,
        "versions": {**base["versions"], **_versions()},
        "cpu": {
            **base["cpu"],
            "used_by_others": others,
            "is_busy": load.is_busy,
            "threads": None if torch is None else torch.get_num_threads(),
            "instructions": _instructions(platform.machine()),
            "fast_4bit_product": None if torch is None else _fast_product(),
        },
        "cache": _cache(),
        "default_model": _default_model(),
        "gpus": [] if torch is None else _gpus(torch),
        "environment": _environment(),
        "torch_error": torch_error,
    }


def _others(load: MachineLoad) -> float | None:
    """Cores that other processes use; looks for a quarter of a second if nothing took so long before."""
    time.sleep(max(0.0, LOOK_S - load.age_s))
    load.look()
    return None if load.others is None else round(load.others, 2)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _torch() -> tuple[Any, str | None]:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return None, f"{type(error).__name__}: {error}"
    return torch, None


def _fast_product() -> str | None:
    from paceline.models.quantized import fast_product

    return fast_product()


def _gpus(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]


def _cpu_field(name: str) -> str | None:
    for line in _lines(Path("/proc/cpuinfo")):
        label, _, value = line.partition(":")
        if label.strip() == name:
            return value.strip()
    return None


def _cpu_name() -> str | None:
    part = _cpu_field("CPU part")
    return _cpu_field("model name") or (part and ARM_PARTS.get(part, f"ARM part {part}"))


def _instructions(machine: str) -> dict[str, bool]:
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


def _default_model() -> Facts:
    try:
        return {"path": str(default_model(local_only=True))}
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
