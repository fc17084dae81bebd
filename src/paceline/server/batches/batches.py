"""Puts files and batches together: the store, the runner over the routes of the server, the API, the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.server import BatchConfig
from paceline.process.client import EngineState
from paceline.server.access.caller import Caller
from paceline.server.api.batch_routes import FILES, batch_routes, file_routes
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.responses import RESPONSES
from paceline.server.api.route import Route
from paceline.server.batches.batch_api import BatchApi
from paceline.server.batches.line_limit import Gate, ServerLoad
from paceline.server.batches.line_run import Attempts, LineLog, LineRunner
from paceline.server.batches.runner import TICK_S, BatchRunner
from paceline.server.batches.store import RETRY_S, ResultWriter, Store
from paceline.server.batches.upload import Uploads
from paceline.server.batches.work import BatchContext
from paceline.server.generate.service import Service

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
FORM_BYTES = 64 * 1024  # of a form, beside its file


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What files and batches have to know of the server around them."""

    config: BatchConfig
    max_line_bytes: int
    callers: Callable[[str], Caller | None]  # what a tenant's key allows now
    log: LineLog
    tick_s: float = TICK_S
    retry_s: float = RETRY_S


def large_bodies(config: BatchConfig) -> dict[bytes, int]:
    """Where more bytes may be posted than elsewhere."""
    return {} if config.batch_dir is None else {FILES.encode(): config.max_file_bytes + FORM_BYTES}


class Batches:
    """Files and batches of one server."""

    def __init__(
        self, service: Service, routes: Sequence[Route], store: Store, settings: BatchSettings
    ) -> None:
        self._service = service
        self._store = store
        config = settings.config
        service.observer = attempts = Attempts(service.observer)
        handlers = {route.path: route.handler for route in routes if route.path in ENDPOINTS}
        lines = LineRunner(handlers, settings.log, attempts)

        def context(has_room: Callable[[int], bool]) -> BatchContext:
            return BatchContext(
                store=store,
                writer=ResultWriter(store, retry_s=settings.retry_s),
                gate=Gate(has_room),
                lines=lines,
                callers=settings.callers,
                models=service.model.names,
                max_lines=config.max_batch_lines,
                max_line_bytes=settings.max_line_bytes,
                retry_s=settings.retry_s,
            )

        self.runner = BatchRunner(
            context,
            self._load,
            is_ready=lambda: service.client.state is EngineState.READY,
            most_lines=config.max_batch_rows,
            tick_s=settings.tick_s,
        )
        uploads = Uploads(store, max_bytes=config.max_file_bytes, quota_bytes=config.max_stored_bytes)
        self.api = BatchApi(store, uploads, self.runner, model=service.model.names[0])

    def routes(self) -> list[Route]:
        settings = self._service.settings
        strict = settings.strict_fields
        return [*file_routes(self.api), *batch_routes(self.api, settings.limits, ENDPOINTS, strict=strict)]

    def start(self) -> None:
        self.runner.start()

    def drain(self) -> None:
        self.runner.drain()

    async def stop(self) -> None:
        await self.runner.stop()
        self._store.close()

    def figures(self) -> list[tuple[str, str, str, Mapping[str, float]]]:
        found, under_way = self.runner.figures, self.runner.num_lines_under_way
        lines = {
            **found.lines,
            "pending": max(0, found.lines["pending"] - under_way),
            "in_progress": under_way,
        }
        return [
            ("batches", "Batches by status.", "status", found.batches),
            ("batch_lines", "Requests of batches that are not over.", "status", lines),
        ]

    def _load(self) -> ServerLoad:
        client, admission = self._service.client, self._service.admission
        return ServerLoad(
            rows=client.info.max_num_seqs,
            queue=self._service.settings.max_queue,
            waiting=client.stats.waiting,
            own=admission.batch_places,
            others=admission.places_taken - admission.batch_places,
            others_unstarted=admission.num_waiting,
        )


def open_batches(service: Service, routes: Sequence[Route], settings: BatchSettings) -> Batches | None:
    """Files and batches, where the server has a folder for them. Raises ConfigError."""
    if settings.config.batch_dir is None:
        return None
    return Batches(service, routes, Store(Path(settings.config.batch_dir).expanduser()), settings)
