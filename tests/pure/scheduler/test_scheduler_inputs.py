"""What a scheduler is told between steps: stops, deadlines, pauses and blocks; and rows that need the host."""

import random

import pytest

from paceline.core.request import BlockReason, FinishReason, RequestId, RequestState
from paceline.errors import InvalidTransition, UnknownRequest
from paceline.scheduler import state
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

# -- a stop found outside ----------------------------------------------------------------------------------


def test_what_comes_after_a_stop_is_discarded() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 20)
    bench.step(8)
    assert bench.finish_at(request, 5)
    ending = bench.finished[request]
    assert (ending.reason, ending.num_output) == (FinishReason.STOP, 5)
    assert not bench.finish_at(request, 5), "once is enough"
    bench.run()


def test_what_comes_after_a_stop_is_not_cached() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 20)
    bench.step(12)
    told = prompt(6) + bench.tokens[request]
    bench.finish_at(request, 3)  # nine tokens: two full blocks
    again = bench.add(told, 2)
    bench.run()
    assert bench.finished[again].num_cached == 8


def test_a_late_stop_is_no_more_than_what_was_delivered() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 20)
    bench.step(3)
    bench.finish_at(request, 9)
    assert bench.finished[request].num_output == 3


@pytest.mark.parametrize("where", ["waiting", "swapped", "paused"])
def test_a_stop_reaches_a_request_that_does_not_run(where: str) -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    request = bench.add(prompt(6), 20)
    bench.step(6)
    if where == "paused":
        bench.scheduler.pause(request)
    else:
        bench.scheduler.preempt(request, swap=where == "swapped")
    assert bench.states()[request].value == where
    bench.finish_at(request, 2)
    assert bench.finished[request].num_output == 2
    bench.run()


class Latest(random.Random):
    """Every copy takes as long as it may."""

    def randint(self, a: int, b: int) -> int:
        return b


def test_a_stop_during_a_swap_in_publishes_nothing_that_is_not_there() -> None:
    """S16: the row's blocks are filled when the copy completes, not when it is asked for."""
    config = engine_config(num_host_blocks=32)
    bench = Bench(config, runner=FakeRunner(config, Faults(rng=Latest(), late_copies=3)))
    request = bench.add(prompt(16), 20)
    bench.step(4)
    bench.scheduler.preempt(request, swap=True)
    bench.scheduler.reset_prefix_cache()
    for _ in range(9):
        if bench.states()[request] is RequestState.BLOCKED:
            break
        bench.step()
    assert bench.states()[request] is RequestState.BLOCKED
    bench.finish_at(request, 2)
    bench.add(prompt(16), 5)
    bench.run()


# -- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["waiting", "running", "swapped", "paused", "blocked"])
def test_a_deadline_fires_without_a_step(where: str) -> None:
    """L8: wherever the request is."""
    bench = Bench(engine_config(num_host_blocks=16))
    request = bench.add(prompt(6), 20, deadline_s=5.0)
    if where == "blocked":
        bench.scheduler.block(request, BlockReason.GRAMMAR, None)
    elif where != "waiting":
        bench.step(3)
    if where == "swapped":
        bench.scheduler.preempt(request, swap=True)
    elif where == "paused":
        bench.scheduler.pause(request)
    assert bench.states()[request].value == where
    assert bench.scheduler.next_wakeup_s() == 5.0
    bench.clock.advance_to(4.999)
    bench.scheduler.expire()
    assert request in bench.state.requests
    bench.clock.advance_to(5.0)
    bench.scheduler.expire()
    bench.flush()
    ending = bench.finished[request]
    assert (ending.reason, ending.detail, ending.time_s) == (FinishReason.ABORT, "deadline", 5.0)
    bench.run()


def test_deadlines_of_requests_that_have_ended_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SPARE_DEADLINES", 8)
    bench = Bench()
    stays = bench.add(prompt(6), 90, deadline_s=50.0)
    for start in range(40):
        bench.scheduler.abort(bench.add(prompt(4, start), 2, deadline_s=100.0))
        assert len(bench.state.deadlines) <= 8 + 4 * 2
    assert bench.scheduler.next_wakeup_s() == 50.0
    bench.clock.advance_to(50.0)
    bench.scheduler.expire()
    bench.flush()
    assert bench.finished[stays].detail == "deadline"
    bench.run()


def test_names_of_tenants_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_TENANTS", 8)
    bench = Bench()
    stays = bench.add(prompt(6), 90)
    name = bench.state.requests[stays].tenant
    index = bench.state.tenant_index(name)
    numbers = [bench.state.tenant_index(f"made up {number}") for number in range(40)]
    assert len({index, *numbers}) == 41
    assert bench.state.tenant_index(name) == index, "it has a request"
    assert len(bench.state._tenants) <= 8
    bench.run()


def test_a_deadline_can_be_moved_and_lifted() -> None:
    bench = Bench()
    ids = [bench.add(prompt(6, start), 90, deadline_s=1.0) for start in range(3)]
    bench.scheduler.set_deadline(ids[0], 2.0)
    bench.scheduler.set_deadline(ids[1], None)
    bench.scheduler.set_deadline(ids[2], 0.5)
    gone = []
    for time_s in (0.5, 1.0, 2.0, 9.0):
        bench.clock.advance_to(time_s)
        bench.scheduler.expire()
        bench.flush()
        gone.append(sorted(bench.finished))
    assert gone == [[ids[2]], [ids[2]], [ids[0], ids[2]], [ids[0], ids[2]]]
    bench.run()


