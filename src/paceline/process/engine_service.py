"""The main loop of the engine's process: take what arrived, step one of its models, tell what became known.

One thread does everything but reading weights again. Between two steps it looks at the socket once without waiting;
while there is nothing to do it sleeps on it. A heartbeat goes out with the events of a step, alone when there are none,
and between the layers of a long step: it comes from the thread that computes, so that a step that hangs is noticed and
one that only takes long is not. With several models the conductor says which of them steps next and which of them
sleeps; frames of another model than the first travel in a `ForModel`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from paceline.config.model_set import ModelShare
from paceline.core.plan import Runner
from paceline.core.standing import WEIGHTS_DROPPED, Standing
from paceline.engine.conductor import Conductor, SleepOrder
from paceline.engine.slab_trade import SlabTrade
from paceline.errors import SleepRefused
from paceline.factory import LoadedModel
from paceline.kv.slabs import SlabMarket
from paceline.process import frames
from paceline.process.channel import Channel, ChannelClosed
from paceline.process.frames import rejected_with
from paceline.process.kv_events import KVEventPublisher
from paceline.process.model_service import ModelService

# Log records of this process on their way to the HTTP process, which writes all logs in one format.
#
# Records wait in a bounded queue until the channel takes them; the newest are dropped first when the reader is slow.
# What is left when the process ends goes to standard error.


MOST_RECORDS = 256
MAX_CHARS = 8000


class LogQueue(logging.Handler):
    """Keeps records as frames. Any thread may log; one at a time may send."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[frames.Log] = deque()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MOST_RECORDS:
            self._num_dropped += 1
            return
        try:
            text = record.getMessage()
        except Exception:  # a message that does not fit its arguments
            text = str(record.msg)
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        self._waiting.append(frames.Log(record.levelno, text[:MAX_CHARS], trace[-MAX_CHARS:]))

    def send(self, channel: Channel) -> None:
        """As much as the socket takes now."""
        while self._waiting and channel.is_free:
            channel.send(frames.encode(self._waiting.popleft()))
        if self._num_dropped and not self._waiting:
            dropped, self._num_dropped = self._num_dropped, 0
            self._waiting.append(frames.Log(logging.WARNING, f"{dropped} log records were dropped"))

    def spill(self) -> None:
        """No reader will take the rest: show it."""
        while self._waiting:
            left = self._waiting.popleft()
            print("\n".join(filter(None, (left.message, left.traceback))), file=sys.stderr, flush=True)


def set_up_logs() -> LogQueue:
    """Everything that is logged or warned of in this process goes to the queue."""
    queue = LogQueue()
    logging.basicConfig(level=logging.WARNING, handlers=[queue], force=True)
    logging.getLogger("paceline").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return queue


FLUSH_S = 1.0  # how long the last frames may take to leave
LOOK_S = 0.005  # between two looks at a model that is being woken

_HEARTBEAT = frames.encode(frames.Update(0.0))
_logger = logging.getLogger("paceline")


class Waking(threading.Thread):
    """Makes the runner of a model that sleeps, beside the steps of the others."""

    def __init__(self, service: ModelService) -> None:
        super().__init__(name="paceline-waking", daemon=True)
        self.began_s = time.monotonic()
        self.runner: Runner | None = None
        self.error: Exception | None = None
        self._service = service
        self.start()

    def run(self) -> None:
        try:
            self.runner = self._service.sleeper.open()
        except Exception as error:
            self.error = error


class LeavingModel(threading.Thread):
    """Lets go of the memory of a model that sleeps, beside the steps of the others: it may be copied to the host."""

    def __init__(self, service: ModelService, level: int) -> None:
        super().__init__(name="paceline-leaving", daemon=True)
        self._service, self.level = service, level
        self.start()

    def run(self) -> None:
        try:
            self._service.sleeper.let_go(self.level)
        except Exception as error:  # no memory on the host: then they are read again
            _logger.warning("weights are not kept in host memory: %s", _one_line(error))
            self._service.sleeper.let_go(WEIGHTS_DROPPED)


