"""`paceline top`: the live picture of a server in a terminal.

Owns the flags, the connection and the loop; what is seen is folded in `picture` and drawn in `view`. A server
that goes away is waited for. The key comes from the environment, PACELINE_ADMIN_KEY or else PACELINE_API_KEY.
"""

from __future__ import annotations

import json
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from paceline.cli.command import Command
from paceline.cli.steer import LOCAL
from paceline.config.options import option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.cli.remote import Connection
    from paceline.cli.top.picture import ServerPicture

WATCH, ABOUT = "/v1/admin/watch", "/v1/admin/about"
DRAW_S = 0.25
SILENCE_S = 15.0  # after which a server is taken for gone
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
ONCE_S = 1.0  # of traffic that one frame looks at
MOST_LINES = 100  # of that frame
PATIENCE_S = 30.0  # for that frame
REFUSED = (400, 401, 403, 404)  # a server that will not say otherwise the next time
HELP = """
Watch a running server in the terminal.

Shows rows, KV blocks, step composition, latencies, tenants, engines, models, adapters and the request of each
row. q or Ctrl-C ends it; when the server goes away, it waits for it.

  paceline top
  paceline top --url http://gpu-3:8000
  paceline top --engine 1               # of a server with several
  paceline top --once                   # one frame as text
  paceline top --json                   # one JSON object per second

Needs an admin key in PACELINE_ADMIN_KEY, or none for a server without keys on the same machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What `paceline top` takes."""

    url: str = option(LOCAL, "address of the server", metavar="URL")
    model: str | None = option(None, "which of several models (default: the first)", metavar="NAME")
    engine: int | None = option(None, "which of several engines (default: 0)", low=0, metavar="NUMBER")
    once: bool = option(False, "show one frame and exit")
    json: bool = option(False, "print one JSON object per line instead")


def _run(values: Mapping[str, Any]) -> None:
    options = TopOptions(**values)
    if not options.once and not options.json and not sys.stdout.isatty():
        raise InputError("the output is no terminal; --once prints one frame, --json one object a second")

    from paceline.cli.remote import admin_connection

    watcher = FeedFollower(admin_connection(options.url), options.model, options.engine)
    if options.once:
        _show_once(watcher, options)
        return
    with suppress(KeyboardInterrupt):  # the usual way to end it
        if options.json:
            _print_json(watcher)
        else:
            _show_live(watcher, options)


class FeedFollower:
    """Follows a server's feed in a separate thread, and continues when the server comes back."""

    def __init__(self, connection: Connection, model: str | None = None, engine: int | None = None) -> None:
        from paceline.cli.top.picture import ServerPicture

        self.picture: ServerPicture = ServerPicture()
        self.state = "connecting"
        self.refusal: Exception | None = None  # there is no use in trying again
        self.lock = threading.Lock()
        self._connection = connection
        self._asked = {"model": model, "engine": engine}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Follow no further; a read that is under way ends automatically."""
        self._stopped.set()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="paceline-top", daemon=True).start()

    def messages(self) -> Iterator[ServerPicture]:
        """The picture after each message, until the feed breaks off."""
        about = self._about()
        with self.lock:
            self.picture.meet(about)
        for message in self._connection.follow(self._path(WATCH), silence_s=SILENCE_S):
            with self.lock:
                self.picture.apply(message)
                self.state = "live"
            yield self.picture

    def _about(self) -> dict[str, Any]:
        """Of several engines, what the one that is watched is."""
        about: dict[str, Any] = self._connection.ask("GET", self._path(ABOUT))
        if "engines" in about and self._asked["engine"] is None:
            self._asked["engine"] = 0
            about = self._connection.ask("GET", self._path(ABOUT))
        return {**about, "number": self._asked["engine"]} if "engines" in about else about

    def _path(self, route: str) -> str:
        query = urlencode({name: value for name, value in self._asked.items() if value is not None})
        return f"{route}?{query}" if query else route

    def _follow(self) -> None:
        from paceline.cli.remote import ServerRefused

        pause_s = FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                for _ in self.messages():
                    pause_s = FIRST_PAUSE_S
                    if self._stopped.is_set():
                        return
            except ServerRefused as error:
                if error.status in REFUSED:
                    self.refusal = error
                    return
                self.state = (
                    "no answer; trying again" if error.status == 0 else f"{error.status}; trying again"
                )
            except Exception as error:  # a bug: the thread that draws raises it
                self.refusal = error
                return
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _show_once(watcher: FeedFollower, options: TopOptions) -> None:
    from rich.console import Console

    from paceline.cli.top.view import frame

    until_s = time.monotonic() + PATIENCE_S
    for picture in watcher.messages():
        if picture.span_s >= ONCE_S or time.monotonic() > until_s:
            break
    if options.json:
        print(json.dumps(_values(watcher)))
        return
    console = Console()
    console.print(frame(watcher.picture, watcher.state, options.url, console.width, height=MOST_LINES))


def _print_json(watcher: FeedFollower) -> None:
    watcher.start()
    while watcher.refusal is None:
        time.sleep(1.0)
        with watcher.lock:
            print(json.dumps(_values(watcher)))
    raise watcher.refusal


def _values(watcher: FeedFollower) -> dict[str, Any]:
    from paceline.cli.top.view import lane_values

    picture = watcher.picture
    values: dict[str, Any] = {"state": watcher.state, "model": picture.about.get("model")}
    if picture.num_messages:
        values |= {"time_s": picture.now_s, **picture.figures().values()}
        values["lanes"] = lane_values(picture.lanes)
    if picture.unavailable:
        values["unavailable"] = picture.unavailable
    return values


def _show_live(watcher: FeedFollower, options: TopOptions) -> None:
    from rich.console import Console
    from rich.live import Live

    from paceline.cli.top.view import frame

    watcher.start()
    console = Console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while watcher.refusal is None:
            size = shutil.get_terminal_size()
            with watcher.lock:
                shown = frame(watcher.picture, watcher.state, options.url, size.columns, size.lines)
            live.update(shown, refresh=True)
            if pressed(DRAW_S) in ("q", "Q"):
                return
    raise watcher.refusal


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, without waiting for the end of a line: "" if none comes within the given seconds."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([number], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    tty.setcbreak(number)
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


TOP = Command(name="top", help=HELP, run=_run, takes=(TopOptions,))
