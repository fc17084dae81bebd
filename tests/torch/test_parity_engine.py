"""The CPU runner against transformers: the same tokens and logits, whatever the batch does around a request.

On torch and on the native kernels. On each, every architecture, batch, chunk, block size, cache, disturbance, loop and
mode occurs in some scenario of `make test`, every pair of them in some scenario of the campaign; the full product is
`python -m tests.torch.parity --all`.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.models.files.open import open_checkpoint
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.model import objection
from tests.bits import Between
from tests.torch.pairwise import covering, pairs_of, product
from tests.torch.parity import (
    BACKENDS,
    BY_BACKEND,
    NUM_PROMPTS,
    TOLERANCE,
    Play,
    Scenario,
    is_allowed,
    pairwise_scenarios,
    play,
    subject,
)
from tests.torch.tiny_models import NAMES, save

HAPPENS = {
    "recompute": "preempted",
    "swap": "preempted",
    "auto": "preempted",
    "pause": "preempted",
    "aborts": "aborted",
    "n=4": "n=4",
    "fork": "forked",
}


def scenarios() -> list[Any]:
    """All but those in which every value occurs once are left to the campaign."""
    return [parameter for backend in BACKENDS for parameter in _scenarios_on(backend)]


def _scenarios_on(backend: str) -> list[Any]:
    values = {
        scenario: {(name, getattr(scenario, name)) for name in BY_BACKEND[backend]}
        for scenario in pairwise_scenarios(backend)
    }
    missing, chosen = set().union(*values.values()), set()
    while missing:
        best = max(values, key=lambda scenario: len(values[scenario] & missing))
        chosen.add(best)
        missing -= values[best]
    return [
        pytest.param(scenario, marks=[] if scenario in chosen else [pytest.mark.campaign])
        for scenario in values
    ]


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_tokens_and_logits_are_those_of_transformers(scenario: Scenario) -> None:
    outcome = play(scenario, quick=True)
    outcome.check()
    if scenario.disturbance != "none":
        assert outcome.counts[HAPPENS[scenario.disturbance]] > 0


@pytest.mark.parametrize(
    "architecture, backend",
    [(name, backend) for backend in BACKENDS for name in BY_BACKEND[backend]["architecture"]],
)
def test_every_position_is_compared(architecture: str, backend: str) -> None:
    scenario = Scenario(
        architecture=architecture, batch="alone", chunk="budget 7", caching=False, backend=backend
    )
    outcome = play(scenario)
    outcome.check()
    references = subject(architecture).references
    assert len(references) == NUM_PROMPTS
    assert outcome.compared == sum(len(reference.sequence) - 1 for reference in references)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_branches_of_branches_in_one_step(seed: int, backend: str) -> None:
    """A block that is copied in a step may be the copy another branch reads in the same step."""
    scenario = Scenario(
        architecture="mistral",
        chunk="budget 7",
        caching=False,
        disturbance="n=4",
        depth=1,
        backend=backend,
        seed=seed,
    )
    play(scenario).check()


def test_a_wrong_weight_is_noticed() -> None:
    play_ = Play(Scenario(architecture="llama"), subject("llama"))
    norm = subject("llama").decoder.parts.norm
    right = norm.weight
    norm.weight = right * (1 + 0.01 * torch.arange(len(right)) / len(right))
    try:
        outcome = play_.run()
    finally:
        norm.weight = right
    assert outcome.worst > TOLERANCE


class Misplaced(Between):
    """Steps whose rows all read the same block as their second one."""

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64]) -> NDArray[np.bool_]:
        rows.tables[0][:, 1] = 1
        return super().forward(rows, batch, due)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_table_is_noticed(backend: str) -> None:
    """A row that reads one block of another's gives other tokens, not only other logits."""
    scenario = Scenario(architecture="llama", caching=False, backend=backend)
    assert Play(scenario, subject("llama"), change=Misplaced).run().wrong


def test_the_native_kernels_refuse_what_they_are_not_compared_on(tmp_path: Path) -> None:
    refused = set(NAMES) - set(BY_BACKEND["native"]["architecture"])
    assert refused
    for name in refused:
        save(name, tmp_path)
        assert objection(open_checkpoint(tmp_path), 16)
    save("llama", tmp_path)
    assert objection(open_checkpoint(tmp_path), 8) and not objection(open_checkpoint(tmp_path), 16)


def test_references_are_not_alike_nor_endless() -> None:
    """Prompts after which every model says the same, or one token for ever, would prove little."""
    for name in ("llama", "gemma3", "qwen3_moe"):
        outputs = [reference.output for reference in subject(name).references]
        assert len(set(outputs)) > NUM_PROMPTS // 2
        assert sum(len(set(output)) for output in outputs) > 3 * NUM_PROMPTS


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_covering_set_covers_every_pair(backend: str) -> None:
    factors = BY_BACKEND[backend]
    wanted = {pair for row in product(factors, is_allowed) for pair in pairs_of(row)}
    rows = covering(factors, is_allowed)
    assert {pair for row in rows for pair in pairs_of(row)} == wanted
    assert all(is_allowed(row) for row in rows)
    largest = sorted((len(values) for values in factors.values()), reverse=True)[:2]
    assert len(rows) < 1.5 * largest[0] * largest[1]
    assert covering(factors, is_allowed) == rows


def test_a_covering_set_of_a_small_product() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    rows = covering(factors, lambda row: row["a"] != row["b"])
    held = {pair for row in rows for pair in pairs_of(row)}
    for a, c in itertools.product((1, 2, 3), repeat=2):
        assert (("a", a), ("c", c)) in held
    assert all(row["a"] != row["b"] for row in rows)
