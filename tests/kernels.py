"""The compiled CPU kernels of this machine, as `make` has put them into the user's cache: all tests use the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from paceline.models.files.fetch import cache_root
from paceline.runner.native.checks import VARIABLE
from paceline.runner.native.code import Code, load_code
from paceline.runner.native.isa import BY_NAME, host_isa

CACHE = cache_root() / "kernels"


@cache
def host_code() -> Code:
    return load_code(host_isa(), CACHE, lambda sentence: None)


@cache
def checked_code() -> Code:
    """Every address is looked up before it is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        return load_code(host_isa(), CACHE, lambda sentence: None)


@cache
def plain_code() -> Code:
    """The path that runs on any processor."""
    return load_code(BY_NAME["plain"], CACHE, lambda sentence: None)


def with_kernels(root: Path) -> Path:
    """A cache for a test alone, in which only the compiled kernels are shared."""
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "kernels").exists():
        (root / "kernels").symlink_to(CACHE)
    return root
