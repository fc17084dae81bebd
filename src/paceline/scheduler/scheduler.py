"""The scheduler as others see it: tell it things, ask it for plans, give it results.

`schedule()` and `update()` are the two halves of a step; everything else is an input that may come between any
two of them. Each input is noted in the journal with its time, so that a run can be repeated. Never imports
torch, reads no wall clock and does no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.core import inputs
from paceline.core.dial import DialSetting
from paceline.core.events import (
    NO_NUMBER,
    NO_REQUEST,
    Decision,
    DecisionKind,
    Forecast,
    Rule,
    StepEvents,
)
from paceline.core.plan import I32, StepPlan, StepResult
from paceline.core.request import (
    NO_ROW,
    NOTHING_PLACED,
    Blocked,
    BlockKey,
    BlockReason,
    FinishReason,
    PlacedStretches,
    Request,
    RequestId,
    RequestState,
)
from paceline.core.standing import ALL_LOST
from paceline.errors import InvalidTransition, UnknownRequest
from paceline.scheduler import steering
from paceline.scheduler.forecast import Forecaster
from paceline.scheduler.injection import inject
from paceline.scheduler.policy import changed_policy, make_policy
from paceline.scheduler.recovery import full_plan, is_slab_in_use, let_go, move_slab, note_wake, start_over
from paceline.scheduler.rejections import Rejection, check_extension, late_rejection, rejection_of
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step import pinning
from paceline.scheduler.step.compose import Composer
from paceline.scheduler.step.pace import ExpectedRoom, make_pace
from paceline.scheduler.step.preemption import preempt, put_aside
from paceline.scheduler.update import apply_result, finish, retire_batch


class Scheduler:
    """Iteration-level scheduling over one row table and one KV cache."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.composer = Composer(state)
        self.forecaster = Forecaster(state)
        self._withheld = (0,) * len(state.kv.groups)
        self._has_slept = False  # since the last plan
        pinning.limit_pins(state)

    # -- the two halves of a step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do now."""
        noted, decided = len(self.state.journal), len(self.state.decisions)
        self.expire()
        pinning.settle(self.state)
        for number in self.state.modules.take_deserted():
            self.state.end(self.state.requests[number], FinishReason.ABORT)
            self._after_leaving()
        if self._has_slept:
            self._has_slept = False
            note_wake(self.state)
        self._note_withheld()
        self.state.accounting.settle()
        plan = self.composer.compose()
        if plan is None:
            self._note_idle(noted, decided)
        return plan

    def update(self, result: StepResult) -> None:
        """Take in the result of the oldest plan under way."""
        self._input(inputs.Done(seq=result.seq))
        flight = self.state.flights[0]
        work = flight.work
        if work.prefill_tokens and len(result.verified):  # drafts take as long as tokens of prompts
            verified = int(result.verified.sum())
            work = replace(work, prefill_tokens=work.prefill_tokens + verified)
        if self.composer.pace is not None:
            self.composer.pace.learn(work, result.times)
        self.state.sizes.learn(work, result.times, self.state.now_s)
        if self.state.drafts is not None:
            self.state.drafts.learn(flight.work, result, flight.room)
        apply_result(self.state, result)
        if self.state.dial.watches:
            steering.judge(self.state)
        self.forecaster.learn(work, result.times, self.state.now_s, is_busy=bool(self.state.requests))

    def take_events(self) -> StepEvents:
        """What has become known since the last call."""
        return self.state.events.take()

    def take_decisions(self) -> list[Decision]:
        taken, self.state.decisions = self.state.decisions, []
        return taken

    def take_journal(self) -> inputs.Journal:
        taken, self.state.journal = self.state.journal, []
        return taken

    def forecast(self, request: Request) -> Forecast | None:
        """When a request that has not been added would have its first and its last token; None: not known yet."""
        self._tick()
        return self.forecaster.predict(request, ExpectedRoom(self.state, self.composer.pace))

    def next_place_s(self) -> float | None:
        """Seconds until a running request is thought to end; None: no request runs, or it is not known."""
        return self.forecaster.next_ending_s()

    # -- inputs --------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Accept new requests, all of them or none. Raises when one can never fit, cannot make its times, or the queue
        is full. One that comes with output was accepted before, elsewhere, and is not refused for others."""
        self._tick()
        self.state.kv.pins.expire()
        rejection = rejection_of(self.state, requests) or self._too_late(requests)
        if rejection is not None:
            self._reject(rejection.requests, rejection.rule)
            raise rejection.error
        for request in requests:
            self._accept(request, len(requests))
            if requests[0].parent is not None:
                figures = (NO_NUMBER, NO_NUMBER, NO_NUMBER, requests[0].parent)
                score = f"score {request.score:g}" if request.score else ""
                self.state.decide(
                    DecisionKind.FORK, request, Rule.BRANCHED, request.shares, figures, detail=score
                )
        for request in requests:
            if request.has_output and request.num_tokens == request.max_total:  # nothing is left to generate
                self.state.queue.remove(request)
                self.state.close(request, FinishReason.LENGTH)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise the error these requests would be rejected with if they came now."""
        rejection = rejection_of(self.state, requests) or self._too_late(requests)
        if rejection is not None:
            raise rejection.error

    def abort(self, request_id: RequestId, detail: str = "abort") -> bool:
        """End a request now, whatever it is doing. An unknown or finished one is left alone."""
        request = self.state.requests.get(request_id)
        if request is None:
            return False
        self._input(inputs.AbortRequest(request=request_id, detail=detail))
        self.state.end(request, FinishReason.ABORT, detail)
        self._after_leaving()
        return True

    def prune(self, request_id: RequestId) -> bool:
        """Drop a branch."""
        return self.abort(request_id, "pruned")

    def finish_at(self, request_id: RequestId, num_output: int) -> bool:
        """A stop was found outside: the output ends after `num_output` tokens, what came later is discarded."""
        state = self.state
        request = state.requests.get(request_id)
        if request is None:
            return False
        if request.held is not None and request.num_tokens <= request.num_prompt + num_output:
            return True
        self._input(inputs.FinishRequest(request=request_id, num_output=num_output))
        total = request.num_prompt + num_output
        if request.row == NO_ROW:
            if request.id in state.queue:  # it counts the request's tokens
                state.queue.remove(request)
            request.tokens = request.tokens[:total]
            state.close(request, FinishReason.STOP)
            return True
        rows, row = state.rows, request.row
        request.tokens = request.tokens[:total]
        for column in (rows.num_tokens, rows.num_known, rows.computed):
            column[row] = min(int(column[row]), total)
        finish(state, request, FinishReason.STOP)
        self._after_leaving()
        return True

    def fail(self, request_id: RequestId, detail: str) -> bool:
        """End a request with an error; what it computed is not shared."""
        request = self.state.requests.get(request_id)
        if request is None:
            return False
        self._input(inputs.FailRequest(request=request_id, detail=detail))
        if request.row != NO_ROW:
            self.state.kv.quarantine(request.row)
        self.state.end(request, FinishReason.ERROR, detail)
        self._after_leaving()
        return True

    def fork(self, request_id: RequestId, branches: Sequence[Request]) -> None:
        """Add branches of a live request, all or none. Their tokens are the parent's, as far as delivered.

        A branch shares its parent's blocks if the parent runs when the branch is admitted, and starts from the
        prefix cache if not; its output is the same either way.
        """
        parent = self._live(request_id)
        for branch in branches:
            branch.parent = request_id
            branch.arrival_s = min(branch.arrival_s, parent.arrival_s)  # goes where its parent goes
        self.add(branches)

    def extend(
        self,
        request_id: RequestId,
        tokens: I32,
        max_tokens: int | None = None,
        placed: PlacedStretches = NOTHING_PLACED,
    ) -> None:
        """Put tokens behind those a request has; it continues from there, at its old place in the order.

        They become part of its output, and its length grows by them. `max_tokens`: how many it may generate from here
        on, as many as were left where it is None. `placed`: texts among the tokens that are placed. What it had
        computed is found in the prefix cache.
        """
        request = self._live(request_id)
        num_tokens = self.num_tokens_of(request)
        if max_tokens is None:
            max_tokens = request.max_total - num_tokens
        total = num_tokens + len(tokens)
        check_extension(self.state, request, num_tokens, total, max_tokens, placed.modules)
        self._input(
            inputs.Extend(
                request=request_id,
                num_tokens=len(tokens),
                max_tokens=max_tokens,
                stretches=inputs.log_stretches(placed.stretches),
                modules=inputs.log_modules(placed.modules),
            )
        )
        state = self.state
        waits = request.id in state.queue
        if waits:  # it counts the request's tokens
            state.queue.remove(request)
        try:
            if request.row != NO_ROW:
                state.publish(request)
                state.kv.release(request.row)
                state.leave_row(request)
                request.blocked, request.reserved, request.num_computed = None, False, 0
            inject(state, request, tokens, max_tokens, placed)
        except Exception as error:
            state.fail(request, error)
            return
        finally:
            self._after_leaving()
        if waits:
            state.queue.push(request, state.orders[request.id], state.tenant_index(request.tenant))
        elif request.state is not RequestState.PAUSED:
            state.let_on(request)
            state.enqueue(request)
        if request.id in state.queue:
            self.composer.admission.ask_for_modules(request)

    def set_score(self, request_id: RequestId, score: float) -> None:
        """Where a branch stands among the others of its tree: the higher goes first and is preempted last."""
        request = self._live(request_id)
        self._input(inputs.SetScore(request=request_id, score=score))
        self.state.decide(DecisionKind.CHANGE, request, Rule.SCORE, detail=f"{score:g}")
        request.score = score
        if request.tree is not None:
            self.state.deal_places(request.tree)

    def num_tokens_of(self, request: Request) -> int:
        """Prompt and delivered output."""
        return request.num_tokens if request.row == NO_ROW else self.state.rows.num_tokens.item(request.row)

    def tokens_of(self, request_id: RequestId) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Prompt and delivered output of a live request."""
        request = self._live(request_id)
        if request.row == NO_ROW:
            return request.tokens
        rows, row = self.state.rows, request.row
        count = int(rows.num_tokens[row] - rows.num_known[row])
        return np.concatenate([request.tokens, rows.outputs[row, :count]])

    def set_priority(self, request_id: RequestId, priority: int) -> None:
        """Another number of priority, which counts from the priority of the request's class."""
        request = self._live(request_id)
        service_level = request.service_level._replace(priority=priority)
        found = service_level.effective_priority
        self._input(inputs.SetPriority(request=request_id, priority=priority))
        self.state.decide(DecisionKind.CHANGE, request, Rule.PRIORITY, priority)
        request.service_level = service_level
        if request.row != NO_ROW:
            self.state.rows.priority[request.row] = found
        elif request.id in self.state.queue:
            self.state.queue.set_priority(request)

    def set_deadline(self, request_id: RequestId, deadline_s: float | None) -> None:
        request = self._live(request_id)
        self._input(inputs.SetDeadline(request=request_id, deadline_s=deadline_s))
        away = "" if deadline_s is None else f"{max(0.0, deadline_s - self.state.now_s):.3f} s"
        self.state.decide(DecisionKind.CHANGE, request, Rule.DEADLINE, detail=away)
        request.deadline_s = deadline_s
        if request.row != NO_ROW:
            self.state.rows.deadline_s[request.row] = request.due_s
        elif request.id in self.state.queue:
            self.state.queue.set_deadline(request)
        self.state.watch_deadline(request)

    def set_policy(self, name: str, **options: float | str) -> None:
        """Order by another policy from now on. `options` are those of the config that policies read."""
        config = changed_policy(self.state.config, name, options)
        policy = make_policy(config, self.state.policy)
        self._input(inputs.SetPolicy(name=name, options=tuple(sorted(options.items()))))
        self.state.use_policy(config, policy)
        steering.record_policy(self.state, name, options)

    def set_dial(self, setting: DialSetting) -> None:
        """Another place between latency and throughput, a target to hold, or off."""
        steering.check_turn(self.state)
        self._input(inputs.SetDial(target=setting.kind, value=setting.value))
        steering.turn(self.state, setting)
        if self.composer.pace is None:
            self.composer.pace = make_pace(self.state.config, dialled=True)

    def preempt(self, request_id: RequestId, *, swap: bool | None = False) -> bool:
        """Preempt a running request; with `swap` None its KV is swapped or recomputed, whichever is cheaper.

        False when it does not run, is reserved, or has ended.
        """
        request = self._live(request_id)
        if request.state is not RequestState.RUNNING or request.reserved or self._is_done(request):
            return False
        self._input(inputs.Preempt(request=request_id, swap=swap))
        preempt(self.state, request, swap=swap, reason="forced")
        self._after_leaving()
        return True

    def pause(self, request_id: RequestId, *, swap: bool | None = None) -> None:
        """Put a request aside until `resume`; it releases its row and blocks, by `swap` or the cheapest way."""
        request = self._live(request_id)
        returns = request.blocked is not None and request.blocked.reason is BlockReason.SWAP_IN
        resting = (RequestState.BLOCKED, RequestState.PAUSED, RequestState.HELD)
        stuck = request.state in resting and not returns
        if stuck or self._is_done(request):
            raise InvalidTransition(f"request {request_id} is {request.state.value}: it cannot be paused")
        self._input(inputs.Pause(request=request_id, swap=swap))
        if request.row != NO_ROW:  # what is still being copied in cannot be copied out
            put_aside(self.state, request, swap=False if returns else swap, reason="paused")
            request.blocked = None
            self._after_leaving()
        if request.is_terminal:
            return  # a per-request hook failed on the way
        self.state.decide(DecisionKind.CHANGE, request, Rule.PAUSED)
        self.state.queue.remove(request)
        request.move(RequestState.PAUSED)
        self.state.modules.stops(request)

    def resume(self, request_id: RequestId) -> None:
        """Let a paused request run again, at its old place in the order."""
        request = self._live(request_id)
        if request.state is not RequestState.PAUSED:
            raise InvalidTransition(f"request {request_id} is {request.state.value}, not paused")
        self._input(inputs.Resume(request=request_id))
        self.state.decide(DecisionKind.CHANGE, request, Rule.RESUMED)
        self.state.enqueue(request)

    def block(self, request_id: RequestId, reason: BlockReason, deadline_s: float | None) -> None:
        """A waiting request needs something from outside before it may run."""
        request = self._live(request_id)
        if request.state is not RequestState.WAITING:
            raise InvalidTransition(f"request {request_id} is {request.state.value}: it cannot be blocked")
        self._input(inputs.Block(request=request_id, reason=reason, deadline_s=deadline_s))
        self.state.queue.remove(request)
        request.move(RequestState.BLOCKED)
        request.blocked = Blocked(reason=reason, deadline_s=deadline_s)
        self.state.watch_deadline(request)

    def unblock(self, request_id: RequestId) -> bool:
        """What a blocked request waited for is here. Late word for one that is not blocked is ignored."""
        request = self.state.requests.get(request_id)
        if request is None or request.blocked is None or request.blocked.reason is BlockReason.SWAP_IN:
            return False
        self._input(inputs.Unblock(request=request_id))
        request.blocked = None
        self.state.enqueue(request)
        return True

    def set_adapter(self, number: int, identity: str) -> None:
        """Note which adapter a number stands for, or with an empty identity that it stands for none any more."""
        self._input(inputs.SetAdapter(number=number, identity=identity))
        if identity:
            self.state.adapters.register(number, identity)
        else:
            self.state.adapters.forget(number)

    def adapter_read(self, number: int, *, failed: bool = False) -> None:
        """What was ordered is in memory, or cannot be."""
        self._input(inputs.AdapterRead(number=number, failed=failed))
        self.state.adapters.arrived(number, failed=failed)

    def restore(
        self,
        places: Sequence[int],
        keys: Sequence[BlockKey],
        uses: Sequence[int],
        learned: tuple[tuple[float, ...], ...] = (),
    ) -> None:
        """Earlier runs have left prefixes on the disk, and have learned by level: before anything is added. Or, without
        places, other servers have, at any time."""
        names = tuple([key.key for key in keys])
        self._input(inputs.Restored(places=tuple(places), keys=names, uses=tuple(uses), learned=learned))
        self.state.kv.learn(learned)
        self.state.kv.restore(np.array(places, np.int64), keys, uses)

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have left: cached prefixes, and texts that drafts come from."""
        self._input(inputs.ResetCache())
        self.state.cache_resets += 1
        self.state.kv.reset_cache()

    def unpin(self, tenant: str, name: str) -> bool:
        """A pin ends before its time. False: there is none of that name."""
        self._input(inputs.Unpin(tenant=tenant, name=name))
        return pinning.unpin(self.state, tenant, name)

    def expire(self) -> None:
        """End requests whose deadline has passed. Called by `schedule`, and by the engine when idle."""
        state = self.state
        self._tick()
        while state.deadlines and state.deadlines[0][0] <= state.now_s:
            due_s, request_id = heapq.heappop(state.deadlines)
            request = state.requests.get(request_id)
            if request is None:
                continue
            if request.deadline_s is not None and request.deadline_s <= due_s:
                self._note(inputs.Expired(request=request_id))
                state.end(request, FinishReason.ABORT, "deadline")
                self._after_leaving()
            elif request.blocked is not None and request.blocked.deadline_s == due_s:
                self._note(inputs.Expired(request=request_id))
                state.end(request, FinishReason.ERROR, f"{request.blocked.reason.value}_timeout")
            elif request.held is not None and request.held.until_s == due_s:
                self._note(inputs.Expired(request=request_id))
                state.end(request, request.held.reason, Rule.HOLD_OVER.value)

    def next_wakeup_s(self) -> float | None:
        """When something may change by the clock alone: a deadline, or the opening of the admission gate."""
        state = self.state
        while state.deadlines and not state.is_due(*state.deadlines[0]):
            heapq.heappop(state.deadlines)
        times = [state.deadlines[0][0]] if state.deadlines else []
        opening = state.mode.next_opening_s(state.queue.view(state.now_s), state.rows.num_live)
        if opening is not None:
            times.append(opening)
        return min(times, default=None)

    @property
    def tokens_left(self) -> int:
        """Tokens of the last step's budget that nothing was left to use."""
        return self.composer.last_draft.left

    @property
    def has_open_copies(self) -> bool:
        """A copy is to be sent or under way."""
        return self.composer.has_open_copies or self.state.tiers.has_news

    # -- snapshots and recovery ----------------------------------------------------------------------------

    def snapshot(self) -> StepPlan:
        """A full plan: every live row, rebuilt from what is known. Only between steps, with none under way."""
        return full_plan(self.state, self.composer.decode_rows())

    def recover(self) -> StepPlan:
        """A step has failed: no result will come. Every row is preempted, and the runner starts from a clean plan."""
        self._input(inputs.StepFailed())
        start_over(self.state)
        self.composer.forget()
        return StepPlan(seq=self.state.kv.submitted, full=True)

    def sleep(self, *, levels_lost: int = ALL_LOST) -> None:
        """The runner's memory is let go of, and what these levels hold with it. Only while neither a step nor a copy is
        under way."""
        self._input(inputs.Sleep(levels_lost=levels_lost))
        let_go(self.state, levels_lost)
        self.composer.forget()
        self._has_slept = True

    def move_slab(self, number: int, *, gained: bool) -> bool:
        """Blocks come from another model, or go to it. False: a step or a copy under way needs some of them."""
        if not gained and is_slab_in_use(self.state, number):
            return False
        self._input(inputs.MoveSlab(number=number, gained=gained))
        return move_slab(self.state, number, gained=gained)

    def shrink(self) -> bool:
        """Memory ran out in a step: for a while half as many rows. False if there was one left only."""
        self._input(inputs.Shrink())
        return self.state.halve_rows()

    def fail_all(self) -> None:
        """The engine is lost: every live request ends with an error."""
        self._input(inputs.FailAll())
        for request in list(self.state.requests.values()):
            self.state.end(request, FinishReason.ERROR, "engine_failed")
        self.state.kv.settle()

    # -- helpers -------------------------------------------------------------------------------------------

    def _too_late(self, requests: Sequence[Request]) -> Rejection | None:
        """Why a request cannot make its times; a branch of one that runs, and one that has begun, is not asked."""
        request, wanted = requests[0], requests[0].sampling
        if not wanted.has_objectives or wanted.on_infeasible == "try" or request.parent is not None:
            return None
        if any(each.has_output for each in requests):
            return None
        forecast = self.forecast(request)
        return None if forecast is None else late_rejection(request, forecast)

    def _reject(self, requests: Sequence[Request], reason: Rule) -> None:
        kv = self.state.kv
        for request in requests:
            request.move(RequestState.REJECTED)
            self.state.counters.added += 1
            self.state.counters.rejected += 1
            self._note(inputs.AddRequest.of(request, len(requests)))
            room, need = min(kv.slabs.least_usable), max(kv.full_need(request.max_total))
            figures = (NO_NUMBER, room, need, NO_REQUEST)
            self.state.decide(DecisionKind.REFUSE, request, reason, request.max_total, figures)

    def _accept(self, request: Request, together: int) -> None:
        state = self.state
        self._note(inputs.AddRequest.of(request, together))
        state.counters.added += 1
        state.requests[request.id] = request
        if request.adapter:
            state.adapters.add_request(request.adapter)
        if request.media:
            state.encodings.add_request(request)
        if request.is_module:
            state.modules.comes(request, state.orders)
        state.enqueue(request)
        self.composer.admission.ask_for_modules(request)
        state.watch_deadline(request)
        if request.parent is not None and request.parent in state.requests:
            state.children.setdefault(request.parent, set()).add(request.id)
        if request.parent is not None or request.tree_limits is not None:
            state.join_tree(request)

    def _after_leaving(self) -> None:
        if self.state.mode.keeps_finished:
            retire_batch(self.state)
        self.state.kv.settle()

    def _is_done(self, request: Request) -> bool:
        """Has its last token and waits for its batch to leave."""
        return request.row != NO_ROW and bool(self.state.rows.done[request.row])

    def _live(self, request_id: RequestId) -> Request:
        request = self.state.requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"no live request has the id {request_id}")
        return request

    def _tick(self) -> None:
        state = self.state
        state.now_s = max(state.now_s, state.clock.now())
        state.kv.block_time.set_time(state.now_s)
        state.sizes.forget_old(state.now_s)

    def _input(self, value: inputs.Input) -> None:
        """Something came from outside: the clock ticks, and the journal has it with the time."""
        self._tick()
        self._note(value)

    def _note(self, value: inputs.Input) -> None:
        self.state.journal.append((self.state.now_s, value))

    def _note_idle(self, noted: int, decided: int) -> None:
        """A look that gave no plan may have moved something; repeated looks that did not are left out."""
        journal = self.state.journal
        looked = bool(journal) and isinstance(journal[-1][1], inputs.Idle)
        if not looked or len(journal) > noted or len(self.state.decisions) > decided:
            self._note(inputs.Idle())

    def _note_withheld(self) -> None:
        """Blocks that are kept back from outside are an input too."""
        withheld = tuple([pool.withheld for pool in self.state.pools])
        if withheld != self._withheld:
            self._withheld = withheld
            self._note(inputs.Withheld(blocks=withheld))
