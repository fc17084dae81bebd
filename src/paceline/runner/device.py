"""Whether this machine's GPU can be used, and what to say when it cannot."""

from __future__ import annotations

import importlib.util

import torch

from paceline.config import ModelConfig
from paceline.errors import ConfigError

OLDEST = (8, 0)  # compute capability: bfloat16 and asynchronous copies
OLDEST_FP8 = (8, 9)  # conversion from and to eight bits


def choose_device(model: ModelConfig) -> str:
    """`cuda` or `cpu`, as the user says, or as the machine has it."""
    reason = _why_no_gpu()
    if model.device == "cuda" and reason:
        raise ConfigError(f"--device cuda: {reason}")
    if reason or model.device == "cpu":
        if model.kv_cache_dtype != "auto":
            raise ConfigError(
                f"--kv-cache-dtype {model.kv_cache_dtype} needs a GPU, and this model runs on the CPU: take auto"
            )
        return "cpu"
    if model.kv_cache_dtype != "auto" and torch.cuda.get_device_capability() < OLDEST_FP8:
        raise ConfigError(
            f"--kv-cache-dtype {model.kv_cache_dtype}: {torch.cuda.get_device_name()} is too old for it, a compute "
            "capability of 8.9 is needed: take auto"
        )
    return "cuda"


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it with torch's CUDA build"
    if torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is too old: a compute capability of 8.0 is needed"
    return ""
