"""The order in which a device works: streams, and marks to wait for.

On a CPU everything is done when a call returns; kernels run there through Triton's interpreter, for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LONG_S, VERY_LONG_S = 0.01, 0.1  # work that takes longer is measured twice, each alone, or once


class Mark:
    """A place in the queue."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @classmethod
    def timed(cls, device: torch.device) -> Mark:
        """In the queue that was entered, with the time at which the device comes to it."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(event)

    def wait(self) -> None:
        """Return when everything queued before is done."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Between the two places, on the device; both are timed and reached."""
        if self._event is None or earlier._event is None:
            return 0.0
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def is_reached(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


class DeviceQueue:
    """One stream of work: that of all steps of a runner, or that of its copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = None
        if self.is_gpu:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whatever is launched inside goes into the queue."""
        with torch.inference_mode():
            if self.stream is None:
                yield
                return
            # As torch.cuda.stream does it, in less time: that is much beside a step of a millisecond.
            before = torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)
            try:
                yield
            finally:
                torch.cuda.set_stream(before)

    def mark(self) -> Mark:
        if self.stream is None:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return Mark(event)

    def follow(self, other: DeviceQueue) -> None:
        """What is queued here from now on begins when all that is queued there by now is done."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def drain(self) -> None:
        """Wait for everything the device has been given, by whatever queue."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for some work that is queued here."""

        def timed(times: int) -> float:
            started_s = time.perf_counter()
            for _ in range(times):
                work()
            self.drain()
            return (time.perf_counter() - started_s) / times

        with self.entered():
            timed(1)  # the first may load something
            seconds = timed(1)
            if seconds > VERY_LONG_S:
                return seconds
            return min(seconds, timed(1)) if seconds > LONG_S else timed(3)
