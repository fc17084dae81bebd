"""Kernels on tiny shapes through Triton's interpreter, on machines without a GPU; tests/gpu has the real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.gpu.kernels.decode_attention import DecodeTuning
from paceline.runner.gpu.kernels.gated_product import Activation, is_worth_gating
from paceline.runner.gpu.kernels.gumbel_sampling import (
    SamplingColumns,
    allocate_candidates,
    sample,
)
from paceline.runner.gpu.kernels.skinny_product import ProductTuning, small_tuning
from paceline.runner.gpu.kernels.step_rows import DrawnTokens, RowColumns, update_rows
from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_row_cases as row_cases
from tests.gpu import kernel_small_cases as small
from tests.gpu.kernel_references import reference_sample, reference_update_rows

SMALL = cases.Shape(device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("lengths", [[1], [0, 0], [5, 700, 64, 1, 0, 65], [128] * 9])
@pytest.mark.parametrize("window", [0, 100])
def test_a_work_list_covers_what_rows_see(lengths: list[int], window: int) -> None:
    cases.check_plan(lengths, "cpu", window=window, target=5)


@pytest.mark.parametrize("window", [0, 70])
def test_decode_attention(window: int) -> None:
    cases.check_decode(SMALL, [1, 0, 64, 300, 65], window=window, target_chunks=4)


def test_decode_attention_of_larger_tiles() -> None:
    cases.check_decode(SMALL, [130, 33], tuning=DecodeTuning(tile=64))


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("window", [0, 70])
def test_decode_attention_of_rows_with_drafts(width: int, window: int) -> None:
    rows = [(0, 1), (63, 2), (64, width), (300, width - 1), (126, width)]
    cases.check_wide_decode(SMALL, rows, width=width, window=window, target_chunks=4)


@pytest.mark.parametrize("window", [0, 70])
def test_prefill_attention_with_and_without_what_was_before(window: int) -> None:
    for group in (SMALL.group, 3):  # three queries to a key do not fill a tile
        shape = replace(SMALL, group=group)
        cases.check_prefill(shape, [(0, 1), (0, 70), (130, 67), (64, 0), (63, 2), (200, 9)], window=window)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [(64, 8000 // 64 * 64)],
        [(8, 1984)] * 32,
        [(2, 256), (1, 64), (300, 12_800), (17, 320)],
        [(2 + number % 40, 64 * (1 + number * number % 97)) for number in range(32)],
    ],
)
def test_the_list_of_shared_beginnings_covers_them(groups: list[tuple[int, int]]) -> None:
    for group, target in ((4, 33), (2, 33), (1, 4), (8, 264), (3, 33)):
        cases.check_shared_plan(groups, "cpu", group=group, target=target)


def test_shared_prefixes_are_computed_once_and_joined() -> None:
    cases.check_cascade(SMALL, [(128, [1, 70, 64] * 12)])
    cases.check_cascade(SMALL, [(64, [1, 70]), (704, [3, 64, 1]), (192, [5] * 35)], alone=[1, 130])
    cases.check_cascade(SMALL, [(64, [1, 2])] * 32, alone=[9], target=1)


@pytest.mark.parametrize("rotary_dim, has_norm", [(64, False), (64, True), (32, True)])
def test_rope_and_kv_write(rotary_dim: int, has_norm: bool) -> None:
    cases.check_rope_kv_write(SMALL, 9, rotary_dim=rotary_dim, has_norm=has_norm)


@pytest.mark.parametrize("rotary_dim", [64, 32, 24])
def test_placed_keys_are_turned(rotary_dim: int) -> None:
    cases.check_place_kv(SMALL, 37, rotary_dim=rotary_dim)
    cases.check_place_kv(replace(SMALL, kv_heads=3, head_dim=96), 9, rotary_dim=rotary_dim)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_residual_and_norm(parts: int) -> None:
    small.check_residual_norm(SMALL, 3, 100, parts=parts)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(activation: Activation) -> None:
    small.check_gated_activation(SMALL, 3, 1100, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product(activation: Activation) -> None:
    small.check_gated_product(SMALL, 300, 256, 128, activation)


def test_gate_and_up_are_one_product_where_its_last_round_is_nearly_full() -> None:
    """On 132 multiprocessors, with the inner widths of models of 8B and 0.6B."""
    assert not is_worth_gating(64, 14336, 4096, 132)  # few rows have a separate product
    worth = [tokens for tokens in range(64, 961, 64) if is_worth_gating(tokens, 14336, 4096, 132)]
    assert worth == [128, 256, 384, 512, 640, 768, 832, 896, 960]
    assert is_worth_gating(640, 3072, 1024, 132) and is_worth_gating(2048, 3072, 1024, 132)
    assert not is_worth_gating(1024, 3072, 1024, 132)  # a round and a half
    assert not is_worth_gating(8192, 1000, 1024, 132) and not is_worth_gating(8192, 3072, 100, 132)


def test_sampling_draws_what_the_definition_says() -> None:
    vocabulary, slots = 4999, 6
    logits = torch.randn(slots, vocabulary) * 3
    logits[0, 17] = logits[0, 4900] = 50.0  # greedy: lowest id among equals
    logits[4, 3] = float("nan")
    logits[5] = float("-inf")
    rows = torch.tensor([2, 0, 1, 5, 4, 3], dtype=torch.int32)
    temperature = torch.tensor([0.6, 1.0, 0.0, 0.7, 0.8, 1e-6, 3.0], dtype=torch.float64)
    seed = torch.tensor([1, -5, 9, 3, 4, 8, 2**40], dtype=torch.int64)
    position = torch.tensor([5, 2**33 + 1, 0, 7, 8, 9, 1], dtype=torch.int64)
    tokens = torch.full((slots,), -7, dtype=torch.int32)
    finite = torch.full((slots,), 7, dtype=torch.uint8)
    columns = SamplingColumns(slot_rows=rows, temperature=temperature, seed=seed, position=position)
    sample(tokens, finite, logits, columns, allocate_candidates(slots, vocabulary, "cpu", turns=2))
    assert finite.tolist() == [1, 1, 1, 1, 0, 0]
    expected = [
        reference_sample(logits[slot], float(temperature[row]), int(seed[row]), int(position[row]))
        for slot, row in enumerate(rows[:4].tolist())
    ]
    assert tokens.tolist() == [*expected, 0, 0]
    assert expected[0] == 17


def test_rows_take_their_tokens_and_end() -> None:
    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def fresh() -> RowColumns:
        stops = torch.full((5, 8), -1, dtype=torch.int32)
        stops[1, 2] = 42
        return RowColumns(
            length=column(3, 3, 3, 3, 3),
            max_length=column(10, 10, 4, 10, 10),
            active=column(1, 1, 1, 0, 1),
            dropped=column(0, 0, 0, 0, 0),
            stop_ids=stops,
            tokens=torch.zeros(5, 6, dtype=torch.int32),
        )

    slot_rows, tokens = column(4, 3, 2, 1, 0), column(1, 2, 3, 42, 42)
    finite = torch.tensor([0, 1, 1, 1, 2], dtype=torch.uint8)
    drawn = DrawnTokens(token=torch.zeros(5, dtype=torch.int32), code=torch.zeros(5, dtype=torch.int32))
    rows, expected = fresh(), fresh()
    update_rows(rows, drawn, slot_rows, tokens, finite)
    report = reference_update_rows(expected, slot_rows, tokens, finite)
    assert list(zip(drawn.token.tolist(), drawn.code.tolist(), strict=True)) == report
    assert [code for _, code in report] == [3, -1, 2, 1, 1]
    for name in ("tokens", "length", "active"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name


@pytest.mark.parametrize("vocabulary", [7, 512, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_definition(vocabulary: int, dtype: torch.dtype) -> None:
    row_cases.check_token_logprobs("cpu", draws=7, vocabulary=vocabulary, dtype=dtype)


@pytest.mark.parametrize("parts, gated", [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("rows", [5, 19])
def test_skinny_product(rows: int, parts: int, gated: bool) -> None:
    tuning = ProductTuning(columns=16, inner=64, parts=parts, num_warps=1, rows=16)  # 19: two programs
    small.check_skinny_product(SMALL, rows, 32, 256, tuning, gated=gated)


@pytest.mark.parametrize(("columns", "inner", "parts"), [(48, 192, 3), (64, 128, 1), (16, 256, 2)])
def test_products_of_a_head_are_cut_to_fit(columns: int, inner: int, parts: int) -> None:
    tuning = small_tuning(columns, inner, splits=True)
    assert tuning is not None and tuning.parts == parts
    small.check_skinny_product(SMALL, 3, columns, inner, tuning)
    assert small_tuning(columns + 1, inner) is None and small_tuning(columns, inner + 1) is None


@pytest.mark.parametrize("has_norm, gated", [(False, False), (True, False), (True, True)])
def test_row_product(has_norm: bool, gated: bool) -> None:
    cases.check_row_product(SMALL, 6, 1100, has_norm=has_norm, gated=gated)
