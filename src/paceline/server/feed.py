"""The feed of the live page: one look at the engine for everybody who watches, as server-sent events.

While nobody watches nothing is asked of the engine. A reader that is too slow loses whole messages, which it sees by
their numbers; each message also carries the whole state of now, so that it can begin anew from any of them. What is
in a message comes from `serving.sight`, and the latencies from this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from paceline.errors import PacelineError, QueueFull
from paceline.server.metrics import RequestMetrics
from paceline.serving.client import EngineClient, EngineStats, EngineUnavailable, WatchedClient

INTERVAL_S = 0.2
LONGEST_INTERVAL_S = 2.0
MOST_SHARE = 0.007  # of the engine's processor time, that watching may take before looks become rarer
FREE_SHARE = 0.001  # of the time, that it may take even of an engine that does nothing else
JUDGED_S = 2.0  # over which that is judged
MOST_BEHIND = 8  # messages
MOST_WATCHING = 16
LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}
END = None


class Pace:
    """How often to look: less often where that is dear."""

    def __init__(self) -> None:
        self._interval_s = INTERVAL_S
        self._before: tuple[float, float, float] | None = None

    def interval_s(self, stats: EngineStats, now_s: float) -> float:
        """The time to the next look, by what looks have taken of the engine's processor so far."""
        if self._before is None or stats.cpu_s < self._before[1]:  # the first look, or an engine started anew
            self._before = (stats.watch_cpu_s, stats.cpu_s, now_s)
        elif now_s - self._before[2] >= JUDGED_S:
            now = (stats.watch_cpu_s, stats.cpu_s, now_s)
            watch_s, cpu_s, wall_s = (after - before for after, before in zip(now, self._before, strict=True))
            wanted_s = self._interval_s * watch_s / max(MOST_SHARE * cpu_s, FREE_SHARE * wall_s)
            self._interval_s = min(LONGEST_INTERVAL_S, max(INTERVAL_S, wanted_s))
            self._before = now
        return self._interval_s


class Feed:
    """Everybody who watches one engine."""

    def __init__(self, client: EngineClient, requests: RequestMetrics) -> None:
        self._client = client
        self._requests = requests
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    @property
    def num_watching(self) -> int:
        return len(self._readers)

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Messages from now on, until the server stops."""
        if not isinstance(self._client, WatchedClient):
            raise EngineUnavailable("this engine cannot be watched")
        if len(self._readers) >= MOST_WATCHING:
            raise QueueFull(f"{MOST_WATCHING} pages watch already; close one")
        reader: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BEHIND)
        self._readers.add(reader)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._client))
        try:
            while (next_one := await reader.get()) is not END:
                yield next_one
        finally:
            self._readers.discard(reader)

    async def _run(self, client: WatchedClient) -> None:
        loop, pace = asyncio.get_running_loop(), Pace()
        try:
            while self._readers:
                due_s = loop.time() + pace.interval_s(self._client.stats, loop.time())
                try:
                    seen = await client.look()
                except EngineUnavailable as error:
                    if error.code == "shutting_down":
                        return
                    seen = msgspec.json.encode({"unavailable": str(error)})
                except PacelineError as error:
                    seen = msgspec.json.encode({"unavailable": str(error)})
                self._tell(self._message(seen))
                await asyncio.sleep(max(0.0, due_s - loop.time()))
        finally:
            self._task = None
            self._tell(END)

    def _message(self, seen: bytes) -> bytes:
        self._number += 1
        return b"data: %b\n\n" % message(self._number, self._requests, seen)

    def _tell(self, message: bytes | None) -> None:
        for reader in self._readers:
            if reader.full():
                reader.get_nowait()
            reader.put_nowait(message)


def message(number: int, requests: RequestMetrics, seen: bytes) -> bytes:
    """One message: its number, what is known of requests, and what was seen of the engine."""
    told: dict[str, object] = {name: requests.histograms[full][1].counts for name, full in LATENCIES.items()}
    # Buckets are wide: no percentile read off them may lie above what was seen.
    told["longest"] = {name: requests.histograms[full][1].largest for name, full in LATENCIES.items()}
    told["tokens"] = [requests.generation_tokens, requests.prompt_tokens]
    return b'{"n":%d,"server":%b,"engine":%b}' % (number, msgspec.json.encode(told), seen)


def latency_bounds(requests: RequestMetrics) -> dict[str, tuple[float, ...]]:
    """The upper ends of the buckets that messages count in."""
    return {name: requests.histograms[full][1].bounds for name, full in LATENCIES.items()}
