"""What a result must carry to mean anything later: the accelerator, the commit, the sizes the engine chose.

What cannot be found out is None. The processor, memory and versions are gathered by `paceline doctor`.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import paceline
from paceline.factory import LoadedModel
from paceline.runner.device import why_no_gpu


def accelerator() -> dict[str, Any] | None:
    """The GPU that steps would be computed on."""
    if why_no_gpu():
        return None
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "multiprocessors": int(properties.multi_processor_count),
        "cuda": torch.version.cuda,
    }


def triton_version() -> str | None:
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def source_commit() -> str | None:
    """The commit of the checkout this package runs from, with a mark when files differ from it."""
    package = Path(paceline.__file__).resolve().parent
    root = package.parents[1]
    if not (root / ".git").exists():  # installed, maybe inside a checkout of something else
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _git(root, "status", "--porcelain", "--", "src") else commit


# What a machine's measurement decides: to be the same in runs that are compared.
BUDGETS = ("max_num_batched_tokens", "max_num_prompt_tokens")


def engine_sizes(loaded: LoadedModel) -> dict[str, Any]:
    """The sizes the engine runs with, given or chosen."""
    scheduler, kv = loaded.config.scheduler, loaded.config.kv
    return {
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_prompt_tokens": scheduler.max_num_prompt_tokens,
        "step_target_ms": scheduler.step_target_ms,
        "mode": scheduler.mode,
        "scheduling_policy": scheduler.scheduling_policy,
        "block_size": kv.block_size,
        "num_blocks": kv.num_blocks,
        "enable_prefix_caching": kv.enable_prefix_caching,
        "depth": loaded.config.depth,
        "dtype": loaded.hardware.dtype,
        "kv_cache_dtype": loaded.hardware.kv_dtype,
        "quantization": loaded.hardware.quantization,
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
