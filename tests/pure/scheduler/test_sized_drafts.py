"""How many drafts a GPU's step has room for follows from what they bring and from what its sizes take."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config.speculative import DraftConfig
from paceline.core.plan import DRAFT_KINDS, EMPTY, DraftTally, StepResult, StepTimes, StepWork
from paceline.scheduler.draft_budget import SizedBudget

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAT = tuple(0.004 + 1e-7 * size for size in SIZES)  # reading weights is all it takes
STEEP = tuple(1e-4 * size for size in SIZES)  # each token takes its time
KIND = 3


def budget(seconds: tuple[float, ...], width: int = 7) -> SizedBudget:
    return SizedBudget(DraftConfig(width=width, sizes=SIZES, seconds=seconds), width)


def run(
    drafts: SizedBudget,
    rows: int,
    acceptance: float,
    steps: int,
    seconds: tuple[float, ...],
    *,
    have_drafts: bool = True,
) -> None:
    """Steps of `rows` rows, each with drafts of one kind, of which a share is right; or without any."""
    random, now_s = np.random.default_rng(1), 0.0
    for seq in range(1, steps + 1):
        width, tokens = drafts.choose(rows, 10_000)
        each = min(width, tokens // rows) if have_drafts else 0
        right = np.minimum(random.geometric(1.0 - acceptance, rows) - 1, each) if acceptance < 1 else each
        count = np.broadcast_to(np.asarray(right) + 1, rows).astype(np.int32)
        compared, equal, offered = np.zeros((3, DRAFT_KINDS), np.int32)
        offered[KIND] = rows * have_drafts
        if not have_drafts:
            pass
        elif each:
            compared[KIND], equal[KIND] = np.minimum(count, each).sum(), np.minimum(count - 1, each).sum()
        else:
            compared[KIND], equal[KIND] = rows, random.binomial(rows, acceptance)
        size = next(size for size in SIZES if size >= rows + tokens)
        took_s = seconds[SIZES.index(size)]
        result = StepResult(
            seq=seq,
            rows=np.arange(rows, dtype=np.int32),
            generation=np.zeros(rows, np.int32),
            tokens=np.zeros((rows, width + 1), np.int32),
            count=count,
            finished=np.zeros(rows, np.uint8),
            finite=np.ones(rows, np.bool_),
            times=StepTimes(start_s=now_s, end_s=now_s + took_s),
            verified=np.full(rows, each, np.int32) if width else EMPTY,
            drafts=DraftTally(compared, equal, offered),
        )
        now_s += took_s
        drafts.learn(StepWork(decode_rows=rows), result, tokens)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_drafts_that_are_right_get_large_steps_where_these_cost_little(rows: int) -> None:
    drafts = budget(FLAT)
    run(drafts, rows, 0.9, 60, FLAT)
    width, tokens = drafts.choose(rows, 10_000)
    assert width >= 5 and tokens >= 5 * rows
    predicted, seen = drafts.gains(rows, width)
    assert predicted > 3.0 and seen > 3.0


@pytest.mark.parametrize("seconds, acceptance", [(FLAT, 0.0), (STEEP, 0.6)])
def test_drafts_that_cost_more_than_they_bring_end(seconds: tuple[float, ...], acceptance: float) -> None:
    drafts = budget(seconds)
    run(drafts, 16, acceptance, 60, seconds)
    assert drafts.choose(16, 10_000) == (0, 0)


@pytest.mark.parametrize("seconds", [FLAT, STEEP])
def test_rows_that_have_no_drafts_get_no_room(seconds: tuple[float, ...]) -> None:
    drafts = budget(seconds)
    run(drafts, 16, 0.9, 12, seconds, have_drafts=False)
    assert drafts.choose(16, 10_000) == (0, 0)
    run(drafts, 16, 0.9, 60, FLAT)
    run(drafts, 16, 0.9, 100, FLAT, have_drafts=False)
    assert drafts.choose(16, 10_000) == (0, 0), "rows that had some before, too"


def test_drafts_come_back_when_texts_change() -> None:
    drafts = budget(FLAT)
    run(drafts, 4, 0.0, 60, FLAT)
    assert drafts.choose(4, 10_000) == (0, 0)
    run(drafts, 4, 0.9, 200, FLAT)
    assert drafts.choose(4, 10_000)[0] > 2


def test_no_room_is_given_that_is_not_there() -> None:
    drafts = budget(FLAT)
    assert drafts.choose(4, 0) == (0, 0)
    assert drafts.choose(4, 10_000, prompt_tokens=5) == (0, 0)
    width, tokens = drafts.choose(4, 3)
    assert width >= 1 and tokens == 3
    assert drafts.choose(600, 10_000) == (0, 0), "there is no step of that size"
