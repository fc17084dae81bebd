"""`paceline top`: the figures are those of the feed, the frame fits its terminal, and a server may come and go."""

from __future__ import annotations

import io
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.main import run
from paceline.cli.remote import Connection
from paceline.cli.top.picture import RECOMPUTE, SWAP, ServerPicture, percentile
from paceline.cli.top.run import FeedFollower
from paceline.cli.top.view import frame
from paceline.engine.trace import StepTrace
from paceline.process.live_view import delta_values
from tests.dst.world import World
from tests.waiting import wait_until

BOUND_S = 60.0
BOUNDS = [0.1, 1.0]
ABOUT = {
    "model": "a\x1b[31mmodel",
    "engine": {"max_num_seqs": 16, "device": "cpu", "dtype": "float32"},
    "latency_bounds": {"ttft": BOUNDS, "itl": BOUNDS, "e2e": BOUNDS},
}


def messages(seed: int = 5, steps: int = 120) -> list[dict[str, Any]]:
    """What a feed says of a world with faults, preemptions and several tenants."""
    world = World(seed)
    trace = world.engine.watcher = StepTrace(world.engine.scheduler.state)
    found: list[dict[str, Any]] = []
    rng, step = random.Random(seed), world.step

    def watched() -> None:
        step()
        if rng.random() < 0.3:
            number = len(found) + 1
            counts = {name: [0, number, 0] for name in ("ttft", "itl", "e2e")}
            server = {**counts, "tokens": [10 * number, 5 * number]}
            engine = {"first": number == 1, **delta_values(trace.take_delta())}
            found.append(json.loads(json.dumps({"n": number, "server": server, "engine": engine})))

    world.step = watched  # type: ignore[method-assign]
    world.run(steps)
    return found


def told(picture: ServerPicture, width: int = 80, height: int = 24, state: str = "live") -> str:
    stream = io.StringIO()
    shown = frame(picture, state, "http://127.0.0.1:8000", width, height)
    Console(file=stream, width=width, color_system=None).print(shown)
    return stream.getvalue()


@pytest.mark.parametrize("seed", [5, 6, 11])
def test_figures_are_those_of_the_state(seed: int) -> None:
    picture = ServerPicture()
    picture.meet(ABOUT)
    for message in messages(seed):
        picture.apply(message)
        snapshot, figures = message["engine"]["snapshot"], picture.figures()
        assert figures.running == len(snapshot["rows"][0]) and figures.waiting == snapshot["num_waiting"]
        assert sum(figures.blocks.values()) == sum(snapshot["num_blocks"])
        assert sum(rows for rows, _ in figures.tenants.values()) == figures.running
        on_rows = {lane.request for lane in picture.lanes.values() if lane.request is not None}
        assert on_rows == set(snapshot["rows"][1])
        json.dumps(figures.values())


def test_lanes_show_preempted_requests() -> None:
    seen = set()
    for seed in range(12):
        picture = ServerPicture()
        picture.meet(ABOUT)
        for message in messages(seed):
            picture.apply(message)
            seen |= {what for lane in picture.lanes.values() for what in lane.cells.values()}
        if {RECOMPUTE, SWAP} <= seen:
            return
    raise AssertionError(f"only {seen} was shown")


@pytest.mark.parametrize("width, height", [(80, 24), (60, 12), (200, 60), (20, 5)])
def test_a_frame_fits_its_terminal(width: int, height: int) -> None:
    picture = ServerPicture()
    picture.meet(ABOUT)
    assert "nothing received yet" in told(picture, max(width, 60))
    for message in messages():
        picture.apply(message)
        text = told(picture, max(width, 60), height)
        assert max(map(len, text.splitlines())) <= max(width, 60)
        assert "\x1b" not in text
    if width >= 80:
        assert len(text.splitlines()) <= height
        assert "rows" in text and "TTFT" in text and "tok/s" in text


