"""How a checkpoint's matrices are kept on this machine, and what the operator should know about it."""

from __future__ import annotations

from paceline.checkpoint.open import Checkpoint
from paceline.config import ModelConfig
from paceline.models.load import DenseStorage, Storage
from paceline.models.quantized import QuantizedStorage, fast_product


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
