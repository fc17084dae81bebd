"""How much energy the engine's device has taken, where it says so: NVIDIA's management library, by its C interface.

The library comes with the driver, so that nothing has to be installed for it. A process that computes on no such
device, an old device or a driver that will not tell has no figure; nothing else may come of it. torch is only asked
for the device's identity when this process has loaded it already.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

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
