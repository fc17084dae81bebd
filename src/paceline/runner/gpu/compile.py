"""Compiling all kernels of a model at once, before the first step runs.

The kernels a step needs are found by going through steps without running them: each launch asks for its kernel, and
threads compile those that are not in Triton's cache. A fresh machine thus starts in a fraction of the time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
_logger = logging.getLogger("paceline")


late_compilations: list[str] = []  # kernels that were compiled after everything should have been


def watch_compilations() -> None:
    """From now on a kernel that is compiled is told: whoever waits for its step waits a second or more."""

    def compiled(*, repr: str, **_: Any) -> None:
        late_compilations.append(repr)
        _logger.warning("a kernel was compiled while serving: %s", repr)

    knobs.runtime.jit_post_compile_hook = compiled


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, a kernel that is launched is compiled, several at a time, and not run."""
    knobs.runtime.jit_post_compile_hook = None
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
            yield
    finally:
        JITFunction.run = run
