"""The table a pace is kept by, as measured on a device whose steps take what a formula says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.config.engine import SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.models.files.open import open_checkpoint
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.graphs import TOKEN_BUCKETS
from paceline.runner.gpu.step_times import FEWEST, PACE, measured_drafts, with_pace

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FIXED_S, TOKEN_S, PRODUCT_S, ROW_S, BYTE_S = 1e-3, 2e-5, 2e-9, 5e-6, 2.5e-13


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

    def byte_seconds(self) -> float:
        return BYTE_S


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return open_checkpoint(tmp_path, load_format="dummy").spec


def test_the_table_holds_what_steps_take_without_attention(spec: ModelSpec) -> None:
    config = with_pace(
        SchedulerConfig(max_num_batched_tokens=8192, max_model_len=4096), Device(), spec, item_bytes=2
    )
    costs = config.step_costs
    assert costs is not None and config.step_target_ms == pytest.approx(PACE * 5)
    assert costs.sizes[0] == FEWEST and set(costs.sizes) <= set(TOKEN_BUCKETS)
    assert costs.seconds == pytest.approx([FIXED_S + TOKEN_S * size for size in costs.sizes])
    assert costs.product_s == pytest.approx(PRODUCT_S) and costs.row_s == pytest.approx(ROW_S)
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
    assert costs.context_s == pytest.approx(token_bytes * BYTE_S)


def test_a_step_has_no_more_tokens_than_a_stretched_target_allows(spec: ModelSpec) -> None:
    given = SchedulerConfig(max_num_batched_tokens=8192, max_model_len=4096, step_target_ms=20.0)
    config = with_pace(given, Device(), spec, item_bytes=2)
    assert config.step_target_ms == 20.0
    assert 1536 <= config.max_num_batched_tokens <= 2560  # 34 ms and a margin
    assert with_pace(given, Device(max_slots=4), spec, 2).step_target_ms == 20.0


def test_no_target_means_no_pace(spec: ModelSpec) -> None:
    given = SchedulerConfig(max_num_batched_tokens=8192, step_target_ms=0.0)
    assert with_pace(given, Device(), spec, 2) == given


def test_a_small_budget_is_the_only_size(spec: ModelSpec) -> None:
    config = with_pace(SchedulerConfig(max_num_batched_tokens=100), Device(max_slots=4), spec, 2)
    assert config.step_costs is not None and config.step_costs.sizes == (100,)


class DraftingDevice(Device):
    draft_sizes = (2, 4, 8)

    def drafted_seconds(self, num_tokens: int) -> float:
        return {2: 4e-3, 4: 7e-3, 8: 6e-3}[num_tokens]


def test_a_larger_step_with_drafts_is_never_taken_for_a_quicker_one() -> None:
    drafts = measured_drafts(DraftingDevice(), DraftConfig(width=4))
    assert drafts.sizes == (1, 2, 4, 8) and drafts.seconds == (4e-3, 4e-3, 6e-3, 6e-3)
    assert drafts.width == 4