def busy() -> ServerPicture:
    """A picture whose figures are as long as those of a large server."""
    picture = ServerPicture()
    picture.meet(ABOUT)
    for message in messages():
        picture.apply(message)
    times = {"p50": 12_345.0, "p90": 34_567.0, "p99": 123_456.0}
    figures = replace(
        picture.figures(),
        running=128,
        rows=256,
        waiting=1_234,
        output_per_s=12_345.0,
        prompt_per_s=123_456.0,
        step_ms=123.4,
        decode_tokens=128.0,
        prefill_tokens=1_920.0,
        padding=64.0,
        budget=8_192.0,
        blocks={"free": 20_000, "cached": 12_345, "held": 30_123, "shared": 4_321},
        latencies_ms={"ttft": times, "itl": times, "e2e": times},
        below={
            "disk": {
                "held": 20,
                "cached": 123_456,
                "places": 1_234_567,
                "hits": 12_345_678,
                "stored": 234_567,
                "loaded": 123_456,
                "failed": 12,
                "is_off": False,
            }
        },
        models=[
            {
                "name": f"a model with a long name {number}",
                "share": 0.5,
                "standing": "waking",
                "device_s": 123_456.7,
                "running": 128,
                "waiting": 1_234,
                "part": 0.25 * number,
                "slabs": [123, 45, 6, 678],
            }
            for number in (1, 3)
        ],
        adapters={
            "known": 1_000,
            "resident": 16,
            "read": 123_456,
            "evicted": 123_456,
            "running": [f"adapter-{number}" for number in range(8)],
            "num_running": 100,
            "waiting": ["another"],
            "num_waiting": 1,
        },
        tenants={f"tenant {number} of many": (20 - number, number) for number in range(8)},
    )
    picture.figures = lambda: figures  # type: ignore[method-assign]
    return picture


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("is_busy", [False, True])
def test_nothing_of_a_frame_is_cut_in_the_middle(width: int, is_busy: bool) -> None:
    picture = busy()
    if not is_busy:
        del picture.figures
    lines = told(picture, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines[1:]), "only a long name of a model may be shortened"
    text = "\n".join(lines)
    latency = "12,345/34,567/123,456" if is_busy else "550/910/991"
    assert re.search(rf"E2E {latency} +ms, p50/90/99$", text, re.M)
    assert re.search(r"x recompute\s+s swap$", text, re.M), "every sign of the lanes has its name"
    assert "tok/s" in text and re.search(r"\d decode \+ [\d,]+ prefill( |$)", text, re.M)
    assert not is_busy or re.search(r"and \d more$", text, re.M), "tenants without room are counted"
    assert width < 120 or ("in 123,456 tok/s" in text if is_busy else "prefill of 64" in text)


def test_models_and_adapters_have_their_lines() -> None:
    picture = ServerPicture()
    picture.meet(ABOUT)
    message = messages()[-1]
    for second in range(2):
        again = json.loads(json.dumps(message))
        again["engine"]["snapshot"]["time_s"] = 100.0 + second
        shared = {"share": 0.5, "standing": "awake", "running": 1, "waiting": 0, "slabs": [0, 0, 0, 0]}
        again["server"]["models"] = [
            {"name": "left", "device_s": 10.0 + 3 * second, **shared},
            {"name": "right", "device_s": 20.0 + second, **shared},
        ]
        picture.apply(again)
    text = told(picture)
    assert re.search(r"^model +left +█.* awake  75% of 50%  13.0 s", text, re.M)
    assert re.search(r"^model +right +█.* awake  25% of 50%  21.0 s", text, re.M)
    assert "adapter" not in text
    text = told(busy(), 120)
    assert re.search(r"^adapter +16 of 1,000 +running adapter-0 adapter-1 ", text, re.M)
    assert re.search(r"and 92 more waiting another +read again 123,456", text.replace("\n", " "))
    assert re.search(r"^disk +123,456 of 1,234,567 .*hit 12,345,678 tok", text, re.M)


ENGINES = [
    {"number": number, "rows": 64, "waiting": 3, "kv_usage": 0.5, "restarts": number} for number in range(2)
]


def fleet_message(known: dict[str, Any], second: int, *states: str) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(json.dumps(known))
    message["engine"]["snapshot"]["time_s"] = 100.0 + second
    message["server"]["engines"] = [
        {**each, "state": state, "running": 16, "output_tokens": 1000 * (1 + number) * second}
        for (number, each), state in zip(enumerate(ENGINES), states, strict=True)
    ]
    return message


def test_engines_have_their_lines_whether_the_one_that_is_watched_answers_or_not() -> None:
    picture, known = ServerPicture(), messages()[-1]
    picture.meet({**ABOUT, "number": 0})
    assert "engine " not in told(busy()), "one engine has no line"
    for second in range(2):
        picture.apply(fleet_message(known, second, "ready", "drained"))
    text = told(picture, 140)
    assert "engine 0" in text.splitlines()[0]
    assert re.search(r"^engine +0 +█.* ready  16 of 64 rows  3 wait  1,000 tok/s  KV 50%", text, re.M)
    assert re.search(r"^engine +1 +█.* drained .* 2,000 tok/s  KV 50%  restarts 1", text, re.M)
    assert [round(each["output_per_s"]) for each in picture.figures().values()["engines"]] == [1000, 2000]
    lost = fleet_message(known, 2, "lost", "ready")
    lost["engine"] = {"unavailable": "the engine's process was ended"}
    lost["server"]["passages"] = [(4.2, 0, 1, 12, 345)]
    for watched in (picture, ServerPicture()):
        watched.apply(lost)
        text = told(watched, 80)
        assert re.search(r"^engine +0 +█.* lost ", text, re.M) and "the engine's process was ended" in text
        assert "4 s ago: 12 requests went on from engine 0 to 1" in text


