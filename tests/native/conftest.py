"""The compiled kernels, as fixtures."""

from __future__ import annotations

import pytest

from paceline.runner.native.code import Code
from tests.kernels import host_code, plain_code


@pytest.fixture(scope="session")
def code() -> Code:
    return host_code()


@pytest.fixture(scope="session")
def plain() -> Code:
    return plain_code()
