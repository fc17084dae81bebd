"""What is wrong with a machine or an installation, and what to do about it: a sentence or two each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.default_model import DEFAULT_MODEL
from paceline.cli.doctor_facts import KV_SPACE
from paceline.runner.machine_load import busy_sentence

GIB = 2**30
LITTLE_MEMORY_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something to know. What is broken keeps models from running."""

    text: str
    is_broken: bool = False


def find_problems(facts: dict[str, Any]) -> list[Problem]:
    return [*_installation(facts), *_arithmetic(facts), *_room(facts), *_settings(facts)]


def _installation(facts: dict[str, Any]) -> list[Problem]:
    found = []
    for name, version in facts["versions"].items():
        if version is None:
            text = f"{name} is not installed; install paceline again: pip install --force-reinstall paceline"
            found.append(Problem(text=text, is_broken=True))
    if facts["torch_error"] is not None and facts["versions"].get("torch") is not None:
        text = f"torch is installed but cannot be imported ({facts['torch_error']}); install it again"
        found.append(Problem(text=text, is_broken=True))
    return found


def _arithmetic(facts: dict[str, Any]) -> list[Problem]:
    cpu, found = facts["cpu"], []
    if facts["torch_error"] is None and cpu["fast_4bit_product"] is None:
        text = (
            "torch has no fast 4-bit product on this machine: quantised models run unpacked, which takes more "
            "memory and is slower; torch has one for ARM with dot products and for x86 with AVX2"
        )
        found.append(Problem(text=text))
    if cpu["is_busy"]:
        found.append(Problem(text=busy_sentence(cpu["used_by_others"], cpu["cores"])))
    if cpu["threads"] and cpu["threads"] > cpu["cores"]:
        text = f"{cpu['threads']} threads share {cpu['cores']} cores; set OMP_NUM_THREADS={cpu['cores']}"
        found.append(Problem(text=text))
    if facts["gpus"]:
        found.append(Problem(text="there is a GPU, but this version computes on the CPU only"))
    return found


def _room(facts: dict[str, Any]) -> list[Problem]:
    found = []
    free = facts["memory"]["available_bytes"]
    if free is not None and free < LITTLE_MEMORY_BYTES:
        text = "less than 1 GiB of memory is free: close other programs, or give --kv-cache-memory-bytes"
        found.append(Problem(text=text))
    if facts["default_model"]["path"] is not None:
        return found
    cache = facts["cache"]
    needed = DEFAULT_MODEL.wheel_bytes + DEFAULT_MODEL.file_bytes
    if not cache["is_writable"]:
        text = f"{cache['path']} cannot be written to; set PACELINE_CACHE_ROOT to a folder that can"
        found.append(Problem(text=text, is_broken=True))
    elif cache["free_bytes"] < needed:
        text = f"the disk of {cache['path']} has no room for the default model ({needed / 1e6:.0f} MB); make room"
        found.append(Problem(text=f"{text}, or set PACELINE_CACHE_ROOT to another disk", is_broken=True))
    return found


def _settings(facts: dict[str, Any]) -> list[Problem]:
    asked = facts["environment"].get(KV_SPACE)
    if not asked:
        return []
    try:
        value = float(asked)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        text = f"{KV_SPACE} is {asked!r}; set it to a number of GiB above 0, or remove it"
        return [Problem(text=text, is_broken=True)]
    free = facts["memory"]["available_bytes"]
    if free is not None and value * GIB > free:
        return [
            Problem(text=f"{KV_SPACE} asks for {value:g} GiB, more than the free memory; make it smaller")
        ]
    return []
