"""Starting a kernel while the one before it still runs (programmatic dependent launch, Hopper and later).

A kernel launched so begins when every program of its predecessor has announced it, and must wait before it touches
what the predecessor wrote or reads. Before that it may load weights, and whatever was written by kernels before the
predecessor: ours announce only after their own wait. It pays where kernels are shorter than their launch.

One kernel waits last (`announce`, then `wait`): a product whose inputs were complete before its predecessor began,
which runs beside it. What follows such a kernel may read nothing that the predecessor wrote before its own wait.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_and_announce(OVERLAPPED: tl.constexpr):
    """Waits for the kernel before this one to be complete and lets the next one start."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def announce(OVERLAPPED: tl.constexpr):
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAPPED: tl.constexpr):
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
