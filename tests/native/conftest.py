"""The compiled kernels, as fixtures; a machine's GPU is out of sight, so that `auto` means the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.runner.native.code import Code
from tests.kernels import host_code, plain_code


@pytest.fixture(scope="package", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def code() -> Code:
    return host_code()


@pytest.fixture(scope="session")
def plain() -> Code:
    return plain_code()
