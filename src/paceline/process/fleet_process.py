"""Several engine processes of one model, each with its supervisor, behind one `Fleet`.

An engine that is lost is started again by its own supervisor, as one engine is; the fleet lives as long as one of them
may. What concerns all of them is told to all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from paceline.config.model_set import ModelSet
from paceline.config.server import FleetConfig, ProcessConfig
from paceline.process import frames
from paceline.process.child import EngineChild, Place
from paceline.process.fleet import Fleet
from paceline.process.questions import Numbers
from paceline.process.supervisor import EngineProcess

_logger = logging.getLogger("paceline")


class FleetProcess:
    """Engines in separate processes, behind `client`. The interface of `EngineProcess`."""

    def __init__(
        self,
        models: ModelSet,
        config: ProcessConfig,
        fleet: FleetConfig,
        children: Sequence[EngineChild],
    ) -> None:
        """`children`: processes that were started already, and wait for the model to load."""
        numbers, model = Numbers(), models.entries[0].model
        self.engines = [
            EngineProcess(model, {}, config, child, models, numbers=numbers, place=child.place)
            for child in children
        ]
        self.places = [child.place or Place() for child in children]  # what of this machine each has
        self.client = Fleet([engine.client for engine in self.engines], fleet, numbers)
        self.clients = [self.client]
        self.on_lost: Callable[[str], None] | None = None
        for number, engine in enumerate(self.engines):
            engine.on_lost = partial(self._engine_lost, number)
            engine.fleet_key, engine.rank = self.client.prefixes.key, number
            member = self.client.members[number]
            member.pid, member.num_restarts = partial(_pid_of, engine), partial(_restarts_of, engine)

    @property
    def on_loading(self) -> Callable[[frames.StillLoading | None], None] | None:
        return self.engines[0].on_loading

    @on_loading.setter
    def on_loading(self, show: Callable[[frames.StillLoading | None], None] | None) -> None:
        self.engines[0].on_loading = show  # they do the same at the same time

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()

    async def wait_ready(self) -> None:
        """Until all have loaded the model. Raises EngineUnavailable that says why one cannot."""
        await asyncio.gather(*(engine.wait_ready() for engine in self.engines))

    async def stop(self) -> None:
        self.client.stop()
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def _engine_lost(self, number: int, reason: str) -> None:
        """It is not started again."""
        self.client.members[number].is_gone = True
        _logger.error("engine %d is lost for good: %s", number, reason)
        if all(member.is_gone for member in self.client.members) and self.on_lost is not None:
            self.on_lost(reason)


def _pid_of(engine: EngineProcess) -> int | None:
    return engine.pid


def _restarts_of(engine: EngineProcess) -> int:
    return engine.num_restarts
