"""What several ranks of a model cost: links by published figures, shards, and what is left undivided."""

from dataclasses import replace

import pytest

from paceline.cli.sim.flags import LINK_NAMES
from paceline.costs.cost_model import StepShape
from paceline.costs.network import LINKS, Link, link_of, possible_ranks, rank_shape
from paceline.costs.presets import device_spec, kv_capacity_tokens, model_shape
from paceline.costs.roofline import Roofline
from paceline.errors import InputError

MB = 1 << 20
LLAMA = model_shape("llama-3.3-70b")
B200 = device_spec("b200")
NVLINK5 = link_of("nvlink5")
DECODE = StepShape(decode_rows=512, decode_context=512 * 1024, logit_rows=512)


@pytest.mark.parametrize(
    ("ranks", "megabytes", "published_us"), [(2, 0.5, 7), (4, 0.5, 10), (4, 1.0, 15), (4, 4.0, 29)]
)
def test_sums_take_what_was_published(ranks: int, megabytes: float, published_us: float) -> None:
    seen_us = 1e6 * LINKS["nvlink4"].sum_seconds(megabytes * MB, ranks)
    assert seen_us == pytest.approx(published_us, rel=0.15)


def test_a_sum_takes_the_shorter_of_two_ways() -> None:
    link = Link(name="slow", latency_s=1.0, bandwidth=1.0)
    assert link.sum_seconds(1.0, 4) == pytest.approx(1.0 + 3.0)  # each reads the parts of three others
    # Each sums a quarter, all gather the rest.
    assert link.sum_seconds(100.0, 4) == pytest.approx(3.0 + 150.0)
    assert link.gather_seconds(100.0, 4) == pytest.approx(1.0 + 75.0)
    assert link.copy_seconds(5.0) == pytest.approx(6.0)
    assert link.sum_seconds(100.0, 1) == link.gather_seconds(100.0, 1) == link.sum_seconds(0.0, 4) == 0.0


def test_the_command_knows_every_link() -> None:
    assert set(LINK_NAMES) == LINKS.keys()
    with pytest.raises(InputError, match="nvlink4, nvlink5"):
        link_of("string")


def test_ranks_hold_equal_parts_of_the_products_and_the_whole_embedding() -> None:
    parts = rank_shape(LLAMA, 8)
    assert 8 * parts.layer_parameters == LLAMA.layer_parameters
    assert 8 * parts.head_parameters == LLAMA.head_parameters
    assert 8 * parts.kv_bytes_per_token == LLAMA.kv_bytes_per_token
    embedding = LLAMA.vocab * LLAMA.hidden * LLAMA.dtype_bytes
    assert embedding < parts.weight_bytes - LLAMA.weight_bytes / 8 + embedding / 8 + 1 < 1.01 * embedding
    assert kv_capacity_tokens(parts, B200) > 8 * kv_capacity_tokens(LLAMA, B200)


def test_key_value_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    assert rank_shape(LLAMA, 16).kv_heads == 1
    assert rank_shape(LLAMA, 1) is LLAMA


def test_a_number_that_does_not_divide_is_refused_with_those_that_do() -> None:
    assert possible_ranks(model_shape("smollm2-135m")) == (1, 3)
    with pytest.raises(
        InputError, match=r"64 heads, 8 of keys and values; possible sizes are 1, 2, 4, 8, 16"
    ):
        rank_shape(LLAMA, 6)


def test_products_and_kv_are_divided_and_norms_are_not() -> None:
    one, two = (Roofline(LLAMA, B200, ranks, NVLINK5).parts(DECODE) for ranks in (1, 2))
    assert two.decode_attention_s == pytest.approx(one.decode_attention_s / 2)
    assert one.matmul_s / 2 <= two.matmul_s < 0.6 * one.matmul_s
    assert one.elementwise_s / 2 < two.elementwise_s < one.elementwise_s
    assert two.fixed_s == one.fixed_s and one.network_s == 0.0
    sums_s = 160 * NVLINK5.sum_seconds(512 * 8192 * 2, 2)
    assert sums_s < two.network_s < 1.1 * sums_s


def test_over_a_poor_link_two_are_slower_than_one() -> None:
    one, fast, poor = (
        Roofline(LLAMA, B200, ranks, link).step_seconds(DECODE)
        for ranks, link in ((1, NVLINK5), (2, NVLINK5), (2, link_of("eth-100g")))
    )
    assert fast < one < poor


def test_four_bits_are_read_in_a_quarter_and_a_bit_more() -> None:
    wide = replace(LLAMA, layer_weight_bytes=None)
    layers = LLAMA.layers * LLAMA.layer_parameters
    assert wide.weight_bytes - LLAMA.weight_bytes == pytest.approx(layers * (2 - 0.5625))
    few, many = (StepShape(decode_rows=rows) for rows in (1, 4096))
    narrow_s, wide_s = ([Roofline(m, B200).parts(s).matmul_s for s in (few, many)] for m in (LLAMA, wide))
    assert wide_s[0] / narrow_s[0] == pytest.approx(2 / 0.5625)
    assert wide_s[1] / narrow_s[1] == pytest.approx(9000 / 2250)  # products: dense FP4 over bf16
    h200 = Roofline(LLAMA, device_spec("h200")).parts(many).matmul_s  # has no 4-bit products
    assert h200 == pytest.approx(Roofline(wide, device_spec("h200")).parts(many).matmul_s)


# Llama-3.3-70B in FP4 on B200s, 128 tokens in and 2,048 out, total output tokens/s (TensorRT-LLM 0.19).
PUBLISHED = {1: 9_925, 2: 15_460, 4: 23_609, 8: 30_743}
HOST_ROW_S = 10e-6  # of an engine that loops over its requests in Python and waits for them


def output_tokens_per_s(ranks: int) -> float:
    """Of rows in the middle of their answers: as many as fit, 2,048 at most, 1,500 on average of 3,000 requests."""
    context = 128 + 1024
    rows = min(1500, kv_capacity_tokens(rank_shape(LLAMA, ranks), B200) // context)
    shape = StepShape(decode_rows=rows, decode_context=rows * context, logit_rows=rows)
    return rows / (Roofline(LLAMA, B200, ranks, NVLINK5).step_seconds(shape) + rows * HOST_ROW_S)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_ranks_bring_what_was_published(ranks: int) -> None:
    speed_up = output_tokens_per_s(ranks) / output_tokens_per_s(1)
    assert speed_up == pytest.approx(PUBLISHED[ranks] / PUBLISHED[1], rel=0.15)
