"""Whether this machine's GPU can be used, what to say when it cannot, and how matrices are kept on it."""

from __future__ import annotations

import importlib.util

import torch

from paceline.config.engine import ModelConfig
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint
from paceline.models.load import DenseStorage, Storage
from paceline.models.quantized import QuantizedStorage, fast_product

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


# How a checkpoint's matrices are kept on this machine, and what the operator should know about it.


def choose_storage(model: ModelConfig, checkpoint: Checkpoint) -> tuple[Storage, tuple[str, ...]]:
    """The storage, and notices in sentences."""
    types = set(checkpoint.stored)
    is_quantized = any(name.startswith(("Q", "IQ")) for name in types)
    notices = []
    if model.dtype not in ("auto", "float32") or types & {"BF16", "F16"}:
        stored = "/".join(sorted(types & {"BF16", "F16"})) or model.dtype
        notices.append(f"{stored} weights are computed in float32: this machine's CPU is faster with it")
    if is_quantized and model.quantization == "auto":
        product = fast_product()
        if product is not None:
            return QuantizedStorage(product), tuple(notices)
        notices.append("quantised weights are unpacked to float32: torch has no fast product for them here")
    return DenseStorage(), tuple(notices)
