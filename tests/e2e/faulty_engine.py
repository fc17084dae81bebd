"""The engine's process with faults that a test switches on while it runs; the program itself knows nothing of them.

The file named by PACELINE_TEST_FAULT says what the model's next computation does: `raise N` (N times), `hang`, `exit`,
`segv`, `slow SECONDS`, `poison TOKEN` (it ends the process as `exit` does, once a prompt with this token has come), or
nothing.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paceline.factory import load_model
from paceline.process import engine_main

FAULT = Path(os.environ["PACELINE_TEST_FAULT"])


def strike() -> None:
    name, _, value = FAULT.read_text().partition(" ") if FAULT.exists() else ("", "", "")
    if name == "raise":
        FAULT.write_text(f"raise {int(value) - 1}" if int(value) > 1 else "")
        raise RuntimeError("injected")
    if name == "hang":
        time.sleep(3600)
    if name == "exit":
        FAULT.write_text("")
        os._exit(3)
    if name == "segv":
        FAULT.write_text("")
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "slow":
        time.sleep(float(value))


def load(*arguments: Any, **named: Any) -> Any:
    loaded = load_model(*arguments, **named)
    add, poisoned = loaded.engine.add, []

    def noting(tokens: Any, *more: Any, **options: Any) -> Any:
        name, _, value = FAULT.read_text().partition(" ") if FAULT.exists() else ("", "", "")
        if name == "poison" and int(value) in tokens:
            poisoned.append(value)
        return add(tokens, *more, **options)

    patch.object(loaded.engine, "add", noting).start()
    from paceline.runner.native.step import NativeStep

    forward = NativeStep.forward

    def faulty(self: NativeStep, *inputs: Any) -> Any:
        strike()
        if poisoned:
            os._exit(3)
        return forward(self, *inputs)

    patch.object(NativeStep, "forward", faulty).start()
    return loaded


if __name__ == "__main__":
    with patch.object(engine_main, "load_model", load):
        os._exit(engine_main.main())
