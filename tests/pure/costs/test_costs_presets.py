"""Model shapes against the published parameter counts; devices; how many tokens fit."""

from dataclasses import replace

import pytest

from paceline.costs.presets import DEVICES, MODELS, as_held, device_spec, kv_capacity_tokens, model_shape
from paceline.errors import InputError

PUBLISHED_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "llama-3.1-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
}


def test_parameter_counts_are_the_published_ones() -> None:
    assert {name: shape.num_parameters for name, shape in MODELS.items()} == PUBLISHED_PARAMETERS


def test_kv_bytes_per_token_of_the_two_measured_models() -> None:
    assert model_shape("qwen3-0.6b").kv_bytes_per_token == 114_688
    assert model_shape("llama-3.1-8b").kv_bytes_per_token == 131_072


def test_names_are_found_in_any_case() -> None:
    assert model_shape("Llama-3.1-8B") is MODELS["llama-3.1-8b"]
    assert device_spec("H200") is DEVICES["h200"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown model 'gpt-9'.*llama-3\.1-8b.*qwen3-0\.6b"):
        model_shape("gpt-9")
    with pytest.raises(InputError, match=r"unknown device 'abacus'.*a100, cpu-2core, h100, h200"):
        device_spec("abacus")


def test_capacity_is_what_the_weights_leave() -> None:
    model, device = model_shape("llama-3.1-8b"), device_spec("h200")
    free = int(device.memory_bytes * 0.9) - 2 * 8_030_261_248
    assert kv_capacity_tokens(model, device) == free // 131_072
    assert kv_capacity_tokens(model, device, 0.5) < kv_capacity_tokens(model, device, 0.9)


def test_a_model_that_does_not_fit_names_both_sizes() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-70b does not fit on h200.*131\.4 GiB and 126\.4 GiB"):
        kv_capacity_tokens(model_shape("llama-3.1-70b"), device_spec("h200"))


def test_no_room_for_a_single_token_is_not_a_fit() -> None:
    model = model_shape("smollm2-135m")
    device = replace(device_spec("h200"), memory_bytes=model.weight_bytes + model.kv_bytes_per_token - 1)
    with pytest.raises(InputError, match="does not fit"):
        kv_capacity_tokens(model, device, 1.0)
    roomier = replace(device, memory_bytes=device.memory_bytes + 1)
    assert kv_capacity_tokens(model, roomier, 1.0) == 1


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan")])
def test_utilization_out_of_range(utilization: float) -> None:
    with pytest.raises(InputError, match="memory_utilization"):
        kv_capacity_tokens(model_shape("qwen3-0.6b"), device_spec("h200"), utilization)


def test_a_device_with_its_own_element_width_doubles_weights_and_kv() -> None:
    model = model_shape("smollm2-135m")
    held = as_held(model, device_spec("cpu-2core"))
    assert held.weight_bytes == 2 * model.weight_bytes
    assert held.kv_bytes_per_token == 2 * model.kv_bytes_per_token
    assert as_held(model, device_spec("h200")) is model
