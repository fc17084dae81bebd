"""The feed of the live page: looks at the engine, as messages for all viewers, and the messages of the last minute.

A message holds what happened since the one before and the whole state of now, so that a reader can begin anew from any
of them; a reader that is too slow loses whole messages, which it sees by their numbers. While there is no reader the
engine is looked at rarely, and not at all while it rests: that keeps the last minute for a page that is opened late.
What is in a message comes from `process.live_view`; latencies, the names of requests and how models share the device
come from this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from paceline.config.engine import POLICIES
from paceline.errors import PacelineError, QueueFull
from paceline.process.client import EngineClient, EngineState, EngineStats, EngineUnavailable
from paceline.process.fleet.fleet import Fleet
from paceline.server.api.fields import choice_of, read_query, whole_of
from paceline.server.api.fleet_routes import engine_values
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnknownModel, openai_error_frame
from paceline.server.generate.requests import MOST_REQUESTS, RecentRequests
from paceline.server.logs import log
from paceline.server.metrics.request_metrics import RequestFamilies
from paceline.version import __version__

INTERVAL_S = 0.2
LONGEST_INTERVAL_S = 2.0
UNWATCHED_INTERVAL_S = 2.0  # the notes of this time fit into a trace, whatever the engine does
MOST_SHARE = 0.007  # of the engine's processor time, that watching may take before looks become rarer
FREE_SHARE = 0.001  # of the time, that it may take even of an engine that does nothing else
JUDGED_S = 2.0  # over which that is judged
MOST_BEHIND = 8  # messages
MOST_WATCHING = 16
PAST_S = 60.0  # what a page shows
MOST_PAST_BYTES = 32 * 2**20
MOST_NAMES = 1024  # that are sent to a page when it is opened
MOST_ADAPTERS = 8  # whose names are sent
LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}
END = None
SHOWN_S = 60.0  # that a failover is told
MovedName = tuple[tuple[int, ...], str, str, int]


class LookInterval:
    """How often to look: less often where that is expensive."""

    def __init__(self) -> None:
        self._interval_s = INTERVAL_S
        self._before: tuple[float, float, float] | None = None

    def interval_s(self, stats: EngineStats, now_s: float) -> float:
        """The time to the next snapshot, by what snapshots have taken of the engine's processor so far."""
        if (
            self._before is None or stats.cpu_s < self._before[1]
        ):  # the first snapshot, or an engine started anew
            self._before = (stats.watch_cpu_s, stats.cpu_s, now_s)
        elif now_s - self._before[2] >= JUDGED_S:
            now = (stats.watch_cpu_s, stats.cpu_s, now_s)
            watch_s, cpu_s, wall_s = (after - before for after, before in zip(now, self._before, strict=True))
            wanted_s = self._interval_s * watch_s / max(MOST_SHARE * cpu_s, FREE_SHARE * wall_s)
            self._interval_s = min(LONGEST_INTERVAL_S, max(INTERVAL_S, wanted_s))
            self._before = now
        return self._interval_s


class Past:
    """The messages of the last minute, the newest at the end, within a number of bytes."""

    def __init__(self, seconds: float = PAST_S, most_bytes: int = MOST_PAST_BYTES) -> None:
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._kept: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, message: bytes, now_s: float) -> None:
        self._kept.append((now_s, message))
        self._bytes += len(message)
        self.drop(now_s)

    def drop(self, now_s: float) -> None:
        """Forget what is too old: of the message before the minute only the state counts, and it is kept for that."""
        oldest_s = now_s - self._seconds
        while len(self._kept) > 1 and (self._kept[1][0] < oldest_s or self._bytes > self._most_bytes):
            self._bytes -= len(self._kept.popleft()[1])

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def messages(self) -> list[bytes]:
        return [message for _, message in self._kept]


