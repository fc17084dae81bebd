"""Whether Triton's interpreter can run kernels in this process; asked before a test module imports them."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch


def reason_to_skip() -> str:
    """Empty where the interpreter can be used; with PACELINE_REQUIRE_TRITON=1 it must be."""
    reason = _reason()
    if reason and os.environ.get("PACELINE_REQUIRE_TRITON") == "1":
        pytest.fail(f"{reason}, although PACELINE_REQUIRE_TRITON=1", pytrace=False)
    return reason


def _reason() -> str:
    """Triton decides how kernels are run when it is imported first."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        return "tests/gpu runs the kernels themselves"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton was imported to compile; run this file with TRITON_INTERPRET=1"
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4) and version("triton") < "3.7":
        return "the interpreter of this Triton needs numpy before 2.4"
    os.environ["TRITON_INTERPRET"] = "1"
    _patch_the_language_once()
    return ""


def _patch_the_language_once() -> None:
    """The interpreter replaces the functions of `triton.language` at every launch, and again at every call from one
    device function to another, which takes longer than what is called. Here they stay replaced."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()

    def patch_once(fn: Any) -> Any:
        values = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        seen = tl in values, tl.core in values
        if seen not in patched:
            patched.add(seen)
            patch(fn)
        return interpreter._LangPatchScope()

    if patch.__name__ != patch_once.__name__:
        interpreter._patch_lang = patch_once


def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts from and to e4m3 as a card does them. The interpreter's own lose the carry of a rounding (1.97 becomes 1)
    and know no NaN. What is beyond the range becomes NaN here, so that a kernel that does not saturate is found."""
    import triton.language as tl
    from triton.runtime import interpreter

    own = interpreter._convert_float
    kinds = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
    kinds[tl.float8e4nv] = torch.float8_e4m3fn

    def convert(data: Any, source: Any, goal: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, goal):
            return own(data, source, goal, rounding)
        number = torch.frombuffer(bytearray(data.tobytes()), dtype=kinds[source]).float()
        if goal == tl.float8e4nv:
            number = torch.where(number.abs() > 464.0, torch.nan, number)
        found = number.to(kinds[goal]).view(torch.uint8).numpy()
        return found.view(f"u{goal.primitive_bitwidth // 8}").reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
