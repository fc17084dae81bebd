"""The engine's main loop in its own process: take what arrived, step, tell what became known.

One thread does everything. Between two steps it looks at the socket once without waiting; while there is nothing to
do it sleeps on it. A sign of life goes out with the news of a step, by itself when there are none, and between the
layers of a long step: it comes from the thread that computes, so that a step that hangs is noticed and one that only
takes long is not. A request that raises is answered alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.dial import DialSetting
from paceline.core.events import NOT_FINITE, StepEvents
from paceline.core.request import Change, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import Urgency
from paceline.engine.engine import Engine, apply_change, resume_all
from paceline.engine.stepper import Stepper
from paceline.errors import EngineFailed, InvalidRequest, PacelineError, QueueFull
from paceline.factory import LoadedModel
from paceline.process import frames
from paceline.process.channel import Channel, ChannelClosed
from paceline.process.client import EngineStats, Steering
from paceline.process.engine_logs import LogQueue
from paceline.process.frames import refusal_of
from paceline.process.live_view import LiveView
from paceline.process.outbox import Outbox
from paceline.runner.machine_load import LoadNews
from paceline.scheduler.forecast import Forecast
from paceline.scheduler.invariants import SampledChecker
from paceline.scheduler.policy import POLICY_OPTIONS
from paceline.scheduler.scheduler import Scheduler

# Turning the dial and changing the policy of an engine that serves, in its own process, and saying how it
# stands.


def steer(scheduler: Scheduler, asked: frames.Steer) -> frames.Steered:
    """Do what is asked, if anything is, and answer."""
    refusal = None
    try:
        if asked.dial is not None:
            kind, value = asked.dial
            scheduler.set_dial(DialSetting(kind=kind, value=value))
        if asked.policy is not None:
            name, options = asked.policy
            _change_policy(scheduler, name, options)
    except PacelineError as error:
        refusal = refusal_of(0, error)
    return frames.Steered(asked.question, steering_of(scheduler), refusal)


def _change_policy(scheduler: Scheduler, name: str, options: Mapping[str, float | str]) -> None:
    """Without a name, other options of the policy there is."""
    scheduler.set_policy(name or scheduler.state.config.scheduling_policy, **options)


def steering_of(scheduler: Scheduler) -> Steering:
    """How it stands now."""
    config = scheduler.state.config
    options = {name: getattr(config, name) for name in sorted(POLICY_OPTIONS)}
    return Steering(
        dial=scheduler.state.dial.status(), policy=config.scheduling_policy, policy_options=options
    )


FAREWELL_S = 1.0  # how long the last news may take to leave
OLDEST_SUBMISSION_S = 3600.0
LONGEST_TIMEOUT_S = 1e9
MOST_TOLD = 256  # newest decisions in one answer: it has to fit into a frame
NUMERICAL_ERROR = "numerical_error"
# In a row, and for all their rows: then damaged weights are loaded again.
MOST_STEPS_WITHOUT_A_NUMBER = 2

_SIGN_OF_LIFE = frames.encode(frames.News(0.0))
_logger = logging.getLogger("paceline")


class EngineService:
    """Serves one engine over one channel."""

    def __init__(
        self,
        loaded: LoadedModel,
        channel: Channel,
        configure: frames.Configure,
        logs: LogQueue,
    ) -> None:
        engine = self._engine = loaded.engine
        self._logs = logs
        self._channel = channel
        self._vocab_size = loaded.checkpoint.spec.vocab_size
        self._outbox = Outbox(configure.max_frame_bytes)
        self._answers: deque[frames.Answer] = deque()
        self._live_view = LiveView(engine)
        self._stepper = Stepper(engine, self._tell)
        engine.on_forecast = self._foretell
        self._steps_without_a_number = 0
        self._heartbeat_s = configure.heartbeat_s
        self._stats_interval_s = min(configure.stats_interval_s, configure.heartbeat_s)
        self._next_report_s = self._next_sign_s = 0.0
        loaded.pulse.on_beat = self._sign_of_life
        self._free = loaded.free
        load = None if loaded.free is None else loaded.free.load
        self._load_news = None if load is None else LoadNews(load, said_busy=load.is_busy)
        self._busy_s = 0.0
        self._was_busy = False
        self._stopping = False
        self._draining = False  # nobody may be paused any more

    def run(self) -> int:
        """Serve until told to stop or left alone; returns the exit code of the process."""
        try:
            while not self._stopping:
                self._turn()
            self._say_farewell()
            return 0
        except ChannelClosed:  # nobody is left to answer
            self._abort_all()
            return 0
        except Exception as error:
            _logger.exception("the engine gives up")
            self._stepper.tell_rest()
            self._say_farewell(frames.Failed(_one_line(error)))
            return 70

    def _turn(self) -> None:
        nap_s = self._stepper.wait_s()
        if nap_s != 0:
            self._sleep(nap_s)
            self._stepper.wake()
        payloads = self._channel.receive()
        for payload in payloads:
            self._apply(payload)
        if self._outbox.has_answers:
            self._deliver()
        started_s = time.monotonic()
        if payloads or nap_s is not None:
            self._stepper.step()
        now_s = time.monotonic()
        self._busy_s += now_s - started_s
        if now_s >= self._next_report_s or self._was_busy != self._engine.has_requests:
            self._report(now_s)  # at the end of work at once: an idle engine has gauges of zero
        self._deliver()

    def _tell(self, events: StepEvents) -> None:
        """Hand on what a step made known. Raises EngineFailed when the model computes nothing but nonsense."""
        self._outbox.put(events)
        if events.tokens:
            self._steps_without_a_number = 0
        elif any(ending.detail == NUMERICAL_ERROR for ending in events.finished):
            self._steps_without_a_number += 1
            if self._steps_without_a_number >= MOST_STEPS_WITHOUT_A_NUMBER:
                raise EngineFailed(NOT_FINITE)

    def _sleep(self, nap_s: float | None) -> None:
        left_s = max(0.0, self._next_report_s - time.monotonic())
        self._channel.wait(left_s if nap_s is None else min(nap_s, left_s))

    def _sign_of_life(self) -> None:
        """Called while a step computes. Only an empty message: the news of a step are complete when it is."""
        now_s = time.monotonic()
        if now_s < self._next_sign_s:
            return
        self._next_sign_s = now_s + self._heartbeat_s
        with suppress(ChannelClosed):  # found again between two steps
            if self._channel.is_free:
                self._channel.send(_SIGN_OF_LIFE)

    def _report(self, now_s: float) -> None:
        is_busy = self._was_busy = self._engine.has_requests
        self._next_report_s = now_s + (self._stats_interval_s if is_busy else self._heartbeat_s)
        self._tell_of_load()
        rejected = self._channel.rejects.total
        stats = stats_of(self._engine, self._busy_s, rejected)
        self._outbox.put_stats(replace(stats, watch_cpu_s=self._live_view.cpu_s, cpu_s=time.process_time()))

    def _tell_of_load(self) -> None:
        """Look at the machine, also while there is nothing to do: the next request finds its threads right."""
        if self._free is None or self._load_news is None:
            return
        self._free.look()
        news = self._load_news.take()
        if news is not None:
            _logger.warning("%s", news)

    def _deliver(self) -> None:
        """Send as much as the socket takes; the rest waits, and what comes meanwhile is joined to it."""
        while self._outbox and self._channel.is_free:
            self._channel.send(frames.encode(self._outbox.take()))
        while self._answers and self._channel.is_free:
            self._channel.send(frames.encode(self._answers.popleft()))
        self._logs.send(self._channel)

    # -- what the other side asks for ----------------------------------------------------------------------

    def _apply(self, payload: bytes) -> None:
        try:
            message = frames.decode_to_engine(payload)
        except frames.BadFrame as error:
            self._channel.rejects.undecodable += 1
            _logger.warning("a frame was not understood: %s", _one_line(error))
            return
        if isinstance(message, frames.Add):
            self._add(message)
        elif isinstance(message, frames.Abort):
            for branch in message.branches:
                self._engine.abort(RequestId(branch))
        elif isinstance(message, frames.FinishAt):
            self._engine.scheduler.finish_at(RequestId(message.branch), message.num_output)
        elif isinstance(message, frames.Explain):
            branch = RequestId(message.branch)
            known = self._engine.decisions_of(branch)[-MOST_TOLD:]
            told = [frames.ToldDecision.of(decision) for decision in known]
            is_live = branch in self._engine.scheduler.state.requests
            self._answers.append(frames.Explained(message.question, told, is_live))
        elif isinstance(message, frames.Steer):
            self._answers.append(steer(self._engine.scheduler, message))
        elif isinstance(message, frames.Look):
            self._answers.append(frames.Seen(message.question, self._live_view.look()))
        elif isinstance(message, frames.Change):
            self._change(message)
        elif isinstance(message, frames.Drain):
            self._draining = True
            resume_all(self._engine.scheduler)
        elif isinstance(message, frames.Ping):
            self._next_report_s = 0.0
        elif isinstance(message, frames.Stop):
            self._stopping = True
        else:
            self._channel.rejects.undecodable += 1  # a second configuration

    def _add(self, add: frames.Add) -> None:
        try:
            tokens = self._tokens(add.tokens)
            sampling = add.sampling.params()
            sampling.check_vocabulary(self._vocab_size)
            _check_logprobs(sampling)
            if add.timeout_s is not None and not 0 <= add.timeout_s < LONGEST_TIMEOUT_S:
                raise InvalidRequest("the timeout is no time a request could take", param="timeout")
            urgency = Urgency(add.service_class, add.priority)
            if add.asks:
                forecast = self._engine.forecast(tokens, sampling, tenant=add.tenant, urgency=urgency)
                self._foretell(add.first, forecast)
                return
            now_s = time.monotonic()
            age_s = now_s - add.submitted_s
            submitted_s = add.submitted_s if 0 <= age_s < OLDEST_SUBMISSION_S else now_s
            self._engine.add(
                tokens,
                sampling,
                tenant=add.tenant,
                urgency=urgency,
                arrival_s=submitted_s,
                deadline_s=None if add.timeout_s is None else submitted_s + add.timeout_s,
                first_id=RequestId(add.first),
            )
        except PacelineError as error:
            place_s = self._engine.scheduler.next_place_s() if isinstance(error, QueueFull) else None
            self._outbox.put_refusal(refusal_of(add.first, error, place_s))
        except Exception:
            _logger.exception("request %d could not be added", add.first)
            if add.asks:
                self._foretell(add.first, None)
            else:
                self._fail(add)

    def _foretell(self, first: int, forecast: Forecast | None) -> None:
        if forecast is None:
            self._outbox.put_told(frames.Told(first, None, None, 0))
            return
        # Counted from when the other process sent it: whoever waits counts from there too.
        first_s, finish_s = forecast.first_token_s, forecast.finish_s
        told = frames.Told(
            first,
            forecast.waited_s + first_s,
            forecast.waited_s + finish_s,
            forecast.ahead,
            forecast.num_cached,
            forecast.num_output,
        )
        self._outbox.put_told(told)

    def _change(self, message: frames.Change) -> None:
        paused = None if message.paused and self._draining else message.paused
        change = Change(priority=message.priority, until_s=message.until_s, paused=paused)
        outcomes = [
            apply_change(self._engine.scheduler, RequestId(branch), change) for branch in message.branches
        ]
        self._answers.append(frames.Changed(message.question, outcomes))

    def _tokens(self, column: bytes) -> NDArray[np.int32]:
        if len(column) % frames.TOKEN.itemsize:
            raise InvalidRequest("the prompt is no list of token ids", param="prompt")
        tokens = np.frombuffer(column, frames.TOKEN).astype(np.int32)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise InvalidRequest(
                f"a token id of the prompt is not in [0, {self._vocab_size})", param="prompt"
            )
        return tokens

    def _fail(self, add: frames.Add) -> None:
        """Something of ours broke while a request was added: it ends alone."""
        for branch in range(add.first, add.first + max(1, add.sampling.n)):
            if not self._engine.abort(RequestId(branch)):
                sizes = (len(add.tokens) // frames.TOKEN.itemsize, 0, 0, 0)
                ending = frames.BranchEnding(branch, "error", "internal_error", time.monotonic(), *sizes, 0.0)
                self._outbox.put_ending(ending)

    # -- the end -------------------------------------------------------------------------------------------

    def _abort_all(self) -> None:
        for request_id in list(self._engine.scheduler.state.requests):
            self._engine.abort(request_id)

    def _say_farewell(self, last: frames.Failed | None = None) -> None:
        """Let the last news leave, for a moment."""
        until_s = time.monotonic() + FAREWELL_S
        try:
            if last is None:
                self._abort_all()
                self._stepper.tell_rest()
            while time.monotonic() < until_s:
                self._deliver()
                if not self._outbox and self._channel.is_free:
                    if last is None:
                        return
                    self._channel.send(frames.encode(last))
                    last = None
                self._channel.wait(0.01)
        except ChannelClosed:
            return


def stats_of(engine: Engine, busy_s: float, rejected_frames: int = 0) -> EngineStats:
    """The gauges of this moment."""
    state = engine.scheduler.state
    pools = [group.pool for group in state.kv.groups]
    checker, counters = engine.checker, state.counters
    return EngineStats(
        running=state.rows.num_live,
        waiting=len(state.queue),
        blocks_used=sum(pool.usable - pool.num_free for pool in pools),
        blocks_total=sum(pool.usable for pool in pools),
        steps=engine.num_submitted,
        busy_s=busy_s,
        steps_by_tokens=tuple(counters.steps_by_tokens),
        computed_tokens=counters.computed_tokens,
        padding_tokens=counters.padding_tokens,
        occupied_rows=counters.occupied_rows,
        decode_context=counters.decode_context,
        context_products=counters.context_products,
        logit_rows=counters.logit_rows,
        preemptions=counters.preempted,
        prefix_queries=counters.prompt_tokens if state.kv.caching else 0,
        prefix_hits=counters.cached_tokens if state.kv.caching else 0,
        violations=sum(checker.violations.values()) if isinstance(checker, SampledChecker) else 0,
        failed_steps=counters.failed_steps,
        preempted_by=dict(counters.preempted_by),
        fairness_gap=state.accounting.gap(),
        next_place_s=engine.scheduler.next_place_s(),
        rejected_frames=rejected_frames,
        dial=state.dial.status(),
    )


def _check_logprobs(sampling: SamplingParams) -> None:
    """A token's logprobs must fit into a frame: those of a whole vocabulary may not."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) == -1:
            raise InvalidRequest(f"{name} of the whole vocabulary are not available here", param=name)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:512]
