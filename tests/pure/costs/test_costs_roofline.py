"""The roofline: the measured table to the digit, sane limits everywhere else; the models and devices it knows."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.costs.cost_model import PiecewiseLinear, StepShape, span_context_products
from paceline.costs.presets import (
    CPU_2CORE_STEP_MS,
    CPU_2CORE_XEON_STEP_MS,
    DEVICES,
    H200_BULK_FLOPS,
    H200_STEP_MS,
    H200_STEP_ROWS,
    MODELS,
    DeviceSpec,
    MatmulCurve,
    as_held,
    device_spec,
    kv_capacity_tokens,
    matmul_curves,
    model_shape,
)
from paceline.costs.roofline import Roofline
from paceline.errors import InputError

H200 = device_spec("h200")
LLAMA_8B = model_shape("llama-3.1-8b")


def products_ms(roofline: Roofline, rows: int) -> float:
    """Matrix products of a decode step in which every row is sampled, without the reads of the logits."""
    parts = roofline.parts(StepShape(decode_rows=rows, logit_rows=rows))
    logits_s = 2 * rows * roofline.model.vocab * 2 / (0.88 * H200.read_bandwidth)
    return (parts.matmul_s + parts.head_s - logits_s) * 1e3


@pytest.mark.parametrize("name", H200_STEP_MS)
def test_the_measured_table_is_reproduced(name: str) -> None:
    roofline = Roofline(model_shape(name), H200)
    for rows, measured_ms in zip(H200_STEP_ROWS, H200_STEP_MS[name], strict=True):
        assert products_ms(roofline, rows) == pytest.approx(measured_ms, rel=1e-9)


def test_between_two_measured_row_counts_the_time_is_interpolated() -> None:
    roofline = Roofline(LLAMA_8B, H200)
    assert products_ms(roofline, 384) == pytest.approx((6.62 + 11.70) / 2)


@pytest.mark.parametrize("name", H200_BULK_FLOPS)
def test_many_rows_run_at_the_bulk_rate(name: str) -> None:
    model = model_shape(name)
    seconds = Roofline(model, H200).parts(StepShape(prefill_tokens=8192)).matmul_s
    assert 2 * model.layers * model.layer_parameters * 8192 / seconds == pytest.approx(H200_BULK_FLOPS[name])


def test_every_part_of_an_8b_step_by_hand() -> None:
    shape = StepShape(
        decode_rows=90,
        decode_context=117_000,
        prefill_tokens=934,
        prefill_context_products=934 * 1000,
        logit_rows=0,
        copy_bytes=1_000_000_000,
    )
    parts = Roofline(LLAMA_8B, H200).parts(shape)
    assert parts.fixed_s == 0.5e-3
    body, head = 32 * LLAMA_8B.layer_parameters, 128_256 * 4096
    assert parts.matmul_s == pytest.approx(23.63e-3 * body / (body + head))
    assert parts.decode_attention_s == pytest.approx(117_000 * 131_072 / (4.22e12 * 0.88))
    assert parts.prefill_attention_s == pytest.approx(4 * 32 * 4096 * 934_000 / 360e12)
    # 8 hidden, 2 x 6144 rotary, 2048 KV written, 2 x 4096 around attention, 3 x 14336 for the gate
    elements = 8 * 4096 + 2 * 6144 + 2048 + 2 * 4096 + 3 * 14_336
    assert parts.elementwise_s == pytest.approx(1024 * 32 * elements * 2 / (4.22e12 * 0.88))
    assert parts.head_s == 0.0
    assert parts.copy_s == pytest.approx(1e9 / 50e9)


def test_an_empty_step_costs_the_fixed_part() -> None:
    assert Roofline(LLAMA_8B, H200).step_seconds(StepShape()) == 0.5e-3


def test_a_short_span_on_a_long_context_costs_at_least_a_read_of_it() -> None:
    roofline = Roofline(LLAMA_8B, H200)
    shape = StepShape(prefill_tokens=1, prefill_context_products=span_context_products(29_999, 1))
    assert roofline.parts(shape).prefill_attention_s == pytest.approx(30_000 * 131_072 / (4.22e12 * 0.88))


def test_span_products_are_the_sum_of_contexts() -> None:
    for start, num_tokens in ((0, 1), (0, 5), (100, 7), (3, 0)):
        assert span_context_products(start, num_tokens) == sum(start + i + 1 for i in range(num_tokens))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_device_beats_its_own_limits(model: object, device: DeviceSpec) -> None:
    roofline = Roofline(model_shape(getattr(model, "name", "")), device)
    held = roofline.model
    device = device.for_layers(held)
    for rows in (1, 3, 8, 100, 187, 300, 1024, 3000, 50_000):
        seconds = roofline.parts(StepShape(decode_rows=rows)).matmul_s
        weights = held.layers * held.layer_parameters
        width = held.dtype_bytes if device.weight_bytes is None else device.weight_bytes
        assert seconds >= 0.999 * weights * width / device.read_bandwidth
        assert seconds >= 0.999 * 2 * rows * weights / device.matmul_peak


def test_models_without_a_table_lie_between_and_beyond_the_measured_ones() -> None:
    def rate(name: str, rows: int) -> float:
        model = model_shape(name)
        seconds = Roofline(model, H200).parts(StepShape(decode_rows=rows)).matmul_s
        return 2 * model.layers * model.layer_parameters * rows / seconds

    for rows in (1, 64, 512, 8192):
        assert rate("qwen3-0.6b", rows) < rate("llama-3.2-1b", rows) < rate("llama-3.1-8b", rows) * 1.0001
        assert rate("llama-3.1-70b", rows) == pytest.approx(rate("llama-3.1-8b", rows))
    assert rate("smollm2-135m", 64) < rate("qwen3-0.6b", 64)


def test_a_device_without_curves_gets_the_shares_of_its_limits_that_the_h200_reached() -> None:
    assert not DEVICES["h100"].matmul_curves
    twin = replace(H200, matmul_curves=())
    for carried, measured in zip(matmul_curves(twin), H200.matmul_curves, strict=True):
        assert carried.rows == pytest.approx(measured.rows)
        assert carried.flops == pytest.approx(measured.flops)


def test_the_h100_reads_slower_and_multiplies_alike() -> None:
    h100, h200 = Roofline(LLAMA_8B, DEVICES["h100"]), Roofline(LLAMA_8B, H200)
    one, bulk = StepShape(decode_rows=1), StepShape(prefill_tokens=8192)
    assert h100.parts(one).matmul_s / h200.parts(one).matmul_s == pytest.approx(4.8 / 3.35, rel=1e-3)
    assert h100.parts(bulk).matmul_s == pytest.approx(h200.parts(bulk).matmul_s, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "steps"), [("cpu-2core", CPU_2CORE_STEP_MS), ("cpu-2core-xeon", CPU_2CORE_XEON_STEP_MS)]
)
def test_two_cpu_cores_take_what_their_steps_took(device: str, steps: dict[str, float]) -> None:
    roofline = Roofline(model_shape("smollm2-135m"), device_spec(device))
    for name, measured_ms in steps.items():
        tokens = int(name.split()[-1])
        shape = StepShape(decode_rows=tokens, decode_context=140 * tokens, logit_rows=tokens)
        if name.startswith("prompt"):
            products = tokens * (tokens + 1) // 2
            shape = StepShape(prefill_tokens=tokens, prefill_context_products=products, logit_rows=1)
        assert 1e3 * roofline.step_seconds(shape) == pytest.approx(measured_ms, rel=0.01), name


def test_quantised_weights_are_read_in_their_own_width() -> None:
    device = replace(device_spec("cpu-2core"), matmul_peak=1e15)
    assert device.seconds_per_parameter(1, 4) == pytest.approx(0.73 / 18e9)
    assert replace(device, weight_bytes=None).seconds_per_parameter(1, 4) == pytest.approx(4 / 18e9)


counts = st.integers(min_value=0, max_value=20_000)


@given(
    device=st.sampled_from(sorted(DEVICES)),
    decode_rows=counts,
    prefill_tokens=counts,
    context=counts,
    logit_rows=st.integers(min_value=0, max_value=2048),
)
def test_more_work_of_any_other_kind_never_costs_less(
    device: str, decode_rows: int, prefill_tokens: int, context: int, logit_rows: int
) -> None:
    roofline = Roofline(LLAMA_8B, device_spec(device))
    shape = StepShape(
        decode_rows=decode_rows,
        decode_context=context * decode_rows,
        prefill_tokens=prefill_tokens,
        prefill_context_products=context * prefill_tokens,
        logit_rows=logit_rows,
    )
    seconds = roofline.step_seconds(shape)
    assert seconds >= roofline.device.fixed_step_s
    for more in (
        replace(shape, decode_context=shape.decode_context + 1000),
        replace(shape, copy_bytes=1 << 20),
        replace(
            shape, prefill_context_products=shape.prefill_context_products + (1000 if prefill_tokens else 0)
        ),
    ):
        assert roofline.step_seconds(more) >= seconds


def test_piecewise_is_constant_before_linear_between_and_sloped_after() -> None:
    function = PiecewiseLinear((10, 20, 40), (1.0, 3.0, 3.0), 0.5)
    assert [function(x) for x in (0, 10, 15, 20, 30, 40, 44)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 5.0]


def test_a_single_point_curve_is_a_constant_rate() -> None:
    per_weight = MatmulCurve(layer_parameters=100, rows=(1.0,), flops=(2.0,)).seconds_per_parameter()
    assert [per_weight(rows) for rows in (1, 2, 10)] == [1.0, 2.0, 10.0]


# ----------------------------------------------------------------
# Model shapes against the published parameter counts; devices; how many tokens fit.


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
    found = {name: MODELS[name].num_parameters for name in PUBLISHED_PARAMETERS}
    assert found == PUBLISHED_PARAMETERS


def test_kv_bytes_per_token_of_the_two_measured_models() -> None:
    assert model_shape("qwen3-0.6b").kv_bytes_per_token == 114_688
    assert model_shape("llama-3.1-8b").kv_bytes_per_token == 131_072


def test_names_are_found_in_any_case() -> None:
    assert model_shape("Llama-3.1-8B") is MODELS["llama-3.1-8b"]
    assert device_spec("H200") is DEVICES["h200"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown model 'gpt-9'.*llama-3\.1-8b.*qwen3-0\.6b"):
        model_shape("gpt-9")
    with pytest.raises(
        InputError, match=r"unknown device 'abacus'.*a100, b200, cpu-2core, cpu-2core-xeon, h100, h200"
    ):
        device_spec("abacus")


def test_capacity_is_what_the_weights_leave() -> None:
    model, device = model_shape("llama-3.1-8b"), device_spec("h200")
    free = int(device.memory_bytes * 0.9) - 2 * 8_030_261_248
    assert kv_capacity_tokens(model, device) == free // 131_072


def test_a_model_that_does_not_fit_names_both_sizes() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-70b does not fit on h200.*131\.4 GiB and 126\.4 GiB"):
        kv_capacity_tokens(model_shape("llama-3.1-70b"), device_spec("h200"))


def test_no_room_for_a_single_token_is_not_a_fit() -> None:
    model = model_shape("smollm2-135m")
    needed = model.weight_bytes + model.kv_bytes_per_token
    device = replace(device_spec("h200"), memory_bytes=math.ceil((needed - 1) / 0.9))
    with pytest.raises(InputError, match="does not fit"):
        kv_capacity_tokens(model, device)
    assert kv_capacity_tokens(model, replace(device, memory_bytes=math.ceil(needed / 0.9))) == 1


def test_a_device_with_its_own_element_width_doubles_weights_and_kv() -> None:
    model = model_shape("smollm2-135m")
    held = as_held(model, device_spec("cpu-2core"))
    assert held.weight_bytes == 2 * model.weight_bytes
    assert held.kv_bytes_per_token == 2 * model.kv_bytes_per_token
    assert as_held(model, device_spec("h200")) is model
