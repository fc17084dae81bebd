"""What the live page costs: the engine that is watched, and the browser that draws.

*Engine*: 1,024 rows on a device that takes a fixed time for a step, looked at as often as the server does while a page
watches, and while none does; with one row leaving and joining in every step, and without a change. Shares are of the
processor time of the engine's thread, by the same counter that the metrics show. *Server* (with --url): the same
counters of a server that runs and is busy, while this program watches it as a page does. *Frames* (with --frames): a
simulated run with 1,024 rows on the page in Chromium, played at its own speed; the time the page's code takes for each
frame, and the time between frames.

    python -m benchmarks.page_cost [--step-ms 5] [--seconds 10] [--frames] [--json FILE]
    python -m benchmarks.page_cost --url http://127.0.0.1:8000 [--seconds 10]    # PACELINE_ADMIN_KEY, if it has one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_cost import PROMPT, NoOpRunner
from paceline.config.engine import Capacity, EngineConfig, KVConfig, SchedulerConfig
from paceline.core.plan import Pending, StepPlan
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.process.client import EngineStats
from paceline.process.live_view import LiveView
from paceline.server.live.feed import UNWATCHED_INTERVAL_S, LookInterval

ROWS, CHURN = 1024, 1
SIMULATED = (
    *("sim", "--model", "qwen3-0.6b", "--trace", "uniform:50-600x200-600", "--num-requests", "6000"),
    *("--rate", "150", "--max-num-seqs", str(ROWS), "--ui", "--ui-port", "0"),
)


class PacedRunner:
    """A device that takes its time."""

    def __init__(self, num_rows: int) -> None:
        self.inner = NoOpRunner(num_rows)
        self.step_s = 0.0

    def reset(self, full: StepPlan) -> None:
        self.inner.reset(full)

    def submit(self, plan: StepPlan) -> Pending:
        due_s = time.monotonic() + self.step_s
        done = self.inner.submit(plan)
        time.sleep(max(0.0, due_s - time.monotonic()))
        return done


def engine_shares(step_s: float, seconds: float, *, churn: int, is_watched: bool) -> dict[str, float]:
    """Processor time of watching, as a share of that of the thread, and of a look and a step alone."""
    engine, runner = _full_engine()
    runner.step_s, runner.inner.leaving = step_s, churn
    live_view = LiveView(engine)
    look_s, steps, next_s, pace = [], 0, 0.0, LookInterval()
    began_s, began_cpu = time.monotonic(), time.thread_time()
    while time.monotonic() - began_s < seconds:
        if time.monotonic() >= next_s:
            before = live_view.cpu_s
            live_view.look()
            look_s.append(live_view.cpu_s - before)
            stats = EngineStats(watch_cpu_s=live_view.cpu_s, cpu_s=time.thread_time() - began_cpu)
            wanted_s = pace.interval_s(stats, time.monotonic()) if is_watched else UNWATCHED_INTERVAL_S
            next_s = time.monotonic() + wanted_s
        for _ in engine.step().finished:
            _add(engine)
        steps += 1
    spent_s = time.thread_time() - began_cpu
    return {
        "rows": ROWS,
        "rows_changed_per_step": churn,
        "step_ms": step_s * 1e3,
        "steps": steps,
        "engine_cpu_share_of_wall": spent_s / (time.monotonic() - began_s),
        "watch_share_of_engine_cpu": live_view.cpu_s / spent_s,
        "looks_per_s": len(look_s) / seconds,
        "look_ms": statistics.median(look_s) * 1e3,
        "note_us": (live_view.cpu_s - sum(look_s)) / steps * 1e6,
    }


COUNTERS = ("watch_cpu_seconds_total", "engine_cpu_seconds_total", "engine_steps_total")
SETTLED_S = 6.0  # after which the feed has found how often to look


def server_share(url: str, seconds: float) -> dict[str, float]:
    """The share of a server's engine that watching takes, of processor time, once looks come as often as they will."""
    feed = _asked(f"{url}/v1/admin/watch")
    messages = [0]

    def read() -> None:
        for line in feed:
            messages[0] += line.startswith(b"data: ")

    threading.Thread(target=read, daemon=True).start()
    time.sleep(SETTLED_S)
    before, first = _counters(url), messages[0]
    time.sleep(seconds)
    watch_s, cpu_s, steps = (after - was for after, was in zip(_counters(url), before, strict=True))
    return {
        "watch_share_of_engine_cpu": watch_s / cpu_s,
        "engine_cpu_share_of_wall": cpu_s / seconds,
        "steps_per_s": steps / seconds,
        "watch_us_per_step": watch_s / max(steps, 1.0) * 1e6,
        "looks_per_s": (messages[0] - first) / seconds,
    }


def _counters(url: str) -> list[float]:
    text = _asked(f"{url}/metrics").read().decode()
    return [float(re.findall(rf"^paceline:{name}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for name in COUNTERS]


def _asked(address: str) -> Any:
    key = os.environ.get("PACELINE_ADMIN_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60)


def _full_engine() -> tuple[Engine, PacedRunner]:
    scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=65_536, max_model_len=4096)
    config = EngineConfig(scheduler=scheduler, kv=KVConfig(block_size=16, num_blocks=65_536), depth=0)
    runner = PacedRunner(Capacity.of(config).num_rows)
    engine = build_engine(config, runner)
    for _ in range(ROWS):
        _add(engine)
    for _ in range(8):
        engine.step()
    return engine, runner


_random = np.random.default_rng(0)


def _add(engine: Engine) -> None:
    engine.add(_random.integers(0, 1000, PROMPT, np.int32), SamplingParams(max_tokens=2000, ignore_eos=True))


def frame_times(seconds: float) -> dict[str, Any]:
    """Of the page in Chromium, with every row in use."""
    from playwright.sync_api import sync_playwright

    command = subprocess.Popen(
        [sys.executable, "-m", "paceline", *SIMULATED], stderr=subprocess.PIPE, text=True
    )
    try:
        assert command.stderr is not None
        address = next(found[1] for line in command.stderr if (found := re.search(r"(http://\S+/ui)", line)))
        with sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.goto(address)
            page.wait_for_timeout(1000)
            page.evaluate("paceline.player().seek(paceline.player().first + 15)")
            page.wait_for_timeout(3000)
            page.evaluate(
                "{ window.gaps = []; let last = 0; const next = (at) => { if (last) gaps.push(at - last); last = at;"
                " requestAnimationFrame(next); }; requestAnimationFrame(next); paceline.frames.length = 0; }"
            )
            page.wait_for_timeout(1000 * seconds)
            rows, frames, gaps = page.evaluate("[paceline.stage.rows.size, paceline.frames, gaps]")
            browser.close()
    finally:
        command.terminate()
        command.wait()
    return {"rows": rows, "frame_ms": _spread(frames), "between_frames_ms": _spread(gaps)}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = np.sort(values)
    return {name: round(float(np.quantile(ordered, share)), 2) for name, share in _SHARES} | {
        "count": len(values)
    }


_SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--url", default="", help="of a server that is busy, instead of an engine of its own")
    parser.add_argument("--frames", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    if given.url:
        found["server"] = server_share(given.url.rstrip("/"), given.seconds)
    else:
        for name, is_watched in (("watched", True), ("unwatched", False)):
            for kind, churn in (("changing", CHURN), ("steady", 0)):
                found[f"{name}, {kind}"] = engine_shares(
                    given.step_ms / 1e3, given.seconds, churn=churn, is_watched=is_watched
                )
    if given.frames:
        found["page"] = frame_times(given.seconds)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
