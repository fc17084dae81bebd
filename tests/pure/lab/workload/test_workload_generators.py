"""The built-in generators: statistics against those of the traces, structure of sessions.

The targets were measured on the published files, with the definitions of `paceline.lab.workload.describe`. With
PACELINE_DATA naming a folder that holds the files, they are measured again and compared directly.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paceline.lab.workload import Workload, WorkloadSummary, describe, load_workload

SEEDS = range(5)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trace in numbers; quantiles at 10, 25, 50, 75, 90 and 99 %."""

    file: str
    num_requests: int
    rate: float
    prompt_mean: float
    prompt_quantiles: tuple[float, ...]
    output_mean: float
    output_quantiles: tuple[float, ...]
    rank_correlation: float
    gap_variation: float
    dispersion_10s: float
    block_reuse: float | None = None


TARGETS = {
    # Azure LLM inference trace 2023, conversation (github.com/Azure/AzurePublicDataset, CC-BY-4.0)
    "azure-conv": Target(
        file="azure2023_conv.csv",
        num_requests=19_366,
        rate=5.530,
        prompt_mean=1154.7,
        prompt_quantiles=(207, 396, 1020, 1189, 2734, 4142),
        output_mean=211.1,
        output_quantiles=(54, 85, 129, 395, 424, 601),
        rank_correlation=0.073,
        gap_variation=1.094,
        dispersion_10s=3.857,
    ),
    # Azure LLM inference trace 2023, code (same place); the Splitwise paper has its mean and median
    "azure-code": Target(
        file="azure2023_code.csv",
        num_requests=8_819,
        rate=2.566,
        prompt_mean=2047.8,
        prompt_quantiles=(147, 578, 1469, 2744, 5188, 7436),
        output_mean=27.9,
        output_quantiles=(7, 9, 13, 24, 55, 251),
        rank_correlation=-0.021,
        gap_variation=13.15,
        dispersion_10s=71.64,
    ),
    # Mooncake FAST'25 conversation trace (github.com/kvcache-ai/Mooncake, Apache-2.0)
    "mooncake": Target(
        file="mooncake_conversation_trace.jsonl",
        num_requests=12_031,
        rate=3.401,
        prompt_mean=12035.1,
        prompt_quantiles=(964, 2306, 6909, 15367, 27367, 85400),
        output_mean=342.6,
        output_quantiles=(24, 156, 350, 472, 597, 1119),
        rank_correlation=0.072,
        gap_variation=3.034,
        dispersion_10s=2.099,
        block_reuse=0.3664,
    ),
    # Chatbot Arena trace of the VTC artifact (github.com/Ying1123/VTC-artifact, Apache-2.0), as CSV
    "multi-tenant": Target(
        file="vtc_arena_multiclient_trace.csv",
        num_requests=1_500,
        rate=2.498,
        prompt_mean=136.3,
        prompt_quantiles=(5, 13, 40, 161, 432, 902),
        output_mean=256.2,
        output_quantiles=(18, 62, 211, 458, 513, 785),
        rank_correlation=0.264,
        gap_variation=1.104,
        dispersion_10s=2.514,
    ),
}
NAMES = list(TARGETS)

# Requests of each of the 27 clients in the Chatbot Arena trace.
CLIENT_REQUESTS = [
    199, 40, 296, 22, 66, 120, 67, 56, 36, 23, 262, 26, 43, 44, 22, 46, 25, 3, 12, 19, 31, 2, 19, 11, 2, 7, 1,
]  # fmt: skip


@cache
def generated(name: str, seed: int) -> Workload:
    return load_workload(name, seed=seed)


@cache
def summary(name: str, seed: int) -> WorkloadSummary:
    return describe(generated(name, seed))