def test_bars_begin_below_each_other_on_a_wide_terminal() -> None:
    lines = told(busy(), 120).splitlines()
    bars = [line.index("█") for line in lines if line.startswith(("rows", "blocks", "steps"))]
    assert len(bars) == 3 and len(set(bars)) == 1


def test_rates_and_percentiles_are_differences() -> None:
    picture = ServerPicture()
    picture.meet(ABOUT)
    message = messages()[-1]
    for second in range(4):
        again = json.loads(json.dumps(message))
        again["engine"]["snapshot"]["time_s"] = 100.0 + second
        again["engine"]["steps"] = {name: [] for name in again["engine"]["steps"]}
        again["engine"]["changes"] = {}
        again["engine"]["done"] = []
        again["server"]["tokens"] = [1000 + 50 * second, 0]
        again["server"]["itl"] = [7, second, 0]
        picture.apply(again)
    figures = picture.figures()
    assert figures.output_per_s == pytest.approx(50.0)
    assert figures.latencies_ms["itl"]["p50"] == pytest.approx(550.0)
    assert figures.latencies_ms["ttft"]["p50"] == pytest.approx(550.0), (
        "none meanwhile: those since the start"
    )
    assert figures.step_ms is None and figures.decode_tokens is None
    assert "none lately" in told(picture)
    again["server"]["longest"] = {"itl": 0.4, "ttft": 9.0}
    picture.apply(again)
    latencies = picture.figures().latencies_ms
    assert latencies["itl"]["p50"] == 400.0, "nothing is longer than what was seen"
    assert latencies["ttft"]["p50"] == pytest.approx(550.0)


def test_percentiles_of_buckets() -> None:
    assert percentile((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert percentile((1.0, 2.0), (4, 0, 0), 0.5) == 0.5
    assert percentile((1.0, 2.0), (1, 1, 2), 0.99) == 2.0


# ---------------------------------------------------------------- a server that comes and goes


class Feed:
    """A server that sends a few messages to each client and then breaks off."""

    def __init__(self, port: int = 0, status: int = 200) -> None:
        sent = messages()
        feed = self
        self.asked = 0
        self.keys: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                feed.keys.append(self.headers.get("authorization"))
                if status != 200:
                    self._answer(status, b'{"error": {"message": "an admin key is needed"}}')
                elif self.path.endswith("/about"):
                    self._answer(200, json.dumps(ABOUT).encode())
                else:
                    feed.asked += 1
                    self.send_response(200)
                    self.send_header("content-type", "text/event-stream")
                    self.end_headers()
                    for index, message in enumerate(sent):
                        message["engine"]["snapshot"]["time_s"] = float(index)
                        self.wfile.write(b": alive\n\ndata: " + json.dumps(message).encode() + b"\n\n")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed()
    yield made
    made.close()


def test_one_frame_as_text_and_as_json(
    feed: Feed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "secret")
    assert run(["top", "--url", feed.url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "rows" in text and "live" not in text.splitlines()[0] and "127.0.0.1" in text.splitlines()[0]
    assert run(["top", "--url", feed.url, "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "live" and found["rows"] == 16 and found["waiting"] >= 0
    assert set(feed.keys) == {"Bearer secret"}


def test_a_server_that_goes_is_waited_for(feed: Feed) -> None:
    watcher = FeedFollower(Connection(feed.url, ""))
    watcher.start()
    wait_until(lambda: feed.asked >= 2)  # it broke off once and was asked again
    port = feed.port
    feed.close()
    wait_until(lambda: watcher.state.startswith("no answer"))
    assert watcher.picture.num_messages > 0, "the last picture stays"
    back = Feed(port)
    try:
        wait_until(lambda: back.asked >= 1 and watcher.picture.num_messages > 0)
    finally:
        watcher.stop()
        back.close()
    assert watcher.refusal is None


def test_a_refusal_is_final(capsys: pytest.CaptureFixture[str]) -> None:
    feed = Feed(status=403)
    try:
        assert run(["top", "--url", feed.url, "--json"]) == 1
    finally:
        feed.close()
    assert "an admin key is needed" in capsys.readouterr().err


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9"]) == 2
    assert "--once" in capsys.readouterr().err
    assert run(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_pictures_and_their_pages_are_shown() -> None:
    picture = ServerPicture()
    picture.meet(ABOUT)
    sees = (seed for seed in range(5, 99) if World(seed).engine.scheduler.state.config.encoder is not None)
    for message in messages(seed=next(sees)):
        picture.apply(message)
    figures = picture.figures()
    assert figures.encoded > 0 and figures.pages["pages"] >= figures.pages["held"] + figures.pages["cached"]
    assert f"pictures {figures.encoded:,} (" in told(picture, width=140)
    assert f"of {figures.pages['pages']} pages" in told(picture, width=140)
    plain = ServerPicture()
    plain.meet(ABOUT)
    for message in messages(steps=20):
        plain.apply(message)
    assert "pictures" not in told(plain, width=140)
