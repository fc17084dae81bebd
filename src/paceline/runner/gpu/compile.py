"""Compiling all kernels of a model at once, before the first step runs.

The kernels a step needs are found by going through steps without running them: each launch asks for its kernel, and
threads compile those that are not in Triton's cache, together with the C function that launches each. A fresh machine
thus starts in a fraction of the time. Apart from `graphs`, whose sizes are used where there is no Triton.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
_logger = logging.getLogger("paceline")


late_compilations: list[str] = []  # kernels that were compiled after everything should have been


def watch_compilations() -> None:
    """From now on log every kernel that is compiled: its step takes a second or more."""

    def compiled(*, repr: str, **_: Any) -> None:
        late_compilations.append(repr)
        _logger.warning("a kernel was compiled while serving: %s", repr)

    knobs.runtime.jit_post_compile_hook = compiled


class _Loading(ThreadPoolExecutor):
    """Kernels are loaded where they are compiled: Triton would run a C compiler at the first launch of each."""

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            kernel.run  # noqa: B018 - asking for it makes it
            return kernel

        return super().submit(compile_and_load)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, a kernel that is launched is compiled, several at a time, and not run."""
    knobs.runtime.jit_post_compile_hook = None
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    threads = _Loading(
        min(MAX_THREADS, os.cpu_count() or 1),
        initializer=torch.cuda.set_device,
        initargs=(torch.cuda.current_device(),),
    )
    try:
        with threads, AsyncCompileMode(threads):
            yield
    finally:
        JITFunction.run = run
