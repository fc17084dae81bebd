"""What a viewer is sent, made in the engine's process: a trace of its steps, each delta as JSON.

The first snapshot begins the trace, which continues for as long as the engine lives: without a viewer, the engine
keeps a bounded number of notes. What watching costs this process is counted and sent with every snapshot. Blocks
travel as two bits each. Knows nothing of pages.
"""

from __future__ import annotations

import base64
import ctypes
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import CPUWork
from paceline.engine.engine import Engine
from paceline.engine.snapshot import ROW_COLUMNS, Snapshot
from paceline.engine.trace import StepTrace, TraceDelta

# How much energy the engine's device has taken, where it says so: NVIDIA's management library, by its C interface.
#
# The library comes with the driver, so that nothing has to be installed for it. A process that computes on no such
# device, an old device or a driver that will not tell has no figure; nothing else may come of it. torch is only
# asked for the device's identity when this process has loaded it already.


LIBRARY = "libnvidia-ml.so.1"
_OK = 0


class Energy:
    """A counter of joules since the driver was loaded. Looks for the device when it is first asked."""

    def __init__(self) -> None:
        self._device = ctypes.c_void_p()

    def joules(self) -> float | None:
        """What the device has taken so far; None where that is not known."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3 if code == _OK else None

    @cached_property
    def _library(self) -> Any:
        identity = device_identity()
        if identity is None:
            return None
        try:
            library = ctypes.CDLL(LIBRARY)
            found = library.nvmlInit_v2() == _OK and (
                library.nvmlDeviceGetHandleByUUID(identity.encode(), ctypes.byref(self._device)) == _OK
            )
        except (OSError, AttributeError):  # no driver, or one that lacks these functions
            return None
        return library if found else None


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
    "placed": "placed",
    "encodes": "encodes",
    "notes": "notes",
}
# Figures of a snapshot that are sent under their own names.
_TOKENS = (
    *("prompt_tokens", "cached_tokens", "computed_tokens", "padding_tokens"),
    *("draft_tokens", "accepted_tokens"),
)
COUNTED = ("saved", "evicted", "preempted", "swapped", "finished", "vectors", "encoded", "media", *_TOKENS)
_WORD = np.dtype("<u4")  # four blocks before they are packed


class LiveView:
    """Traces one engine and counts what that costs."""

    def __init__(self, engine: Engine, cpu_work: Callable[[], CPUWork] = CPUWork) -> None:
        self._engine = engine
        self._cpu_work = cpu_work
        self._energy = Energy()
        self._trace: StepTrace | None = None
        self._snapshots_s = 0.0

    @property
    def cpu_s(self) -> float:
        """Processor time of this thread, spent on watching since the start."""
        return self._snapshots_s + (self._trace.cpu_s if self._trace is not None else 0.0)

    def snapshot(self) -> bytes:
        """What happened since the last snapshot, and the current state."""
        started_s = time.thread_time()
        is_first = self._trace is None
        if self._trace is None:
            self._trace = self._engine.watcher = StepTrace(self._engine.scheduler.state)
        costs = {
            "watch_cpu_s": self.cpu_s,
            "cpu_s": time.process_time(),
            "energy_j": self._energy.joules(),
            "phase_s": self._cpu_work().phase_s,
        }
        seen = msgspec.json.encode(
            {"first": is_first, "costs": costs, **delta_values(self._trace.take_delta())}
        )
        self._snapshots_s += time.thread_time() - started_s
        return seen


def delta_values(delta: TraceDelta) -> dict[str, Any]:
    """A delta as plain values."""
    return {
        "steps": {short: getattr(delta.steps, name) for short, name in STEP_COLUMNS.items()},
        "changes": {short: getattr(delta.changes, name) for short, name in CHANGE_COLUMNS.items()},
        "done": delta.done,
        "dropped": delta.dropped,
        "evicted": delta.evicted,
        "cleared": delta.cleared,
        "ended": delta.ended,
        "snapshot": snapshot_values(delta.snapshot),
    }


def snapshot_values(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "seq": snapshot.seq,
        "time_s": snapshot.time_s,
        "columns": ROW_COLUMNS,
        "rows": snapshot.rows.tolist(),
        "left": snapshot.left,
        "tenants": snapshot.tenants,
        "tenant_of": snapshot.tenant_of.tolist(),
        "waiting": snapshot.waiting,
        "num_waiting": snapshot.num_waiting,
        "num_blocks": [len(kinds) for kinds in snapshot.blocks],
        "blocks": [base64.b64encode(packed(kinds)).decode() for kinds in snapshot.blocks],
        "below": snapshot.below,
        **{name: getattr(snapshot, name) for name in COUNTED},
    }


def packed(kinds: NDArray[np.uint8]) -> bytes:
    """Four blocks in a byte, the first in the lowest bits."""
    padded = np.zeros(-(-len(kinds) // 4) * 4, np.uint8)
    padded[: len(kinds)] = kinds
    words = padded.view(_WORD)
    return (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8).tobytes()