def mean_over_seeds(name: str, field: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(np.mean([getattr(summary(name, seed), field) for seed in SEEDS], axis=0))


def assert_near(
    got: object, wanted: object, *, rel: float, tokens: float = 1.0, what: str = "lengths"
) -> None:
    """Equal within a share of the target, or within a token where that share is less than one."""
    np.testing.assert_array_less(
        np.abs(np.asarray(got, float) - np.asarray(wanted, float)),
        np.maximum(rel * np.abs(np.asarray(wanted, float)), tokens) + 1e-12,
        err_msg=f"{what}: got {got}, wanted {wanted}",
    )


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("name", NAMES)
def test_the_default_size_is_the_traces(name: str) -> None:
    assert len(generated(name, 0)) == TARGETS[name].num_requests
    assert generated(name, 0).name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lengths_over_seeds(name: str) -> None:
    target = TARGETS[name]
    assert_near(mean_over_seeds(name, "prompt_quantiles"), target.prompt_quantiles, rel=0.08)
    assert_near(mean_over_seeds(name, "output_quantiles"), target.output_quantiles, rel=0.08)
    assert_near(mean_over_seeds(name, "prompt_mean"), target.prompt_mean, rel=0.05)
    assert_near(mean_over_seeds(name, "output_mean"), target.output_mean, rel=0.05)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_every_seed(name: str, seed: int) -> None:
    target, got = TARGETS[name], summary(name, seed)
    assert_near(got.prompt_quantiles, target.prompt_quantiles, rel=0.15)
    # Few requests, or sessions whose turns are alike, leave the quantiles of one seed more room.
    loose = name in ("multi-tenant", "mooncake")
    assert_near(got.output_quantiles, target.output_quantiles, rel=0.2 if loose else 0.15)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_output_are_tied_as_in_the_trace(name: str) -> None:
    assert mean_over_seeds(name, "rank_correlation") == pytest.approx(
        TARGETS[name].rank_correlation, abs=0.02
    )


@pytest.mark.parametrize("name", NAMES)
def test_rate_and_burstiness(name: str) -> None:
    target = TARGETS[name]
    assert mean_over_seeds(name, "rate") == pytest.approx(target.rate, rel=0.03)
    assert mean_over_seeds(name, "gap_variation") == pytest.approx(target.gap_variation, rel=0.1)
    assert mean_over_seeds(name, "dispersion_10s") == pytest.approx(target.dispersion_10s, rel=0.15)
    for seed in SEEDS:
        assert summary(name, seed).rate == pytest.approx(target.rate, rel=0.06)
        assert summary(name, seed).gap_variation == pytest.approx(target.gap_variation, rel=0.25)
    assert summary(name, 0).dispersion_10s == pytest.approx(target.dispersion_10s, rel=0.25)


def test_the_bursts_are_not_those_of_a_poisson_process() -> None:
    for name in NAMES:
        redrawn = describe(load_workload(name, arrivals="poisson"))
        assert redrawn.dispersion_10s == pytest.approx(1.0, abs=0.3)
        assert redrawn.dispersion_10s < 0.75 * TARGETS[name].dispersion_10s


def test_code_falls_silent_for_long_stretches() -> None:
    # 57 silences of more than 5 s in the trace, the longest of 217 s.
    for seed in SEEDS:
        gaps = np.diff(generated("azure-code", seed).arrival_s)
        assert 45 <= int((gaps > 5.0).sum()) <= 70
        assert 150 <= gaps.max() <= 260


def test_mooncake_arrives_in_ticks_of_three_seconds() -> None:
    times = generated("mooncake", 0).arrival_s
    assert np.array_equal(times, np.rint(times / 3.0) * 3.0)


def test_more_requests_than_the_trace_go_on_at_its_rate() -> None:
    for name in ("azure-conv", "azure-code"):
        workload = load_workload(name, num_requests=40_000)
        assert len(workload) == 40_000
        assert workload.rate == pytest.approx(TARGETS[name].rate, rel=0.04)


# ---------------------------------------------------------------- tenants


def test_shares_of_the_clients() -> None:
    workload = generated("multi-tenant", 0)
    assert workload.tenants == tuple(str(client) for client in range(27))
    wanted = np.array(CLIENT_REQUESTS) / 1500
    got = mean_over_seeds("multi-tenant", "tenant_shares")
    # Five draws of 1,500: three standard errors of a share, and what a noisy total rate adds to them.
    allowed = 3 * np.sqrt(wanted * (1 - wanted) / (1500 * len(SEEDS))) + 0.04 * wanted + 0.0005
    assert (np.abs(got - wanted) <= allowed).all(), (got * 1500).round(1)


def test_the_heaviest_clients_stay_heavy_in_every_seed() -> None:
    for seed in SEEDS:
        shares = np.array(summary("multi-tenant", seed).tenant_shares)
        assert shares[[0, 2, 5, 10]].sum() == pytest.approx(877 / 1500, abs=0.06)
        assert set(np.argsort(shares)[-3:].tolist()) == {0, 2, 10}


def test_clients_come_and_go() -> None:
    workload = generated("multi-tenant", 0)
    phase = np.mod(workload.arrival_s, 600.0)
    # The second heaviest arrives after a third of the time.
    assert phase[workload.tenant == 10].min() >= 205.0
    assert phase[workload.tenant == 19].max() < 150.0
    twice = load_workload("multi-tenant", num_requests=3_000)
    late = twice.arrival_s > 600.0
    assert len(set(twice.tenant[late].tolist())) >= 24  # and all come again


# ---------------------------------------------------------------- sessions


@dataclass(frozen=True, kw_only=True)
class SessionShape:
    """How requests lean on earlier ones, read off their block ids alone."""

    first_share: float  # requests that share nothing but the system block
    kept_quantiles: tuple[float, ...]  # blocks a later turn finds again, at 25, 50, 75, 90 %
    gap_quantiles_s: tuple[float, ...]  # to the request that it found them of, at 25, 50, 75 %
    appending: float  # of the later turns: all full blocks of the prompt before, and more
    repeating: float  # the same prompt again
    early_first_share: float  # as first_share, of the first 300 s
    turn_output_correlation: float  # of the logarithms of the outputs of two turns in a row


def session_shape(workload: Workload) -> SessionShape:
    assert workload.prefix_ids is not None
    last_with: dict[int, int] = {}
    kept, before = [], []
    for request, ids in enumerate(workload.prefix_ids):
        count = next((i for i, block_id in enumerate(ids) if block_id not in last_with), len(ids))
        kept.append(count)
        before.append(last_with[ids[count - 1]] if count else -1)
        last_with.update(dict.fromkeys(ids, request))
    num_kept, parent = np.array(kept), np.array(before)
    later = np.flatnonzero(num_kept > 1)
    prompt, previous = workload.prompt_len[later], workload.prompt_len[parent[later]]
    gaps = workload.arrival_s[later] - workload.arrival_s[parent[later]]
    outputs = np.log(workload.output_len)
    return SessionShape(
        first_share=float(np.mean(num_kept <= 1)),
        kept_quantiles=tuple(np.quantile(num_kept[later], (0.25, 0.5, 0.75, 0.9)).tolist()),
        gap_quantiles_s=tuple(np.quantile(gaps, (0.25, 0.5, 0.75)).tolist()),
        appending=float(np.mean((num_kept[later] >= previous // 512) & (prompt > previous))),
        repeating=float(np.mean(prompt == previous)),
        early_first_share=float(np.mean(num_kept[workload.arrival_s < 300.0] <= 1)),
        turn_output_correlation=float(np.corrcoef(outputs[later], outputs[parent[later]])[0, 1]),
    )


# Measured on the Mooncake conversation trace.
MOONCAKE_SHAPE = SessionShape(
    first_share=0.613,
    kept_quantiles=(5, 12, 26, 49),
    gap_quantiles_s=(66, 123, 264),
    appending=0.822,
    repeating=0.026,
    early_first_share=0.790,
    turn_output_correlation=0.647,
)


def assert_same_shape(got: SessionShape, wanted: SessionShape) -> None:
    assert got.first_share == pytest.approx(wanted.first_share, abs=0.03)
    assert got.early_first_share == pytest.approx(wanted.early_first_share, abs=0.08)
    assert_near(got.kept_quantiles, wanted.kept_quantiles, rel=0.15)
    assert_near(got.gap_quantiles_s, wanted.gap_quantiles_s, rel=0.15, what="gaps")
    assert got.appending == pytest.approx(wanted.appending, abs=0.04)
    assert got.repeating == pytest.approx(wanted.repeating, abs=0.01)
    assert got.turn_output_correlation == pytest.approx(wanted.turn_output_correlation, abs=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_block_reuse(seed: int) -> None:
    assert summary("mooncake", seed).block_reuse == pytest.approx(0.3664, rel=0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_have_the_shape_of_the_trace(seed: int) -> None:
    assert_same_shape(session_shape(generated("mooncake", seed)), MOONCAKE_SHAPE)


def test_block_ids_cover_the_prompt_and_open_with_the_system_block() -> None:
    workload = generated("mooncake", 0)
    assert workload.prefix_block == 512
    assert workload.prefix_ids is not None
    for ids, prompt_len in zip(workload.prefix_ids, workload.prompt_len.tolist(), strict=True):
        assert len(ids) == -(-prompt_len // 512)
        assert ids[0] == 0
        assert len(set(ids)) == len(ids)


def assert_ids_form_a_tree(workload: Workload) -> None:
    """An id stands for all tokens up to its block's end, so it always follows the same id."""
    assert workload.prefix_ids is not None
    before: dict[int, int] = {}
    for ids in workload.prefix_ids:
        for previous, block_id in zip((-1, *ids[:-1]), ids, strict=True):
            assert before.setdefault(block_id, previous) == previous


def test_block_ids_form_a_tree() -> None:
    assert_ids_form_a_tree(generated("mooncake", 0))


def test_a_partial_block_is_shared_only_by_the_same_prompt() -> None:
    workload = generated("mooncake", 0)
    assert workload.prefix_ids is not None
    prompts = workload.prompt_len.tolist()
    partial = {
        ids[-1]: length for ids, length in zip(workload.prefix_ids, prompts, strict=True) if length % 512
    }
    for ids, length in zip(workload.prefix_ids, prompts, strict=True):
        assert all(block_id not in partial for block_id in ids[:-1])
        assert partial.get(ids[-1], length) == length


def test_no_prompt_outgrows_the_context_of_the_trace() -> None:
    prompts = np.concatenate([generated("mooncake", seed).prompt_len for seed in SEEDS])
    assert prompts.min() >= 891
    assert prompts.max() <= 126_195


# ---------------------------------------------------------------- against the real files


@cache
def real(name: str) -> Workload:
    folder = os.environ.get("PACELINE_DATA")
    if not folder:
        pytest.skip("PACELINE_DATA names no folder with the traces")
    path = Path(folder) / TARGETS[name].file
    if not path.exists():
        pytest.skip(f"{TARGETS[name].file} is not in PACELINE_DATA")
    return load_workload(str(path))


@pytest.mark.parametrize("name", NAMES)
def test_the_targets_are_those_of_the_real_file(name: str) -> None:
    target, got = TARGETS[name], describe(real(name))
    assert got.num_requests == target.num_requests
    for field in ("rate", "prompt_mean", "output_mean", "gap_variation", "dispersion_10s"):
        assert getattr(got, field) == pytest.approx(getattr(target, field), rel=2e-3), field
    assert got.block_reuse == (pytest.approx(target.block_reuse, rel=2e-3) if target.block_reuse else None)
    assert got.rank_correlation == pytest.approx(target.rank_correlation, abs=1e-3)
    assert_near(got.prompt_quantiles, target.prompt_quantiles, rel=0.0)
    assert_near(got.output_quantiles, target.output_quantiles, rel=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_generated_against_real(name: str) -> None:
    wanted = describe(real(name))
    assert_near(mean_over_seeds(name, "prompt_quantiles"), wanted.prompt_quantiles, rel=0.1)
    assert_near(mean_over_seeds(name, "output_quantiles"), wanted.output_quantiles, rel=0.1)
    assert mean_over_seeds(name, "rank_correlation") == pytest.approx(wanted.rank_correlation, abs=0.02)
    assert mean_over_seeds(name, "rate") == pytest.approx(wanted.rate, rel=0.03)
    assert mean_over_seeds(name, "gap_variation") == pytest.approx(wanted.gap_variation, rel=0.25)
    assert mean_over_seeds(name, "dispersion_10s") == pytest.approx(wanted.dispersion_10s, rel=0.25)


def test_real_sessions() -> None:
    workload = real("mooncake")
    assert_ids_form_a_tree(workload)
    assert_same_shape(session_shape(workload), MOONCAKE_SHAPE)
    assert_same_shape(session_shape(generated("mooncake", 0)), session_shape(workload))


def test_real_clients() -> None:
    workload = real("multi-tenant")
    assert workload.tenants == tuple(str(client) for client in range(27))
    assert np.bincount(workload.tenant).tolist() == CLIENT_REQUESTS
