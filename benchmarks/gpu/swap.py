"""Swapping on the card: how fast blocks go to the host and come back, and what decoding loses meanwhile.

`python -m benchmarks.gpu.swap [--json FILE]`: blocks of the 8B and the 0.6B shape, at places behind one another and at
scattered ones, then a decode step of 64 rows by itself and beside copies that never end.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import argparse
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from paceline.core.plan import NO_SWAPS, Swaps
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.kv_pools import SwapPool

SHAPES = {"0.6B": (28, 8, 128), "8B": (32, 8, 128)}  # layers, kv heads, head_dim
BLOCKS = (1, 4, 16, 64, 256)
TIMES = 7
PLACES = 512


def swaps_of(blocks, places) -> Swaps:
    zeros = np.zeros(len(blocks), np.int32)
    return Swaps(
        ticket=zeros, group=zeros, block=np.array(blocks, np.int32), place=np.array(places, np.int32)
    )


def rates(shape, count: int, *, scattered: bool) -> tuple[float, float, float]:
    """GB/s out and back, and milliseconds of host time to queue the way out."""
    layers, heads, dim = shape
    pool = torch.zeros(2 * layers, PLACES + 1, heads, 64, dim, dtype=torch.bfloat16, device="cuda")
    steps = DeviceQueue(pool.device)
    places = SwapPool([pool.view(torch.int64).transpose(0, 1)], PLACES, steps)
    numbers = list(range(PLACES))
    if scattered:
        random.Random(1).shuffle(numbers)
    swaps = swaps_of(
        [1 + number for number in numbers[:count]],
        sorted(numbers[:count]) if not scattered else numbers[-count:],
    )
    size = count * pool[:, 0].numel() * pool.itemsize
    out, back, queued = [], [], []
    for _ in range(TIMES):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        places.swap(swaps, NO_SWAPS)
        queued.append(time.perf_counter() - started_s)
        places.completed(wait=True)
        out.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        places.swap(NO_SWAPS, swaps)
        places.completed(wait=True)
        back.append(time.perf_counter() - started_s)
    return size / min(out) / 1e9, size / min(back) / 1e9, 1e3 * statistics.median(queued)


def beside_decoding() -> dict[str, float]:
    """Milliseconds of a step that reads 16 GB and draws nothing, by itself and beside copies in both directions."""
    weights = torch.zeros(8 << 30, dtype=torch.bfloat16, device="cuda")
    layers, heads, dim = SHAPES["8B"]
    pool = torch.zeros(2 * layers, 257, heads, 64, dim, dtype=torch.bfloat16, device="cuda")
    steps = DeviceQueue(pool.device)
    places = SwapPool([pool.view(torch.int64).transpose(0, 1)], 256, steps)
    many = swaps_of(range(1, 257), range(256))
    ring, drawn = (
        torch.empty(64, dtype=torch.int32, pin_memory=True),
        torch.zeros(64, dtype=torch.int32, device="cuda"),
    )

    def steps_ms() -> float:
        taken = []
        for _ in range(20):
            started_s = time.perf_counter()
            with steps.entered():
                weights.sum()
                ring.copy_(drawn, non_blocking=True)
            steps.mark().wait()
            taken.append(time.perf_counter() - started_s)
        return 1e3 * statistics.median(taken)

    steps_ms()
    figures = {"alone, ms": steps_ms()}
    for name, pair in (("beside swaps out", (many, NO_SWAPS)), ("beside swaps in", (NO_SWAPS, many))):
        for _ in range(8):
            places.swap(*pair)
        figures[f"{name}, ms"] = steps_ms()
        torch.cuda.synchronize()
        places.forget()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, shape in SHAPES.items():
        for count in BLOCKS:
            for scattered in (False, True):
                out, back, queued = rates(shape, count, scattered=scattered)
                how = "scattered" if scattered else "in a row"
                found[f"{name}, {count} blocks {how}"] = {"out": out, "back": back, "queued_ms": queued}
                print(f"| {name} | {count} | {how} | {out:.1f} | {back:.1f} | {queued:.2f} |", flush=True)
    found["a step of 16 GB"] = beside_decoding()
    print(found["a step of 16 GB"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
