"""The CPU runner against transformers: the same tokens and logits, whatever the batch does around a request.

Every architecture, batch, chunk, block size, cache, disturbance, loop and mode occurs in some scenario of `make test`,
every pair of them in some scenario of the campaign; the full product is `python -m tests.torch.parity --all`.
"""

import itertools
from typing import Any

import pytest
import torch

from tests.torch.pairwise import covering, pairs_of, product
from tests.torch.parity import (
    FACTORS,
    NUM_PROMPTS,
    TOLERANCE,
    Play,
    Scenario,
    is_allowed,
    pairwise_scenarios,
    play,
    subject,
)
from tests.torch.tiny_models import NAMES

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
    """All but those that show a value for the first time are left to the campaign; a model stays on one worker."""
    shown: set[tuple[str, object]] = set()
    found = []
    for scenario in pairwise_scenarios():
        values = {(name, getattr(scenario, name)) for name in FACTORS}
        marks = [pytest.mark.xdist_group(f"parity of {scenario.architecture}")]
        if values <= shown:
            marks.append(pytest.mark.campaign)
        shown |= values
        found.append(pytest.param(scenario, marks=marks))
    return found


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_tokens_and_logits_are_those_of_transformers(scenario: Scenario) -> None:
    outcome = play(scenario, quick=True)
    outcome.check()
    if scenario.disturbance != "none":
        assert outcome.counts[HAPPENS[scenario.disturbance]] > 0


@pytest.mark.parametrize("architecture", NAMES)
def test_every_position_is_compared(architecture: str) -> None:
    outcome = play(Scenario(architecture=architecture, batch="alone", chunk="budget 7", caching=False))
    outcome.check()
    references = subject(architecture).references
    assert len(references) == NUM_PROMPTS
    assert outcome.compared == sum(len(reference.sequence) - 1 for reference in references)


@pytest.mark.parametrize("seed", range(3))
def test_branches_of_branches_in_one_step(seed: int) -> None:
    """A block that is copied in a step may be the copy another branch reads in the same step."""
    scenario = Scenario(
        architecture="mistral", chunk="budget 7", caching=False, disturbance="n=4", depth=1, seed=seed
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


def test_a_wrong_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that reads one block of another's gives other tokens, not only other logits."""
    play_ = Play(Scenario(architecture="llama", caching=False), subject("llama"))
    append = play_.runner._rows._append

    def misplaced(appends: object) -> None:
        append(appends)  # type: ignore[arg-type]
        play_.runner._rows.tables[0][:, 1] = 1

    monkeypatch.setattr(play_.runner._rows, "_append", misplaced)
    assert play_.run().wrong


def test_references_are_not_alike_nor_endless() -> None:
    """Prompts after which every model says the same, or one token for ever, would prove little."""
    for name in ("llama", "gemma3", "qwen3_moe"):
        outputs = [reference.output for reference in subject(name).references]
        assert len(set(outputs)) > NUM_PROMPTS // 2
        assert sum(len(set(output)) for output in outputs) > 3 * NUM_PROMPTS


def test_the_covering_set_covers_every_pair() -> None:
    wanted = {pair for row in product(FACTORS, is_allowed) for pair in pairs_of(row)}
    rows = covering(FACTORS, is_allowed)
    assert {pair for row in rows for pair in pairs_of(row)} == wanted
    assert all(is_allowed(row) for row in rows)
    largest = sorted((len(values) for values in FACTORS.values()), reverse=True)[:2]
    assert len(rows) < 1.5 * largest[0] * largest[1]
    assert covering(FACTORS, is_allowed) == rows


def test_a_covering_set_of_a_small_product() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    rows = covering(factors, lambda row: row["a"] != row["b"])
    held = {pair for row in rows for pair in pairs_of(row)}
    for a, c in itertools.product((1, 2, 3), repeat=2):
        assert (("a", a), ("c", c)) in held
    assert all(row["a"] != row["b"] for row in rows)
