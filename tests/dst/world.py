"""One seeded run: traffic in, steps, every output compared with the reference, everything accounted for."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from paceline.config.engine import EngineConfig
from paceline.core.clock import ManualClock
from paceline.core.events import Finished, Held, StepEvents
from paceline.core.parameters import KVKeep
from paceline.core.recorder import StepRecorder
from paceline.core.request import (
    OWN_REQUESTS,
    BlockReason,
    FinishReason,
    Request,
    RequestId,
    RequestState,
)
from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidTransition
from paceline.factory import build_engine
from paceline.kv.prefix import KeyMaker
from paceline.scheduler.invariants import InvariantChecker, InvariantViolation
from paceline.scheduler.scheduler import Scheduler
from tests.dst.adapters import AdapterMoves, draw_adapters
from tests.dst.contexts import Contexts, has_contexts
from tests.dst.coverage import Coverage
from tests.dst.dials import Changes, draw_steering
from tests.dst.injected import CollidingKeyMaker, CursedHooks, Shortage
from tests.dst.media import Media, draw_encoder
from tests.dst.objectives import REFUSALS, Objectives
from tests.dst.pins import Pins, draw_pins, has_pins
from tests.dst.pooled import Pooled, draw_pools
from tests.dst.settings import (
    draw_config,
    draw_drafts,
    draw_levels,
    draw_pace,
    draw_traffic,
    draw_trouble,
    more_prefixes,
)
from tests.dst.slabs import SlabMoves, draw_slabs
from tests.dst.trees import TreeMoves, has_trees
from tests.dst.watch import AdmissionWatch, BatchWatch, Expectation, WatchedRunner, check_idle
from tests.fake_faults import DeviceFault, Faults
from tests.guides import VOCAB, FakeGuide, FakeGuideMaker
from tests.reference_output import Stretches, placed_of, reference_output

STEP_TIMES_S = (0.001, 0.002, 0.01)
ROWS_AT_ONCE = 1280  # of all half-steps looked at together: few enough to stay in the processor's cache


def _can_drop(config: EngineConfig) -> bool:
    """Whether requests may drop parts of their KV."""
    is_plain = len(config.kv.groups) == 1 and config.kv.groups[0].window is None
    return is_plain and config.scheduler.mode == "continuous" and config.scheduler.drafts is None


class World:
    """An engine, its clients and its bad luck, all from one seed."""

    def __init__(
        self,
        seed: int,
        make_recorder: Callable[[EngineConfig], StepRecorder] | None = None,
        *,
        drafts: bool = True,
        trees: bool = True,
        drops: bool = True,
        media: bool = True,
        contexts: bool = True,
    ) -> None:
        """`drafts`, `trees`, `drops`, `media`, `contexts`: False: there are none, whatever the seed says."""
        self.guide_rng, self.keep_rng = random.Random(seed + 13), random.Random(seed + 17)
        self.rng = rng = random.Random(seed)
        self.config = draw_steering(seed, draw_pace(random.Random(seed + 2), draw_config(rng)))
        if drafts:
            self.config = draw_drafts(random.Random(seed + 11), self.config)
        level_rng = random.Random(seed + 19)
        self.config = draw_adapters(seed, draw_levels(level_rng, self.config))
        self.config = draw_encoder(seed, draw_slabs(seed, draw_pools(seed, self.config)), media)
        self.config = draw_pins(seed, self.config)
        self.drops_kv = drops and self.keep_rng.random() < 0.25 and _can_drop(self.config)  # some requests do
        self.traffic = traffic = more_prefixes(self.config, draw_traffic(rng, self.config))
        self.trouble = draw_trouble(rng)
        self.clock = ManualClock()
        told = not self.drops_kv and not (trees and has_trees(seed)) and not has_pins(seed)
        told &= not (contexts and has_contexts(seed))
        self.coverage = Coverage(self.config, self.trouble, make_recorder, told=told)
        key = seed.to_bytes(32, "little", signed=True)
        maker = (CollidingKeyMaker if self.trouble.same_keys else KeyMaker)(self.config.kv.block_size, key)
        self.hooks = CursedHooks(maker)
        self.shortage = Shortage(rng, self.trouble.alloc_failure)
        self.runner = WatchedRunner(self.config, self._faults(seed, level_rng))
        self.adapters = AdapterMoves(seed, self.config, self.runner)
        self.engine = build_engine(
            self.config,
            self.runner,
            clock=self.clock,
            hooks=self.hooks,
            recorder=self.coverage,
            make_pool=self.shortage.make_pool,
            make_checker=self._make_checker,
            guide_maker=FakeGuideMaker(self.guide_rng),
            make_adapters=self.adapters.make,
        )
        self.adapters.begin(self.engine)
        self.slabs = SlabMoves(seed, self.config, self.engine, self.coverage.counts)
        if self.trouble.cursed and make_recorder is None:  # a log tells what hooks did, not what blocks did
            self.hooks.watch(self.engine.scheduler.state)
        self.runner.scheduler, self.runner.found = self.engine.scheduler, self.checker.found
        self.admissions = AdmissionWatch(self.engine.scheduler, self.checker.found)
        self.batches = BatchWatch(self.engine.scheduler)
        self.clients: dict[int, Expectation] = {}
        self.live: dict[int, Expectation] = {}
        self.blocked: set[int] = set()  # those that ever waited for something, but for a guide
        self.due: set[int] = set()  # those that were ever given a deadline
        vocabulary = 3 if rng.random() < 0.3 else 1000
        self.prefixes = [[rng.randrange(vocabulary) for _ in range(64)] for _ in range(traffic.num_prefixes)]
        self.changes, self.trees = Changes(seed, self.engine.scheduler), TreeMoves(seed, self, trees)
        self.objectives, self.overlapped = Objectives(seed), self.config.depth > 0
        self.media = Media(seed, self.config, self.runner, self.coverage.counts)
        self.contexts = Contexts(seed, self.config, self.trouble, self.engine.scheduler, self.coverage.counts)
        self.contexts.begin(self.runner, contexts)
        self.pooled = Pooled(seed, self.config, self.coverage.counts)
        self.pins = Pins(seed, self.engine.scheduler, self.coverage.counts)
        self.acts = self._acts()

    def _faults(self, seed: int, level_rng: random.Random) -> Faults:
        faults = Faults(
            rng=random.Random(seed + 1),
            step_failure=self.trouble.step_failure,
            nan_row=self.trouble.nan_row,
            late_copies=self.trouble.late_copies,
        )
        if self.config.kv.cache_on_host:
            faults.late_moves = level_rng.choice((0, 3, 8))
            faults.copy_failure = level_rng.choice((0.0, 0.02, 0.1))
        return faults

    def _make_checker(self, scheduler: Scheduler) -> InvariantChecker:
        batch = max(64, ROWS_AT_ONCE // scheduler.state.rows.num_rows)
        self.checker = InvariantChecker(scheduler, batch=batch)
        return self.checker

    # -- running -------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Counter[str]:
        """Run, and raise what went wrong first."""
        try:
            counts = self._run(steps)
        except Exception:
            self.checker.flush()
            raise
        self.checker.flush()
        return counts

    def _run(self, steps: int) -> Counter[str]:
        """Traffic for `steps` steps, then quiet until everything has ended and nothing is left."""
        was_empty = False
        for _ in range(steps):
            self._traffic()
            empty = not self.engine.has_requests and self.engine.is_idle
            if empty and was_empty:  # one look at an empty engine tells what the next would
                self.shortage.draw()
                self._pass_time()
            else:
                self.step()
            was_empty = empty
        self._drain()
        self.pins.let_go()
        self.engine.close()
        check_idle(self.engine.scheduler.state, self.clients)
        self._count()
        return self.coverage.counts

    def step(self) -> None:
        self.shortage.draw()
        self.batches.before_step()
        try:
            events = self.engine.step_overlapped() if self.overlapped else self.engine.step()
        finally:
            self._raise_first()
        self.runner.check_distrusted()
        # A structure that is complete ends as a stop string does: at once, in every mode.
        by_themselves = [
            f
            for f in events.finished
            if self.clients[f.request].sampling.structured_outputs is None and f.detail != "hold_over"
        ]
        self.batches.after_step(by_themselves)
        self.receive(events)
        self._check_deadlines()
        self._pass_time()

    def _pass_time(self) -> None:
        self.clock.advance(STEP_TIMES_S[int(self.rng.random() * len(STEP_TIMES_S))])

    def _raise_first(self) -> None:
        """What went wrong inside the engine's error boundaries comes before what follows from it."""
        if self.checker.first is not None:
            self.checker.flush()
        error = self.engine.last_error
        if error is not None and not isinstance(error, DeviceFault):
            raise error

    def _drain(self) -> None:
        """L3: without arrivals everything ends within a bound."""
        scheduler = self.engine.scheduler
        config = self.config.scheduler
        work = sum(
            -(-r.num_tokens // scheduler.state.dial.fewest) + r.max_total
            for r in scheduler.state.requests.values()
        )
        allowed = 200 + 40 * len(scheduler.state.requests) + 8 * work * (2 + config.max_preemptions)
        for request in list(scheduler.state.requests.values()):
            if request.state is RequestState.PAUSED:
                scheduler.resume(request.id)
            elif request.id in self.blocked:
                scheduler.unblock(request.id)
        while self.engine.has_requests or not self.engine.is_idle:
            self.step()
            wakeup = scheduler.next_wakeup_s()
            if wakeup is not None and not scheduler.state.flights and not scheduler.state.rows.num_live:
                self.clock.advance_to(wakeup)
            allowed -= 1
            if allowed < 0:
                raise InvariantViolation("L3", f"{len(scheduler.state.requests)} requests never end")
        self.receive(self.engine.drain())

    def _count(self) -> None:
        scheduler_state = self.engine.scheduler.state
        counters, counts = scheduler_state.counters, self.coverage.counts
        counts["preempt"] += counters.preempted
        counts["swap"] += counters.swapped
        counts["fork"] += counters.forked
        counts["late finish"] += counters.late_results
        counts["draft taken"] += counters.accepted_tokens
        counts["draft rejected"] += counters.draft_tokens - counters.accepted_tokens
        counts["failed step"] += counters.failed_steps
        counts["nan row"] += self.runner.nan_rows
        counts["evict"] += sum(group.pool.num_evicted for group in self.engine.scheduler.state.kv.groups)
        counts["adapter read"] += scheduler_state.adapters.read
        counts["adapter evicted"] += scheduler_state.adapters.evicted
        counts["requests"] += counters.added
        counts["rejected"] += counters.rejected
        counts[f"mode {self.config.scheduler.mode}"] += 1
        counts["keeps a pace"] += self.config.scheduler.keeps_pace

    def _check_deadlines(self) -> None:
        """L8: a request past its deadline ended in the step that came after it."""
        if not self.due:
            return
        now_s = self.engine.scheduler.state.now_s
        for rid in [rid for rid in self.due if rid not in self.live]:
            self.due.discard(rid)
        for rid in self.due:
            deadline_s = self.live[rid].deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                raise InvariantViolation("L8", f"request {rid} lives past its deadline {deadline_s}")

    # -- what clients see ----------------------------------------------------------------------------------

    def receive(self, events: StepEvents) -> None:
        clients = self.clients
        for batch in events.tokens:
            for rid, token, index in zip(
                batch.requests.tolist(), batch.tokens.tolist(), batch.index.tolist(), strict=True
            ):
                client = clients[rid]
                if batch.is_injected:
                    client.injected(token, index)
                    continue
                if client.ended is not None or client.before + len(client.tokens) != index:
                    raise InvariantViolation("S20", f"request {rid} got token {index} out of turn")
                client.tokens.append(token)
        for held in events.held:
            self._held(held)
        if not events.finished:
            return
        # No token of a step that was under way comes after an abort.
        for ending in events.finished:
            for batch in events.tokens if ending.reason is FinishReason.ABORT else ():
                if (batch.index[batch.requests == ending.request] >= ending.num_output).any():
                    raise InvariantViolation("S20", f"request {ending.request} got a token out of turn")
        for ending in events.finished:
            self._ended(ending)

    def _held(self, held: Held) -> None:
        """A branch has come to its end, and is kept."""
        client = self.live[held.request]
        self.coverage.counts["hold"] += 1
        if client.stop_at is not None:  # a stop string was found: what came behind it is gone
            client.tokens = client.tokens[: client.stop_at]
            client.stop_at, expected = None, client.tokens
        else:
            expected, reason = self.alone(client)
            if held.reason.value != reason:
                raise InvariantViolation("O1", f"request {held.request} is held for {held.reason.value}")
        if client.tokens != expected or held.num_output != client.before + len(client.tokens):
            raise InvariantViolation(
                "O1", f"request {held.request} is held at {client.tokens}, not {expected}"
            )
        client.held = held

    def _ended(self, ending: Finished) -> None:
        client = self.live.pop(ending.request, None)
        if client is None or client.ended is not None:
            raise InvariantViolation("S20", f"request {ending.request} ended twice")
        client.ended = ending
        self._excuse(client, ending)
        client.check_reason(ending)
        self.pooled.ended(client, ending)
        self.pins.ended(client, ending)
        got = client.tokens
        by_itself = ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if client.held is not None and by_itself:
            expected, reason = got, ending.reason.value
            if (ending.reason, ending.detail) != (client.held.reason, "hold_over"):
                raise InvariantViolation(
                    "O1", f"request {ending.request} was held and ended by {ending.detail}"
                )
        elif client.sampling.pooling is not None:
            expected, reason = [], ending.reason.value
        elif by_itself and (client.stop_at is None or ending.reason is FinishReason.LENGTH):
            expected, reason = self.alone(client)
            if ending.reason.value != reason:
                raise InvariantViolation("O1", f"request {ending.request} ended by {ending.reason.value}")
        else:  # it was ended: what it got is a beginning
            expected, reason = self.alone(client, len(got))
        if got != expected:
            raise InvariantViolation("O1", f"request {ending.request} got {got}, alone it gets {expected}")
        if ending.num_output - client.before != (len(got) if client.stop_at is None else client.stop_at):
            raise InvariantViolation("O4", f"request {ending.request}: {ending.num_output} is not {len(got)}")

    def alone(self, client: Expectation, at_most: int | None = None) -> tuple[list[int], str]:
        """What a client gets from an engine that has nothing else to do."""
        size, before = self.config.kv.block_size, client.before
        stretches = Stretches(client.pictures, client.placed)
        return reference_output(
            client.prompt, client.sampling, at_most, client.seen, size, before, client.start, stretches
        )

    def _excuse(self, client: Expectation, ending: Finished) -> None:
        """Faults that were injected and may have ended this request."""
        if self.hooks.cursed.get(ending.request) or self.runner.steps_failed > 1:
            client.told.add("internal_error")
        if any(
            self.hooks.cursed.get(number) and client.places(each) for number, each in self.clients.items()
        ):
            client.told.add("internal_error")  # the module that it waits for could not be computed
        if self.runner.nan_rows:
            client.told.add("numerical_error")
        guide = FakeGuide.of(client.sampling, client.seen + len(client.tokens))
        if guide is not None:
            self.coverage.counts["structure broken"] += ending.detail == "grammar_error"
            self.coverage.counts["structure complete"] += guide.is_over
            if guide.breaks:
                client.told.add("grammar_error")

    # -- traffic -------------------------------------------------------------------------------------------

    def _traffic(self) -> None:
        rng, traffic = self.rng, self.traffic
        self.changes.perhaps()
        self.trees.perhaps()
        self.adapters.perhaps()
        self.pins.perhaps()
        if self.slabs.perhaps(self.runner):
            self.receive(self.engine.scheduler.take_events())
        # A request waits now and then, not all the time: to judge the same one in every step shows little.
        if rng.random() < traffic.add and (not len(self.engine.scheduler.state.queue) or rng.random() < 0.1):
            for _ in range(min(rng.randint(1, traffic.burst), traffic.crowd - len(self.live))):
                self._add()
        # One draw says whether anything happens, and what; after it, more may.
        while (draw := rng.random()) < self.acts[-1][0]:
            next(act for bound, act in self.acts if draw < bound)()

    def _acts(self) -> list[tuple[float, Callable[[], None]]]:
        """What may happen beside arrivals, each with the end of its part of [0, 1): as often as its chance says."""
        traffic = self.traffic
        acts = (
            (traffic.flood, self._flood),
            (traffic.abort, self._abort),
            (traffic.fork, self._fork),
            (traffic.prune, self._prune),
            (traffic.preempt, self._preempt),
            (traffic.pause, self._pause),
            (traffic.block, self._block),
            (traffic.reprioritize, self._reprioritize),
            (traffic.deadline, self._deadline),
            (traffic.stop_string, self._stop_string),
            (traffic.reset_cache, self.engine.scheduler.reset_prefix_cache),
        )
        bounds = accumulate(chance for chance, _ in acts)
        total = 1 + sum(chance for chance, _ in acts)
        return [(bound / total, act) for bound, (_, act) in zip(bounds, acts, strict=True)]

    def _add(self) -> None:
        rng, traffic, longest = self.rng, self.traffic, self.config.scheduler.max_model_len
        length = rng.randint(1, traffic.longest_prompt)
        shared = rng.randint(0, length)
        if self.config.kv.cache_on_host and rng.random() < 0.8:
            shared = length  # what was evicted is asked for again
        prompt = rng.choice(self.prefixes)[:shared] + [rng.randrange(1000) for _ in range(length - shared)]
        modules = self.contexts.draw(prompt)
        length = len(prompt)
        if not modules and rng.random() < 0.1:  # the same blocks after another beginning are other blocks
            prompt[0] = rng.randrange(1000)
        room = longest - length if rng.random() < 0.99 else longest
        most = max(1, min(room, traffic.longest_output))
        sampling = SamplingParams(
            max_tokens=rng.randint(1, most) if rng.random() < 0.3 else most,
            n=rng.choice((1, 1, 1, 1, 2, 3)) if traffic.fork else 1,
            seed=rng.randrange(1 << 40),
            stop_token_ids=(int(VOCAB * traffic.stop_chance),) if traffic.stop_chance else (),
        )
        tenant = f"tenant-{rng.randrange(traffic.num_tenants)}"
        self.shortage.now = False
        self.admissions.begin()
        sampling = self.objectives.of(sampling)
        service_level = self.objectives.service_level(rng.choice((0, 0, 0, 1, 2)))
        if rng.random() < traffic.guided_share:
            sampling = replace(sampling, structured_outputs=self._structure())
        if self.drops_kv and self.keep_rng.random() < 0.6:
            size = self.config.kv.block_size
            first, recent = self.keep_rng.randint(0, 2 * size), self.keep_rng.randint(1, 4 * size)
            sampling = replace(sampling, kv_keep=KVKeep(first=first, recent=recent))
        sampling, limits = self.trees.sampling(sampling), self.trees.limits()
        sampling = self.pins.sampling(self.pooled.sampling(sampling))
        media = [] if modules else self.media.draw(prompt)
        modules = [] if sampling.pooling is not None else modules
        is_module = self.contexts.is_on and self.pins.computes(sampling)
        if is_module:
            prompt, media, modules = self.contexts.text(), [], []
        try:
            ids = self.engine.add(
                prompt,
                sampling,
                tenant=tenant,
                service_level=service_level,
                tree=limits,
                adapter=self.adapters.choose(),
                media=media,
                modules=modules,
                is_module=is_module,
            )
        except REFUSALS:
            self.admissions.check_refusal()
            return
        self._check_queue()
        for rid in ids:
            self.expect(rid, prompt, tenant)
            request = self.engine.scheduler.state.requests[rid]
            self.clients[rid].pictures = self.media.expect(request, media, tenant)
            self.clients[rid].placed = placed_of(request)

    def _structure(self) -> Structure:
        rng = self.guide_rng
        return Structure(kind="regex", source=f"{rng.randrange(1000)}:{rng.choice((1, 2, 4, 9, 20, 60))}")

    def _flood(self) -> None:
        for _ in range(self.config.scheduler.max_queue - len(self.engine.scheduler.state.queue) + 2):
            self._add()

    def _check_queue(self) -> None:
        """L7: what was just accepted fits into the queue."""
        queue, config = self.engine.scheduler.state.queue, self.config.scheduler
        if len(queue) > config.max_queue or queue.num_tokens > config.max_queue_tokens:
            raise InvariantViolation("L7", f"{len(queue)} requests, {queue.num_tokens} tokens are waiting")

    def expect(self, rid: RequestId, prompt: list[int], tenant: str) -> None:
        request = self.engine.scheduler.state.requests[rid]
        client = Expectation(prompt, request.sampling, tenant, deadline_s=request.deadline_s)
        client.start = self.adapters.start(request.adapter)
        self.clients[rid] = self.live[rid] = client
        self.due |= {rid} if request.deadline_s is not None else set()
        if self.trouble.cursed and self.rng.random() < self.trouble.cursed:
            self.hooks.cursed[rid] = self.rng.choice(("admit", "new_keys", "extend", "publish", "finish"))

    def _pick(self, *states: RequestState) -> Request | None:
        requests = self.engine.scheduler.state.requests
        if not requests:
            return None
        for _ in range(4):
            request = requests[self.rng.choice(list(requests))]
            if request.id >= OWN_REQUESTS:  # no client knows of it
                continue
            if not states or request.state in states:
                return request
        return None

    def _abort(self) -> None:
        request = self._pick()
        if request is not None:
            state = self.engine.scheduler.state
            in_flight = request.row >= 0 and bool(state.flights)
            self.coverage.counts["abort in flight"] += in_flight
            self.live[request.id].told.add("abort")
            self.engine.abort(request.id)
            self.engine.abort(request.id)  # S19: twice is once
            self.receive(self.engine.scheduler.take_events())

    def _fork(self) -> None:
        request = self._pick(RequestState.RUNNING)
        if request is None:
            return
        tokens = self.engine.scheduler.tokens_of(request.id).tolist()
        if len(tokens) >= self.config.scheduler.max_model_len:
            return
        self.admissions.begin()
        try:
            ids = self.engine.fork(request.id, self.rng.choice((1, 2)))
        except (*REFUSALS, InvalidTransition):
            self.admissions.check_refusal()
            return
        self._check_queue()
        parent = self.clients[request.id]
        for rid in ids:
            self.expect(rid, tokens, parent.tenant)
            self.clients[rid].seen = parent.seen + len(tokens) - len(parent.prompt)
            branch = self.engine.scheduler.state.requests[rid]
            self.clients[rid].pictures, self.clients[rid].placed = parent.pictures, placed_of(branch)

    def _prune(self) -> None:
        state = self.engine.scheduler.state
        branches = sorted(child for children in state.children.values() for child in children)
        if branches:
            branch = self.rng.choice(branches)
            if branch in self.live:
                self.live[branch].told.add("pruned")
            self.coverage.counts["prune"] += self.engine.prune(branch)
            self.receive(self.engine.scheduler.take_events())

    def _preempt(self) -> None:
        request = self._pick(RequestState.RUNNING)
        if request is not None:
            self.engine.scheduler.preempt(request.id, swap=self.rng.random() < 0.5)

    def _pause(self) -> None:
        scheduler = self.engine.scheduler
        for paused in list(scheduler.state.requests.values()):
            if paused.state is RequestState.PAUSED and self.rng.random() < 0.5:
                scheduler.resume(paused.id)
        request = self._pick()
        if request is not None:
            with contextlib.suppress(InvalidTransition):
                scheduler.pause(request.id, swap=self.rng.choice((None, False, True)))

    def _block(self) -> None:
        scheduler = self.engine.scheduler
        for blocked in list(scheduler.state.requests.values()):
            if blocked.id in self.blocked and self.rng.random() < 0.5:
                scheduler.unblock(blocked.id)
        request = self._pick(RequestState.WAITING)
        if request is not None:
            deadline = self.clock.now() + 0.05 if self.rng.random() < 0.3 else None
            if deadline is not None:
                self.live[request.id].told.add("grammar_timeout")
            scheduler.block(request.id, BlockReason.GRAMMAR, deadline)
            self.blocked.add(request.id)

    def _reprioritize(self) -> None:
        request = self._pick()
        if request is not None:
            self.engine.scheduler.set_priority(request.id, self.rng.choice((-1, 0, 3)))

    def _deadline(self) -> None:
        request = self._pick()
        if request is not None:
            soon = self.clock.now() + self.rng.choice((0.0, 0.02, 0.5))
            self.engine.scheduler.set_deadline(request.id, self.rng.choice((soon, None)))
            self.live[request.id].deadline_s = request.deadline_s
            self.due.add(request.id)

    def _stop_string(self) -> None:
        request = self._pick()
        client = self.live.get(request.id) if request is not None else None
        if request is not None and client is not None and client.tokens:
            client.stop_at = self.rng.randint(1, len(client.tokens))
            if client.held is not None and client.stop_at == len(client.tokens):
                client.stop_at = None  # it ends there already
                return
            self.engine.scheduler.finish_at(request.id, client.before + client.stop_at)
            self.receive(self.engine.scheduler.take_events())
