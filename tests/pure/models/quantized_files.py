"""Quantised model folders written by hand in the forms others publish, with the weights they stand for.

Every number is laid out entry by entry as its format is described, and its value worked out in float64 beside it: no
code of the reader is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.stored import tensor_names
from tests.pure.models.made import config, safetensors, spec_of

Array = NDArray[Any]
CONFIG = config(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
WITH_EXPERTS = CONFIG | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
TYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32", "int64": "I64", "uint8": "F8_E4M3"}


@dataclass
class Written:
    """Tensors of a file by name, and what the quantised matrices among them are worth."""

    quantization: dict[str, Any]
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    tensors: dict[str, Array] = field(default_factory=dict)
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)


Write = Callable[[Written, str, tuple[int, int], np.random.Generator], NDArray[np.float64]]


def e4m3(byte: int) -> float:
    """A sign, four bits of exponent (bias 7), three of a fraction."""
    sign, exponent, fraction = (-1.0 if byte & 128 else 1.0), byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return float(sign * (1 + fraction / 8) * 2.0 ** (exponent - 7))


def fp8_bytes(shape: tuple[int, int], random: np.random.Generator) -> tuple[Array, NDArray[np.float64]]:
    raw = random.integers(0, 256, shape).astype(np.uint8)
    raw[(raw & 127) == 127] = 3  # not a number
    table = [e4m3(byte) if byte & 127 != 127 else 0.0 for byte in range(256)]
    return raw, np.array([[table[byte] for byte in row] for row in raw.tolist()])


def fp8(scale_name: str, scales: str) -> Write:
    def write(
        out: Written, stem: str, shape: tuple[int, int], random: np.random.Generator
    ) -> NDArray[np.float64]:
        raw, values = fp8_bytes(shape, random)
        rows, inner = shape
        sizes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-inner // 128))}[scales]
        scale = random.uniform(1e-3, 1e-2, sizes).astype(np.float32)
        out.tensors |= {f"{stem}.weight": raw, f"{stem}.{scale_name}": scale}
        out.tensors[f"{stem}.input_scale"] = np.ones(1, np.float32)
        for row in range(rows):
            for column in range(inner):
                at = {"tensor": (0,), "channel": (row, 0), "block": (row // 128, column // 128)}[scales]
                values[row, column] *= scale[at]
        return values

    return write


def int8(out: Written, stem: str, shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.float64]:
    q = random.integers(-128, 128, shape).astype(np.int8)
    scale = random.uniform(1e-3, 1e-2, (shape[0], 1)).astype(np.float32)
    out.tensors |= {f"{stem}.weight": q, f"{stem}.weight_scale": scale}
    return q.astype(np.float64) * scale


def drawn(shape: tuple[int, int], group: int, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Numbers of four bits [rows, inner], their zero points and scales [rows, groups]."""
    groups = shape[1] // group
    q = random.integers(0, 16, shape)
    zero = random.integers(1, 16, (shape[0], groups))
    return q, zero, random.uniform(1e-2, 1e-1, (shape[0], groups)).astype(np.float16)


def worth(q: Array, zero: Array, scale: Array, group: int) -> NDArray[np.float64]:
    of_group = np.arange(q.shape[1]) // group
    return (q - zero[:, of_group]) * scale.astype(np.float64)[:, of_group]


