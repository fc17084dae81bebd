"""Whether this machine's GPU can be used, and what to say when it cannot.

The driver is asked first, without torch: on a machine without a GPU nothing here needs torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import suppress

from paceline.config.engine import ModelConfig
from paceline.errors import ConfigError

OLDEST = (8, 0)  # compute capability: bfloat16 and asynchronous copies
OLDEST_FP8 = (8, 9)  # conversion from and to eight bits


def choose_device(model: ModelConfig) -> str:
    """`cuda` or `cpu`, as the user says, or as the machine has it."""
    reason = "" if model.device == "cpu" else why_no_gpu()
    if model.device == "cuda" and reason:
        raise ConfigError(f"--device cuda: {reason}")
    if reason or model.device == "cpu":
        if model.kv_cache_dtype.startswith("fp8"):
            raise ConfigError(
                f"--kv-cache-dtype {model.kv_cache_dtype} needs a GPU, and this model runs on the CPU: take int8 or "
                "auto"
            )
        if model.kv_offloading_size:
            raise ConfigError(
                "--kv-offloading-size is for a GPU, and this model runs on the CPU, whose memory holds the KV cache "
                "itself: give that more with --kv-cache-memory-bytes"
            )
        if model.quantization == "fp8":
            raise ConfigError(
                "--quantization fp8 needs a GPU, and this model runs on the CPU: take int8, or leave it out"
            )
        return "cpu"
    if model.kv_cache_dtype == "int8":
        raise ConfigError(
            "--kv-cache-dtype int8 is for a CPU, and this model runs on a GPU: take fp8, or add --device cpu"
        )
    import torch

    if torch.cuda.get_device_capability() < OLDEST_FP8:
        for name, value in (
            ("--kv-cache-dtype", model.kv_cache_dtype),
            ("--quantization", model.quantization),
        ):
            if value.startswith("fp8"):
                raise ConfigError(
                    f"{name} {value}: {torch.cuda.get_device_name()} is too old for it, a compute capability of 8.9 is "
                    "needed: take auto"
                )
    return "cuda"


def why_no_gpu() -> str:
    """Why steps cannot be computed on a GPU, in words; empty when they can."""
    if not driver_gpus():
        return "no GPU is found here"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; install it with paceline[gpu]"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it with torch's CUDA build"
    if torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is too old: a compute capability of 8.0 is needed"
    return ""


def driver_gpus() -> list[str]:
    """Names of the GPUs that NVIDIA's driver offers."""
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    names: list[str] = []
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            for number in range(count.value):
                driver.cuDeviceGetName(name, len(name), number)
                names.append(name.value.decode(errors="replace"))
    return names