class EngineService:
    """Serves the models of one process over one channel, or over one after the other."""

    def __init__(
        self,
        models: Sequence[LoadedModel],
        conductor: Conductor,
        market: SlabMarket | None,
        configure: frames.Configure,
        logs: LogQueue,
        publisher: KVEventPublisher | None = None,
    ) -> None:
        self._logs = logs
        self._channel: Channel  # to the front there is
        self._conductor = conductor
        self._models = [
            ModelService(loaded, configure, seat, (lambda: 0) if index else self._num_rejects)
            for index, (loaded, seat) in enumerate(zip(models, conductor.seats, strict=True))
        ]
        self.publisher = publisher
        if publisher is not None:
            self._models[0].publish_to(publisher)
        self._waking: dict[int, Waking] = {}
        self._leaving: dict[int, LeavingModel] = {}
        # Model and question of operators who wait for it to leave.
        self._told_later: list[tuple[int, int]] = []
        self._trade = None if market is None else SlabTrade(market, [loaded.engine for loaded in models])
        for model in self._models[1:]:
            model.tells_load = False
        if market is not None:
            for index, model in enumerate(self._models):
                model.slabs = partial(market.use, index)
        self._heartbeat_s = configure.heartbeat_s
        self._next_heartbeat_s = 0.0
        for loaded in models:
            loaded.pulse.on_beat = self._send_heartbeat
        self._has_begun = self._stopping = False
        self._last: frames.Leaving | None = None  # to be told at the end

    def run(self, channel: Channel) -> int:
        """Serve until a Stop frame comes or the socket ends; returns the exit code of the process."""
        self._channel = channel
        try:
            if not self._has_begun:
                self._begin()
            while not self._stopping:
                self._turn()
            self._flush_and_close(self._last)
            return 0
        except ChannelClosed:  # the HTTP process is gone
            self._abort_all()
            return 0
        except Exception as error:
            _logger.exception("the engine gives up")
            for model in self._models:
                model.deliver_rest()
            self._flush_and_close(frames.Failed(_one_line(error)))
            return 70

    def _begin(self) -> None:
        """There may not be room for all models at the start."""
        self._has_begun = True
        seats = enumerate(self._conductor.seats)
        sleepers = [index for index, seat in seats if seat.standing is Standing.ASLEEP]
        for index in sleepers:
            self._put_to_sleep(SleepOrder(index, self._conductor.seats[index].level))
        if self._trade is not None:
            for leaving in self._leaving.values():
                leaving.join()
            self._rest_and_wake()
            self._trade.begin()

    def meet(self, front: frames.Join) -> None:
        """Another front comes, for the next `run`: nothing is left of what the last one asked for."""
        self._heartbeat_s = front.heartbeat_s
        self._stopping = self._last is not None
        for model in self._models:
            model.meet(front)

    def leave(self) -> None:
        """Tell the front, if there is one, to go on elsewhere, and end. May be called at any time."""
        self._last, self._stopping = frames.Leaving(), True

    def _num_rejects(self) -> int:
        return self._channel.rejects.total

    def _turn(self) -> None:
        now_s = time.monotonic()
        nap_s = self._nap_s(now_s)
        if nap_s != 0:
            left_s = max(0.0, min(model.next_report_s for model in self._models) - now_s)
            self._channel.wait(left_s if nap_s is None else min(nap_s, left_s))
        for payload in self._channel.receive():
            self._apply(payload)
        for model in self._models:
            model.catch_up()
        if any(model.has_answers for model in self._models):
            self._deliver()
        if self._waking or not self._conductor.is_settled:
            self._rest_and_wake()
        if self._trade is not None:
            self._trade.settle()
        self._step()
        now_s = time.monotonic()
        for model in self._models:
            model.report_when_due(now_s)
            model.note_prefixes()
        self._deliver()

    def _nap_s(self, now_s: float) -> float | None:
        naps = [nap_s for nap_s in (model.nap_s(now_s) for model in self._models) if nap_s is not None]
        if self._waking or self._leaving:
            naps.append(LOOK_S)
        return min(naps) if naps else None

    def _step(self) -> None:
        """One step of one model."""
        now_s = time.monotonic()
        ready = [not model.engine.is_asleep and model.nap_s(now_s) == 0 for model in self._models]
        chosen = self._conductor.next(ready)
        if chosen is not None:
            self._conductor.charge(chosen, self._models[chosen].step())
        for model in self._models:
            if model.engine.is_asleep:
                model.deliver_rest()

    def _send_heartbeat(self) -> None:
        """Called while a step computes. Only an empty update: the events of a step are complete when it is."""
        now_s = time.monotonic()
        if now_s < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + self._heartbeat_s
        with suppress(ChannelClosed):  # found again between two steps
            if self._channel.is_free:
                self._channel.send(_HEARTBEAT)

    def _deliver(self) -> None:
        """Send as much as the socket takes; the rest waits, and what comes meanwhile is joined to it."""
        for number, model in enumerate(self._models):
            told = model.tell()
            while model and self._channel.is_free:
                self._channel.send(frames.for_model(number, next(told)))
        self._logs.send(self._channel)

    # -- what the other side asks for ----------------------------------------------------------------------

    def _apply(self, payload: bytes) -> None:
        number = 0
        try:
            message = frames.decode_to_engine(payload)
            if isinstance(message, frames.ForModel):
                number = message.model
                message = frames.decode_to_engine(message.payload)
        except frames.BadFrame as error:
            self._channel.rejects.undecodable += 1
            _logger.warning("a frame was not understood: %s", _one_line(error))
            return
        if isinstance(message, frames.Drain):
            for model in self._models:
                model.drain()
        elif isinstance(message, frames.Ping):
            for model in self._models:
                model.next_report_s = 0.0
        elif isinstance(message, frames.Stop):
            self._stopping = True
        elif isinstance(message, frames.Configure | frames.Join | frames.ForModel) or number >= len(
            self._models
        ):
            self._channel.rejects.undecodable += 1  # a second configuration, or about no model
        elif isinstance(message, frames.Rest):
            self._rest(number, message)
        else:
            self._models[number].apply(message)

    # -- sleep ---------------------------------------------------------------------------------------------

    def _rest(self, number: int, asked: frames.Rest) -> None:
        """An operator puts a model to sleep, or wakes it."""
        model, seat = self._models[number], self._conductor.seats[number]
        rejected = None
        try:
            if not asked.level:
                self._conductor.call(number)
                self._rest_and_wake()
            elif seat.standing is not Standing.FAILED:
                self._check_sleep(number, asked)
                if asked.aborts:
                    model.abort_all()
                self._put_to_sleep(SleepOrder(number, asked.level))
        except SleepRefused as error:
            rejected = rejected_with(error)
        if asked.level and number in self._leaving and rejected is None:
            self._told_later.append((number, asked.question))  # its memory is free when it is answered
            return
        model.answer(frames.Rested(asked.question, seat.standing, rejected))

    def _check_sleep(self, number: int, asked: frames.Rest) -> None:
        model, seat = self._models[number], self._conductor.seats[number]
        if seat.config.pinned:
            raise SleepRefused("this model is pinned: it never sleeps")
        if seat.standing is Standing.WAKING:
            raise SleepRefused("this model is being woken; try again when it is awake")
        count = len(model.engine.scheduler.state.requests)
        if count and not asked.aborts:
            raise SleepRefused(
                f"{count} requests of this model are under way; wait for them, or end them with mode=abort"
            )

    def _rest_and_wake(self) -> None:
        """Carry out what the conductor orders, and take in models that have woken."""
        for number, waking in list(self._waking.items()):
            if not waking.is_alive():
                del self._waking[number]
                self._finish_waking(number, waking)
        for number, leaving in list(self._leaving.items()):
            if not leaving.is_alive():
                del self._leaving[number]
                self._finish_leaving(number, leaving)
        busy = [model.engine.has_requests or model.engine.adapters.is_asked for model in self._models]
        for order in self._conductor.orders(time.monotonic(), busy):
            if order.level:
                self._put_to_sleep(order)
            else:
                self._begin_to_wake(order.model)

    def _put_to_sleep(self, order: SleepOrder) -> None:
        model = self._models[order.model]
        if not model.engine.is_asleep:
            model.engine.sleep(levels_lost=model.sleeper.levels_lost)
            model.deliver_rest()
        level = max(order.level, self._conductor.seats[order.model].level)
        if not model.sleeper.on_gpu:
            model.sleeper.let_go(level)
        elif order.model not in self._leaving:
            self._leaving[order.model] = LeavingModel(model, level)
        model.sleeps += 1
        model.next_report_s = 0.0
        self._conductor.slept(order.model, level)
        _logger.info("%s sleeps (level %d)", self._name(order.model), level)

    def _finish_leaving(self, number: int, leaving: LeavingModel) -> None:
        level = self._conductor.seats[number].level
        if leaving.level < level:  # it was put to a deeper sleep meanwhile
            self._leaving[number] = LeavingModel(self._models[number], level)
            return
        if self._trade is not None:
            self._trade.slept(number)
        for question in [question for model, question in self._told_later if model == number]:
            standing = self._conductor.seats[number].standing
            self._models[number].answer(frames.Rested(question, standing, None))
        self._told_later = [each for each in self._told_later if each[0] != number]

    def _begin_to_wake(self, number: int) -> None:
        if number in self._leaving or (self._trade is not None and not self._trade.make_room(number)):
            return  # it is ordered again
        self._conductor.waking(number)
        self._models[number].next_report_s = 0.0
        self._waking[number] = Waking(self._models[number])

    def _finish_waking(self, number: int, waking: Waking) -> None:
        model, now_s = self._models[number], time.monotonic()
        model.next_report_s = 0.0
        error = waking.error
        if waking.runner is not None:
            try:
                model.engine.wake(waking.runner)
            except Exception as failure:
                error = failure
        if error is None:
            seconds = now_s - waking.began_s
            self._conductor.woke(number, now_s, seconds)
            model.wakes += 1
            model.last_wake_s = seconds
            _logger.info("%s is awake after %.3f s", self._name(number), seconds)
            return
        _logger.error("%s could not be woken: %s", self._name(number), _one_line(error))
        if self._trade is not None:
            self._trade.slept(number)
        self._conductor.wake_failed(number)  # the second time in a row, the other side ends its requests

    def _name(self, number: int) -> str:
        return called(self._conductor.seats[number].config)

    # -- the end -------------------------------------------------------------------------------------------

    def _abort_all(self) -> None:
        for model in self._models:
            model.abort_all()

    def _flush_and_close(self, last: frames.Failed | frames.Leaving | None = None) -> None:
        """Let the last frames leave, for a moment."""
        until_s = time.monotonic() + FLUSH_S
        try:
            if last is None:
                self._abort_all()
                for model in self._models:
                    model.deliver_rest()
            while time.monotonic() < until_s:
                self._deliver()
                if not any(self._models) and self._channel.is_free:
                    if last is None:
                        return
                    self._channel.send(frames.encode(last))
                    last = None
                self._channel.wait(0.01)
        except ChannelClosed:
            return


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:512]


def called(share: ModelShare) -> str:
    """A model in the log; one that shares its device with no other has no name here."""
    return f"the model {share.name}" if share.name else "the model"