def words(nibbles: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight numbers along an axis in a word; `order`: the number that each nibble holds."""
    moved = np.moveaxis(nibbles, axis, -1).astype(np.uint32)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for nibble, number in enumerate(order):
        packed |= moved[..., number::8] << np.uint32(4 * nibble)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def packed(group: int, symmetric: bool) -> Write:
    def write(
        out: Written, stem: str, shape: tuple[int, int], random: np.random.Generator
    ) -> NDArray[np.float64]:
        q, zero, scale = drawn(shape, group, random)
        if symmetric:
            zero = np.full_like(zero, 8)
        else:
            out.tensors[f"{stem}.weight_zero_point"] = words(zero, 0)
        out.tensors |= {f"{stem}.weight_packed": words(q, 1), f"{stem}.weight_scale": scale}
        out.tensors[f"{stem}.weight_shape"] = np.array(shape, np.int64)
        return worth(q, zero, scale, group)

    return write


def gptq(group: int, less: int) -> Write:
    def write(
        out: Written, stem: str, shape: tuple[int, int], random: np.random.Generator
    ) -> NDArray[np.float64]:
        q, zero, scale = drawn(shape, group, random)
        out.tensors |= {
            f"{stem}.qweight": words(q.T, 0),
            f"{stem}.qzeros": words((zero - less).T, 1),
            f"{stem}.scales": np.ascontiguousarray(scale.T),
            f"{stem}.g_idx": (np.arange(shape[1]) // group).astype(np.int32),
        }
        return worth(q, zero, scale, group)

    return write


def awq(out: Written, stem: str, shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.float64]:
    q, zero, scale = drawn(shape, 64, random)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    out.tensors |= {
        f"{stem}.qweight": words(q.T, 1, order),
        f"{stem}.qzeros": words(zero.T, 1, order),
        f"{stem}.scales": np.ascontiguousarray(scale.T),
    }
    return worth(q, zero, scale, 64)


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def bits(number: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": number, "type": kind, "symmetric": True, "dynamic": False, **more}


# Name: what the config says, how a matrix is written, the kind it is read as.
FORMATS: dict[str, tuple[dict[str, Any], Write, str]] = {
    "fp8 per tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", "tensor"),
        "FP8",
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        fp8("weight_scale_inv", "block"),
        "FP8",
    ),
    "compressed fp8 per tensor": (
        compressed("float-quantized", bits(8, "float", strategy="tensor")),
        fp8("weight_scale", "tensor"),
        "FP8",
    ),
    "compressed fp8 per channel": (
        compressed("float-quantized", bits(8, "float", strategy="channel")),
        fp8("weight_scale", "channel"),
        "FP8",
    ),
    "compressed int8": (compressed("int-quantized", bits(8, "int", strategy="channel")), int8, "INT8"),
    "compressed int4 in 32s": (
        compressed("pack-quantized", bits(4, "int", strategy="group", group_size=32)),
        packed(32, True),
        "INT4",
    ),
    "compressed int4 with zero points": (
        compressed("pack-quantized", bits(4, "int", strategy="group", group_size=128, symmetric=False)),
        packed(128, False),
        "INT4",
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq(128, 1), "INT4"),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        gptq(32, 0),
        "INT4",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        awq,
        "INT4",
    ),
}


def written(name: str, seed: int = 0, values: dict[str, Any] = CONFIG) -> Written:
    """A model whose layers' matrices are quantised; embedding, head, norms and routers are float32."""
    quantization, write, _ = FORMATS[name]
    random, out = np.random.default_rng(seed), Written(dict(quantization), values)
    for tensor, shape in tensor_names(spec_of(values)):
        if tensor.startswith("model.layers.") and len(shape) == 2 and not tensor.endswith("mlp.gate.weight"):
            rows, inner = shape
            out.values[tensor] = write(out, tensor.removesuffix(".weight"), (rows, inner), random)
        else:
            out.tensors[tensor] = random.standard_normal(shape, np.float32)
    return out


def save(folder: Path, model: Written) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(model.config | {"quantization_config": model.quantization})
    )
    header: dict[str, object] = {}
    data = b""
    for name, array in model.tensors.items():
        start = len(data)
        data += np.ascontiguousarray(array).tobytes()
        place = {"shape": list(array.shape), "data_offsets": [start, len(data)]}
        header[name] = {"dtype": TYPES[array.dtype.name], **place}
    (folder / "model.safetensors").write_bytes(safetensors(header, data))
    return folder
