"""Several engine processes of one model, each with its supervisor, behind one `Fleet`.

An engine that is lost is started again by its own supervisor, as one engine is; the fleet lives as long as one of them
may. Engines elsewhere are linked to beside them. What concerns all of them is told to all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from paceline.config.links import Address
from paceline.config.model_set import ModelSet
from paceline.config.server import FleetConfig, ProcessConfig
from paceline.process import frames
from paceline.process.child import EngineChild, Place
from paceline.process.client import EngineState
from paceline.process.fleet.fleet import LOOK_S, Fleet, Member
from paceline.process.questions import Numbers
from paceline.process.remote.elsewhere import Elsewhere, look_up
from paceline.process.remote.remote_engine import RemoteEngine
from paceline.process.supervisor import EngineProcess

NAMES_S = 5.0  # from one look at what a name stands for to the next
_logger = logging.getLogger("paceline")


class FleetProcess:
    """Engines in separate processes, behind `client`. The interface of `EngineProcess`."""

    def __init__(
        self,
        models: ModelSet,
        config: ProcessConfig,
        fleet: FleetConfig,
        children: Sequence[EngineChild],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`children`: processes that were started already, and wait for the model to load."""
        self._model, self._config, self._numbers = models.entries[0].model, config, Numbers()
        self._elsewhere = elsewhere or Elsewhere()
        self.engines: list[EngineProcess] = []
        self.places = [child.place or Place() for child in children]  # what of this machine each has
        self.client = Fleet((), fleet, self._numbers)
        self.clients = [self.client]
        self.on_lost: Callable[[str], None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        for child in children:
            self._attach(
                EngineProcess(
                    self._model, {}, config, child, models, numbers=self._numbers, place=child.place
                )
            )
        for address in self._elsewhere.addresses:
            self._link(address)

    def _attach(self, engine: EngineProcess) -> Member:
        self.engines.append(engine)
        member = self.client.attach(engine.client)
        engine.on_lost = partial(self._engine_lost, member.number)
        engine.fleet_key, engine.rank = self.client.prefixes.key, member.number
        member.pid, member.num_restarts = partial(_pid_of, engine), partial(_restarts_of, engine)
        return member

    def _link(self, address: Address) -> Member:
        engine = RemoteEngine(
            self._model,
            self._config,
            address,
            self._elsewhere.context,
            numbers=self._numbers,
            digest=self._elsewhere.digest,
        )
        member = self._attach(engine)
        member.address = str(address)
        return member

    @property
    def elsewhere(self) -> str:
        """Where further engines are, in words."""
        return str(self._elsewhere)

    @property
    def on_loading(self) -> Callable[[frames.StillLoading | None], None] | None:
        return self.engines[0].on_loading if self.engines else None

    @on_loading.setter
    def on_loading(self, show: Callable[[frames.StillLoading | None], None] | None) -> None:
        for engine in self.engines[:1]:
            engine.on_loading = show  # they do the same at the same time

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()
        for name in self._elsewhere.names:
            self._tasks.append(asyncio.create_task(self._follow(name), name="paceline-names"))

    async def wait_ready(self) -> None:
        """Until all of this machine have loaded the model, and one takes requests. Raises EngineUnavailable that says
        why one cannot."""
        own = [engine for engine in self.engines if not isinstance(engine, RemoteEngine)]
        await asyncio.gather(*(engine.wait_ready() for engine in own))
        while self.client.state is not EngineState.READY:
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        self.client.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def _engine_lost(self, number: int, reason: str) -> None:
        """It is not started again."""
        self.client.members[number].is_gone = True
        _logger.error("engine %d is lost for good: %s", number, reason)
        if all(member.is_gone for member in self.client.members) and self.on_lost is not None:
            self.on_lost(reason)

    async def _follow(self, name: Address) -> None:
        """Engines are those that a name stands for. One that has lost its name is gone when its link is."""
        while True:
            found = {str(each): each for each in await look_up(name)}
            known = {member.address: member for member in self.client.members if not member.is_gone}
            for text, address in found.items():
                if text not in known:
                    member = self._link(address)
                    await self.engines[member.number].start()
            for member, engine in zip(self.client.members, self.engines, strict=True):
                is_of_name = isinstance(engine, RemoteEngine) and engine.address.name == name.host
                if is_of_name and member.address not in found and not member.is_gone and not engine.is_ready:
                    member.is_gone = True
                    await engine.stop()
            await asyncio.sleep(NAMES_S)


def _pid_of(engine: EngineProcess) -> int | None:
    return engine.pid


def _restarts_of(engine: EngineProcess) -> int:
    return engine.num_restarts
