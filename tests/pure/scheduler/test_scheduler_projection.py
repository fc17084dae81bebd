"""A walk over the steps to come, against the same counted step by step."""

import pytest

from paceline.scheduler.forecast import StepProjection


def cost(decoding: float, prompt_tokens: float) -> float:
    return 1.0 + 0.01 * (decoding + prompt_tokens)


def projection(
    *lives: float, budget: int = 10, free_rows: int = 8, free_blocks: float = 1000.0
) -> StepProjection:
    return StepProjection(
        cost,
        lambda decoding: budget,
        endings=[(life, 2.0) for life in lives],
        free_rows=free_rows,
        free_blocks=free_blocks,
        block_size=16,
    )


def test_a_prompt_that_fits_takes_one_step_of_its_size() -> None:
    walk = projection()
    walk.read(4)
    assert walk.seconds == 0.0
    assert walk.first_token_s() == pytest.approx(cost(0, 4))


def test_prompts_share_steps_and_long_ones_take_several() -> None:
    walk = projection()
    walk.read(6)
    walk.read(18)  # 10 + 10 + 4
    assert walk.first_token_s() == pytest.approx(2 * cost(0, 10) + cost(0, 4))


def test_rows_that_decode_leave_less_of_a_step_until_they_end() -> None:
    walk = projection(2.0, 2.0)
    walk.read(30)  # 8, 8, then 10 and 4
    assert walk.first_token_s() == pytest.approx(2 * cost(2, 8) + cost(0, 10) + cost(0, 4))


def test_without_a_row_the_next_ending_is_waited_for() -> None:
    walk = projection(5.0, 9.0, free_rows=0)
    walk.admit(1)
    assert walk.seconds == pytest.approx(5 * cost(2, 0))
    walk.read(3)
    assert walk.first_token_s() == pytest.approx(5 * cost(2, 0) + cost(1, 3))


def test_without_blocks_as_many_endings_as_free_them_are_waited_for() -> None:
    walk = projection(3.0, 6.0, 9.0, free_blocks=0.0)
    walk.admit(3)
    assert walk.decoding == 1  # two of them had to end


def test_who_was_read_decodes_and_ends() -> None:
    walk = projection(free_rows=1)
    walk.admit(1)
    walk.read(10)
    walk.decode(4.0, 1.0)
    walk.admit(1)  # waits for it
    assert walk.seconds == pytest.approx(cost(0, 10) + 4 * cost(1, 0))


def test_with_nobody_to_wait_for_nothing_is_waited_for() -> None:
    walk = projection(free_rows=0, free_blocks=0.0)
    walk.admit(5)
    walk.read(1)
    assert walk.first_token_s() == pytest.approx(cost(0, 1))
