"""The figures continuous batching is judged by: sums of steps, work from a model's shape, and the last minute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.counters import STEP_TOKEN_BOUNDS, Counters, LevelUse, MediaUse
from paceline.core.events import Rule
from paceline.core.plan import StepPlan, StepWork
from paceline.costs.cost_model import work_done
from paceline.costs.presets import MODELS, published_peak
from paceline.models.spec import ExpertsSpec, ModelSpec, RopeSpec, model_work
from paceline.process.client import EngineStats
from paceline.server.metrics.batching import (
    WINDOW_S,
    BatchLimits,
    RecentTotals,
    Totals,
    level_families,
    media_families,
    recent_costs,
    recent_figures,
)
from paceline.server.metrics.families import Families


def test_a_step_adds_what_it_carries() -> None:
    counters = Counters()
    work = StepWork(
        decode_rows=3, decode_context=30, prefill_tokens=5, prefill_context_products=15, logit_rows=4
    )
    counters.planned(StepPlan(seq=1, work=work, pad_tokens=2, padding_rows=1), 4)
    counters.planned(StepPlan(seq=2, work=StepWork(decode_rows=1, decode_context=7, logit_rows=1)), 1)
    assert (counters.computed_tokens, counters.padding_tokens, counters.occupied_rows) == (9, 3, 5)
    assert (counters.decode_context, counters.context_products, counters.logit_rows) == (37, 52, 5)
    assert counters.steps_by_tokens[STEP_TOKEN_BOUNDS.index(1)] == 1
    assert counters.steps_by_tokens[STEP_TOKEN_BOUNDS.index(8)] == 1
    assert sum(counters.steps_by_tokens) == 2


def test_levels_have_their_own_figures() -> None:
    counters = Counters(prompt_tokens=100, cached_tokens=70, found_tokens=[40, 20, 10])
    counters.copied(0, incoming=False, num_blocks=3, seconds=0.5, failed=False)
    counters.copied(1, incoming=True, num_blocks=2, seconds=0.25, failed=True)
    counters.judged(Rule.LOADS)
    disk = LevelUse("disk", 1, 7, 9, hits=10, stored=3, loaded=2, failed=1, is_off=True)
    stats = EngineStats(counters=counters, below=(disk,))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in level_families(stats, None, Families("p:", "m"))
        for sample in family.samples
    }
    by_source = {
        key[-1]: value for key, value in found.items() if key[0] == "p:prompt_tokens_by_source_total"
    }
    assert by_source == {"local_compute": 30, "local_cache_hit": 40, "host": 20, "disk": 10}
    assert found["p:kv_copy_seconds_total", "m", "0", "host_out"] == 0.5
    assert found["p:kv_copy_seconds_total", "m", "0", "disk_in"] == 0.0
    assert found["p:kv_copy_failures_total", "m", "0", "disk_in"] == 1
    assert found["p:kv_level_blocks", "m", "0", "disk", "cached"] == 7
    assert found["p:kv_level_up", "m", "0", "disk"] == 0
    assert found["p:kv_loads_total", "m", "0", Rule.LOADS.value] == 1


def test_pictures_have_their_own_figures() -> None:
    counters = Counters(media_queries=5, media_hits=2, encode_as_tokens=300.0, computed_tokens=900)
    counters.planned(StepPlan(seq=1, work=StepWork(encode_positions=64)), 0)
    stats = EngineStats(counters=counters, media=MediaUse(held=3, cached=4, pages=9))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in media_families(stats, Families("p:", "m"))
        for sample in family.samples
    }
    assert found["p:mm_cache_queries_total", "m", "0"] == 5
    assert found["p:mm_cache_hits_total", "m", "0"] == 2
    assert found["p:encode_positions_total", "m", "0"] == 64
    assert found["p:encode_step_share", "m", "0"] == 0.25
    assert found["p:encoding_pages", "m", "0", "cached"] == 4


# ---------------------------------------------------------------- work


def spec(**changes: Any) -> ModelSpec:
    shape = MODELS["llama-3.1-8b"]
    made = ModelSpec(
        architecture="llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=8192,
        windows=(None,) * shape.layers,
        ropes=(RopeSpec(rotary_dim=shape.head_dim),),
        layer_ropes=(0,) * shape.layers,
    )
    return replace(made, **changes)


def test_work_of_a_model_is_that_of_its_shape() -> None:
    shape = MODELS["llama-3.1-8b"]
    work = model_work(spec(), weight_bytes=shape.weight_bytes, kv_token_bytes=shape.kv_bytes_per_token)
    assert work.token_flops == 2 * shape.layers * shape.layer_parameters
    assert work.logit_flops == 2 * shape.head_parameters
    read = (shape.layers * shape.layer_parameters + shape.head_parameters) * shape.dtype_bytes
    assert work.step_bytes == pytest.approx(read, rel=0.001)  # the embedding is not read
    done = work_done(work, steps=10, tokens=640, products=64_000, decode_context=64_000, logit_rows=640)
    assert done.flops == pytest.approx(2 * 640 * (shape.num_parameters - shape.head_parameters), rel=0.01)
    assert done.read_bytes == pytest.approx(10 * read + 64_000 * shape.kv_bytes_per_token, rel=0.001)
    assert done.written_bytes == 640 * shape.kv_bytes_per_token


def test_a_tied_embedding_is_read_and_experts_are_counted_by_use() -> None:
    tied = model_work(spec(tied_embeddings=True), weight_bytes=1000, kv_token_bytes=1.0)
    assert tied.step_bytes == 1000
    dense = model_work(spec(), weight_bytes=1000, kv_token_bytes=1.0)
    layers = tuple(range(32))
    experts = ExpertsSpec(num_experts=8, per_token=2, intermediate_size=14_336, normalize=True, layers=layers)
    sparse = model_work(spec(experts=experts), weight_bytes=1000, kv_token_bytes=1.0)
    assert sparse.step_bytes is None, "how many experts a step reads depends on its tokens"
    assert 1.5 * dense.token_flops < sparse.token_flops < 2 * dense.token_flops
    done = work_done(sparse, steps=1, tokens=1, products=0, decode_context=0, logit_rows=0)
    assert done.read_bytes is None


def test_a_peak_is_told_only_where_it_is_known_for_sure() -> None:
    peak = published_peak("NVIDIA H200")
    assert peak is not None and peak.flops == 989e12 and peak.bandwidth == 4.8e12
    assert published_peak("NVIDIA H100 PCIe") is None
    assert published_peak("cpu") is None


# ---------------------------------------------------------------- the last minute


UNKNOWN = BatchLimits()


class Clocked:
    """Totals that are set by hand."""

    def __init__(self) -> None:
        self.now = Totals(time_s=100.0)
        self.recent = RecentTotals(lambda: self.now)

    def go(self, **changes: Any) -> None:
        self.now = self.now._replace(**changes)


def figures(clocked: Clocked, limits: BatchLimits = UNKNOWN) -> dict[str, float]:
    return {name: value for name, _, value in recent_figures(clocked.recent.change(), limits)}


def test_shares_are_differences_over_a_minute() -> None:
    clocked = Clocked()
    clocked.recent.note()
    assert figures(clocked) == {}, "nothing can be said of no time"
    clocked.go(time_s=110.0, steps=100, busy_s=5.0, row_places=800, occupied_rows=400, computed_tokens=1000)
    clocked.go(
        padding_tokens=250,
        preemptions=20,
        vectors=15,
        flops=1e12,
        read_bytes=2e12,
        met=3,
        missed=1,
        output_tokens=500,
    )
    found = figures(clocked, BatchLimits(peak_flops=1e12, peak_bandwidth=1e12, cost_per_hour=3.6))
    assert found == {
        "busy_share": 0.5,
        "preemptions_per_second": 2.0,
        "vectors_per_second": 1.5,
        "slot_occupancy_mean": 0.5,
        "padding_share": 0.25,
        "goodput_share": 0.75,
        "goodput_requests_per_second": 0.3,
        "compute_share": 0.1,
        "memory_share": 0.2,
    }
    assert recent_costs(clocked.recent.change(), BatchLimits(cost_per_hour=3.6)) == {
        "output": pytest.approx(20.0),
        "all": pytest.approx(20.0),
    }


def test_what_is_older_than_a_minute_does_not_count() -> None:
    clocked = Clocked()
    for second in range(200):
        clocked.go(time_s=100.0 + second, busy_s=min(float(second), 100.0), steps=second)
        clocked.recent.note()
    change = clocked.recent.change()
    assert change is not None and change.time_s == pytest.approx(WINDOW_S)
    assert figures(clocked)["busy_share"] == 0.0, "it has rested for longer than that"


def test_an_engine_that_is_started_anew_counts_from_nothing() -> None:
    clocked = Clocked()
    clocked.go(steps=500, busy_s=50.0)
    clocked.recent.note()
    clocked.go(time_s=110.0, steps=3, busy_s=0.5)
    assert figures(clocked) == {}, "never a negative share"
    clocked.recent.note()
    clocked.go(time_s=112.0, steps=30, busy_s=1.5)
    assert figures(clocked)["busy_share"] == 0.5


def test_an_idle_minute_has_no_cost_of_tokens_and_no_goodput() -> None:
    clocked = Clocked()
    clocked.recent.note()
    clocked.go(time_s=130.0)
    assert set(figures(clocked)) == {"busy_share", "preemptions_per_second", "vectors_per_second"}
    assert recent_costs(clocked.recent.change(), BatchLimits(cost_per_hour=1.0)) == {}
