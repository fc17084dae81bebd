"""Drafts from the row's own tokens, and what is learnt of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.speculative import DraftConfig, read_speculative_config
from paceline.core.plan import (
    EMPTY,
    DraftTally,
    GuideWork,
    StepPlan,
    StepResult,
    StepTimes,
    StepWork,
    i32,
    whole_rows,
)
from paceline.core.sampling import SamplingParams
from paceline.errors import ConfigError
from paceline.runner.device_rows import DeviceRows, Drafts
from paceline.runner.drafts import FOLLOWED, FOUND, OF_HISTORY, History, NgramDrafter
from paceline.scheduler.draft_budget import TALLIES, DraftBudget, StepSeconds

CONFIG = EngineConfig(
    kv=KVConfig(num_blocks=64), scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=200), depth=0
)
SURE = np.full(32, 0.9, np.float32)


class Texts:
    """Rows with tokens, and a drafter that sees them grow."""

    def __init__(self, *texts: list[int], history: History | None = None) -> None:
        self.rows = DeviceRows(CONFIG)
        self.drafter = NgramDrafter(history)
        for row, text in enumerate(texts):
            self.join(row, text)

    def join(
        self,
        row: int,
        text: list[int],
        limit: int = 200,
        tenant: int = 1,
        *,
        num_prompt: int | None = None,
        prediction: tuple[int, ...] = (),
    ) -> None:
        joins = whole_rows([row], [text], [limit], SamplingParams())
        joins = replace(joins, texts=np.array([tenant]), num_prompt=i32([num_prompt or len(text)]))
        self.rows.apply(StepPlan(seq=1, joins=joins))
        self.drafter.join(self.rows, row, prediction)

    def say(self, row: int, *tokens: int, verified: int = 0) -> None:
        """A row gets tokens in one step."""
        start = int(self.rows.num_tokens[row])
        self.rows.tokens[row, start : start + len(tokens)] = tokens
        self.rows.num_tokens[row] += len(tokens)
        self.drafter.observe(self.rows, np.array([row]), np.array([len(tokens)]), np.array([verified]))

    def drafts(
        self,
        *rows: int,
        width: int = 4,
        tokens: int = 100,
        floor: float = 0.1,
        trust: np.ndarray | None = None,
    ) -> list[list[int]]:
        made = self.propose(*rows, width=width, tokens=tokens, floor=floor, trust=trust)
        if made is None:
            return [[] for _ in rows]
        return [row[:count].tolist() for row, count in zip(made.tokens, made.number.tolist(), strict=True)]

    def propose(
        self, *rows: int, width: int, tokens: int, floor: float, trust: np.ndarray | None
    ) -> Drafts | None:
        plan = StepPlan(
            seq=2,
            draft_width=width,
            draft_tokens=tokens,
            draft_floor=floor,
            trust=SURE if trust is None else trust,
        )
        return self.drafter.propose(self.rows, plan, np.array(rows))


def test_a_text_goes_on_as_it_did_before() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 7, 8, 20, 21])
    texts.say(0, 3)
    assert texts.drafts(0) == [[]]  # one token alone says too little
    texts.say(0, 4)
    assert texts.drafts(0) == [[5, 6, 7, 8]]
    texts.say(0, 5, 6, verified=4)
    assert texts.drafts(0) == [[7, 8, 20, 21]]


def test_the_longest_match_counts_and_then_the_latest() -> None:
    texts = Texts([9, 1, 2, 3, 50, 8, 2, 3, 60, 7, 2, 3, 70, 9, 1])
    texts.say(0, 2)
    texts.say(0, 3)
    assert texts.drafts(0, width=1) == [[50]]  # 1, 2, 3
    texts.say(0, 61)
    texts.say(0, 2)
    texts.say(0, 3)
    assert texts.drafts(0, width=1) == [[61]]  # 2, 3, and no longer match


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    texts = Texts([5, 6, 7, 5, 6])
    texts.say(0, 7)
    assert texts.drafts(0, width=7) == [[5, 6, 7, 5, 6, 7, 5]]
    texts = Texts([4, 4, 4])
    texts.say(0, 4)
    assert texts.drafts(0, width=3) == [[4, 4, 4]]


def test_no_row_learns_from_another_and_none_from_its_rows_last_owner() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6], [8, 9, 1])
    texts.say(1, 2)
    texts.say(1, 3)
    assert texts.drafts(1) == [[]]
    texts.join(0, [8, 9, 1])
    texts.say(0, 2)
    texts.say(0, 3)
    assert texts.drafts(0) == [[]]


def test_the_likeliest_are_taken_within_the_budget_and_above_the_floor() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [1, 2, 9, 9, 9, 9, 9, 1])
    texts.say(0, 5)
    texts.say(1, 2)
    trust = np.zeros(32, np.float32)
    trust[9:12], trust[:3] = 0.9, 0.5  # matches of five tokens, of two
    assert texts.drafts(0, 1, trust=trust) == [[6, 7, 1, 2], [9, 9, 9]]
    assert texts.drafts(0, 1, trust=trust, floor=0.6) == [[6, 7, 1, 2], []]
    assert texts.drafts(0, 1, trust=trust, tokens=5) == [[6, 7, 1, 2], [9]]
    assert texts.drafts(0, 1, trust=trust, tokens=3) == [[6, 7, 1], []]
    assert texts.drafts(0, 1, trust=trust, floor=1.0) == [[], []]


def test_no_draft_goes_beyond_the_limit_of_its_row() -> None:
    texts = Texts()
    texts.join(0, [1, 2, 3, 4, 5, 1], limit=10)
    texts.say(0, 2)
    assert texts.drafts(0) == [[3, 4]]  # the token that is drawn behind them is the tenth
    texts.rows.ended[0] = True
    assert texts.drafts(0) == [[]]


def test_drafts_are_compared_whether_they_are_verified_or_not() -> None:
    texts = Texts([1, 2, 3, 4, 5, 6, 1])
    texts.say(0, 2)
    assert texts.drafter.take_tally() is None
    texts.say(0, 3)  # as guessed, and not verified
    texts.say(0, 4, 5, 6, 9, verified=4)  # of four, three were right
    tally = texts.drafter.take_tally()
    assert tally is not None and (tally.compared.sum(), tally.equal.sum()) == (5, 4)
    assert texts.drafter.take_tally() is None


def test_where_no_draft_is_worth_it_many_rows_are_looked_at_now_and_then() -> None:
    texts = Texts(*([1, 2, 3, 4, 5, 6, 1] for _ in range(4)))
    every = np.arange(4)
    none = {"width": 0, "tokens": 0, "floor": 1.0, "trust": None}
    tallied = []
    for token in (2, 3, 4, 5, 6):
        assert texts.propose(*every.tolist(), **none) is None  # type: ignore[arg-type]
        texts.rows.tokens[every, texts.rows.num_tokens[every]] = token
        texts.rows.num_tokens[every] += 1
        texts.drafter.observe(texts.rows, every, np.ones(4, np.int64), None)
        tally = texts.drafter.take_tally()
        tallied.append(0 if tally is None else int(tally.compared.sum()))
    # The fourth step is the first that is looked at, and then there are guesses.
    assert tallied == [0, 0, 0, 0, 0]
    for token in (1, 2, 3, 4):
        assert texts.propose(*every.tolist(), **none) is None  # type: ignore[arg-type]
        texts.rows.tokens[every, texts.rows.num_tokens[every]] = token
        texts.rows.num_tokens[every] += 1
        texts.drafter.observe(texts.rows, every, np.ones(4, np.int64), None)
    tally = texts.drafter.take_tally()
    assert tally is not None and (tally.compared.sum(), tally.equal.sum()) == (4, 4)  # one of each row
    assert texts.drafts(*every.tolist()) == [[5, 6, 1, 2]] * 4  # what was not looked at is known by then


def ended(texts: Texts, row: int) -> None:
    texts.rows.ended[row] = True
    texts.drafter.leave(texts.rows, row)


EXPECTED = (40, 41, 42, 43, 44, 45, 46, 47)


def test_a_prediction_is_drafted_from_its_first_token_on() -> None:
    texts = Texts()
    texts.join(0, [1, 2, 3], prediction=EXPECTED)
    texts.say(0, 40)  # of the prompt's last step: nothing is drafted for it
    assert texts.drafts(0) == [[41, 42, 43, 44]]
    texts.say(0, 41, 42, 43, 44, 45, verified=4)
    assert texts.drafts(0) == [[46, 47]]  # as far as it goes
    texts.say(0, 46, 47, 9, verified=2)
    assert texts.drafts(0) == [[]]
    tally = texts.drafter.take_tally()
    assert tally is not None and tally.compared[FOUND] == tally.equal[FOUND] == 1
    assert tally.compared[FOLLOWED] == tally.equal[FOLLOWED] == 6


def test_a_prediction_is_found_again_behind_an_edit() -> None:
    texts = Texts()
    texts.join(0, [1, 2, 3], prediction=(50, 51, *EXPECTED, 50, 51, 60, 61))
    texts.say(0, 70)
    assert texts.drafts(0) == [[]]
    texts.say(0, 41)
    texts.say(0, 42)
    assert texts.drafts(0) == [[43, 44, 45, 46]]
    texts.say(0, 43)
    texts.say(0, 71)
    assert texts.drafts(0) == [[]]
    texts.say(0, 50)
    texts.say(0, 51)
    assert texts.drafts(0) == [[60, 61]]  # behind what it has said, not before
    texts.say(0, 42)
    texts.say(0, 43)
    assert texts.drafts(0) == [[44, 45, 46, 47]]  # it may go back all the same


def test_a_prediction_is_of_its_row_alone_and_goes_on_after_a_preemption() -> None:
    texts = Texts([1, 2, 3], history=History(64))
    texts.join(1, [1, 2, 3], prediction=EXPECTED)
    for row in (0, 1):
        texts.say(row, 40)
    texts.say(0, 41)
    assert texts.drafts(0, 1) == [[], [41, 42, 43, 44]]
    ended(texts, 1)
    texts.join(2, [1, 2, 3, 40, 41, 42], num_prompt=3, prediction=EXPECTED)
    assert texts.drafts(2) == [[43, 44, 45, 46]]
    texts.join(2, [41, 42, 43])
    texts.say(2, 44)
    assert texts.drafts(2) == [[]]  # it is not kept for others, nor for the row's next owner


def test_what_is_drafted_from_a_prediction_is_told_by_row() -> None:
    texts = Texts([1, 2, 3, 1])
    texts.join(1, [1, 2, 3, 1], prediction=EXPECTED)
    texts.say(0, 2)
    assert texts.propose(0, width=3, tokens=9, floor=0.1, trust=SURE).predicted is None  # type: ignore[union-attr]
    texts.say(1, 2)
    texts.say(1, 40)
    texts.say(1, 41)
    made = texts.propose(0, 1, width=3, tokens=9, floor=0.1, trust=SURE)
    assert made is not None and made.predicted is not None
    assert (made.number.tolist(), made.predicted.tolist()) == ([3, 3], [0, 3])


def test_a_prediction_that_is_followed_comes_first_and_one_that_was_found_by_trust() -> None:
    for found, expected in ((0.1, 50), (0.9, 43)):
        texts = Texts()
        texts.join(0, [41, 42, 50, 51, 52, 53], prediction=EXPECTED)
        trust = np.full(32, 0.5, np.float32)
        trust[FOUND] = found
        texts.drafts(0, trust=trust)
        texts.say(0, 41)
        texts.say(0, 42)
        assert texts.drafts(0, width=1, trust=trust) == [[expected]]
        texts.say(0, 43)
        assert texts.drafts(0, width=1, trust=trust) == [[44]]


STORY = [31, 32, 33, 34, 35, 36, 37, 38, 39]


def test_a_text_that_has_ended_is_drafted_from_by_rows_of_its_tenant() -> None:
    texts = Texts(STORY, history=History(64))
    ended(texts, 0)
    texts.join(1, [9, 31, 32])
    texts.say(1, 33)
    assert texts.drafts(1) == [[34, 35, 36, 37]]
    texts.say(1, 34, 35, 36, 37, 38, verified=4)
    assert texts.drafts(1) == [[39]]  # there it ended
    texts.join(2, [9, 31, 32], tenant=2)
    texts.say(2, 33)
    assert texts.drafts(2) == [[]]


def test_only_texts_that_ended_well_are_kept() -> None:
    texts = Texts(STORY, history=History(64))
    texts.drafter.leave(texts.rows, 0)  # aborted, or preempted
    texts.join(1, [9, 31, 32])
    texts.say(1, 33)
    assert texts.drafts(1) == [[]]


def test_the_more_trusted_of_two_sources_is_taken() -> None:
    for of_history, expected in ((0.9, 34), (0.1, 50)):
        texts = Texts(STORY, history=History(64))
        ended(texts, 0)
        texts.join(1, [31, 32, 33, 50, 31, 32])
        trust = np.full(32, 0.5, np.float32)
        trust[OF_HISTORY:] = of_history
        texts.drafts(1, trust=trust)
        texts.say(1, 33)
        assert texts.drafts(1, width=1, floor=0.05, trust=trust) == [[expected]]


def test_the_ring_forgets_the_oldest_texts_and_never_gives_what_was_written_over() -> None:
    history = History(256)
    for number in range(40):
        history.add(np.array([100 * number + place for place in range(10)]), 7)
    assert history.find([3900, 3901, 3902], 7)[1] == 3
    assert history.find([0, 1, 2], 7) == (0, 0)
    assert history.find([3900, 3901, 3902], 8) == (0, 0)
    place, length = history.find([3901, 3902, 3903, 3904, 3905, 3906, 3907], 7)
    assert length == 7 and history.guess(place, 2) == [3908, 3909]
    long = np.arange(1000)
    history.add(long, 7)  # of a text that is longer than a part of the ring, the end
    assert history.find([995, 996, 997], 7)[1] == 3 and history.find([5, 6, 7], 7) == (0, 0)


def test_a_place_that_another_tenant_has_written_over_is_not_read() -> None:
    history = History(64)
    history.add(np.array([1, 2, 3, 4]), 7)
    assert history.find([1, 2, 3], 7)[1] == 3
    for _ in range(13):  # the last of them lies where the first text lay, and says the same
        history.add(np.array([1, 2, 3, 4]), 8)
    assert history.find([1, 2, 3], 8)[1] == 3
    assert history.find([1, 2, 3], 7) == (0, 0)


# -- how many ----------------------------------------------------------------------------------------------


def result(
    rows: int, verified: int, count: int, seconds: float, tally: DraftTally | None = None
) -> StepResult:
    return StepResult(
        seq=1,
        rows=i32(range(rows)),
        generation=EMPTY,
        tokens=np.zeros((rows, 8), np.int32),
        count=i32([count] * rows),
        finished=np.zeros(rows, np.uint8),
        finite=np.ones(rows, np.bool_),
        times=StepTimes(start_s=0.0, end_s=seconds),
        verified=i32([verified] * rows),
        drafts=tally,
    )


def test_the_floor_is_what_a_token_more_costs_at_the_present_rate() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=2e-3), 7)
    assert budget.choose(1, 100) == (7, 7)
    assert budget.floor == pytest.approx(1.05 * 2 / 8)
    assert budget.choose(8, 100) == (7, 56) and budget.floor == pytest.approx(1.05 * 16 / 22)
    assert budget.choose(8, 5) == (7, 5)
    assert budget.choose(1000, 5000) == (0, 0)  # a token more costs as much as one of those


def test_beside_prompts_a_draft_costs_what_a_token_of_theirs_does() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=1e-6), 7)
    for number in range(200):
        work = StepWork(decode_rows=1, prefill_tokens=100) if number % 2 else StepWork(decode_rows=1)
        seconds = 6e-3 + (20e-3 if number % 2 else 0.0)
        budget.learn(work, result(1, 0, 1, seconds))
    budget.choose(1, 100)
    assert budget.floor < 0.01
    budget.choose(1, 100, prompt_tokens=50)
    assert budget.floor == pytest.approx(1.05 * 0.2 / 6, rel=0.05)


def test_what_drafts_bring_is_told() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=9e-3, token_s=1e-3), 3)
    assert budget.gains(1, 0) == (1.0, 1.0)
    tally = DraftTally(i32([100] + [0] * 31), i32([90] + [0] * 31))
    for _ in range(100):  # three drafts in each step, of which two are right
        budget.learn(StepWork(decode_rows=1), result(1, 3, 3, 13e-3, tally))
        budget.learn_drafts(tally)
    predicted, seen = budget.gains(1, 3)
    assert predicted == pytest.approx((1 + 0.9 + 0.81 + 0.73) * 10 / 13, rel=0.02)
    assert seen == pytest.approx(3 * 10 / 13, rel=0.02)
    assert budget.is_news(3, 5.0)
    assert not budget.is_news(2, 5.5)  # too soon
    assert budget.is_news(2, 6.0)


def test_room_is_made_for_as_many_as_the_best_kind_may_have() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=2e-3), 7)
    tally = DraftTally(i32([100] * 2 + [0] * 30), i32([50, 10] + [0] * 30))
    for _ in range(20):
        budget.learn_drafts(tally)
    assert budget.choose(1, 100) == (1, 1)  # 0.26 is above a half of a half
    tally = DraftTally(i32([100] * 2 + [0] * 30), i32([10, 10] + [0] * 30))
    for _ in range(20):
        budget.learn_drafts(tally)
    assert budget.choose(1, 100) == (0, 0)


def test_where_drafts_are_right_others_are_less_worth() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=2e-3), 7)
    for _ in range(100):
        budget.learn(StepWork(decode_rows=1), result(1, 0, 2, 0.0))
    budget.choose(1, 100)
    assert budget.floor == pytest.approx(2 * 1.05 * 2 / 8, rel=1e-3)


def guided(certain: int) -> StepResult:
    return result(8, 0, 1, 0.0)._replace(guided=GuideWork(8, 0.0, certain=certain))


def test_there_is_room_for_what_guides_are_certain_of() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=2e-3), 7)
    wrong = DraftTally(i32([1000] * 32), i32([0] * 32))
    for _ in range(TALLIES):
        budget.learn_drafts(wrong)
    work = StepWork(decode_rows=8)
    budget.learn(work, guided(0))
    assert budget.choose(8, 100) == (0, 0)
    budget.learn(work, guided(12))
    assert budget.choose(8, 100) == (7, 56) and budget.choose(8, 5) == (7, 5)
    predicted, _ = budget.gains(8, 7)  # with what is certain, not with what guesses have room for
    assert predicted == pytest.approx((1 + 1.2 / 8) * 22 / 24)
    budget.learn(work, result(8, 0, 1, 0.0))  # other answers have none of it
    assert budget.choose(8, 100) == (0, 0)
    budget.learn(work, guided(12))
    for _ in range(20):  # a text without rules
        assert budget.choose(8, 100)[0]
        budget.learn(work, guided(0))
    for _ in range(20):  # a long one
        budget.learn(work, guided(0))
    assert budget.choose(8, 100) == (0, 0)


@pytest.mark.parametrize(("wider_s", "room"), [(30e-3, 7), (36e-3, 0)])
def test_a_certain_token_waits_where_it_costs_more_than_a_row(wider_s: float, room: int) -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=2e-3), 7)
    wrong = DraftTally(i32([1000] * 32), i32([0] * 32))
    work = StepWork(decode_rows=8)
    for _ in range(200):
        budget.learn(work, result(8, 0, 1, 16e-3, wrong))
        budget.learn(work, result(8, 1, 1, wider_s, wrong))
    budget.learn(work, guided(12))
    assert budget.choose(8, 100)[0] == room


def test_trust_follows_what_is_seen_and_is_told_when_it_has_moved() -> None:
    budget = DraftBudget(DraftConfig(), 7)
    assert (budget.tell_trust() == 0.5).all()
    assert not len(budget.tell_trust())
    tally = DraftTally(i32([10] + [0] * 31), i32([9] + [0] * 31))
    for _ in range(20):
        budget.learn(StepWork(decode_rows=1), result(1, 0, 1, 0.0, tally))
    told = budget.tell_trust()
    assert told[0] == pytest.approx(0.9, abs=0.03) and (told[1:] == 0.5).all()
    tally = DraftTally(i32([10] + [0] * 31), i32([0] * 32))
    for _ in range(200):
        budget.learn(StepWork(decode_rows=1), result(1, 0, 1, 0.0, tally))
    assert budget.tell_trust()[0] < 0.05


def test_what_steps_take_is_learnt_by_their_size() -> None:
    seconds = StepSeconds(6e-3, 2e-3)
    assert seconds(4) / seconds(1) == pytest.approx(14 / 8)
    for number in range(400):  # a fifth token costs much, a machine that is twice as slow nothing
        tokens = 4 + number % 2
        seconds.learn(tokens, (1.0 if number < 200 else 2.0) * (14e-3 if tokens == 4 else 20e-3))
    assert seconds(5) / seconds(4) == pytest.approx(20 / 14, rel=0.03)
    assert seconds(6) / seconds(5) == pytest.approx(18 / 16, rel=0.01)  # as the line has it
    before = seconds(4)
    seconds.learn(4, 10.0)  # a stall
    assert seconds(4) == pytest.approx(before, rel=0.15)


def test_a_size_that_costs_more_than_it_brings_is_left_out() -> None:
    budget = DraftBudget(DraftConfig(fixed_s=6e-3, token_s=1e-3), 7)
    budget.choose(4, 100)
    assert budget.floor == pytest.approx(1.05 * 0.4)
    for number in range(200):
        verified = number % 2
        one = result(1, verified, 1, 10e-3 + 1.8e-3 * verified)
        budget.learn(StepWork(decode_rows=4), one._replace(count=i32([1] * 4)))
    assert budget.choose(4, 100)[0] == 7 and budget.floor == pytest.approx(1.05 * 4 * 0.18, rel=0.1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("ngram", DraftConfig()),
        ('{"method": "ngram", "num_speculative_tokens": 3}', DraftConfig(width=3)),
        ('{"num_speculative_tokens": 0}', None),
        ('{"num_speculative_tokens": 5}', DraftConfig(method="history", width=5)),
        ("auto", DraftConfig(method="history")),
        ("suffix", DraftConfig(method="history")),
        ('{"method": "eagle3", "model": "x"}', DraftConfig(method="eagle", model="x", width=4)),
        ('{"model": "x"}', DraftConfig(method="history", model="x", width=4)),
    ],
)
def test_what_the_flag_says(text: str, expected: DraftConfig | None) -> None:
    assert read_speculative_config(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eagle", "method eagle needs model"),
        ('{"method": "draft_model"}', "method draft_model needs model"),
        ('{"method": "eagle", "model": 3}', "model must be the folder or the name of a model"),
        ("mtp", "method 'mtp' is not off, auto, ngram, history"),
        ("", "method '' is not off, auto, ngram, history"),
        ("{", "is not JSON"),
        ('{"method": "ngram", "model": "x"}', "method ngram takes no model"),
        ('{"method": "ngram", "tree": "x"}', "tree is not known"),
        ('{"num_speculative_tokens": 16}', "must be 0 to 15, not 16"),
        ('{"num_speculative_tokens": true}', "must be 0 to 15, not True"),
        ('{"method": ["ngram"]}', "method ['ngram'] is not"),
    ],
)
def test_what_it_cannot_say(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config") as caught:
        read_speculative_config(text)
    assert says in str(caught.value)