class Feed:
    """The messages of one engine, and its viewers."""

    def __init__(
        self, client: EngineClient, requests: RequestFamilies, fleet: EngineClient | None = None
    ) -> None:
        """`fleet`: what the engine is one of, where there are several."""
        self.past = Past()
        self.models: Sequence[WatchedModel] = ()  # all of the server
        # Names the requests; None until the API is up.
        self.recent: RecentRequests | None = None
        self._client = client
        self._fleet = fleet or client
        self._requests = requests
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._has_reader = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._num_named = 0  # of the requests that `recent` knows
        self._num_moved = 0  # of those that went on in another engine
        self._num_steps = -1  # as of the last snapshot

    def start(self) -> None:
        """Begin to keep the last minute."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def drain(self) -> None:
        return None

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def messages(self, *, with_past: bool = False) -> AsyncGenerator[bytes, None]:
        """Messages from now on, until the server stops; first those of the last minute, if they are wanted."""
        if len(self._readers) >= MOST_WATCHING:
            raise QueueFull(f"{MOST_WATCHING} pages watch already; close one")
        reader: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BEHIND)
        before = self._past_frames() if with_past else []
        self._readers.add(reader)
        self._has_reader.set()
        self.start()
        try:
            for message in before:
                yield message
            while (next_one := await reader.get()) is not END:
                yield next_one
        finally:
            self._readers.discard(reader)

    async def _run(self) -> None:
        loop, pace = asyncio.get_running_loop(), LookInterval()
        try:
            while True:
                self._has_reader.clear()
                if self._readers:
                    due_s = loop.time() + pace.interval_s(self._client.stats, loop.time())
                    if not await self._look(loop.time()):
                        return
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
                    continue
                if self._is_moving() and not await self._look(loop.time()):
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(UNWATCHED_INTERVAL_S):
                        await self._has_reader.wait()
        except Exception as error:
            log("the live page's feed failed", level=logging.ERROR, error=error)
        finally:
            self._task = None
            self._send(END)

    def _is_moving(self) -> bool:
        """Whether the engine has made a step since the last snapshot, or may be about to."""
        stats = self._client.stats
        is_ready = self._client.state is EngineState.READY
        return is_ready and (stats.steps != self._num_steps or bool(stats.running or stats.waiting))

    async def _look(self, now_s: float) -> bool:
        """Look once and tell it. False when the server stops."""
        try:
            self._num_steps = self._client.stats.steps
            seen = await self._client.snapshot()
        except EngineUnavailable as error:
            if error.code == "shutting_down":
                return False
            self._send(self._message(msgspec.json.encode({"unavailable": str(error)})))
        except PacelineError as error:
            self._send(self._message(msgspec.json.encode({"unavailable": str(error)})))
        else:
            made = self._message(seen)
            self.past.add(made, now_s)
            self._send(made)
        return True

    def _message(self, seen: bytes) -> bytes:
        self._number += 1
        shared = sharing(self.models, self._client) | fleet_values(self._fleet)
        return b"data: %b\n\n" % message(self._number, self._requests, seen, self._new_names(), shared)

    def _new_names(self) -> list[Named | MovedName]:
        """Requests that came, or went on in another engine, since the last message."""
        if self.recent is None:
            return []
        moved, self._num_moved = num_moved(self._fleet) - self._num_moved, num_moved(self._fleet)
        count = self.recent.num_noted - self._num_named
        self._num_named = self.recent.num_noted
        return [
            *_names(self.recent, min(count, MOST_NAMES)),
            *moved_names(self._fleet, self.recent, min(moved, MOST_NAMES)),
        ]

    def _past_frames(self) -> list[bytes]:
        """What a page begins with: names, how many messages of the past follow, and these."""
        past = self.past.messages()
        names: list[Named | MovedName] = []
        if self.recent is not None:
            moved = moved_names(self._fleet, self.recent, MOST_NAMES)
            names = [*_names(self.recent, MOST_NAMES), *moved]
        return [b"data: %b\n\n" % msgspec.json.encode({"names": names, "past": len(past)}), *past]

    def _send(self, message: bytes | None) -> None:
        for reader in self._readers:
            if reader.full():
                reader.get_nowait()
            reader.put_nowait(message)


class WatchedModel(NamedTuple):
    """A model of the server, and its part of the page."""

    name: str
    share: float  # of the device's time, against those of the others
    client: EngineClient
    requests: RequestFamilies
    feeds: list[Feed]  # of its engines


def feeds_of(client: EngineClient, requests: RequestFamilies) -> list[Feed]:
    """One for each engine of a model."""
    return [Feed(each, requests, client) for each in engines_of(client)]


def feed_of(model: WatchedModel, number: int) -> Feed:
    """The feed of an engine, which may have come while serving."""
    for client in engines_of(model.client)[len(model.feeds) :]:
        feed = Feed(client, model.requests, model.client)
        feed.recent, feed.models = model.feeds[0].recent, model.feeds[0].models
        model.feeds.append(feed)
    return model.feeds[number]


def sharing(models: Sequence[WatchedModel], client: EngineClient) -> dict[str, Any]:
    """What the models of a server and the adapters of one do with the device; nothing where there is one model alone.

    Read by the page (sharing.js) and by `paceline top`.
    """
    found: dict[str, Any] = {}
    if len(models) > 1:
        found["models"] = [_turns(model) for model in models]
    stats, known = client.stats.adapters, client.adapters
    if known:
        names = {info.number: name for name, info in known.items()}
        found["adapters"] = {
            "known": len(known),
            "resident": stats.resident,
            "most": stats.most or len(known),
            "read": stats.read,
            "evicted": stats.evicted,
            "running": _first_names(names, stats.running),
            "waiting": _first_names(names, stats.waiting),
            "num_running": len(stats.running),
            "num_waiting": len(stats.waiting),
        }
    return found


def _first_names(names: Mapping[int, str], numbers: Sequence[int]) -> list[str]:
    return sorted(names[each] for each in numbers if each in names)[:MOST_ADAPTERS]


def _turns(model: WatchedModel) -> dict[str, Any]:
    stats = model.client.stats
    return {
        "name": model.name,
        "share": model.share,
        "standing": stats.standing,
        "device_s": stats.busy_s,
        "running": stats.running,
        "waiting": stats.waiting,
        "slabs": stats.slabs,
    }


# The numbers of a request's branches, its id, the first words of its prompt.
Named = tuple[tuple[int, ...], str, str]


def _names(recent: RecentRequests, count: int) -> list[Named]:
    return [(each.numbers, each.id, each.words) for each in recent.newest(count) if each.numbers]


def message(
    number: int,
    requests: RequestFamilies,
    seen: bytes,
    names: Sequence[Named | MovedName] | None = None,
    shared: dict[str, Any] | None = None,
) -> bytes:
    """One message: its number, what is known of requests, new names of them, and what was seen of the engine."""
    figures: dict[str, object] = {
        name: requests.histograms[full][1].counts for name, full in LATENCIES.items()
    }
    figures |= shared or {}
    # Buckets are wide: no percentile read off them may lie above what was seen.
    figures["longest"] = {name: requests.histograms[full][1].largest for name, full in LATENCIES.items()}
    figures["tokens"] = [requests.generation_tokens, requests.prompt_tokens]
    named = msgspec.json.encode(names or [])
    return b'{"n":%d,"server":%b,"names":%b,"engine":%b}' % (
        number,
        msgspec.json.encode(figures),
        named,
        seen,
    )


def latency_bounds(requests: RequestFamilies) -> dict[str, tuple[float, ...]]:
    """The upper ends of the buckets that messages count in."""
    return {name: requests.histograms[full][1].bounds for name, full in LATENCIES.items()}


def watch_routes(models: Callable[[], Sequence[WatchedModel]]) -> list[Route]:
    """What the live page asks for: the feed of a model's steps, and what its engine is. For admins."""

    def watched(call: Call) -> WatchedModel:
        found, name = models(), read_query(call.query, ("model",)).get("model")
        for model in found:
            if name in (None, model.name):
                return model
        known = ", ".join(model.name for model in found)
        raise UnknownModel(f"the model {name!r:.128} is not watched; there is {known}", param="model")

    def engine_asked(call: Call, engines: Sequence[EngineClient]) -> int | None:
        """Which of several engines is asked for."""
        query = read_query(call.query, ("engine",))
        is_named = "engine" in query
        return whole_of(query, "engine", default=0, low=0, high=len(engines) - 1) if is_named else None

    async def watch(call: Call) -> Answer | Events:
        with_past = choice_of(read_query(call.query, ("past",)), "past", ("true", "false")) == "true"
        model = watched(call)
        feed = feed_of(model, engine_asked(call, engines_of(model.client)) or 0)
        return Events(frames=feed.messages(with_past=with_past), error_frame=openai_error_frame)

    async def about(call: Call) -> Answer | Events:
        model = watched(call)
        engines = engines_of(model.client)
        number = engine_asked(call, engines)
        values: dict[str, Any] = {
            "version": __version__,
            "model": model.name,
            "engine": asdict(model.client.info if number is None else engines[number].info),
            "policies": POLICIES,
            "latency_bounds": latency_bounds(model.requests),
        }
        if len(engines) > 1:
            values["engines"] = len(engines)
        return Answer(body=msgspec.json.encode(values))

    summary = (
        "Watch a model step by step, as server-sent events; ?past=true begins a minute ago, "
        "?engine=N is one engine of several"
    )
    return [
        described("GET", "/v1/admin/watch", watch, summary, needs_admin=True),
        described(
            "GET", "/v1/admin/about", about, "What the engine is: sizes, device, version", needs_admin=True
        ),
    ]


