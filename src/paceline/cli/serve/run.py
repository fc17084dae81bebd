"""Runs a server in this process: binds, starts the engine's process, serves, and ends with an exit code.

The order is what makes a start quick: the engine's process first, which imports what it needs while this one does the
same. It is told what to load when keys and sockets are in order; a mistake there ends it before it has begun. torch is
never imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.serve.view import card_lines, show_card
from paceline.config.engine import ModelConfig
from paceline.config.process import ProcessConfig
from paceline.config.server import ServerConfig
from paceline.errors import PacelineError
from paceline.process.client import EngineInfo
from paceline.process.supervisor import EngineProcess
from paceline.server.access.auth import Keyring
from paceline.server.access.keys_file import read_keys
from paceline.server.app import Api, Application
from paceline.server.batches.batches import BatchSettings, large_bodies
from paceline.server.billing.billing import Billing
from paceline.server.http.listener import Listener
from paceline.server.lifecycle import Server
from paceline.server.logs import LogOutput
from paceline.server.metrics.tracing import Tracing
from paceline.server.open_api import model_names, open_api
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.process.child import EngineChild


class EngineNotStarted(PacelineError):
    """There is no process for the engine."""

    exit_code = 70


def run_server(config: ServerConfig, process: ProcessConfig, engine: Mapping[str, Any]) -> int:
    """Serve until told to stop; returns the exit code."""
    from paceline.llm.arguments import split_arguments
    from paceline.models.files.fetch import bring_here, find

    model, given = split_arguments(None, engine)
    find(model.model)
    with contextlib.suppress(OSError, ValueError):  # a disk that is full is no reason not to serve
        print(
            f"paceline {__version__}: loading {model.model or 'SmolLM2-135M-Instruct'} ...",
            file=sys.stderr,
            flush=True,
        )

    _set_process_limits(config)
    child = _start_engine()
    try:
        bring_here(model.model, model.revision, model.download_dir)

        import uvloop

        from paceline.server.access.keys_file import read_keys
        from paceline.server.app import check_exposure
        from paceline.server.billing.billing import open_billing
        from paceline.server.logs import set_up_logs
        from paceline.server.metrics.tracing import open_tracing

        keyring = read_keys(config.api_keys_file)
        check_exposure(config, keyring)
        tracing = open_tracing(config.observe.otlp_endpoint)
        billing = open_billing(config.billing)
        sockets = _bind(config)
    except BaseException:
        child.kill_now()
        raise
    output = set_up_logs(config.log_format, config.log_level)

    async def serve() -> int:
        from paceline.cli.serve.view import LoadingLine
        from paceline.process.supervisor import EngineProcess

        running = EngineProcess(model, given, process, child)
        running.on_loading = LoadingLine(sys.stderr).show
        await running.start()
        await asyncio.sleep(0)  # the engine is told what to load before this process is busy importing

        server, listeners = build_server(config, model, running, keyring, sockets, output, billing, tracing)
        return await server.run(listeners)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve())
            if tracing is not None:
                tracing.close()
            output.finish()
            # A thread that still computes, or an output that blocks, must not hold up the end.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)
    finally:
        output.finish()
        for bound in sockets:
            bound.close()


def _start_engine() -> EngineChild:
    from paceline.process import child

    try:
        return child.EngineChild(child.COMMAND)
    except OSError as error:
        raise EngineNotStarted(f"the engine's process cannot be started: {error}") from error


def _bind(config: ServerConfig) -> list[socket.socket]:
    from paceline.server.http.listener import bind_tcp, bind_unix

    sockets = [bind_unix(config.uds) if config.uds is not None else bind_tcp(config.host, config.port)]
    if config.metrics_port is not None:
        try:
            sockets.append(bind_tcp(config.metrics_host, config.metrics_port, flag="--metrics-port"))
        except BaseException:
            sockets[0].close()
            raise
    return sockets


def _set_process_limits(config: ServerConfig) -> None:
    """As many files as connections need, and no core dumps: there are prompts in memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + 256
    with contextlib.suppress(ValueError, OSError):
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if soft > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# Puts the parts of a server together: engine process, application, listeners, API, card.


def build_server(
    config: ServerConfig,
    model: ModelConfig,
    engine: EngineProcess,
    keyring: Keyring,
    sockets: Sequence[socket.socket],
    output: LogOutput,
    billing: Billing,
    tracing: Tracing | None,
) -> tuple[Server, list[Listener]]:
    """A server that has not started, and its listeners."""
    app = Application(config, engine.client, keyring)
    app.dropped_lines = lambda: output.dropped
    if tracing is not None:
        tracing.model_name = lambda: app.metrics.model_name
        app.log.on_finished, app.more_counters = tracing.finished, tracing.figures
    app.on_weights = engine.client.set_weights
    app.status.hindrance = lambda: billing.hindrance
    billing.report()
    uses_tls = config.ssl_certfile is not None
    large = large_bodies(config.batches)
    listeners = [Listener(app.main, sockets[0], config, uses_tls=uses_tls, large_bodies=large)]
    if app.side is not None:
        listeners.append(Listener(app.side, sockets[1], config))
    batches = BatchSettings(
        config=config.batches, max_line_bytes=config.max_body_bytes, callers=app.caller_of, log=app.log
    )
    build = open_api(model, config.api, engine.client, app.log, billing, batches)

    async def open_in_thread() -> Api:
        return await asyncio.get_running_loop().run_in_executor(None, build)

    def show(info: EngineInfo) -> None:
        base, metrics, options = _urls(config, listeners)
        names = model_names(model, config.api)
        lines = card_lines(
            info,
            version=__version__,
            names=names,
            base_url=base,
            metrics_url=metrics,
            curl_options=options,
            needs_key=len(keyring) > 0,
        )
        show_card(lines, sys.stdout)

    server = Server(
        config,
        engine,
        app,
        open_api=open_in_thread,
        on_ready=show,
        read_keys=lambda: read_keys(config.api_keys_file),
    )
    return server, listeners


def _urls(config: ServerConfig, listeners: Sequence[Listener]) -> tuple[str, str, str]:
    """Where the API and the metrics are, and what curl needs to get there."""
    scheme = "https" if config.ssl_certfile is not None else "http"
    options = ""
    base = f"{scheme}://{listeners[0].address}"
    if config.uds is not None:
        options, base = f"--unix-socket {config.uds} ", f"{scheme}://localhost"
    metrics = base if len(listeners) == 1 else f"http://{listeners[1].address}"
    return base, f"{metrics}/metrics", options
