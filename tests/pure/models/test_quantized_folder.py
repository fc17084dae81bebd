"""Quantised folders of every kind: their weights are those that were written, and what is wrong with one is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.open import open_checkpoint
from paceline.models.files.records import record_of
from tests.pure.models.quantized_files import FORMATS, Written, save, written

GATE = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    model = written(name)
    checkpoint = open_checkpoint(save(tmp_path, model))
    assert checkpoint.quantized == [FORMATS[name][2]]
    assert len(model.values) == 7
    for tensor, values in model.values.items():
        stored = checkpoint.tensor(tensor)
        assert stored.dtype == FORMATS[name][2] and stored.shape == values.shape
        np.testing.assert_allclose(stored.to_float32(), values, rtol=2e-6, atol=1e-9)
        record = record_of(stored)
        assert record.inner == values.shape[1] and record.inner % record.scale.shape[1] == 0
    plain = checkpoint.tensor("model.norm.weight")
    np.testing.assert_array_equal(plain.to_float32(), model.tensors["model.norm.weight"])


def test_bytes_of_e4m3_are_what_torch_reads() -> None:
    torch = pytest.importorskip("torch")
    from paceline.models.files.records import fp8_table

    right = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(fp8_table(), right)


def fault(name: str, why: str, change: Callable[[Written], object]) -> Any:
    return pytest.param(name, why, change, id=f"{name}: {why}")


def config_of(model: Written) -> Any:
    return model.quantization["config_groups"]["group_0"]["weights"]


def spoil(part: str, value: float) -> Callable[[Written], object]:
    return lambda model: model.tensors[f"{GATE}.{part}"].reshape(-1).__setitem__(0, value)


def say(name: str, value: object) -> Callable[[Written], object]:
    return lambda model: model.quantization.__setitem__(name, value)


FAULTS = [
    fault("awq", "the method 'bitsandbytes' is not read; supported are", say("quant_method", "bitsandbytes")),
    fault("awq", "version must be gemm", say("version", "gemv")),
    fault("gptq", "bits must be 4", say("bits", 3)),
    fault("gptq", "group_size must be -1 or a multiple of 32, not 20", say("group_size", 20)),
    fault("gptq", "groups of 96 do not divide the 128 inputs of", say("group_size", 96)),
    fault("fp8 blocks", "weight_block_size must be 128 x 128", say("weight_block_size", [64, 64])),
    fault("fp8 blocks", "fmt must be e4m3", say("fmt", "e5m2")),
    fault(
        "compressed int8",
        "nvfp4-pack-quantized of 8-bit int weights is not read",
        say("format", "nvfp4-pack-quantized"),
    ),
    fault(
        "compressed int8",
        "config_groups must be one",
        lambda model: model.quantization["config_groups"].__setitem__("group_1", {}),
    ),
    fault(
        "compressed int8",
        "symmetric must be true for eight bits",
        lambda model: config_of(model).__setitem__("symmetric", False),
    ),
    fault(
        "compressed int4 with zero points",
        "weight_zero_point is missing",
        lambda model: model.tensors.pop(f"{GATE}.weight_zero_point"),
    ),
    fault("awq", "qzeros is missing", lambda model: model.tensors.pop(f"{GATE}.qzeros")),
    fault(
        "compressed int8",
        "are neither one, one per row or group, nor one for 128 x 128 blocks",
        lambda model: model.tensors.__setitem__(f"{GATE}.weight_scale", np.ones(7, np.float32)),
    ),
    fault(
        "gptq",
        "scales or zero points of model.layers.0.mlp.gate_proj have the shape",
        lambda model: model.tensors.__setitem__(f"{GATE}.scales", np.ones((2, 256), np.float16)),
    ),
    fault("gptq", "g_idx puts inputs into groups out of order", spoil("g_idx", 3)),
]
DAMAGE = [
    ("fp8 per tensor", "weight_scale"),
    ("fp8 blocks", "weight_scale_inv"),
    ("compressed fp8 per channel", "weight_scale"),
    ("compressed int8", "weight_scale"),
    ("compressed int4 in 32s", "weight_scale"),
    ("gptq", "scales"),
    ("awq", "scales"),
]
FAULTS += [
    fault(name, f"{part} holds a scale that is zero or not finite", spoil(part, value))
    for name, part in DAMAGE
    for value in (0.0, float("nan"), float("inf"))
]
FAULTS += [
    fault(
        name,
        "weight_scale is missing" if part.startswith("weight") else f"{part} is missing",
        lambda model, part=part: model.tensors.pop(f"{GATE}.{part}"),  # type: ignore[misc]
    )
    for name, part in DAMAGE
]


@pytest.mark.parametrize("name, why, change", FAULTS)
def test_what_is_wrong_is_one_sentence(
    name: str, why: str, change: Callable[[Written], object], tmp_path: Path
) -> None:
    model = written(name)
    model.quantization = _copied(model.quantization)
    change(model)
    folder = save(tmp_path, model)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).tensor(f"{GATE}.weight")
    assert why in str(caught.value) and "\n" not in str(caught.value)


ATTENTION = "model.layers.0.self_attn."


@pytest.mark.parametrize(
    "name", ["{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale"]
)
def test_scales_of_keys_and_values_are_read(name: str, tmp_path: Path) -> None:
    model = written("compressed int8")
    model.tensors[ATTENTION + name.format("k")] = np.array([0.25], np.float32)
    model.tensors[ATTENTION + name.format("v")] = np.array(3.0, np.float32)
    assert open_checkpoint(save(tmp_path, model)).kv_scales == {0: (0.25, 3.0)}


def test_a_file_may_have_scales_of_keys_and_values_alone(tmp_path: Path) -> None:
    model = written("compressed int8")
    for tensor, values in model.values.items():
        model.tensors[tensor] = values.astype(np.float32)
        del model.tensors[tensor.replace("weight", "weight_scale")]
    model.tensors[ATTENTION + "k_scale"] = np.array([0.25], np.float32)
    model.quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    checkpoint = open_checkpoint(save(tmp_path, model))
    assert checkpoint.kv_scales == {0: (0.25, 1.0)} and checkpoint.quantized == []


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0]])
def test_scales_of_keys_that_cannot_be_are_refused(scale: Any, tmp_path: Path) -> None:
    model = written("awq")
    model.tensors[ATTENTION + "k_scale"] = np.array(scale, np.float32)
    with pytest.raises(CheckpointError, match="k_scale must be one number above zero that is finite"):
        open_checkpoint(save(tmp_path, model))


def test_random_weights_are_not_quantised(tmp_path: Path) -> None:
    folder = save(tmp_path, written("awq"))
    with pytest.raises(CheckpointError, match="the model is quantised, and random weights are not"):
        open_checkpoint(folder, load_format="dummy")


def test_a_config_of_a_kind_the_files_do_not_hold_is_refused(tmp_path: Path) -> None:
    model = written("awq")
    model.quantization = FORMATS["compressed int8"][0]
    with pytest.raises(CheckpointError, match=r"the files hold no tensor \.weight of such a kind"):
        open_checkpoint(save(tmp_path, model))


def _copied(value: Any) -> Any:
    return {name: _copied(each) for name, each in value.items()} if isinstance(value, dict) else value
