"""Runs a server in this process: binds, starts the engine's process, serves, and ends with an exit code.

The order is what makes a start quick: the engine's process first, which imports what it needs while this one does the
same: what takes time to import stands in `parts` and in the functions. The engine gets its model when keys and
sockets are in order; a mistake there ends it before it has begun. torch is never imported here.
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

from paceline.config.links import LinkConfig
from paceline.config.model_set import ModelEntry, ModelSet
from paceline.config.server import FleetConfig, ProcessConfig, ServerConfig
from paceline.errors import PacelineError
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.process.child import EngineChild
    from paceline.process.fleet.processes import FleetProcess
    from paceline.process.remote.elsewhere import Elsewhere
    from paceline.process.supervisor import EngineProcess


ONE_ENGINE = FleetConfig()
NO_CERTIFICATES = LinkConfig()


class EngineNotStarted(PacelineError):
    """There is no process for the engine."""

    exit_code = 70


def run_server(
    config: ServerConfig,
    process: ProcessConfig,
    engine: Mapping[str, Any],
    models: ModelSet | None = None,
    fleet: FleetConfig = ONE_ENGINE,
    links: LinkConfig = NO_CERTIFICATES,
) -> int:
    """Serve until a signal stops it; returns the exit code. `models`: where there are several, instead of `engine`."""
    from paceline.llm.arguments import split_arguments
    from paceline.models.files.fetch import bring_here
    from paceline.text.reasoning import named_reasoning
    from paceline.text.tools.formats import named_format

    # Names that there are not are refused before anything is loaded; which row they mean, the template tells later.
    named_format(config.api.tool_call_parser, "")
    named_reasoning(config.api.reasoning_parser, "")
    if models is None:
        model, given = split_arguments(None, engine)
        models = ModelSet(entries=[ModelEntry(model=model, given=given)])
    _check_models(models, config)

    elsewhere = _elsewhere(fleet, links)
    _set_process_limits(config)
    children = _start_engines(fleet.num_local)
    try:
        for entry in models.entries:
            bring_here(entry.model.model, entry.model.revision, entry.model.download_dir)

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
        _kill(children)
        raise
    output = set_up_logs(config.log_format, config.log_level)

    async def serve() -> int:
        running = _engine(models, process, fleet, children, elsewhere)
        await running.start()
        await asyncio.sleep(0)  # the engine gets its model before this process is busy importing

        from paceline.cli.serve.parts import build_server

        server, listeners = build_server(config, models, running, keyring, sockets, output, billing, tracing)
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


def _check_models(models: ModelSet, config: ServerConfig) -> None:
    """Models that there are not, or that have one name, are refused before anything is loaded."""
    from paceline.models.files.fetch import find

    for entry in models.entries:
        find(entry.model.model)
    names = models.entries[0].model.model or "SmolLM2-135M-Instruct"
    if not models.is_one:
        from paceline.server.open_api import names_of

        names = ", ".join(known[0] for known in names_of(models.entries, config.api))
    with contextlib.suppress(OSError, ValueError):  # a disk that is full is no reason not to serve
        print(f"paceline {__version__}: loading {names} ...", file=sys.stderr, flush=True)


def _elsewhere(fleet: FleetConfig, links: LinkConfig) -> Elsewhere | None:
    """Engines elsewhere, if there are any; mistakes in them are told before anything is started."""
    if not fleet.engines:
        return None
    from paceline.process.remote.elsewhere import Elsewhere

    return Elsewhere.read(fleet.engines, links)


def _start_engines(count: int) -> list[EngineChild]:
    from paceline.process import child

    started: list[EngineChild] = []
    try:
        for place in child.deal_out(count) if count > 1 else [None] * count:
            started.append(child.EngineChild(child.COMMAND, place))
    except OSError as error:
        _kill(started)
        raise EngineNotStarted(f"the engine's process cannot be started: {error}") from error
    return started


def _kill(children: Sequence[EngineChild]) -> None:
    for child in children:
        child.kill_now()


def _engine(
    models: ModelSet,
    process: ProcessConfig,
    fleet: FleetConfig,
    children: Sequence[EngineChild],
    elsewhere: Elsewhere | None,
) -> EngineProcess | FleetProcess:
    """One engine has no fleet in its way."""
    from paceline.cli.serve.view import LoadingLine
    from paceline.process.supervisor import EngineProcess

    running: EngineProcess | FleetProcess
    model = models.entries[0].model
    if elsewhere is None and len(children) == 1:
        running = EngineProcess(model, {}, process, children[0], models)
    else:
        from paceline.models.files.digest import model_digest
        from paceline.models.files.fetch import resolve
        from paceline.process.fleet.processes import FleetProcess

        if elsewhere is not None:
            path = resolve(model.model, model.revision, model.download_dir)
            elsewhere = elsewhere._replace(digest=model_digest(path))
        running = FleetProcess(models, process, fleet, children, elsewhere)
    running.on_loading = LoadingLine(sys.stderr).show
    return running


def _bind(config: ServerConfig) -> list[socket.socket]:
    from paceline.process.unix_socket import bind_unix
    from paceline.server.http.listener import CannotListen, bind_tcp

    sockets = [
        bind_unix(config.uds, "--uds", CannotListen)
        if config.uds is not None
        else bind_tcp(config.host, config.port)
    ]
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
