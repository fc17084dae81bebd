"""Self-consistency over answers that are drawn from known shares: when it stops, and whether that was right."""

from __future__ import annotations

import random

import pytest

from benchmarks.searches import Said, voted

LETTERS = "ABCD"


def votes(shares: tuple[float, ...], count: int) -> list[list[Said]]:
    """Full votes of 16 answers of unequal length."""
    draw = random.Random(1)
    return [
        [
            Said(f"So the answer is ({draw.choices(LETTERS, shares)[0]}).", draw.randrange(5, 40))
            for _ in range(16)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("shares", "most_samples"),
    [((1, 0, 0, 0), 0.26), ((8, 1, 1, 0), 0.45), ((6, 3, 1, 0), 0.65), ((4, 4, 1, 1), 0.9)],
    ids=str,
)
def test_a_vote_stops_when_its_leader_is_certain(shares: tuple[float, ...], most_samples: float) -> None:
    cases = votes(shares, 200)
    found = [voted(said) for said in cases]
    full = [voted(said, certainty=1.0, parallel=16) for said in cases]
    assert all(result.num_branches == 16 for result in full)
    same = sum(one.answer == other.answer for one, other in zip(found, full, strict=True))
    assert same >= 0.95 * len(cases)
    assert sum(result.num_branches for result in found) <= most_samples * 16 * len(cases)
