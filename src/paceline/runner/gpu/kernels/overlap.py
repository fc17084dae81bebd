"""Starting a kernel while the one before it still runs (programmatic dependent launch, Hopper and later).

A kernel launched so begins when every program of its predecessor has announced it, and must wait before it touches
what the predecessor wrote or reads. Before that it may load weights, and whatever was written by kernels before the
predecessor: ours announce only after their own wait. It pays where kernels are shorter than their launch.
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
