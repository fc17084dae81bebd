"""`paceline engine`: loads a model, listens, and serves one front after the other until it is told to end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from paceline.config.engine import ModelConfig
from paceline.config.links import Address, LinkConfig
from paceline.config.server import ProcessConfig
from paceline.factory import LoadedModel
from paceline.process import frames
from paceline.process.channel import ChannelClosed
from paceline.process.client import EngineInfo
from paceline.process.engine_main import close_all, make_service, prepare_process, send_whole
from paceline.process.engine_service import EngineService, LogQueue
from paceline.process.remote.port import FrontPort, bind
from paceline.process.remote.tls import make_context

_logger = logging.getLogger("paceline")


def serve_engine(
    model: ModelConfig,
    given: Mapping[str, Any],
    listen: Address,
    links: LinkConfig,
    *,
    on_loading: Callable[[frames.StillLoading | None], None],
    on_ready: Callable[[EngineInfo, str], None],
) -> int:
    """Returns the exit code of the process. `on_ready` is told where it listens."""
    prepare_process()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    _logger.setLevel(logging.INFO)
    links.check(listen, "--listen")
    context, bound = make_context(links, is_engine=True), bind(listen)
    process = ProcessConfig()
    configure = frames.Configure(
        model, dict(given), process.heartbeat_s, process.stats_interval_s, process.max_frame_bytes
    )

    def note(stage: str, done: int, total: int) -> None:
        on_loading(frames.StillLoading(stage, done, total))

    try:
        models, (info,), service = make_service(configure, note, LogQueue())
        on_loading(None)
        gc.collect()
        gc.freeze()  # what loading made stays
        port = FrontPort(bound, context, process.max_frame_bytes)
        port.open()
        _end_on_signals(port, service)
        on_ready(info, listen.path or str(listen._replace(port=bound.getsockname()[1])))
        return _serve_fronts(port, service, models, info)
    finally:
        bound.close()
        if listen.path:
            with contextlib.suppress(OSError):
                os.unlink(listen.path)


def _serve_fronts(
    port: FrontPort, service: EngineService, models: list[LoadedModel], info: EngineInfo
) -> int:
    engine, code = models[0].engine, 0
    while not code and (front := port.next()) is not None:
        channel = front.channel
        try:
            service.meet(front.join)
            now = replace(info, adapters=engine.adapters.infos())
            send_whole(channel, frames.Ready(now, engine.next_id))
            _logger.info("a server has joined")
            code = service.run(channel)
        except ChannelClosed:  # gone before it had begun
            pass
        finally:
            channel.close()
        _logger.info("the server has left")
        port.release()
    close_all(models)
    return code


def _end_on_signals(port: FrontPort, service: EngineService) -> None:
    """The first lets the front go on elsewhere, the second ends at once."""
    told = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told += 1
        if told > 1:
            os._exit(128 + number)
        port.close()
        service.leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
