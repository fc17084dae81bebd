"""The server's two processes as they are, with one signal more: SIGUSR2 writes down what their memory holds.

What the system says of a process's memory moves by megabytes for other reasons; what the allocators have given
out after a collection does not, so that a leak of a kilobyte per request is seen after a few thousand requests.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

FOLDER_VARIABLE = "PACELINE_SOAK_FOLDER"  # a file for each process is written here, named by its number
ENGINE = "--engine"
FEW = 64  # requests that can still be explained or changed


MALLOC_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLOC_FIELDS)


def tell(number: int, frame: object) -> None:
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    held = {"objects": sys.getallocatedblocks(), "malloc_kib": (info.uordblks + info.hblkhd) // 1024}
    place = Path(os.environ[FOLDER_VARIABLE], str(os.getpid()))
    place.with_suffix(".new").write_text(json.dumps(held))
    place.with_suffix(".new").rename(place)


def run(module: str, arguments: Sequence[str]) -> None:
    """Be the HTTP process or the engine; `module` is how the engine is started again."""
    signal.signal(signal.SIGUSR2, tell)
    if list(arguments) == [ENGINE]:
        from paceline.process import engine_main

        os._exit(engine_main.main())
    from paceline.cli.main import main
    from paceline.process import child
    from paceline.server.generate.requests import RecentRequests

    RecentRequests.__init__.__defaults__ = (FEW,)  # it is full before anything is counted
    with patch.object(child, "COMMAND", (sys.executable, "-m", module, ENGINE)):
        main()


if __name__ == "__main__":
    run("tests.soak.inspected", sys.argv[1:])
