"""The table a pace is kept by, as measured on a device whose steps take what a formula says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.config.engine import SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.runner.gpu.graphs import TOKEN_BUCKETS
from paceline.runner.gpu.step_times import FEWEST, PACE, measured_drafts, with_pace

FIXED_S, TOKEN_S, PRODUCT_S, ROW_S, CONTEXT_S = 1e-3, 2e-5, 2e-9, 5e-6, 2.5e-10


@dataclass
class Device:
    max_slots: int = 1024
    longest: int = 4096

    def decode_seconds(self, slots: int) -> float:
        return 5e-3

    def mixed_seconds(self, num_tokens: int, num_decode: int, start: int = 0) -> float:
        room = self.longest - start
        tokens = num_tokens - num_decode
        number, count = max(1, tokens // room), min(tokens, room)
        products = number * (count * start + count**2 / 2)
        return FIXED_S + TOKEN_S * num_tokens + ROW_S * num_decode + PRODUCT_S * products

    def context_seconds(self) -> float:
        return CONTEXT_S


def test_the_table_holds_what_steps_take_without_attention() -> None:
    config = with_pace(SchedulerConfig(max_num_batched_tokens=8192, max_model_len=4096), Device())
    costs = config.step_costs
    assert costs is not None and config.step_target_ms == pytest.approx(PACE * 5)
    assert costs.sizes[0] == FEWEST and set(costs.sizes) <= set(TOKEN_BUCKETS)
    assert costs.seconds == pytest.approx([FIXED_S + TOKEN_S * size for size in costs.sizes])
    assert costs.product_s == pytest.approx(PRODUCT_S) and costs.row_s == pytest.approx(ROW_S)
    assert costs.context_s == CONTEXT_S


def test_a_step_has_no_more_tokens_than_a_stretched_target_allows() -> None:
    given = SchedulerConfig(max_num_batched_tokens=8192, max_model_len=4096, step_target_ms=20.0)
    config = with_pace(given, Device())
    assert config.step_target_ms == 20.0
    assert 1536 <= config.max_num_batched_tokens <= 2560  # 34 ms and a margin
    assert with_pace(given, Device(max_slots=4)).step_target_ms == 20.0


def test_no_target_means_no_pace() -> None:
    given = SchedulerConfig(max_num_batched_tokens=8192, step_target_ms=0.0)
    assert with_pace(given, Device()) == given


def test_a_small_budget_is_the_only_size() -> None:
    config = with_pace(SchedulerConfig(max_num_batched_tokens=100), Device(max_slots=4))
    assert config.step_costs is not None and config.step_costs.sizes == (100,)


class DraftingDevice(Device):
    draft_sizes = (2, 4, 8)

    def drafted_seconds(self, num_tokens: int) -> float:
        return {2: 4e-3, 4: 7e-3, 8: 6e-3}[num_tokens]


def test_a_larger_step_with_drafts_is_never_taken_for_a_quicker_one() -> None:
    drafts = measured_drafts(DraftingDevice(), DraftConfig(width=4))
    assert drafts.sizes == (1, 2, 4, 8) and drafts.seconds == (4e-3, 4e-3, 6e-3, 6e-3)
    assert drafts.width == 4
