"""How long steps take: what tokens cost is remembered, how fast the machine is is followed."""

import random

import pytest

from paceline.costs.step_speed import FEWEST, StepSpeed


def seconds(decoding: int, prompt_tokens: int) -> float:
    """A machine whose steps with prompts cost more than plain ones."""
    return 0.02 + 0.002 * decoding + (0.03 + 0.003 * prompt_tokens if prompt_tokens else 0.0)


def trained(steps: int = 200, slower: float = 1.0, speed: StepSpeed | None = None) -> StepSpeed:
    draw, found = random.Random(3), speed or StepSpeed()
    for _ in range(steps):
        decoding, prompt = draw.randint(0, 20), draw.choice((0, 0, 40, 200))
        found.learn(decoding, prompt, slower * seconds(decoding, prompt) * draw.uniform(0.9, 1.1))
    return found


def test_nothing_is_known_before_steps_with_prompts_have_run() -> None:
    speed = StepSpeed()
    for _ in range(2 * FEWEST):
        speed.learn(4, 0, 0.03)
    assert not speed.is_known
    speed.learn(0, 40, 0.2)
    speed.learn(0, 200, 0.7)
    assert speed.is_known
    assert speed.seconds(0, 120) == pytest.approx(0.45, rel=0.3)


@pytest.mark.parametrize(("decoding", "prompt"), [(1, 0), (20, 0), (0, 40), (10, 200)])
def test_what_tokens_cost_is_learnt_for_both_kinds(decoding: int, prompt: int) -> None:
    assert trained().seconds(decoding, prompt) == pytest.approx(seconds(decoding, prompt), rel=0.2)


@pytest.mark.parametrize("slower", [0.25, 4.0])
def test_a_change_of_speed_is_followed_within_some_steps(slower: float) -> None:
    speed = trained()
    trained(40, slower, speed)
    assert speed.seconds(10, 200) == pytest.approx(slower * seconds(10, 200), rel=0.3)


def test_a_stall_is_forgotten() -> None:
    speed = trained()
    before = speed.seconds(10, 200)
    speed.learn(10, 0, 60.0)
    assert speed.seconds(10, 200) < 1.3 * before
    trained(20, speed=speed)
    assert speed.seconds(10, 200) == pytest.approx(before, rel=0.15)