# -- several engines -----------------------------------------------------------------------------------------


def fleet_values(client: EngineClient) -> dict[str, Any]:
    """Read by the page (engines.js) and by `paceline top`."""
    if not isinstance(client, Fleet):
        return {}
    now_s = time.monotonic()
    passages = [each for each in client.ways.passages if now_s - each.time_s < SHOWN_S]
    return {
        "engines": [
            {**engine_values(member), "output_tokens": client.output_tokens[member.number]}
            for member in client.members
        ],
        "passages": [
            (round(now_s - each.time_s, 2), each.source, each.target, each.requests, each.tokens)
            for each in passages
        ],
    }


def num_moved(client: EngineClient) -> int:
    """Requests that went on in another engine since the start."""
    return client.ways.num_moved if isinstance(client, Fleet) else 0


def moved_names(client: EngineClient, recent: RecentRequests, count: int) -> list[MovedName]:
    """Of the newest that did: the numbers they have there, what they are called, and the number they came with."""
    if not isinstance(client, Fleet) or not count:
        return []
    known = {each.numbers[0]: each for each in recent.newest(MOST_REQUESTS) if each.numbers}
    moved = [(known[first], first, inner) for first, inner in client.ways.moved if first in known]
    return [
        (tuple(number + inner - first for number in each.numbers), each.id, each.words, first)
        for each, first, inner in moved[-count:]
    ]


def engines_of(client: EngineClient) -> Sequence[EngineClient]:
    """What can be watched: the one engine there is, or each of several."""
    return [member.engine for member in client.members] if isinstance(client, Fleet) else [client]
