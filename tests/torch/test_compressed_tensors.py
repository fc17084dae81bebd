"""Files that compressed-tensors writes are read as it reads them: weights of SmolLM2, quantised and packed by that
library, against what its own decoder makes of the same tensors. Skipped where it is not installed, unless
PACELINE_REQUIRE_COMPRESSED_TENSORS is set."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not os.environ.get("PACELINE_REQUIRE_COMPRESSED_TENSORS"):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import tensor_names
from tests.pure.models.made import config, spec_of
from tests.torch.gguf_reference import smollm2_path

# One layer of SmolLM2, cut to sizes that blocks of 128 x 128 divide.
CONFIG = config(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    tie_word_embeddings=True,
    num_key_value_heads=2,
)
FORMATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fp8 per tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "FP8"),
    "fp8 per channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "FP8"),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "FP8",
    ),
    "int8 per channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, "INT8"),
    "int8 in 128s": ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}, "INT8"),
    "int4 per channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, "INT4"),
    "int4 in 32s": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, "INT4"),
    "int4 in 128s with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        "INT4",
    ),
}


def matrices() -> dict[str, torch.Tensor]:
    """By canonical name; numbers drawn at random where SmolLM2 is not on this machine."""
    path = smollm2_path()
    source = None if path is None or not path.exists() else open_checkpoint(path)
    found: dict[str, torch.Tensor] = {}
    for name, shape in tensor_names(spec_of(CONFIG)):
        if source is None:
            values = (np.random.default_rng(len(found)).standard_normal(shape) / 16).astype(np.float32)
        else:
            values = source.tensor(name).to_float32()[tuple(slice(size) for size in shape)]
        found[name] = torch.tensor(values)
    return found


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number that each scale stands for."""
    rows, inner = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        return parts.amin(-1), parts.amax(-1)
    if args.strategy == "block":
        parts = weight.view(rows // 128, 128, inner // 128, 128).transpose(1, 2).flatten(2)
        return parts.amin(-1), parts.amax(-1)
    parts = weight.view(rows, -1, args.group_size if args.strategy == "group" else inner)
    return parts.amin(-1), parts.amax(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_librarys_own_decoder(name: str, tmp_path: Path) -> None:
    form, options, kind = FORMATS[name]
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for tensor, weight in matrices().items():
        if not tensor.startswith("model.layers.") or weight.dim() != 2:
            tensors[tensor] = weight
            continue
        scale, zero_point = calculate_qparams(*extremes(weight, args), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        written = compressor.compress(state, scheme)
        stem = tensor.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": value.contiguous() for part, value in written.items()}
        expected[tensor] = compressor.decompress(dict(written), scheme)["weight"].float()
        assert (expected[tensor] - weight).abs().max() < weight.abs().max() / 4, "else it says nothing"
    said = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"])
    values = CONFIG | {"quantization_config": json.loads(said.model_dump_json())}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantized == [kind] and len(expected) == 7
    for tensor, right in expected.items():
        found = torch.from_numpy(checkpoint.tensor(tensor).to_float32())
        # Numbers and offsets are multiplied with a scale apart, and each is rounded.
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6 * float(right.abs().max()))
