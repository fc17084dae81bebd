"""The dial: what a place means, what is seen, how a target is held, and what a composed step keeps to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.engine import SchedulerConfig, StepCosts
from paceline.core.dial import (
    OFF,
    DialKind,
    DialSetting,
    DialStatus,
    DialWord,
    chosen_setting,
    status_sentences,
)
from paceline.core.events import NO_REQUEST, Decision, DecisionKind, Rule
from paceline.errors import ConfigError, InvalidRequest
from paceline.scheduler.dial.engine_dial import NUM_SLICES, ROWS_PART, Dial, DialRange, Window
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

SIZES = (256, 512, 1024, 2048)
COSTS = StepCosts(sizes=SIZES, seconds=tuple(0.002 + 2e-5 * size for size in SIZES))
NOBODY_WAITS = np.empty(0)
positions = st.floats(0.0, 1.0)


def config(**options: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_batched_tokens": 2048, "max_num_seqs": 64, **options})


def itl(milliseconds: float) -> DialSetting:
    return DialSetting(kind=DialKind.ITL, value=milliseconds)


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, value",
    [
        (DialKind.POSITION, -0.1),
        (DialKind.POSITION, 1.1),
        (DialKind.POSITION, float("nan")),
        (DialKind.ITL, 0.0),
        (DialKind.TTFT, 1e9),
        (DialKind.ITL, True),
    ],
)
def test_a_setting_out_of_range_names_its_field(kind: DialKind, value: float) -> None:
    with pytest.raises(InvalidRequest, match=kind.value) as caught:
        DialSetting(kind=kind, value=value)
    assert caught.value.param == kind.value


def test_one_setting_at_a_time() -> None:
    assert chosen_setting(None, None, None) is None
    assert chosen_setting(0.0, None, None) == DialSetting(kind=DialKind.POSITION, value=0.0)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        chosen_setting(0.5, 30.0, None)
    with pytest.raises(ConfigError, match="--dial and --target-ttft-p99-ms exclude each other"):
        config(dial=0.5, target_ttft_p99_ms=100.0)
    with pytest.raises(ConfigError, match="--dial needs --mode continuous"):
        config(dial=0.5, mode="static")


# -- what a place means --------------------------------------------------------------------------------------


@given(positions, positions, st.booleans(), st.integers(1, 4096), st.integers(1, 512))
def test_turning_up_never_makes_a_step_shorter_or_rows_fewer(
    one: float, other: float, knows_costs: bool, most: int, rows: int
) -> None:
    made = config(step_costs=COSTS if knows_costs else None, max_num_batched_tokens=most, max_num_seqs=rows)
    low, high = (DialRange(made).at(position) for position in sorted((one, other)))
    assert 1 <= low.tokens <= high.tokens <= most
    assert 1 <= low.rows <= high.rows <= rows
    assert 0.0 < low.share <= high.share <= 1.0
    if knows_costs:
        assert low.target_s is not None and high.target_s is not None and 0.0 < low.target_s <= high.target_s


def test_the_ends_of_the_dial() -> None:
    blind, timed = DialRange(config()), DialRange(config(step_costs=COSTS))
    assert blind.at(0.0).tokens == blind.at(ROWS_PART).tokens == 128 and blind.at(1.0).tokens == 2048
    assert blind.at(0.0).rows == 8 and blind.at(ROWS_PART).rows == blind.at(1.0).rows == 64
    assert (blind.at(0.0).share, blind.at(1.0).share) == (0.25, 1.0)
    assert timed.at(ROWS_PART).target_s == pytest.approx(COSTS.seconds[0])
    assert timed.at(1.0).target_s == pytest.approx(1.5 * COSTS.seconds[-1])


@given(st.floats(ROWS_PART, 1.0))
def test_a_length_is_found_where_it_is(position: float) -> None:
    span = DialRange(config(step_costs=COSTS))
    target_s = span.at(position).target_s
    assert target_s is not None and span.position_of(target_s) == pytest.approx(position, abs=2e-4)


# -- what is seen --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_a_quantile_is_right_within_two_percent(values: list[float], share: float) -> None:
    window = Window()
    window.add(np.array(values))
    real = sorted(values)[max(0, int(np.ceil(share * len(values) - 1e-9)) - 1)]
    found = window.quantile(share)
    assert found is not None and found == pytest.approx(real, rel=0.021, abs=1e-4)


def test_old_slices_are_forgotten() -> None:
    window = Window()
    assert window.quantile(0.99) is None
    window.add(np.full(10, 5.0), marked=True)
    for _ in range(NUM_SLICES - 1):
        window.turn()
        window.add(np.full(10, 0.01))
    assert window.total == 80 and window.marked_share == pytest.approx(1 / 8)
    window.turn()
    assert window.total == 70 and window.marked_share == 0.0
    assert window.quantile(1.0) == pytest.approx(0.01, rel=0.02)
    assert window.quantile(0.5, np.full(700, 2.0)) == pytest.approx(2.0, rel=0.02)
    window.clear()
    assert window.total == 0 and window.quantile(0.5) is None


# -- holding a target ----------------------------------------------------------------------------------------


class Plant:
    """An engine with one law: how long a step takes by the limits, at each moment."""

    def __init__(self, options: SchedulerConfig, setting: DialSetting) -> None:
        self.dial = Dial(options, 64)
        self.dial.set(setting)
        self.now_s = 0.0
        self.positions = [self.dial.position]
        self.gaps: list[float] = []

    def run(self, seconds: float, gap_of: Callable[[Dial], float], *, is_full: bool = True) -> None:
        rows, place = np.arange(32), np.ones(32, np.int64)
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            gap_s = gap_of(self.dial)
            self.now_s += gap_s
            self.gaps.append(gap_s)
            self.dial.tokens(rows, place, self.now_s, is_full=is_full)
            if self.dial.is_due(self.now_s):
                assert self.dial.limits is not None
                self.dial.judge(self.now_s, rows=min(32, self.dial.limits.rows), waits=NOBODY_WAITS)
                self.positions.append(self.dial.position)

    @property
    def turns(self) -> int:
        """How often it changed its direction."""
        moves = [b - a for a, b in pairwise(self.positions) if a != b]
        return sum(a * b < 0 for a, b in pairwise(moves))


def tokens_plant(per_token_s: float, noise: Callable[[], float] = lambda: 1.0) -> Callable[[Dial], float]:
    def gap(dial: Dial) -> float:
        assert dial.limits is not None
        return (0.004 + per_token_s * dial.limits.tokens) * noise()

    return gap


@pytest.mark.parametrize("before, after", [(2e-5, 6e-5), (6e-5, 2e-5), (2e-5, 2e-5)])
def test_a_step_in_what_tokens_cost_is_followed_without_oscillation(before: float, after: float) -> None:
    plant = Plant(config(), itl(20.0))
    plant.run(30.0, tokens_plant(before))
    plant.run(60.0, tokens_plant(after))
    assert plant.dial.word is DialWord.HOLDING
    assert plant.gaps[-1] == pytest.approx(0.020, rel=0.15)
    assert plant.turns <= 2 and plant.dial.status().reversals <= 2


def test_noise_ends_in_a_rest() -> None:
    rng = np.random.default_rng(3)
    plant = Plant(config(), itl(20.0))
    noisy = tokens_plant(3e-5, lambda: float(np.exp(rng.normal(0.0, 0.12))))
    plant.run(60.0, noisy)
    settled = len(plant.positions)
    plant.run(240.0, noisy)
    late = plant.positions[settled:]
    assert max(late) - min(late) < 0.1 and plant.turns <= 12
    assert np.percentile(plant.gaps[len(plant.gaps) // 2 :], 99) == pytest.approx(0.020, rel=0.15)


def test_a_coarse_table_is_not_swung_across() -> None:
    """Steps take 14 or 26 ms and nothing between: turning back is tried ever more rarely."""

    def gap(dial: Dial) -> float:
        assert dial.limits is not None
        return 0.026 if dial.limits.tokens >= 700 else 0.014

    plant = Plant(config(), itl(20.0))
    plant.run(600.0, gap)
    assert plant.turns <= 24  # of a thousand judgements
    assert plant.dial.status().reversals >= 2


@pytest.mark.slow
def test_what_changes_nothing_is_not_wound_up() -> None:
    """Light load: steps are never cut, so the position stays, and a crowd meets limits that are right at once."""
    plant = Plant(config(), itl(20.0))
    plant.run(20.0, tokens_plant(4e-5))
    stood = plant.dial.position
    plant.run(300.0, lambda dial: 0.005, is_full=False)
    assert plant.dial.position == stood and plant.dial.word is DialWord.SLACK
    plant.run(5.0, tokens_plant(4e-5))
    assert plant.gaps[-1] == pytest.approx(0.020, rel=0.15)


def test_a_target_out_of_reach_is_said_to_be_and_left_at_the_end() -> None:
    plant = Plant(config(), itl(2.0))
    plant.run(60.0, tokens_plant(2e-5))
    status = plant.dial.status()
    assert status.word is DialWord.UNREACHABLE and status.position == 0.0 and status.max_rows == 4
    assert "raise the target" in status.reason and "cannot be held" in status_sentences(status)[0]
    plant.run(20.0, lambda dial: 0.0018)
    assert plant.dial.word is not DialWord.UNREACHABLE and not plant.dial.reason


def test_rows_are_left_alone_where_steps_are_too_long_by_themselves() -> None:
    plant = Plant(config(step_costs=COSTS), itl(1.0))
    plant.run(30.0, lambda dial: 0.008)
    assert plant.dial.status().max_rows == 64 and plant.dial.word is DialWord.UNREACHABLE


def test_known_costs_say_where_to_begin() -> None:
    dial = Dial(config(step_costs=COSTS), 64)
    dial.set(itl(20.0))
    assert dial.limits is not None and dial.limits.target_s == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.5])
def test_costs_that_are_wrong_are_corrected(factor: float) -> None:
    def gap(dial: Dial) -> float:
        assert dial.limits is not None and dial.limits.target_s is not None
        return dial.limits.target_s * factor

    plant = Plant(config(step_costs=COSTS), itl(20.0))
    plant.run(60.0, gap)
    assert plant.gaps[-1] == pytest.approx(0.020, rel=0.15) and plant.turns <= 2


def test_first_tokens_get_more_until_all_is_theirs() -> None:
    dial = Dial(config(), 64)
    dial.set(DialSetting(kind=DialKind.POSITION, value=0.3))
    dial.set(DialSetting(kind=DialKind.TTFT, value=500.0))
    assert dial.position == 0.3  # begins where the dial stands
    seen = [dial.position]
    for second in range(60):
        for _ in range(60):
            dial.first_token(2.0)
        dial.judge(float(second), rows=10, waits=NOBODY_WAITS)
        seen.append(dial.position)
    assert seen == sorted(seen) and seen[-1] == 1.0
    assert dial.word is DialWord.UNREACHABLE and "send fewer requests" in dial.reason


def test_requests_that_wait_too_long_are_noticed_before_they_get_a_token() -> None:
    dial = Dial(config(), 64)
    dial.set(DialSetting(kind=DialKind.POSITION, value=0.5))
    dial.set(DialSetting(kind=DialKind.TTFT, value=500.0))
    found = dial.judge(1.0, rows=64, waits=np.full(60, 3.0))
    assert found is not None and found.after > 0.5 and found.seen_s == pytest.approx(3.0, rel=0.02)


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=60), st.floats(0.1, 1000.0), st.booleans())
def test_limits_stay_within_bounds_whatever_is_seen(gaps: list[float], target: float, costs: bool) -> None:
    made = config(step_costs=COSTS if costs else None)
    walks = []
    for _ in range(2):
        dial = Dial(made, 64)
        dial.set(itl(target))
        now_s, walk = 0.0, []
        for gap_s in gaps:
            for _ in range(8):
                now_s += gap_s
                dial.tokens(np.arange(64), np.ones(64, np.int64), now_s, is_full=True)
            dial.judge(now_s, rows=64, waits=NOBODY_WAITS)
            assert dial.limits is not None and 0.0 <= dial.position <= 1.0
            assert 1 <= dial.limits.tokens <= 2048 and 1 <= dial.limits.rows <= 64
            walk.append(dial.position)
        walks.append(walk)
    assert walks[0] == walks[1]


# -- in an engine --------------------------------------------------------------------------------------------


def dials(bench: Bench) -> list[Decision]:
    return [decision for decision in bench.watch.decisions if decision.kind is DecisionKind.DIAL]


def test_rows_and_tokens_of_steps_follow_the_dial() -> None:
    bench = Bench(engine_config(max_num_seqs=8, max_num_batched_tokens=32, num_blocks=129, dial=0.0))
    for number in range(6):
        bench.add(prompt(20, number), max_tokens=8)
    bench.step()
    assert bench.scheduler.state.rows.num_live == 1  # one of eight
    # A sixteenth of 32 would be 2, which takes hardly less time.
    assert sum(bench.seen[-1].spans.values()) == 8
    bench.scheduler.set_dial(DialSetting(kind=DialKind.POSITION, value=1.0))
    bench.step()
    assert sum(bench.seen[-1].spans.values()) >= 30
    bench.run()
    bench.scheduler.set_dial(OFF)
    assert bench.scheduler.state.dial.status() == DialStatus(
        max_step_tokens=32, max_prompt_tokens=32, prompt_share=0.5, max_rows=8, position=1.0
    )


def test_every_change_is_on_record() -> None:
    bench = Bench(engine_config())
    bench.scheduler.set_dial(DialSetting(kind=DialKind.POSITION, value=0.25))
    bench.scheduler.set_policy("shortest", ageing_s=3.0)
    bench.add(prompt(4), max_tokens=2)
    bench.run()
    [dial] = dials(bench)
    assert (dial.request, dial.reason, dial.value) == (NO_REQUEST, Rule.OPERATOR, 250)
    assert dial.detail == "position=0.25 from=1 to=0.25 tokens=8 share=0.4375 rows=8"
    [policy] = [decision for decision in bench.watch.decisions if decision.kind is DecisionKind.POLICY]
    assert (policy.reason, policy.detail) == (Rule.OPERATOR, "shortest ageing_s=3.0")


def test_a_padded_batch_has_no_dial() -> None:
    bench = Bench(engine_config(mode="static"))
    with pytest.raises(ConfigError, match="needs --mode continuous"):
        bench.scheduler.set_dial(itl(10.0))