def test_a_deadline_set_again_and_again_fires_once() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 20, deadline_s=3.0)
    for time_s in (1.0, 3.0, 1.0, 2.0):
        bench.scheduler.set_deadline(request, time_s)
    bench.clock.advance_to(1.5)
    bench.scheduler.expire()
    assert request in bench.state.requests
    bench.clock.advance_to(2.0)
    bench.scheduler.expire()
    bench.flush()
    assert bench.finished[request].time_s == 2.0


def test_the_deadline_of_an_ended_request_wakes_no_step() -> None:
    """L4: no timers are left at idle."""
    bench = Bench()
    bench.add(prompt(4), 2, deadline_s=1000.0)
    bench.run()
    assert bench.scheduler.next_wakeup_s() is None


def test_a_passed_deadline_is_met_before_planning() -> None:
    bench = Bench()
    request = bench.add(prompt(4), 2, deadline_s=0.0)
    assert bench.step() is None
    assert bench.finished[request].detail == "deadline"


# -- pause, resume, block, unblock -------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [False, True])
def test_a_paused_request_owns_no_row_and_no_blocks_and_goes_on_where_it_stopped(swap: bool) -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    request = bench.add(prompt(6), 10)
    bench.step(4)
    bench.scheduler.pause(request, swap=swap)
    bench.step(3)
    group = bench.state.kv.groups[0]
    assert group.pool.num_free == group.pool.usable and not bench.state.rows.num_live
    assert bench.states()[request] is RequestState.PAUSED
    assert bool(bench.request(request).host_places) == swap
    assert bench.request(request).preemptions == 0, "it was not preempted, it was put aside"
    bench.scheduler.resume(request)
    bench.run()
    assert len(bench.tokens[request]) == 10


def test_a_waiting_request_can_be_paused() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 3)
    bench.scheduler.pause(request)
    assert bench.step() is None
    bench.scheduler.resume(request)
    bench.run()


def test_a_resumed_request_has_its_old_place_in_the_order() -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    first, second = bench.add(prompt(6), 3), bench.add(prompt(6, 1), 3)
    bench.scheduler.pause(first)
    bench.scheduler.resume(first)
    bench.run()
    assert bench.finished[first].time_s < bench.finished[second].time_s


def test_pausing_twice_and_resuming_a_running_request_is_rejected() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 3)
    with pytest.raises(InvalidTransition, match="waiting, not paused"):
        bench.scheduler.resume(request)
    bench.scheduler.pause(request)
    with pytest.raises(InvalidTransition, match="cannot be paused"):
        bench.scheduler.pause(request)
    bench.scheduler.resume(request)
    bench.run()


def test_a_blocked_request_lets_others_pass_and_comes_back() -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    first, second = bench.add(prompt(6), 3), bench.add(prompt(6, 1), 3)
    bench.scheduler.block(first, BlockReason.ADAPTER, None)
    bench.step()
    assert bench.states() == {first: RequestState.BLOCKED, second: RequestState.RUNNING}
    assert bench.scheduler.unblock(first)
    assert not bench.scheduler.unblock(first), "late word is ignored"
    bench.run()


def test_a_block_that_never_ends_is_given_up_at_its_own_deadline() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 3)
    bench.scheduler.block(request, BlockReason.GRAMMAR, 1.0)
    assert bench.step() is None
    assert bench.scheduler.next_wakeup_s() == 1.0
    bench.clock.advance_to(1.0)
    bench.step()
    ending = bench.finished[request]
    assert (ending.reason, ending.detail) == (FinishReason.ERROR, "grammar_timeout")


def test_a_block_that_ended_in_time_is_not_given_up_later() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 3)
    bench.scheduler.block(request, BlockReason.GRAMMAR, 1.0)
    bench.scheduler.unblock(request)
    bench.clock.advance_to(2.0)
    bench.run()
    assert bench.finished[request].reason is FinishReason.LENGTH


def test_only_a_waiting_request_can_be_blocked() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 3)
    bench.step()
    with pytest.raises(InvalidTransition, match="running"):
        bench.scheduler.block(request, BlockReason.ENCODER, None)
    bench.run()


UNKNOWN = RequestId(99)


def test_an_unknown_request_is_named_or_ignored() -> None:
    scheduler = Bench().scheduler
    for call in (scheduler.pause, scheduler.resume, scheduler.preempt, scheduler.tokens_of):
        with pytest.raises(UnknownRequest, match="99"):
            call(UNKNOWN)
    with pytest.raises(UnknownRequest, match="99"):
        scheduler.set_priority(UNKNOWN, 1)
    with pytest.raises(UnknownRequest, match="99"):
        scheduler.set_deadline(UNKNOWN, 1.0)
    with pytest.raises(UnknownRequest, match="99"):
        scheduler.block(UNKNOWN, BlockReason.GRAMMAR, None)
    assert not scheduler.abort(UNKNOWN) and not scheduler.prune(UNKNOWN)
    assert not scheduler.finish_at(UNKNOWN, 1) and not scheduler.unblock(UNKNOWN)


def test_tokens_of_a_request_are_its_prompt_and_what_was_delivered() -> None:
    bench = Bench()
    request = bench.add(prompt(5), 8)
    assert bench.scheduler.tokens_of(request).tolist() == prompt(5)
    bench.step(3)
    told = prompt(5) + bench.tokens[request]
    assert bench.scheduler.tokens_of(request).tolist() == told
    bench.scheduler.preempt(request)
    assert bench.scheduler.tokens_of(request).tolist() == told
    bench.run()
