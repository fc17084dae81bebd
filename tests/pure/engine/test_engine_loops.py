"""The two loops: the same tokens from both at every depth, the same run from the same inputs."""

import random
from typing import Any

import numpy as np
import pytest

from paceline.config.engine import EngineConfig, GroupSpec
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from tests.cases import first
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.guides import VOCAB
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

Outcome = dict[int, tuple[list[int], FinishReason, int]]


def draw_config(rng: random.Random, depth: int) -> EngineConfig:
    swap = rng.random() < 0.5
    groups = (GroupSpec(), GroupSpec(window=rng.choice((3, 9)))) if rng.random() < 0.25 else (GroupSpec(),)
    return engine_config(
        depth=depth,
        block_size=rng.choice((1, 4, 8)),
        num_blocks=rng.choice((50, 80)),
        num_host_blocks=40 if swap else 0,
        preemption="swap" if swap else "recompute",
        max_num_seqs=rng.choice((2, 5, 8)),
        max_num_batched_tokens=rng.choice((5, 16, 64)),
        max_model_len=48,
        scheduling_policy=rng.choice(("fcfs", "priority")),
        long_prefill_share=rng.choice((0.3, 1.0)),
        groups=groups,
    )


def run_traffic(seed: int, depth: int) -> Outcome:
    """Requests of all kinds, added as the run goes; nothing that depends on how far the other loop has come."""
    rng = random.Random(seed)
    config = draw_config(rng, depth)
    faults = Faults(rng=random.Random(seed), late_copies=rng.choice((0, 2)))
    bench = Bench(config, runner=FakeRunner(config, faults), overlapped=depth > 0)
    prefixes = [prompt(20, number) for number in range(3)]
    for _ in range(12):
        shared = rng.choice(prefixes)[: rng.randint(0, 20)]
        own = [rng.randrange(1000) for _ in range(rng.randint(1, 8))]
        bench.add_all(
            shared + own,
            rng.randint(1, 18),
            n=rng.choice((1, 1, 2)),
            seed=rng.randrange(1 << 30),
            priority=rng.choice((0, 1)),
            stop_token_ids=(VOCAB // 20,) if rng.random() < 0.5 else (),
        )
        bench.step(rng.choice((0, 1, 3)))
    bench.run()
    return {name: (bench.tokens[name], end.reason, end.num_output) for name, end in bench.finished.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(3, range(10)))
def test_the_overlapped_loop_gives_the_tokens_of_the_plain_one(seed: int) -> None:
    plain = run_traffic(seed, 0)
    assert len(plain) >= 12
    for depth in range(1, 5):
        assert run_traffic(seed, depth) == plain, f"depth {depth}"


def as_bytes(value: Any) -> Any:
    """A plan or result as comparable values."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple):
        return tuple(as_bytes(part) for part in value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_bytes(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@pytest.mark.parametrize("depth", [0, 2])
def test_the_same_inputs_give_the_same_plans(depth: int) -> None:
    runs = []
    for _ in range(2):
        bench = Bench(engine_config(depth=depth, num_blocks=20), overlapped=depth > 0)
        for start in range(9):
            bench.add(prompt(1 + 5 * start % 17, start % 4), 9)
            bench.step()
        bench.run()
        runs.append([as_bytes((record.plan, record.result)) for record in bench.watch.records])
    assert len(runs[0]) > 15
    assert runs[0] == runs[1]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_the_device_is_as_many_steps_behind_as_the_depth_says(depth: int) -> None:
    bench = Bench(engine_config(depth=depth), overlapped=True)
    request = bench.add(prompt(4), 20)
    for step in range(1, 10):
        bench.step()
        assert len(bench.tokens[request]) == max(0, step - depth)
    bench.run()


def test_plans_are_numbered_without_gaps() -> None:
    bench = Bench(engine_config(depth=2, num_blocks=14), overlapped=True)
    for start in range(8):
        bench.add(prompt(6, start), 12)
    bench.run()
    numbers = [seen.plan.seq for seen in bench.seen]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [record.plan.seq for record in bench.watch.records] == numbers


def test_a_late_token_is_discarded() -> None:
    """A stop is learnt one step late; the token computed in between is dropped."""
    bench = Bench(engine_config(depth=2), overlapped=True)
    request = bench.add(prompt(4), 60, stop_token_ids=(VOCAB // 3,))
    bench.run()
    assert bench.finished[request].reason is FinishReason.STOP
    assert bench.state.counters.late_results > 0


def test_the_two_loops_may_take_turns() -> None:
    bench = Bench(engine_config(depth=3, num_blocks=14))
    for start in range(6):
        bench.add(prompt(7, start), 12)
    for step in range(30):
        bench.overlapped = step % 3 > 0
        bench.step()
    bench.run()


def test_a_steady_step_tells_the_runner_almost_nothing() -> None:
    """O(changes): rows that go on decoding inside their blocks do not appear in the plan."""
    bench = Bench(engine_config(block_size=16, max_num_seqs=6))
    for start in range(6):
        bench.add(prompt(17, start), 12)
    bench.step(8)
    seen = bench.seen[-1]
    plan = seen.plan
    assert len(seen.decodes) == 6
    columns = (plan.joins.row, plan.leaves, plan.spans.row, plan.decode_rows.added, plan.decode_rows.removed)
    assert not any(len(column) for column in (*columns, plan.new_blocks.row))
    bench.run()


def test_draining_waits_for_what_is_under_way_and_closing_writes_the_end() -> None:
    bench = Bench(engine_config(depth=3), overlapped=True)
    request = bench.add(prompt(4), 3)
    bench.step(3)
    assert not bench.engine.is_idle and not bench.tokens[request]
    bench.receive(bench.engine.drain())
    assert bench.engine.is_idle and len(bench.tokens[request]) == 3
    bench.add(prompt(4, 1), 3)
    bench.step()
    bench.engine.close()
    bench.flush()
    assert bench.engine.is_idle


@pytest.mark.parametrize("late", [0, 3])
def test_an_idle_engine_is_one_for_which_a_further_step_would_do_nothing(late: int) -> None:
    """L4: a swapped request is aborted; its blocks come back when the copy is done, which takes a step."""
    config = engine_config(num_host_blocks=8)
    bench = Bench(config, runner=FakeRunner(config, Faults(rng=random.Random(3), late_copies=late)))
    request = bench.add(prompt(12), 9)
    bench.step(2)
    bench.scheduler.preempt(request, swap=True)
    bench.engine.abort(request)
    bench.flush()
    for _ in range(20):
        if bench.engine.is_idle:
            break
        bench.step()
    bench.check_empty()


def test_the_engine_says_when_it_has_requests() -> None:
    bench = Bench()
    assert not bench.engine.has_requests and bench.engine.is_idle
    bench.add(prompt(4), 2)
    assert bench.engine.has_requests
    bench.run()
    assert not bench.engine.has_requests


def test_tokens_may_come_as_a_list_or_an_array() -> None:
    bench = Bench()
    ids = bench.engine.add(np.array([3, 1, 2], np.int64).astype(np.int32), SamplingParams(max_tokens=2))
    bench.expect(ids[0], [3, 1, 2])
    same = bench.add([3, 1, 2], 2)
    bench.run()
    assert bench.tokens[ids[0]] == bench.tokens[same]
