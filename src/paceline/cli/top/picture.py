"""What `paceline top` shows, folded from the messages of a server's feed: figures of the last seconds and lanes.

A message carries the whole state of its moment, so that the picture can begin with any of them; rates and percentiles
are differences of counters between messages. Knows nothing of terminals and of connections.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

WINDOW_S = 30.0  # of percentiles and lanes
RATE_S = 5.0
CELL_S = 0.5  # of a lane
PREFILL, DECODE, RECOMPUTE, SWAP = "p", "d", "r", "s"  # what a row did in a cell of its lane
SHARES = (0.5, 0.9, 0.99)
IDLE_SHARE = 0.01  # of the time: of a device that computes less, everything is a large part
LATENCIES = ("ttft", "itl", "e2e")
LEVEL = ("held", "cached", "places", "hits", "stored", "loaded", "failed", "is_off")
PAGES = ("held", "cached", "pages")
Message = Mapping[str, Any]


@dataclass(slots=True)
class DrawnLane:
    """A row and what it did lately."""

    request: int | None = None
    num_tokens: int = 0
    limit: int = 0
    tenant: str = ""
    cells: dict[int, str] = field(default_factory=dict)  # by the number of the cell


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFigures:
    """The numbers of one moment. What is not known yet is None."""

    step: int
    running: int
    rows: int
    waiting: int
    preempted: int
    swapped: int
    finished: int
    vectors: int  # requests that ended with one
    vectors_per_s: float
    encoded: int  # pictures
    encoded_per_s: float
    pages: Mapping[str, int]  # of their vectors: held, cached, pages
    blocks: Mapping[str, int]  # free, cached, held, shared
    below: Mapping[str, Mapping[str, int]]  # host, disk: their fields of LEVEL
    models: Sequence[Mapping[str, Any]]  # of a server of several, as the feed has them
    engines: Sequence[Mapping[str, Any]]  # of a server of several, as the feed has them
    adapters: Mapping[str, Any]  # as the feed has them; empty: none
    hit_share: float | None
    output_per_s: float
    prompt_per_s: float
    steps_per_s: float
    step_ms: float | None
    decode_tokens: float | None  # of a step, on average
    prefill_tokens: float | None
    padding: float | None
    budget: float | None
    latencies_ms: Mapping[str, Mapping[str, float | None]]  # by name, then p50, p90, p99
    tenants: Mapping[str, tuple[int, int]]  # rows and waiting requests of each

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        found["tenants"] = {
            name: {"running": rows, "waiting": waits} for name, (rows, waits) in self.tenants.items()
        }
        return found


class ServerPicture:
    """Messages in, figures and lanes out."""

    def __init__(self) -> None:
        self.about: Mapping[str, Any] = {}
        self.lanes: dict[int, DrawnLane] = {}
        self.waiting: list[Sequence[Any]] = []
        self.now_s = 0.0
        self.unavailable = ""  # what the server says of an engine that is not there
        # Requests that went on in another engine, as the feed has them.
        self.passages: Sequence[Sequence[float]] = ()
        self._engines: Sequence[Mapping[str, Any]] = ()
        self._kept: deque[Message] = deque()
        self._steps: deque[Mapping[str, Any]] = deque()
        self._done: dict[int, float] = {}

    def meet(self, about: Mapping[str, Any]) -> None:
        """A server answered, the same as before or another: nothing that was seen counts any more."""
        self.about = about
        self.lanes.clear()
        self._kept.clear()
        self._steps.clear()
        self._done.clear()

    @property
    def num_messages(self) -> int:
        return len(self._kept)

    @property
    def span_s(self) -> float:
        """How long it has been watched, up to the window."""
        return _time(self._kept[-1]) - _time(self._kept[0]) if self._kept else 0.0

    def apply(self, message: Message) -> None:
        delta = message["engine"]
        self._engines = message["server"].get("engines", ())
        self.passages = message["server"].get("passages", ())
        self.unavailable = delta.get("unavailable", "")
        if self.unavailable:
            return
        if self._kept and delta["snapshot"]["time_s"] < self.now_s:  # a machine that was started anew
            self.meet(self.about)
        self.now_s = delta["snapshot"]["time_s"]
        self.waiting = delta["snapshot"]["waiting"]
        self._kept.append(message)
        while len(self._kept) > 2 and _time(self._kept[0]) < self.now_s - WINDOW_S:
            self._kept.popleft()
        self._note_steps(delta)
        self._note_rows(delta["snapshot"])

    def figures(self) -> ShownFigures:
        """There must have been a message."""
        snapshot = self._kept[-1]["engine"]["snapshot"]
        latest = [step for step in self._steps if step["t"] >= self.now_s - RATE_S]
        lengths = [self._done[step["seq"]] - step["t"] for step in latest if step["seq"] in self._done]
        prompt, cached = snapshot["prompt_tokens"], snapshot["cached_tokens"]
        return ShownFigures(
            step=snapshot["seq"],
            running=len(snapshot["rows"][0]),
            rows=self.about.get("engine", {}).get("max_num_seqs", 0),
            waiting=snapshot["num_waiting"],
            preempted=snapshot["preempted"],
            swapped=snapshot["swapped"],
            finished=snapshot["finished"],
            vectors=snapshot["vectors"],
            vectors_per_s=self._rate(lambda message: message["engine"]["snapshot"]["vectors"]),
            encoded=snapshot.get("encoded", 0),
            encoded_per_s=self._rate(lambda message: message["engine"]["snapshot"].get("encoded", 0)),
            pages=dict(zip(PAGES, snapshot.get("media", (0, 0, 0)), strict=True)),
            blocks=_blocks(snapshot),
            below={name: dict(zip(LEVEL, found, strict=True)) for name, *found in snapshot.get("below", ())},
            models=self._models(),
            engines=self.engines(),
            adapters=self._kept[-1]["server"].get("adapters", {}),
            hit_share=cached / prompt if prompt else None,
            output_per_s=self._rate(lambda message: message["server"]["tokens"][0]),
            prompt_per_s=self._rate(lambda message: message["engine"]["snapshot"]["prompt_tokens"]),
            steps_per_s=self._rate(lambda message: message["engine"]["snapshot"]["seq"]),
            step_ms=_mean([length * 1e3 for length in lengths]),
            decode_tokens=_mean([step["d"] for step in latest]),
            prefill_tokens=_mean([step["p"] for step in latest]),
            padding=_mean([step["padding"] for step in latest]),
            budget=_mean([step["b"] for step in latest]),
            latencies_ms={name: self._percentiles(name) for name in LATENCIES},
            tenants=_tenants(snapshot),
        )

    def engines(self) -> list[dict[str, Any]]:
        """Each of several, whether the one that is watched answers or not."""
        return [{**each, "output_per_s": self._engine_rate(each["number"])} for each in self._engines]

    # -- lanes and steps -----------------------------------------------------------------------------------

    def _note_steps(self, delta: Mapping[str, Any]) -> None:
        steps = unpack_steps(delta)
        self._steps.extend(steps)
        self._done.update((done[0], done[1]) for done in delta["done"])
        for step, after in pairwise(steps):  # of steps that were only counted, the next one tells the end
            if after["seq"] == step["seq"] + 1:
                self._done.setdefault(step["seq"], after["t"])
        while self._steps and self._steps[0]["t"] < self.now_s - RATE_S:
            self._done.pop(self._steps.popleft()["seq"], None)
        where = {lane.request: lane for lane in self.lanes.values() if lane.request is not None}
        for step in steps:
            cell = self.cell(step["t"])
            for row, _ in step.get("spans", ()):
                self._lane(row).cells.setdefault(cell, PREFILL)
            for kind, request, rule, *_ in step.get("notes", ()):
                if kind == "preempt" and request in where:
                    where[request].cells[cell] = SWAP if rule.endswith("swap") else RECOMPUTE

    def _note_rows(self, snapshot: Mapping[str, Any]) -> None:
        columns = dict(zip(snapshot["columns"], snapshot["rows"], strict=True))
        cell, oldest = self.cell(self.now_s), self.cell(self.now_s - WINDOW_S)
        live = set(columns["row"])
        for index, row in enumerate(columns["row"]):
            lane = self._lane(row)
            lane.request, lane.tenant = (
                columns["request"][index],
                snapshot["tenants"][snapshot["tenant_of"][index]],
            )
            lane.num_tokens, lane.limit = columns["num_tokens"][index], columns["limit"][index]
            if lane.cells.get(cell, PREFILL) == PREFILL:
                lane.cells[cell] = DECODE if columns["decoding"][index] else PREFILL
        for row, lane in list(self.lanes.items()):
            if row not in live:
                lane.request = None
            lane.cells = {number: what for number, what in lane.cells.items() if number > oldest}
            if not lane.cells and lane.request is None:
                del self.lanes[row]

    def _lane(self, row: int) -> DrawnLane:
        return self.lanes.setdefault(row, DrawnLane())

    @staticmethod
    def cell(time_s: float) -> int:
        """The number of the cell of a moment."""
        return int(time_s // CELL_S)

    # -- differences ---------------------------------------------------------------------------------------

    def _rate(self, read: Any) -> float:
        last = self._kept[-1]
        first = next(message for message in self._kept if _time(message) >= _time(last) - RATE_S)
        elapsed_s = _time(last) - _time(first)
        return max(0.0, (read(last) - read(first)) / elapsed_s) if elapsed_s > 0 else 0.0

    def _engine_rate(self, number: int) -> float:
        def told(message: Message) -> int:
            engines = message["server"].get("engines", ())
            return next((each["output_tokens"] for each in engines if each["number"] == number), 0)

        return self._rate(told) if self._kept else 0.0

    def _models(self) -> list[dict[str, Any]]:
        """The feed's, with each model's part of the device's time lately."""
        last, first = (self._kept[place]["server"].get("models", ()) for place in (-1, 0))
        before = {model["name"]: model["device_s"] for model in first}
        grown = [model["device_s"] - before.get(model["name"], 0.0) for model in last]
        spent = sum(grown)
        is_idle = spent <= IDLE_SHARE * self.span_s
        parts = [None if is_idle else seconds / spent for seconds in grown]
        return [{**model, "part": part} for model, part in zip(last, parts, strict=True)]

    def _percentiles(self, name: str) -> dict[str, float | None]:
        bounds = self.about.get("latency_bounds", {}).get(name, ())
        first, last = self._kept[0]["server"][name], self._kept[-1]["server"][name]
        counts = [new - old for new, old in zip(last, first, strict=True)]
        if not any(counts):
            counts = last  # nothing lately: what is known since the server started
        found = {}
        for share in SHARES:
            value = percentile(bounds, counts, share)
            longest = self._kept[-1]["server"].get("longest", {}).get(name, math.inf)
            found[f"p{share * 100:.0f}"] = None if value is None else min(value, longest) * 1e3
        return found


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of the counts lies, evenly spread within its bucket; None without counts."""
    total = sum(counts)
    if total <= 0 or len(counts) != len(bounds) + 1:
        return None
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= share * total:
            low = bounds[bucket - 1] if bucket else 0.0
            high = bounds[bucket] if bucket < len(bounds) else low
            return low + (high - low) * (share * total - below) / count
        below += count
    return bounds[-1]


def _time(message: Message) -> float:
    return float(message["engine"]["snapshot"]["time_s"])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _blocks(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """Blocks by what they are, over all layer groups."""
    totals = np.zeros(4, np.int64)
    for packed, count in zip(snapshot["blocks"], snapshot["num_blocks"], strict=True):
        words = np.frombuffer(base64.b64decode(packed), np.uint8)
        kinds = np.stack([(words >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[:count]
        totals += np.bincount(kinds, minlength=4)
    return dict(zip(("free", "cached", "held", "shared"), totals.tolist(), strict=True))


def _tenants(snapshot: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    rows = Counter(snapshot["tenants"][index] for index in snapshot["tenant_of"])
    waits = Counter(waiting[6] for waiting in snapshot["waiting"])
    names = sorted({*rows, *waits}, key=lambda name: (-rows[name], -waits[name], name))
    return {name: (rows[name], waits[name]) for name in names}


def unpack_steps(delta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a message one by one, from its columns, as `stage.js` does.

    Each has its figures, and a list under the name of every kind of change it made. Steps that were only counted repeat
    the one they are counted with, at even distances.
    """
    names = tuple(delta["steps"])
    noted = [dict(zip(names, figures, strict=True)) for figures in zip(*delta["steps"].values(), strict=True)]
    steps = [_following(step) for step in noted]
    for name, (places, *columns) in delta["changes"].items():
        for place, *entry in zip(places, *columns, strict=True):
            steps[place][0].setdefault(name, []).append(entry[0] if len(entry) == 1 else entry)
    return [step for several in steps for step in several]


def _following(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A step and those counted with it, which compute no prompt."""
    count, first_s = step["n"], step["t"]
    apart_s = (step["u"] - first_s) / max(1, count - 1)
    found = [{**step, "n": 1, "seq": step["seq"] + at, "t": first_s + at * apart_s} for at in range(count)]
    for later in found[1:]:
        later |= {"p": 0, "padding": step["pr"]}
    return found
