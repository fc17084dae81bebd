"""One model of the engine's process: its engine, the frames about its requests, and what it has to tell.

Frames come in decoded and go out as payloads; the socket, the turns of models and their sleep are `engine_service`'s
business. A request that raises is answered alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.adapter import AdapterInfo
from paceline.core.counters import SlabUse
from paceline.core.events import NOT_FINITE, Finished, Forecast, StepEvents
from paceline.core.request import BlockKey, ChangeOutcome, FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import MediaInput, MediaPart
from paceline.engine.changes import apply_change, resume_all
from paceline.engine.conductor import Seat
from paceline.engine.reports import gauges_of, told_cache_of
from paceline.engine.snapshot import levels_below
from paceline.engine.stepper import Stepper
from paceline.errors import EngineFailed, InvalidAdapter, InvalidRequest, PacelineError, QueueFull
from paceline.factory import LoadedModel
from paceline.kv.prefix import PrefixCache
from paceline.process import far, frames
from paceline.process.client import EngineStats, Explanation, Steering
from paceline.process.frames import rejected_with
from paceline.process.keys_ahead import KEYS_LOOK_S, LONG_PROMPT, KeysAhead
from paceline.process.kv_events import KVEventPublisher
from paceline.process.live_view import LiveView
from paceline.process.outbox import Outbox
from paceline.routing.prefix_map import KEY_BYTES
from paceline.runner.machine_load import LoadNotices
from paceline.scheduler.invariants import SampledChecker
from paceline.scheduler.policy import POLICY_OPTIONS
from paceline.scheduler.scheduler import Scheduler

# Turning the dial and changing the policy of an engine that serves, in its own process, and saying how it stands.
#
# What is asked for comes as a frame; a mistake in it is an answer, never the end of the engine. Knows the
# scheduler's two inputs for it and nothing of sockets.


def steer(scheduler: Scheduler, request: frames.Steer) -> frames.Steered:
    """Make the changes of a request, if it has any, and answer."""
    rejected = None
    try:
        if request.dial is not None:
            scheduler.set_dial(request.dial)
        if request.policy is not None:
            # Without a name, other options of the policy there is.
            name = request.policy.name or scheduler.state.config.scheduling_policy
            scheduler.set_policy(name, **request.policy.options)
    except PacelineError as error:
        rejected = rejected_with(error)
    return frames.Steered(request.question, steering_of(scheduler), rejected)


def steering_of(scheduler: Scheduler) -> Steering:
    """How it stands now."""
    config = scheduler.state.config
    options = {name: getattr(config, name) for name in sorted(POLICY_OPTIONS)}
    return Steering(
        dial=scheduler.state.dial.status(), policy=config.scheduling_policy, policy_options=options
    )


OLDEST_SUBMISSION_S = 3600.0
LONGEST_TIMEOUT_S = 1e9
MOST_TREE_BRANCHES = 256
MOST_DECISIONS = 256  # newest decisions in one answer: it has to fit into a frame
MOST_NEWS = 2048  # blocks that one turn tells of: 16 KiB
NUMERICAL_ERROR = "numerical_error"
# In a row, and for all their rows: then damaged weights are loaded again.
MOST_STEPS_WITHOUT_A_NUMBER = 2

_logger = logging.getLogger("paceline")


class ModelService:
    """Serves one engine."""

    def __init__(
        self, loaded: LoadedModel, configure: frames.Configure, seat: Seat, num_rejects: Callable[[], int]
    ) -> None:
        engine = self.engine = loaded.engine
        self.sleeper = loaded.sleeper
        self._seat = seat
        self._num_rejects = num_rejects
        self._vocab_size = loaded.checkpoint.spec.vocab_size
        self._take_pace(configure)
        self._pixels_of, self._pixels = 0, bytearray()  # of a request that is on its way
        self._keys_ahead = KeysAhead[frames.Add, frames.ToModel]()
        self._answers: deque[frames.Answer | frames.PrefixNews] = deque()
        self._told_cache: PrefixCache | None = None  # where changes of it are told
        self._is_in_fleet = False
        self._publisher: KVEventPublisher | None = None
        self._share_names(configure.fleet_key)
        self._live_view = LiveView(engine, loaded.cpu_work)
        self._stepper = Stepper(engine, self._on_events)
        engine.on_forecast = self._send_forecast
        self._steps_without_a_number = 0
        self._free = loaded.free
        self._cpu_work = loaded.cpu_work
        load = None if loaded.free is None else loaded.free.load
        self._load_notices = None if load is None else LoadNotices(load, reported_busy=load.is_busy)
        self.tells_load = True  # of the machine; one of several models does
        self.slabs: Callable[[], SlabUse] = SlabUse  # of the memory that models share
        self.sleeps = self.wakes = 0
        self.last_wake_s = 0.0
        self._busy_s = 0.0
        self._was_busy = False
        self._draining = False  # no request may be paused any more
        self._has_news = False  # something came in since the last step
        self._due_s = 0.0  # when a step may find something again, while requests wait for a moment in time

    def _take_pace(self, front: frames.Configure | frames.Join) -> None:
        self._is_far = isinstance(front, frames.Join)  # its clock is another
        self._outbox = Outbox(front.max_frame_bytes)
        self._heartbeat_s = front.heartbeat_s
        self._stats_interval_s = min(front.stats_interval_s, front.heartbeat_s)
        self.next_report_s = 0.0

    def meet(self, front: frames.Join) -> None:
        """Another front comes: end what the last one asked for, and forget what it was to be told."""
        self.abort_all()
        while not self.engine.is_asleep and self._stepper.wait_s() == 0:
            self._stepper.step()  # what was being computed
        self._answers.clear()
        self._draining = self._has_news = self._was_busy = False
        self._take_pace(front)
        self._share_names(front.fleet_key)

    def _share_names(self, fleet_key: bytes) -> None:
        """Name prefixes as a fleet does, and tell of them; what is cached under other names is not found again."""
        if not fleet_key:
            return
        self._is_in_fleet = True
        cache = self._note_changes()
        while cache.has_news:  # another front's
            cache.take_news(MOST_NEWS)
        key = self.engine.use_prefix_key(fleet_key)
        if key != fleet_key:
            self._answers.append(frames.PrefixNews(key=key))

    # -- its turns -----------------------------------------------------------------------------------------

    def nap_s(self, now_s: float) -> float | None:
        """How long it has nothing to do unless something comes in: 0 to step now, None for as long as nothing comes."""
        if self._has_news:
            return 0.0
        wait_s = None if self.engine.is_asleep else self._stepper.wait_s()
        nap_s = wait_s if not wait_s else max(0.0, self._due_s - now_s)
        if not self._keys_ahead:
            return nap_s
        return KEYS_LOOK_S if nap_s is None else min(nap_s, KEYS_LOOK_S)

    def step(self) -> float:
        """One step; returns the seconds it took."""
        started_s = time.monotonic()
        self._has_news = False
        self._stepper.wake()
        self._stepper.step()
        now_s = time.monotonic()
        self._due_s = now_s + (self._stepper.wait_s() or 0.0)
        self._busy_s += now_s - started_s
        return now_s - started_s

    def deliver_rest(self) -> None:
        """Hand on what is known without a step: of a model that sleeps, or of an engine that gave up."""
        self._has_news = False
        self._stepper.deliver_rest()

    def _on_events(self, events: StepEvents) -> None:
        """Hand on what a step made known. Raises EngineFailed when the model computes nothing but nonsense."""
        self._outbox.put(events)
        if events.tokens:
            self._steps_without_a_number = 0
        elif any(ending.detail == NUMERICAL_ERROR for ending in events.finished):
            self._steps_without_a_number += 1
            if self._steps_without_a_number >= MOST_STEPS_WITHOUT_A_NUMBER:
                raise EngineFailed(NOT_FINITE)

    # -- what it tells -------------------------------------------------------------------------------------

    def report_when_due(self, now_s: float) -> None:
        """Gauges, a few times a second; at the end of work at once: an idle engine has gauges of zero."""
        is_busy = self.engine.has_requests
        if now_s < self.next_report_s and self._was_busy == is_busy:
            return
        self._was_busy = is_busy
        self.next_report_s = now_s + (self._stats_interval_s if is_busy else self._heartbeat_s)
        self._check_load()
        self._outbox.stats = self._stats()

    def _stats(self) -> EngineStats:
        """The gauges of this moment. The counters are the scheduler's own, read when the frame is encoded."""
        engine, state, checker = self.engine, self.engine.scheduler.state, self.engine.checker
        pools, drafts = [group.pool for group in state.kv.groups], state.drafts
        return EngineStats(
            running=state.rows.num_live,
            waiting=len(state.queue),
            blocks_used=sum(pool.usable - pool.num_free for pool in pools),
            blocks_total=sum(pool.usable for pool in pools),
            steps=engine.num_submitted,
            busy_s=self._busy_s,
            counters=state.counters,
            caches_prefixes=state.kv.caching,
            violations=sum(checker.violations.values()) if isinstance(checker, SampledChecker) else 0,
            fairness_gap=state.accounting.gap(),
            next_place_s=engine.scheduler.next_place_s(),
            rejected_frames=self._num_rejects(),
            watch_cpu_s=self._live_view.cpu_s,
            cpu_s=time.process_time(),
            dial=state.dial.status(),
            draft_width=0 if drafts is None else drafts.chosen,
            draft_gain=1.0 if drafts is None else drafts.gains(max(state.rows.num_live, 1), drafts.chosen)[1],
            cpu=self._cpu_work(),
            adapters=state.adapters.stats(),
            below=levels_below(state),
            slabs=self.slabs(),
            pins=state.kv.pins.use(),
            media=state.encodings.use(),
            load=gauges_of(engine.scheduler),
            standing=self._seat.standing,
            sleep_level=self._seat.level,
            wakes=self.wakes,
            sleeps=self.sleeps,
            last_wake_s=self.last_wake_s,
        )

    def _check_load(self) -> None:
        """Look at the machine, also while there is nothing to do: the next request finds its threads right."""
        if self._free is None or self._load_notices is None:
            return
        self._free.refresh()
        notice = self._load_notices.take()
        if notice is not None and self.tells_load:
            _logger.warning("%s", notice)

    def note_prefixes(self) -> None:
        """Once a turn: what has changed of the cached prefixes, a bounded part of it. The rest stays noted."""
        cache = self._told_cache
        if cache is None or not cache.has_news or self._answers:
            return
        news = cache.take_news(MOST_NEWS)
        if self._publisher is not None:
            blocks = [cache.by_name[name] for name in news.stored]
            self._publisher.publish(news.evicted, [cache.key_of(block) for block in blocks])
        if self._is_in_fleet:
            columns = [b"".join([name[:KEY_BYTES] for name in names]) for names in news]
            self._answers.append(frames.PrefixNews(*columns))

    def publish_to(self, publisher: KVEventPublisher) -> None:
        """From now on, what is stored and evicted."""
        self._publisher = publisher
        self._note_changes()

    def _note_changes(self) -> PrefixCache:
        self._told_cache = told_cache_of(self.engine.scheduler)
        self._told_cache.take_news(0)
        return self._told_cache

    @property
    def has_answers(self) -> bool:
        """A client waits for what no step has to come before."""
        return self._outbox.has_answers

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._outbox or self._answers)

    def tell(self) -> Iterator[bytes]:
        """Frame after frame; one is taken from what waits when it is asked for."""
        while self._outbox:
            yield self._encoded(self._outbox.take())
        while self._answers:
            yield self._encoded(self._answers.popleft())

    def _encoded(self, frame: frames.Update | frames.PrefixNews | frames.Answer) -> bytes:
        return frames.encode(far.moved(frame, -time.monotonic()) if self._is_far else frame)

    def answer(self, answer: frames.Answer) -> None:
        self._answers.append(answer)

    # -- what the other side asks for ----------------------------------------------------------------------

    def apply(self, message: frames.ToModel) -> None:
        if self._keys_ahead:
            self._keys_ahead.put(message)
        else:
            self._apply(message)

    def catch_up(self, *, wait: bool = False) -> None:
        """Go on with what waited for the keys of a long prompt."""
        if self._keys_ahead:
            self._keys_ahead.take(self._add, self._apply, wait=wait)

    def _apply(self, message: frames.ToModel) -> None:
        self._has_news = True
        if isinstance(message, frames.Add) and self._is_long(message):
            tokens = np.frombuffer(message.tokens, frames.TOKEN).astype(np.int32)
            keys = self.engine.prompt_keys(tokens, message.tenant, message.adapter)
            self._keys_ahead.start(message, keys)
        elif isinstance(message, frames.Add):
            self._add(message)
        elif isinstance(message, frames.Pixels):
            self._keep_pixels(message)
        elif isinstance(message, frames.Fork):
            self._fork(message)
        elif isinstance(message, frames.Abort):
            for branch in message.branches:
                self.engine.abort(RequestId(branch))
        elif isinstance(message, frames.FinishAt):
            self.engine.scheduler.finish_at(RequestId(message.branch), message.num_output)
        elif isinstance(message, frames.Explain):
            branch = RequestId(message.branch)
            explanation = Explanation(
                decisions=list(self.engine.decisions_of(branch)[-MOST_DECISIONS:]),
                is_live=branch in self.engine.scheduler.state.requests,
            )
            self._answers.append(frames.Explained(message.question, explanation))
        elif isinstance(message, frames.Steer):
            self._answers.append(steer(self.engine.scheduler, message))
        elif isinstance(message, frames.Watch):
            self._answers.append(frames.Watched(message.question, self._live_view.snapshot()))
        elif isinstance(message, frames.ChangeBranches):
            self._change(message)
        elif isinstance(message, frames.ExtendBranch):
            self._extend(message)
        elif isinstance(message, frames.Prune):
            ended = [self.engine.prune(RequestId(branch)) for branch in message.branches]
            outcomes = [ChangeOutcome.CHANGED if each else ChangeOutcome.ENDED for each in ended]
            self._answers.append(frames.Changed(message.question, outcomes))
        elif isinstance(message, frames.ShowTree):
            branch = RequestId(message.branch)
            is_live = branch in self.engine.scheduler.state.requests
            found = self.engine.branches_of(branch) if is_live else []
            self._answers.append(frames.TreeShown(message.question, found[:MOST_TREE_BRANCHES]))
        elif isinstance(message, frames.LoadAdapter):
            self._load_adapter(message)
        elif isinstance(message, frames.EndPin):
            self.engine.scheduler.unpin(message.tenant, message.name)
        elif isinstance(message, frames.UnloadAdapter):
            self.engine.unload_adapter(message.number)

    def drain(self) -> None:
        """No request will follow: paused requests continue, and none is paused any more."""
        self._draining = self._has_news = True
        resume_all(self.engine.scheduler)

    def abort_all(self) -> None:
        self.catch_up(wait=True)
        for request_id in list(self.engine.scheduler.state.requests):
            self.engine.abort(request_id)

    def _keep_pixels(self, message: frames.Pixels) -> None:
        """Until their request comes, which is the next; one that never comes leaves its bytes to be dropped here."""
        if message.first != self._pixels_of:
            self._pixels_of, self._pixels = message.first, bytearray()
        self._pixels += message.data

    def _media(self, add: frames.Add) -> list[MediaPart]:
        """What the request's pictures are made from. Raises InvalidRequest where bytes are missing."""
        pixels = self._pixels if self._pixels_of == add.first else bytearray()
        self._pixels_of, self._pixels = 0, bytearray()
        parts: list[MediaPart] = []
        at = 0
        for item in add.media:
            size = math.prod(item.shape)
            if at + size > len(pixels):
                raise InvalidRequest("the pixels of a picture did not arrive", param="messages")
            found = np.frombuffer(pixels, np.uint8, size, at).reshape(item.shape)
            given = MediaInput(
                content=item.content, units=item.units, outputs=item.outputs, pixels=found, grid=item.grid
            )
            parts.append(MediaPart(item.start, given))
            at += size
        return parts

    def _is_long(self, add: frames.Add) -> bool:
        """Whether its keys are made beside steps. Pictures and modules have a part in them, and are few."""
        is_whole = not len(add.tokens) % frames.TOKEN.itemsize
        num_tokens = len(add.tokens) // frames.TOKEN.itemsize
        is_plain = not (add.media or add.modules or add.is_module)
        return is_whole and num_tokens >= LONG_PROMPT and is_plain and add.sampling.prompt_logprobs is None

    def _add(self, add: frames.Add, keys: Sequence[BlockKey] | None = None) -> None:
        try:
            media = self._media(add)
            tokens = self._tokens(add.tokens)
            sampling = add.sampling.params()
            sampling.check_vocabulary(self._vocab_size)
            _check_logprobs(sampling)
            if add.left_s is not None and not 0 <= add.left_s < LONGEST_TIMEOUT_S:
                raise InvalidRequest("the timeout is no time a request could take", param="timeout")
            service_level = ServiceLevel(add.service_class, add.priority)
            modules = [each.part for each in add.modules]
            if add.only_forecast:
                forecast = self.engine.forecast(
                    tokens,
                    sampling,
                    tenant=add.tenant,
                    service_level=service_level,
                    adapter=add.adapter,
                    media=media,
                    modules=modules,
                    keys=keys,
                )
                self._send_forecast(add.first, forecast)
                return
            now_s = time.monotonic()
            sent_s = (
                now_s
                if add.sent_s is None or not 0 <= now_s - add.sent_s < OLDEST_SUBMISSION_S
                else add.sent_s
            )
            age_s = add.age_s if 0 <= add.age_s < OLDEST_SUBMISSION_S else 0.0
            self.engine.number_from(RequestId(add.first))
            self.engine.add(
                tokens,
                sampling,
                tenant=add.tenant,
                service_level=service_level,
                arrival_s=sent_s - age_s,
                deadline_s=None if add.left_s is None else sent_s + add.left_s,
                tree=add.tree,
                adapter=add.adapter,
                media=media,
                modules=modules,
                is_module=add.is_module,
                keys=keys,
                outputs=self._outputs(add),
            )
        except PacelineError as error:
            place_s = self.engine.scheduler.next_place_s() if isinstance(error, QueueFull) else None
            self._outbox.rejections.append(rejected_with(error, add.first, place_s=place_s))
        except Exception:
            _logger.exception("request %d could not be added", add.first)
            if add.only_forecast:
                self._send_forecast(add.first, None)
            else:
                num_prompt = len(add.tokens) // frames.TOKEN.itemsize
                self._fail(add.first, max(1, add.sampling.n), num_prompt)

    def _outputs(self, add: frames.Add) -> list[list[int] | None] | None:
        """What is known of each branch; None: nothing, the request is new."""
        columns = add.outputs
        return [each if each is None else self._tokens(each, "outputs").tolist() for each in columns] or None

    def _fork(self, fork: frames.Fork) -> None:
        try:
            self.engine.number_from(RequestId(fork.first))
            self.engine.fork(
                RequestId(fork.parent),
                fork.count,
                at=fork.at,
                append=self._tokens(fork.append, "append").tolist(),
                score=fork.score,
                changes=fork.changes,
            )
        except PacelineError as error:
            self._outbox.rejections.append(rejected_with(error, fork.first))
        except Exception:
            _logger.exception("branches of request %d could not be made", fork.parent)
            self._fail(fork.first, fork.count, 0)

    def _extend(self, extend: frames.ExtendBranch) -> None:
        rejected = None
        try:
            tokens = self._tokens(extend.tokens, "tokens").tolist()
            modules = [each.part for each in extend.modules]
            self.engine.extend(
                RequestId(extend.branch), tokens, max_tokens=extend.max_tokens, modules=modules
            )
        except PacelineError as error:
            rejected = rejected_with(error, extend.branch)
        except Exception:
            _logger.exception("request %d could not be extended", extend.branch)
            self.engine.scheduler.fail(RequestId(extend.branch), "internal_error")
        self._answers.append(frames.Extended(extend.question, rejected))

    def _load_adapter(self, load: frames.LoadAdapter) -> None:
        def answer(found: AdapterInfo | PacelineError) -> None:
            info, rejected = (
                (None, rejected_with(found)) if isinstance(found, PacelineError) else (found, None)
            )
            self._answers.append(frames.AdapterLoaded(load.question, load.number, info, rejected))

        adapters, folder = self.engine.adapters, Path(load.folder)
        try:
            if load.identity:  # requests with this number follow: it was there before this engine
                answer(adapters.load(load.name, folder, number=load.number, identity=load.identity))
            else:
                adapters.load_later(load.name, folder, load.number, answer)
        except PacelineError as error:
            answer(error)
        except Exception:
            _logger.exception("the adapter %s could not be loaded", load.name)
            answer(InvalidAdapter("the adapter could not be loaded; the log has more"))

    def _send_forecast(self, first: int, forecast: Forecast | None) -> None:
        # Counted from when the HTTP process sent the request: the client counts from there too.
        if forecast is not None:
            delay_s = 0.0 if self._seat.standing is Standing.AWAKE else self._seat.wake_s
            forecast = forecast.since_arrival().later(delay_s)
        self._outbox.forecasts.append((first, forecast))

    def _change(self, message: frames.ChangeBranches) -> None:
        change = message.change
        if change.paused and self._draining:
            change = replace(change, paused=None)
        outcomes = [apply_change(self.engine, RequestId(branch), change) for branch in message.branches]
        self._answers.append(frames.Changed(message.question, outcomes))

    def _tokens(self, column: bytes, name: str = "prompt") -> NDArray[np.int32]:
        if len(column) % frames.TOKEN.itemsize:
            raise InvalidRequest(f"{name} is no list of token ids", param=name)
        tokens = np.frombuffer(column, frames.TOKEN).astype(np.int32)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise InvalidRequest(f"a token id of {name} is not in [0, {self._vocab_size})", param=name)
        return tokens

    def _fail(self, first: int, count: int, num_prompt: int) -> None:
        """Something of ours broke while a request was added: it ends alone."""
        for branch in map(RequestId, range(first, first + count)):
            if not self.engine.abort(branch):
                ending = Finished(
                    request=branch,
                    reason=FinishReason.ERROR,
                    detail="internal_error",
                    time_s=time.monotonic(),
                    num_prompt=num_prompt,
                    num_output=0,
                    num_cached=0,
                    preemptions=0,
                )
                self._outbox.endings.append(ending)


def _check_logprobs(sampling: SamplingParams) -> None:
    """A token's logprobs must fit into a frame: those of a whole vocabulary may not."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) == -1:
            raise InvalidRequest(f"{name} of the whole vocabulary are not available here", param=name)
