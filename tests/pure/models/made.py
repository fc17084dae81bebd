"""Small model files made by hand, so that each of their bytes can be made wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.hf_config import spec_from_config
from paceline.models.files.stored import tensor_names
from paceline.models.files.tensor_layout import PARTS, SANDWICH_PARTS, WHOLE
from paceline.models.spec import ModelSpec

Arrays = dict[str, NDArray[np.float32]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def spec_of(values: Mapping[str, Any]) -> ModelSpec:
    return spec_from_config(values, "config.json")


def arrays_for(spec: ModelSpec, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in tensor_names(spec)}


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def packed(arrays: Mapping[str, NDArray[Any]], dtype: str = "F32") -> bytes:
    """A well-formed safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, len(data)]}
    return safetensors(header, data)


def write_folder(
    folder: Path, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if arrays is None:
        arrays = arrays_for(spec_of(values))
    (folder / "model.safetensors").write_bytes(packed(arrays))
    return folder


# ---------------------------------------------------------------- GGUF

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
F32, F16, Q8_0 = 0, 1, 8


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: object) -> bytes:
    """A value with its type number in front."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case list():
            kinds = [value_bytes(item) for item in value]
            kind = kinds[0][:4] if kinds else struct.pack("<I", UINT32)
            return (
                struct.pack("<I", ARRAY)
                + kind
                + struct.pack("<Q", len(value))
                + b"".join(one[4:] for one in kinds)
            )
    raise TypeError(value)


@dataclass(kw_only=True)
class Gguf:
    """The parts of a GGUF file; what is not given is worked out."""

    fields: Mapping[str, object] = field(default_factory=dict)
    raw_fields: Sequence[bytes] = ()  # name, type and value, as they lie in the file
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    version: int = 3
    num_tensors: int | None = None
    num_fields: int | None = None
    table: Sequence[bytes] | None = None
    alignment: int = 32

    def build(self) -> bytes:
        fields = [text(name) + value_bytes(value) for name, value in self.fields.items()] + list(
            self.raw_fields
        )
        data, table = self._data()
        if self.table is not None:
            table = list(self.table)
        counts = (
            len(table) if self.num_tensors is None else self.num_tensors,
            len(fields) if self.num_fields is None else self.num_fields,
        )
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts) + b"".join(fields) + b"".join(table)
        return head + b"\0" * (-len(head) % self.alignment) + data

    def _data(self) -> tuple[bytes, list[bytes]]:
        data, table = b"", []
        for name, array in self.arrays.items():
            table.append(entry(name, tuple(reversed(array.shape)), F32, len(data)))
            data += array.tobytes()
            data += b"\0" * (-len(data) % self.alignment)
        return data, table


def entry(name: str | bytes, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    """A line of the tensor table; dimensions in the file's order, columns first."""
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def gguf_fields(architecture: str, spec: ModelSpec, **more: object) -> dict[str, object]:
    own: dict[str, object] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.freq_base": spec.ropes[0].theta,
    }
    own |= {name.replace("__", "."): value for name, value in more.items()}
    fields: dict[str, object] = {"general.architecture": architecture}
    fields |= {f"{architecture}.{name}": value for name, value in own.items()}
    fields |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return fields


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What writers of the llama architecture do to q and k: row i of the first half, then of the second."""
    shaped = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return shaped.swapaxes(1, 2).reshape(rows.shape)


def renamed(arrays: Arrays, spec: ModelSpec, *, interleave: bool) -> Arrays:
    """The model's tensors as a GGUF file of a plain architecture holds them."""
    parts = SANDWICH_PARTS if spec.sandwich_norms else PARTS
    stored = {}
    for name, array in arrays.items():
        if name in WHOLE:
            stored[WHOLE[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        part, _, ending = rest.rpartition(".")
        if interleave and part in ("self_attn.q_proj", "self_attn.k_proj"):
            array = interleaved(array, spec.num_heads if "q_" in part else spec.num_kv_heads)
        if part in parts:
            stored[f"blk.{layer}.{parts[part]}.{ending}"] = array
        else:
            stored[name] = array  # experts: the test places them
    return stored
