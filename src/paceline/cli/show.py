"""`--ui`: runs on a page, after they are over or while they are under way. Shared by the commands that make runs.

Owns the two flags, when the port is taken and what is printed. What a recording is and how it is served is the
server's business; nothing heavy is imported unless a page is wanted.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.config.options import CheckedOptions, option

if TYPE_CHECKING:
    import asyncio
    import socket

    from paceline.server.live.recording import Race, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions(CheckedOptions):
    """What a command takes that can show its run."""

    PANEL: ClassVar = "Live page"

    ui: bool = option(False, "play the run on the live page afterwards; Ctrl-C ends it", basic=True)
    ui_port: int = option(8001, "port of the live page, on 127.0.0.1; 0: any free port", low=0, high=65_535)


@contextmanager
def page_port(options: ShowOptions) -> Iterator[socket.socket | None]:
    """The page's socket, if there is to be a page: a port in use is reported before a long run."""
    if not options.ui:
        yield None
        return
    from paceline.server.http.listener import bind_tcp
    from paceline.server.live.replay_server import HOST

    with bind_tcp(HOST, options.ui_port, flag="--ui-port") as bound:
        yield bound


def show_page(recordings: Sequence[Recording], bound: socket.socket) -> None:
    """Serve recordings until Ctrl-C."""
    import asyncio

    import uvloop

    from paceline.server.live.replay_server import show

    def announce(address: str) -> None:
        sys.stdout.flush()
        print(f"The run is on {address}  (Ctrl-C ends)", file=sys.stderr, flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(show(recordings, bound, announce))


class RacePage:
    """Serves a race from a thread, so that it can be watched while its runs are made in this one."""

    def __init__(self, race: Race, bound: socket.socket) -> None:
        self._race = race
        self._bound = bound
        self._address = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._serve, name="race page", daemon=True)

    def __enter__(self) -> RacePage:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._loop is not None and self._stopped is not None
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def announce(self, text: str) -> None:
        print(f"{text} {self._address}/ui/race  (Ctrl-C ends)", file=sys.stderr, flush=True)

    def wait(self, text: str) -> None:
        """Announce where the page is and serve it until interrupted or terminated."""
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        self.announce(text)  # from here on an interrupt ends the page and is no error
        ended.wait()

    def _serve(self) -> None:
        import asyncio

        import uvloop

        from paceline.server.live.replay_server import race_routes, serve

        def ready(address: str) -> None:
            self._address = address
            self._ready.set()

        async def main() -> None:
            self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
            await serve(race_routes(self._race), self._bound, ready, self._stopped)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
