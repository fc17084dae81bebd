"""What a watching page is shown, made in the engine's process: a film of its steps, each cut as JSON.

The first look begins the film, which goes on for as long as the engine lives: an engine that nobody looks at any more
keeps a bounded number of notes. What watching costs this process is counted and told with every look. Blocks travel as
two bits each. Knows nothing of pages.
"""

from __future__ import annotations

import base64
import ctypes
import sys
import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.engine.engine import Engine
from paceline.watch.film import Cut, Film
from paceline.watch.scene import ROW_COLUMNS, Scene

# How much energy the engine's device has taken, where it says so


LIBRARY = "libnvidia-ml.so.1"
_OK = 0


class Energy:
    """A counter of joules since the driver was loaded. Looks for the device when it is first asked."""

    def __init__(self) -> None:
        self._library: Any = None
        self._device = ctypes.c_void_p()
        self._asked = False

    def joules(self) -> float | None:
        """What the device has taken so far; None where nobody can tell."""
        if not self._asked:
            self._asked = True
            self._open()
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3 if code == _OK else None

    def _open(self) -> None:
        identity = device_identity()
        if identity is None:
            return
        try:
            library = ctypes.CDLL(LIBRARY)
            found = library.nvmlInit_v2() == _OK and (
                library.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(self._device)) == _OK
            )
        except (OSError, AttributeError):  # no driver, or one that lacks these functions
            return
        self._library = library if found else None


def device_identity() -> str | None:
    """The UUID of the device this process computes on; None when that is no GPU."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (RuntimeError, AttributeError):
        return None


# How the columns are called in a message. Read by the page (stage.js, charts.js) and by `paceline top`.
STEP_COLUMNS = {
    "seq": "seq",
    "t": "time_s",
    "n": "count",
    "u": "until_s",
    "d": "decode_rows",
    "p": "prefill_tokens",
    "padding": "padding",
    "pr": "padding_rows",
    "b": "budget",
    "r": "running",
    "w": "waiting",
}
CHANGE_COLUMNS = {
    "cleared": "cleared",
    "leaves": "leaves",
    "joins": "joins",
    "spans": "spans",
    "on": "decode_added",
    "off": "decode_removed",
    "pads": "pads",
    "fills": "fills",
    "notes": "notes",
}
_WORD = np.dtype("<u4")  # four blocks before they are packed


class Sight:
    """Looks at one engine, through a film, and knows what that has cost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._energy = Energy()
        self._film: Film | None = None
        self._looks_s = 0.0

    @property
    def cpu_s(self) -> float:
        """Processor time of this thread, spent on watching since the start."""
        return self._looks_s + (self._film.cpu_s if self._film is not None else 0.0)

    def look(self) -> bytes:
        """What happened since the last look, and how things stand now."""
        started_s = time.thread_time()
        is_first = self._film is None
        if self._film is None:
            self._film = self._engine.watcher = Film(self._engine.scheduler.state)
        costs = {"watch_cpu_s": self.cpu_s, "cpu_s": time.process_time(), "energy_j": self._energy.joules()}
        seen = msgspec.json.encode({"first": is_first, "costs": costs, **cut_values(self._film.cut())})
        self._looks_s += time.thread_time() - started_s
        return seen


def cut_values(cut: Cut) -> dict[str, Any]:
    """A cut as plain values."""
    return {
        "steps": {short: getattr(cut.steps, name) for short, name in STEP_COLUMNS.items()},
        "changes": {short: getattr(cut.changes, name) for short, name in CHANGE_COLUMNS.items()},
        "done": cut.done,
        "dropped": cut.dropped,
        "evicted": cut.evicted,
        "cleared": cut.cleared,
        "ended": cut.ended,
        "scene": scene_values(cut.scene),
    }


def scene_values(scene: Scene) -> dict[str, Any]:
    return {
        "seq": scene.seq,
        "time_s": scene.time_s,
        "columns": ROW_COLUMNS,
        "rows": scene.rows.tolist(),
        "left": scene.left,
        "tenants": scene.tenants,
        "tenant_of": scene.tenant_of.tolist(),
        "waiting": scene.waiting,
        "num_waiting": scene.num_waiting,
        "num_blocks": [len(kinds) for kinds in scene.blocks],
        "blocks": [base64.b64encode(packed(kinds)).decode() for kinds in scene.blocks],
        "saved": scene.saved,
        "evicted": scene.evicted,
        "preempted": scene.preempted,
        "swapped": scene.swapped,
        "finished": scene.finished,
        "prompt_tokens": scene.prompt_tokens,
        "cached_tokens": scene.cached_tokens,
        "computed_tokens": scene.computed_tokens,
        "padding_tokens": scene.padding_tokens,
    }


def packed(kinds: NDArray[np.uint8]) -> bytes:
    """Four blocks in a byte, the first in the lowest bits."""
    padded = np.zeros(-(-len(kinds) // 4) * 4, np.uint8)
    padded[: len(kinds)] = kinds
    words = padded.view(_WORD)
    return (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8).tobytes()
