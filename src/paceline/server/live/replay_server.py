"""A server of recordings, on this machine only: the live page with runs instead of an engine, or the race of several.

Owns its routes and its short life. Runs may be over or still under way in another thread. Doors, listeners and the
pages are those of every server; there is no model, no key and nothing that could be changed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence

import msgspec

from paceline.config.server import ServerConfig
from paceline.server.access.keys_file import Keyring
from paceline.server.api.request_routes import explain_any_route
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events, Handler
from paceline.server.errors import Refusal
from paceline.server.generate.requests import Explanations, RecentRequests
from paceline.server.http.asgi import AccessRules, AsgiApp
from paceline.server.http.exchange import Exchange
from paceline.server.http.listener import Listener
from paceline.server.http.request_headers import HostCheck
from paceline.server.live.feed import latency_bounds
from paceline.server.live.page_files import LIVE, page_routes
from paceline.server.live.recording import BUNDLE, Race, Recording
from paceline.server.logs import log
from paceline.version import __version__

HOST = "127.0.0.1"
SUFFIX = "/requests/{id}/explain"


async def show(
    recordings: Sequence[Recording], bound: socket.socket, on_ready: Callable[[str], None]
) -> None:
    """Serve until interrupted or terminated. `on_ready` gets the page's address."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await serve(show_routes(recordings), bound, lambda address: on_ready(f"{address}/ui"), stopped)


async def serve(
    routes: Sequence[Route], bound: socket.socket, on_ready: Callable[[str], None], stopped: asyncio.Event
) -> None:
    """Serve until `stopped` is set. `on_ready` gets the server's address."""
    listener = Listener(AsgiApp(routes, _rules(), _Quiet()), bound, ServerConfig())
    await listener.open()
    try:
        on_ready(f"http://{listener.address}")
        await stopped.wait()
    finally:
        listener.close()
        listener.abort_connections()


def show_routes(recordings: Sequence[Recording]) -> list[Route]:
    async def about(call: Call) -> Answer | Events:
        over = [each for each in recordings if each.is_over]
        if not over:
            raise Refusal("starting", "No run is over yet.")
        return Answer(body=msgspec.json.encode(about_values(over)))

    async def bundle(call: Call) -> Answer | Events:
        found = _bundle(recordings, call.path["run"], call.path["bundle"])
        headers = {"content-encoding": "gzip", "cache-control": "no-store"}
        return Answer(body=found, headers=headers)

    return [
        _route("/v1/admin/about", about),
        _route("/v1/admin/recordings/{run}/{bundle}", bundle),
        *(_explain(number, recording) for number, recording in enumerate(recordings)),
        *page_routes(home=LIVE),
    ]


def race_routes(race: Race) -> list[Route]:
    """The page of a race, and the live page of the runs that are over."""

    async def standing(call: Call) -> Answer | Events:
        return Answer(body=msgspec.json.encode(race.values()), headers={"cache-control": "no-store"})

    return [_route("/v1/admin/race", standing), *show_routes(race.recordings)]


def about_values(recordings: Sequence[Recording]) -> dict[str, object]:
    """What the page has to know before it plays."""
    return {
        "version": __version__,
        "model": "",
        "latency_bounds": latency_bounds(recordings[0].requests),
        "bundle": BUNDLE,
        "recordings": [
            {
                "name": each.name,
                "engine": {"max_num_seqs": each.num_rows, "device": each.device, "dtype": ""},
                "times": [round(time_s, 6) for time_s in each.times],
            }
            for each in recordings
        ],
    }


class _Quiet:
    """No request log; errors of ours are logged all the same."""

    def ended(self, exchange: Exchange) -> None:
        return None

    def failed(self, exchange: Exchange, error: BaseException) -> None:
        log("request failed", level=logging.ERROR, error=error, route=exchange.route)


def _rules() -> AccessRules:
    return AccessRules(
        hosts=HostCheck.of(HOST, ()), keyring=Keyring(()), refusal=lambda: None, stream_keep_alive_s=15.0
    )


def _bundle(recordings: Sequence[Recording], run: str, bundle: str) -> bytes:
    try:
        if not (run.isdecimal() and bundle.isdecimal()):
            raise ValueError
        return recordings[int(run)].bundle(int(bundle))
    except (ValueError, IndexError):
        raise Refusal("not_found") from None


def _explain(number: int, recording: Recording) -> Route:
    return explain_any_route(
        Explanations(recording, RecentRequests()), f"/v1/admin/recordings/{number}{SUFFIX}"
    )


def _route(path: str, handler: Handler) -> Route:
    return Route(methods=("GET",), path=path, handler=handler)
