"""What a request cost: time of blocks against a plain sum, and tokens computed twice against the plans."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from paceline.config.engine import GroupSpec
from paceline.config.speculative import DraftConfig
from paceline.core.plan import EMPTY, StepResult
from paceline.core.request import FinishReason
from paceline.scheduler.rows import Rows
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

UNCACHED = {"enable_prefix_caching": False}


class Watched(Bench):
    """Adds up, step by step and row by row, what requests hold until the clock moves on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.block_us: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()

    def step(self, times: int = 1) -> Any:
        seen = None
        for _ in range(times):
            before_us = int(self.clock.now() * 1e6)
            seen = super().step()  # ends with the clock moving on
            passed_us = int(self.clock.now() * 1e6) - before_us
            rows = self.state.rows
            for row in rows.live.nonzero()[0].tolist():
                held = sum(int(group.held[row] - group.first[row]) for group in self.state.kv.groups)
                self.block_us[rows.request_id.item(row)] += held * passed_us
            if seen is not None:
                self.computed.update(seen.spans)
                self.computed.update(seen.decodes)
        return seen


def check(bench: Watched) -> None:
    for request_id, ending in bench.finished.items():
        assert ending.cost.block_us == bench.block_us[request_id], request_id
        assert 0 <= ending.cost.redone_block_us <= ending.cost.block_us


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [0, 2])
def test_time_of_blocks_is_exact_under_pressure(kind: str, depth: int) -> None:
    config = engine_config(depth=depth, num_blocks=12, num_host_blocks=20, preemption=kind, max_model_len=40)
    bench = Watched(config, overlapped=depth > 0)
    for start in range(24):
        bench.add(prompt(1 + start % 9, start), 4 + start % 17)
    bench.run(4000)
    check(bench)
    endings = bench.finished.values()
    assert {ending.reason for ending in endings} == {FinishReason.LENGTH}
    assert sum(ending.preemptions for ending in endings) > 0
    swaps = sum(ending.cost.swaps for ending in endings)
    assert (swaps > 0) == (kind == "swap")
    assert all(ending.cost.swaps <= ending.preemptions for ending in endings)


def test_windows_that_slide_shared_prompts_and_branches() -> None:
    groups = (GroupSpec(), GroupSpec(window=6))
    bench = Watched(engine_config(groups=groups, num_blocks=60))
    for start in range(6):
        bench.add(prompt(10, start % 2) + prompt(4, 10 + start), 20)
    bench.add_all(prompt(9, 20), 12, n=3, temperature=1.0, seed=1)
    bench.run()
    check(bench)
    assert all(ending.cost.redone == ending.cost.redone_block_us == 0 for ending in bench.finished.values())


def test_a_shared_block_counts_for_each_holder() -> None:
    bench = Watched(engine_config())
    alone = bench.add(prompt(8), 5)
    bench.run()
    first, second = bench.add(prompt(8, 1), 5), bench.add(prompt(8, 1), 5)
    bench.run()
    costs = [bench.finished[request].cost.block_us for request in (alone, first, second)]
    assert bench.finished[second].num_cached > 0
    assert costs[1] == costs[0] and costs[2] > 0.6 * costs[0]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_computed_twice_are_those_the_plans_have_twice(seed: int) -> None:
    """Without a cache, all that was computed beyond the sequence's own length was computed again."""
    chance = random.Random(seed)
    bench = Watched(engine_config(num_blocks=40, num_host_blocks=40, max_num_batched_tokens=12, **UNCACHED))
    ids = [bench.add(prompt(chance.randint(10, 40), start), chance.randint(5, 30)) for start in range(8)]
    for _ in range(2000):
        if not bench.engine.has_requests:
            break
        bench.step()
        running = [request for request in ids if request in bench.state.requests]
        if running and chance.random() < 0.5:
            bench.scheduler.preempt(chance.choice(running), swap=chance.random() < 0.3)
            bench.flush()
    bench.run()
    assert sum(bench.finished[request].cost.redone for request in ids) > 0
    for request in ids:
        ending = bench.finished[request]
        unique = ending.num_prompt + ending.num_output - 1  # the last token is never read
        assert ending.cost.redone == bench.computed[request] - unique
        assert ending.cost.redone or not ending.cost.redone_block_us
    assert sum(bench.finished[request].cost.redone_block_us for request in ids) > 0


def test_a_request_that_fails_or_leaves_has_a_cost_too() -> None:
    bench = Watched(engine_config())
    gone = bench.add(prompt(8), 50)
    bench.step(5)
    bench.engine.abort(gone)
    bench.flush()
    waiting = bench.add(prompt(8, 3), 5)
    bench.engine.abort(waiting)
    bench.flush()
    bench.run()
    assert bench.finished[gone].cost.block_us == bench.block_us[gone] > 0
    assert bench.finished[waiting].cost.block_us == 0


class Told(FakeRunner):
    """Adds up what results say of predictions, by the seed of the row, where they are not too late."""

    rows: Rows

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: dict[int, list[int]] = {}

    def finish_until(self, seq: int) -> StepResult:
        result = super().finish_until(seq)
        late = self.rows.generation[result.rows] != result.generation
        columns = (result.rows, result.predicted * ~late if len(result.predicted) else EMPTY, result.count)
        for row, predicted, count in zip(*(column.tolist() for column in columns), strict=False):
            if predicted:
                found = self.found.setdefault(self._rows[row].seed, [0, 0])
                found[0] += count - 1
                found[1] += predicted - count + 1
        return result


@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_knows_what_became_of_its_prediction(kind: str, depth: int) -> None:
    config = engine_config(
        depth=depth,
        num_blocks=40,
        num_host_blocks=40,
        preemption=kind,
        max_model_len=80,
        drafts=DraftConfig(width=3),
    )
    runner = Told(config, Faults(random.Random(3)))
    bench = Bench(config, runner=runner, overlapped=depth > 0)
    runner.rows = bench.state.rows
    drafts = bench.state.drafts
    assert drafts is not None
    drafts.learn = lambda work, result, room=0: None  # type: ignore[method-assign]
    for number in range(12):
        told = (1, 2, 3) if number % 2 else ()
        bench.add(prompt(5, number), 30, seed=number, prediction=told)
    for _ in range(6):
        bench.step(4)
        running = [request for request in bench.state.requests.values() if request.row >= 0]
        bench.scheduler.preempt(running[0].id, swap=kind == "swap")
    bench.run(4000)
    preempted = 0
    for request, ending in bench.finished.items():
        cost = ending.cost
        seed = bench.asked[request][1].seed
        assert seed is not None
        assert [cost.accepted_predictions, cost.rejected_predictions] == runner.found.get(seed, [0, 0])
        assert bool(cost.accepted_predictions + cost.rejected_predictions) == bool(seed % 2)
        preempted += ending.preemptions
    assert preempted and all(map(sum, zip(*runner.found.values(), strict=True)))
