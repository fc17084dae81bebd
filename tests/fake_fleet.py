"""A fleet whose engines are fakes, for tests of where requests go and how streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from paceline.config.server import FleetConfig, ProcessConfig
from paceline.core.events import Finished
from paceline.core.request import (
    RequestId,
)
from paceline.core.sampling import SamplingParams
from paceline.errors import QueueFull
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.client import BranchUpdate
from paceline.process.fleet.fleet import Fleet
from paceline.process.questions import Numbers
from tests.fake_engine import engine_info, finished

PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(max_tokens=8, seed=3)


class FakeEngine:
    """What one engine of the fleet is sent, and what it says."""

    def __init__(self, client: AsyncEngine) -> None:
        self.client = client
        self.sent: list[frames.ToEngine] = []
        self.num_unsent_bytes = 0

    def send(self, payload: bytes) -> None:
        self.sent.append(frames.decode_to_engine(payload))

    @property
    def adds(self) -> list[frames.Add]:
        return [each for each in self.sent if isinstance(each, frames.Add)]

    @property
    def outputs(self) -> list[list[int] | None]:
        """Of the newest request."""
        columns = self.adds[-1].outputs
        return [None if each is None else np.frombuffer(each, frames.TOKEN).tolist() for each in columns]

    def start(self, **info: Any) -> None:
        self.client.attach(self)
        self.client.ready(engine_info(**{"fingerprint": "same", **info}))

    def die(self) -> None:
        self.client.detach("the engine's process was ended by signal 9 (SIGKILL)")

    def tell(self, *pairs: tuple[int, int], ends: Finished | None = None) -> None:
        """Tokens of branches of the newest request, by their place."""
        first = self.adds[-1].first
        ids = np.array([first + place for place, _ in pairs], frames.ID).tobytes()
        tokens = np.array([token for _, token in pairs], frames.TOKEN).tobytes()
        endings = [] if ends is None else [ends._replace(request=RequestId(first + ends.request))]
        self.client.on_update(frames.Update(1.0, ids, tokens, endings=endings))

    def forecast(self) -> None:
        """It has read the newest request."""
        self.client.on_update(frames.Update(1.0, forecasts=[(self.adds[-1].first, None)]))

    def cache(self, *stored: bytes, evicted: Sequence[bytes] = ()) -> None:
        """What it has cached has changed."""
        self.client.on_prefixes(frames.PrefixNews(b"".join(stored), b"".join(evicted)))

    def refuse(self) -> None:
        rejected = frames.rejected_with(QueueFull("full"), self.adds[-1].first)
        self.client.on_update(frames.Update(1.0, rejections=[rejected]))


def fleet_of(count: int, **options: Any) -> tuple[Fleet, list[FakeEngine]]:
    numbers = Numbers()
    clients = [AsyncEngine(ProcessConfig(), 0, numbers) for _ in range(count)]
    fleet = Fleet(clients, FleetConfig(**{"replicas": count, "router": "round-robin", **options}), numbers)
    engines = [FakeEngine(client) for client in clients]
    for engine in engines:
        engine.start()
    return fleet, engines


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def ends(place: int, num_output: int, reason: str = "length", **more: Any) -> Finished:
    return finished(place, reason, num_output, num_prompt=len(PROMPT), **more)


async def read(stream: Any) -> list[BranchUpdate]:
    """To the end."""
    found: list[BranchUpdate] = []
    num_open = stream.count
    while num_open:
        for update in await stream.take():
            found.append(update)
            num_open -= update.ending is not None
    return found


def tokens_of(updates: list[BranchUpdate], branch: int = 0) -> list[int]:
    return [token for update in updates if update.branch == branch for token in update.tokens]
