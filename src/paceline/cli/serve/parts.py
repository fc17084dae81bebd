"""Puts the parts of a server together: engine process, application, listeners, API, card.

Imported while the engine's process starts: it loads the whole server.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence

from paceline.cli.serve.view import card_lines, engines_lines, further_line, show_card
from paceline.config.model_set import ModelSet
from paceline.config.server import ServerConfig
from paceline.process.async_engine import AsyncEngine
from paceline.process.client import EngineInfo
from paceline.process.fleet.fleet import Fleet
from paceline.process.fleet.processes import FleetProcess
from paceline.process.supervisor import EngineProcess
from paceline.server.access.keys_file import Keyring, read_keys
from paceline.server.api.batch_routes import large_bodies
from paceline.server.app import Api, Application
from paceline.server.batches.batches import BatchSettings
from paceline.server.billing.billing import Billing
from paceline.server.http.listener import Listener
from paceline.server.lifecycle import Server
from paceline.server.logs import LogOutput
from paceline.server.metrics.tracing import Tracing
from paceline.server.open_api import names_of, open_api
from paceline.version import __version__


def build_server(
    config: ServerConfig,
    models: ModelSet,
    engine: EngineProcess | FleetProcess,
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

    def set_weights(weights: Mapping[str, float]) -> None:
        for client in engine.clients:
            client.set_weights(weights)

    app.on_weights = set_weights
    app.status.hindrance = lambda: billing.hindrance
    billing.report()
    uses_tls = config.ssl_certfile is not None
    large = large_bodies(config.batches)
    listeners = [Listener(app.main, sockets[0], config, uses_tls=uses_tls, large_bodies=large)]
    if app.side is not None:
        listeners.append(Listener(app.side, sockets[1], config))
    batches = BatchSettings(
        config=config.batches, max_line_bytes=config.max_body_bytes, callers=app.caller_of
    )
    clients: Sequence[AsyncEngine | Fleet] = engine.clients
    served = list(zip(models.entries, clients, strict=True))
    build = open_api(served, config.api, app.log, billing, batches)

    async def open_in_thread() -> Api:
        api = await asyncio.get_running_loop().run_in_executor(None, build)
        large.update(api.large_bodies)
        return api

    engines = engines_lines(engine.places, engine.elsewhere) if isinstance(engine, FleetProcess) else []

    def show(info: EngineInfo) -> None:
        base, metrics, options = _urls(config, listeners)
        first, *further = names_of(models.entries, config.api)
        lines = card_lines(
            info,
            version=__version__,
            names=first,
            further=engines
            + [
                further_line(names[0], client.info, entry.share)
                for names, (entry, client) in zip(further, served[1:], strict=True)
            ],
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
