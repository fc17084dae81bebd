"""Joules of the device: a figure where NVIDIA's library tells it, none and no error everywhere else."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.process import live_view
from paceline.process.live_view import Energy


class FakeLibrary:
    """Answers as the C functions do."""

    def __init__(self, *, init: int = 0, handle: int = 0, total: int = 0) -> None:
        self.codes = (init, handle, total)
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return self.codes[0]

    def nvmlDeviceGetHandleByUUID(self, identity: bytes, handle: Any) -> int:
        self.asked.append(identity)
        return self.codes[1]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, value: Any) -> int:
        value._obj.value = 12_500
        return self.codes[2]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "device_identity", lambda: "GPU-1234")


def found(monkeypatch: pytest.MonkeyPatch, library: object) -> Energy:
    def load(name: str) -> object:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    return Energy()


@pytest.mark.usefixtures("on_a_gpu")
def test_a_device_that_tells_is_asked_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    meter = found(monkeypatch, library)
    assert meter.joules() == 12.5 and meter.joules() == 12.5
    assert library.asked == [b"GPU-1234"]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    "library",
    [
        OSError("no driver"),
        SimpleNamespace(),
        FakeLibrary(init=1),
        FakeLibrary(handle=2),
        FakeLibrary(total=3),
    ],
    ids=["no library", "an old one", "no driver", "another device", "an old device"],
)
def test_without_a_counter_there_is_no_figure(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    assert found(monkeypatch, library).joules() is None


def test_a_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, AssertionError("it must not be looked for")).joules() is None
