"""A line that follows the points that come."""

import random

import pytest

from paceline.costs.step_speed import RunningLine


def test_a_line_is_found() -> None:
    draw, line = random.Random(1), RunningLine(memory=100)
    for _ in range(300):
        x = draw.uniform(1, 1000)
        line.learn(x, 5.0 + 0.02 * x)
    assert line.at(0) == pytest.approx(5.0)
    assert line.at(500) == pytest.approx(15.0)


def test_the_newest_points_count() -> None:
    draw, line = random.Random(2), RunningLine(memory=50)
    for fixed in (5.0, 9.0):
        for _ in range(400):
            x = draw.uniform(1, 1000)
            line.learn(x, fixed + 0.02 * x)
    assert line.at(0) == pytest.approx(9.0, abs=0.05)


@pytest.mark.parametrize(
    "points", [[(10, 3.0)] * 20, [(10, 9.0), (90, 1.0)] * 20, [(10, 1.0), (20, 90.0)] * 20]
)
def test_neither_part_is_negative(points: list[tuple[float, float]]) -> None:
    """All alike, falling, and rising so steeply that the line would begin below zero."""
    line = RunningLine(memory=1000)
    for x, y in points:
        line.learn(x, y)
    assert line.slope() >= 0.0 <= line.at(0)
    middle = sum(x for x, _ in points) / len(points)
    assert line.at(middle) == pytest.approx(sum(y for _, y in points) / len(points))


def test_nothing_learnt_is_nothing_said() -> None:
    assert RunningLine(memory=10).at(100) == 0.0
