"""Whole simulations: times that can be worked out by hand, order of events, determinism, faults, limits."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.recorder import NoRecorder
from paceline.core.request import RequestId
from paceline.errors import EngineFailed, InputError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.sim import FaultSpec, engine_config, simulate
from paceline.lab.sim.replica import Replica
from paceline.lab.sim.run import Simulation
from paceline.lab.sim.simulated_fleet import REPORT_S
from paceline.routing.routers import LeastLoaded
from paceline.routing.view import Ask, Choice, FleetView
from paceline.scheduler.invariants import InvariantViolation
from tests.pure.lab.sim.sim_helpers import (
    PerToken,
    Seconds,
    machine,
    make_workload,
    random_workload,
    sim_config,
    small_engine,
)

pytestmark = pytest.mark.slow

ALL_FAULTS = FaultSpec(aborts=0.2, bursts=0.1, stalls=0.05, alloc=0.1, preempt=0.1)


def outcomes(record: RunRecord) -> dict[str, int]:
    return {name: int((record.outcome == code).sum()) for code, name in enumerate(OUTCOMES)}


def assert_same(one: RunRecord, other: RunRecord) -> None:
    for column in fields(RunRecord):
        first, second = getattr(one, column.name), getattr(other, column.name)
        if isinstance(first, np.ndarray):
            np.testing.assert_array_equal(first, second, err_msg=column.name)


# ---------------------------------------------------------------- times by hand


@pytest.mark.parametrize(
    ("depth", "host_s", "first_s", "gap_s"),
    [
        (0, 0.0, 1.0, 1.0),
        (1, 0.0, 1.0, 1.0),
        (0, 0.25, 1.25, 1.25),  # every step waits for the host
        (1, 0.25, 1.25, 1.0),  # only the first one does
        (2, 0.25, 1.25, 1.0),
    ],
)
def test_a_lone_request_takes_one_step_per_token(
    depth: int, host_s: float, first_s: float, gap_s: float
) -> None:
    config = sim_config(small_engine(depth=depth), Seconds(1.0), host_step_s=host_s)
    record = simulate(config, make_workload([10.0], prompt=20, output=5))
    assert record.first_token_s.tolist() == [10.0 + first_s]
    assert record.itl_s.tolist() == [gap_s] * 4
    assert record.finished_s.tolist() == [10.0 + first_s + 4 * gap_s] == [record.duration_s]
    assert record.admitted_s.tolist() == [10.0]


def test_a_host_slower_than_the_device_sets_the_pace() -> None:
    config = sim_config(small_engine(depth=1), Seconds(1.0), host_step_s=3.0)
    record = simulate(config, make_workload([0.0], output=5))
    assert record.step_start_s.tolist() == [3.0, 6.0, 9.0, 12.0, 15.0]
    assert record.first_token_s.tolist() == [6.0], "seen when the next step has been planned"
    assert record.finished_s.tolist() == [16.0], "after the last plan there is none to make"


def test_a_long_prompt_takes_its_chunks() -> None:
    config = sim_config(small_engine(), PerToken(fixed=1.0, per_token=0.5))
    record = simulate(config, make_workload([0.0], prompt=150, output=2))
    # Three chunks of at most 64 tokens, then one decode step of one token.
    assert record.first_token_s[0] == pytest.approx(3 * 1.0 + 150 * 0.5)
    assert record.finished_s[0] == pytest.approx(record.first_token_s[0] + 1.5)
    assert record.step_prefill.sum() == 150 and record.step_prefill.tolist()[3:] == [0]
    assert record.step_decode.tolist() == [0, 0, 0, 1]


def test_an_idle_engine_takes_no_steps_and_jumps_to_the_next_arrival() -> None:
    record = simulate(sim_config(cost=Seconds(1.0)), make_workload([0.0, 1000.0], output=3))
    assert record.finished_s.tolist() == [3.0, 1003.0]
    assert record.num_steps == 6
    assert summarize(record).busy_share == pytest.approx(6 / 1003)


def test_a_request_that_arrives_during_a_step_is_in_the_next_plan() -> None:
    # Overlapped: steps end at 1, 2, 3, ... and the plan of the step from 2 to 3 is made at 1.
    record = simulate(sim_config(cost=Seconds(1.0)), make_workload([0.0, 0.5, 1.5], output=8))
    assert record.admitted_s.tolist() == [0.0, 1.0, 2.0]
    assert record.first_token_s.tolist() == [1.0, 3.0, 4.0]
    # Synchronous: the plan is made when the step before has ended.
    record = simulate(sim_config(small_engine(depth=0), Seconds(1.0)), make_workload([0.0, 0.5], output=8))
    assert record.first_token_s.tolist() == [1.0, 2.0]


def test_a_dynamic_batch_starts_at_its_timeout_or_when_it_is_full() -> None:
    config = sim_config(small_engine(mode="dynamic"), Seconds(0.5))
    record = simulate(config, make_workload([10.0, 10.1], output=2))
    assert record.admitted_s.tolist() == [10.2, 10.2], "0.2 s after the first arrival"
    record = simulate(config, make_workload([10.0, 10.02, 10.03, 10.04, 10.05], output=2))
    assert record.admitted_s[:4].tolist() == [10.04] * 4, "four are a batch"
    assert record.admitted_s[4] >= record.finished_s[:4].max(), "the fifth waits until they have left"


def test_a_static_batch_leaves_together_and_pads() -> None:
    config = sim_config(small_engine(mode="static"), Seconds(0.5))
    record = simulate(config, make_workload([0.0] * 4, prompt=[4, 8, 8, 8], output=[1, 2, 6, 3]))
    assert len(set(record.finished_s.tolist())) == 1
    assert record.output_len.tolist() == [1, 2, 6, 3]
    assert summarize(record).padded_tokens == 4 + record.step_padded[record.step_prefill == 0].sum()
    assert record.step_padded.sum() > 4


def test_a_saturated_continuous_batch_beats_a_static_one() -> None:
    workload = random_workload(200, 1, rate=1e6)
    rates = {}
    for mode in ("continuous", "static", "dynamic"):
        record = simulate(sim_config(small_engine(mode=mode)), workload)
        assert outcomes(record)["finished"] == 200
        rates[mode] = summarize(record).output_tokens_per_s or 0.0
    assert rates["continuous"] > 1.3 * max(rates["static"], rates["dynamic"])


# ---------------------------------------------------------------- limits


def test_what_can_never_run_is_refused_and_counted() -> None:
    workload = make_workload([0.0, 1.0, 2.0, 3.0], prompt=[20, 250, 20, 30], output=[5, 10, 5, 5])
    record = simulate(sim_config(), workload)  # 256 tokens at most
    assert outcomes(record) == {"finished": 3, "aborted": 0, "refused": 1, "failed": 0, "unfinished": 0}
    assert np.isnan(record.admitted_s[1]) and record.output_len[1] == 0


def test_a_full_queue_refuses() -> None:
    engine = small_engine()
    engine = replace(engine, scheduler=replace(engine.scheduler, max_queue=3))
    record = simulate(sim_config(engine), make_workload([0.0] * 20))
    assert outcomes(record)["refused"] == 17


def test_a_request_larger_than_the_kv_cache_is_refused() -> None:
    record = simulate(
        sim_config(small_engine(num_blocks=5)), make_workload([0.0, 0.0], prompt=[28, 20], output=5)
    )
    assert outcomes(record)["refused"] == 1 and record.outcome[0] == OUTCOMES.index("refused")


def test_an_empty_workload_and_a_log_of_several_engines_are_refused() -> None:
    with pytest.raises(InputError, match="no requests"):
        simulate(sim_config(), make_workload([0.0]).head(0))
    with pytest.raises(InputError, match="one replica"):
        simulate(sim_config(num_replicas=2), make_workload([0.0]), recorder=NoRecorder())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_replicas": 0}, "--replicas"),
        ({"num_replicas": 10_001}, "--replicas"),
        ({"router": "nearest"}, "--router"),
        ({"host_step_s": -0.1}, "--host-step-s"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        sim_config(**changes)


def test_engines_that_do_not_fit_into_memory_are_refused() -> None:
    with pytest.raises(InputError, match="memory"):
        simulate(sim_config(small_engine(max_model_len=2**45)), make_workload([0.0]))


# ---------------------------------------------------------------- defaults of the engine


def test_engine_defaults_follow_machine_and_workload() -> None:
    workload = make_workload([0.0] * 3, prompt=[100, 20, 30], output=[50, 10, 500])
    engine = engine_config(machine(), workload, {"mode": "static", "max_num_seqs": 17, "batch_size": None})
    assert (engine.kv.block_size, engine.scheduler.max_model_len) == (64, 530)
    assert 13_000 < engine.kv.num_blocks < 15_000, "about 110 GB of 128 KiB tokens beside 16 GB of weights"
    assert (engine.scheduler.mode, engine.scheduler.max_num_seqs, engine.scheduler.batch_size) == (
        "static",
        17,
        32,
    )
    assert engine.kv.num_host_blocks == 0 and not engine.kv.enable_prefix_caching


def test_given_options_win_over_the_defaults() -> None:
    workload = make_workload([0.0], prompt=[100_000], prefix_ids=[(1,)])
    given = {"block_size": 16, "num_blocks": 101, "preemption": "swap", "depth": 0}
    engine = engine_config(machine(), workload, given)
    assert (engine.kv.block_size, engine.kv.num_blocks, engine.kv.num_host_blocks, engine.depth) == (
        16,
        101,
        101,
        0,
    )
    assert engine.scheduler.max_model_len == 1600, "no longer than the KV cache"
    assert engine.kv.enable_prefix_caching
    assert engine_config(machine(), workload, {**given, "num_host_blocks": 5}).kv.num_host_blocks == 5


def test_a_queue_holds_the_whole_workload_unless_told() -> None:
    workload = make_workload([0.0] * 30_000, prompt=10_000)
    scheduler = engine_config(machine(), workload, {}).scheduler
    assert scheduler.max_queue >= 30_000 and scheduler.max_queue_tokens >= 300_000_000


# ---------------------------------------------------------------- determinism, loops, modes


@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
def test_the_same_seed_gives_the_same_run(mode: str) -> None:
    workload = random_workload(80, 9, tenants=3)
    config = sim_config(
        small_engine(mode=mode, num_host_blocks=32),
        num_replicas=3,
        faults=ALL_FAULTS,
        seed=5,
        priorities="random:3",
    )
    assert_same(simulate(config, workload), simulate(config, workload))
    other = simulate(replace(config, seed=6), workload)
    assert other.outcome.tolist() != simulate(config, workload).outcome.tolist()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_every_depth_delivers_every_token(depth: int) -> None:
    workload = random_workload(100, 2)
    record = simulate(sim_config(small_engine(depth=depth)), workload)
    assert outcomes(record)["finished"] == 100
    np.testing.assert_array_equal(record.output_len, workload.output_len)
    assert len(record.itl_s) == (workload.output_len - 1).sum()
    assert (record.finished_s >= record.first_token_s).all()
    assert (record.first_token_s > record.admitted_s).all()
    assert (record.admitted_s >= record.arrival_s).all()


def test_steps_of_a_replica_never_overlap_on_the_device() -> None:
    record = simulate(sim_config(num_replicas=2), random_workload(100, 3))
    for number in (0, 1):
        mine = record.step_replica == number
        assert (record.step_start_s[mine][1:] >= record.step_end_s[mine][:-1] - 1e-12).all()


# ---------------------------------------------------------------- replicas and routing


class Watchful(LeastLoaded):
    """Looks at every replica at the moment a request is routed."""

    simulation: Simulation

    def __init__(self) -> None:
        self.seen = self.differed = 0
        self._since: list[Ask] = []

    def choose(self, view: FleetView, ask: Ask) -> Choice:
        simulation = self.simulation
        self._since = [each for each in self._since if each.now_s // REPORT_S == ask.now_s // REPORT_S]
        self._since.append(ask)
        for replica in simulation.replicas:
            if replica.ready_s is not None:
                assert replica.ready_s >= simulation.now_s, "a replica with work was left behind"
        assert sum(map(len, view._on_way)) == len(self._since) - 1, "what was chosen since the last report"
        live = sum(len(replica.engine.scheduler.state.requests) for replica in simulation.replicas)
        self.differed += int(view.rows.sum()) != live
        self.seen += 1
        return super().choose(view, ask)


def test_a_router_sees_old_loads_and_what_it_has_chosen_since() -> None:
    router = Watchful()
    router.simulation = Simulation(sim_config(num_replicas=4), random_workload(200, 4, rate=80.0))
    assert router.simulation.front is not None
    router.simulation.front._router = router
    router.simulation.run()
    assert router.seen == 200 and router.differed > 20, "some have ended since the last report"


@pytest.mark.parametrize("router", ["soonest", "prefix-aware"])
def test_what_a_front_knows_of_prefixes_is_what_replicas_hold(router: str) -> None:
    talks = [tuple(1000 * talk + block for block in range(4)) for talk in range(40)]
    workload = make_workload(
        [0.05 * at for at in range(160)],
        prompt=64,
        output=4,
        prefix_ids=[talks[at * 7 % 40] for at in range(160)],
    )
    simulation = Simulation(sim_config(small_engine(num_blocks=60), num_replicas=3, router=router), workload)
    simulation.run()
    front = simulation.front
    assert front is not None
    front.hear(1e6, lambda until_s: None)
    front.view.prefixes.pass_time(1e6)
    evicted = 0
    for number, replica in enumerate(simulation.replicas):
        (group,) = replica.engine.scheduler.state.kv.groups
        evicted += group.pool.num_evicted
        assert front.view.prefixes.held(number) == set(group.cache.by_name)
    assert evicted > 20


def test_round_robin_spreads_evenly_and_more_replicas_wait_less() -> None:
    workload = random_workload(120, 5, rate=100.0)
    one = simulate(sim_config(), workload)
    four = simulate(sim_config(num_replicas=4, router="round-robin"), workload)
    waits = [summarize(record).ttft_s.p99 or 0.0 for record in (one, four)]
    assert 0.0 < waits[1] < 0.5 * waits[0]
    assert four.num_replicas == 4 and set(four.step_replica.tolist()) == {0, 1, 2, 3}


def test_prefixes_are_reused_and_a_prefix_aware_router_finds_them() -> None:
    """Sixteen conversations of six turns, each turn with all blocks of the turn before and one more."""
    ids, arrival_s, prompt = [], [], []
    for turn in range(6):
        for talk in range(16):
            ids.append(tuple(1000 * talk + block for block in range(turn + 2)))
            prompt.append(16 * (turn + 2))
            arrival_s.append(turn * 3.0 + talk * 0.1)
    workload = make_workload(arrival_s, prompt=prompt, output=4, prefix_ids=ids)
    shares = {}
    for router in ("round-robin", "prefix-aware", "soonest"):
        config = sim_config(small_engine(num_blocks=600), num_replicas=5, router=router)
        record = simulate(config, workload)
        assert (record.cached_tokens < record.prompt_len).all()
        shares[router] = summarize(record).prefix_hit_share or 0.0
    assert min(shares["prefix-aware"], shares["soonest"]) > 0.6 > 0.3 > shares["round-robin"]


# ---------------------------------------------------------------- faults and checks


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_with_every_fault_every_request_still_ends_once(depth: int) -> None:
    workload = random_workload(150, 8)
    engine = small_engine(depth=depth, num_blocks=40, num_host_blocks=30, preemption="swap")
    record = simulate(sim_config(engine, faults=ALL_FAULTS, seed=3, num_replicas=2), workload)
    ends = outcomes(record)
    assert ends["unfinished"] == ends["failed"] == 0
    assert sum(ends.values()) == 165, "ten per cent more by bursts"
    assert ends["aborted"] > 10 and ends["finished"] > 100
    assert record.preemptions.sum() > 20
    whole = record.outcome == OUTCOMES.index("finished")
    assert (record.output_len[whole] > 0).all()


def test_aborted_requests_stop_where_they_were_told_to() -> None:
    workload = random_workload(300, 12)
    config = sim_config(faults=FaultSpec(aborts=0.5), seed=1)
    simulation = Simulation(config, workload)
    simulation.run()
    record = simulation.record("x")
    aborted = record.outcome == OUTCOMES.index("aborted")
    aborts = simulation._aborts
    assert aborts is not None and aborted.sum() > 100
    by_token = aborted & ~np.isfinite(aborts.at_s)
    late = record.output_len[by_token] - (aborts.at_token[by_token] + 1)
    assert (late == 0).all(), "aborted with the token it was told to end at"
    assert (record.output_len[aborted] <= workload.output_len[aborted]).all()


def test_stalls_lengthen_the_run_and_nothing_else() -> None:
    workload = random_workload(60, 6)
    plain = simulate(sim_config(), workload)
    stalled = simulate(sim_config(faults=FaultSpec(stalls=0.1)), workload)
    assert stalled.duration_s > 1.5 * plain.duration_s
    np.testing.assert_array_equal(stalled.output_len, plain.output_len)


def test_a_checked_run_checks_every_half_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    record = simulate(sim_config(check=True), random_workload(30, 7))
    assert outcomes(record)["finished"] == 30

    def broken(self: object, plan: object) -> None:
        raise InvariantViolation("S99", "made up")

    monkeypatch.setattr("paceline.scheduler.invariants.InvariantChecker.after_schedule", broken)
    with pytest.raises(EngineFailed, match="invariant.*seed 4.*S99"):
        simulate(sim_config(check=True, seed=4), random_workload(30, 7))
    simulate(sim_config(), random_workload(30, 7))  # no invariants are checked here


def test_an_engine_that_never_moves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.sim.replica.MAX_RETRIES", 50)
    with pytest.raises(EngineFailed, match="does not move on"):
        simulate(sim_config(faults=FaultSpec(alloc=1.0)), make_workload([0.0]))


def test_aborting_what_has_ended_is_harmless() -> None:
    workload = make_workload([0.0])
    simulation = Simulation(sim_config(), workload)
    simulation.run()
    replica: Replica = simulation.replicas[0]
    replica.abort(RequestId(0), 99.0)
    assert replica.ready_s is None


# ---------------------------------------------------------------- progress and log


def test_progress_goes_from_nothing_to_everything() -> None:
    seen: list[tuple[int, int, float]] = []
    simulate(sim_config(), random_workload(300, 1), on_progress=lambda *values: seen.append(values))
    assert len(seen) > 2
    assert [ended for ended, _, _ in seen] == sorted(ended for ended, _, _ in seen)
    assert [now_s for _, _, now_s in seen] == sorted(now_s for _, _, now_s in seen)
    assert seen[-1][:2] == (300, 300)


def test_the_run_log_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    from paceline.audit.runlog import RunLogWriter, run_header

    config = sim_config(faults=FaultSpec(aborts=0.1, preempt=0.1), seed=2)
    texts = []
    for name in ("one", "two"):
        path = tmp_path / name
        record = simulate(
            config, random_workload(40, 3), recorder=RunLogWriter(path, run_header(config.engine, seed=2))
        )
        texts.append(path.read_bytes())
        assert path.read_text().count("\n") == record.num_steps + 2
    assert texts[0] == texts[1]
