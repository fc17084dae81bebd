"""Whether Triton's interpreter can run kernels in this process; asked before a test module imports them."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version

import numpy as np
import torch


def reason_to_skip() -> str:
    """Empty where the interpreter can be used. Triton decides how kernels are run when it is imported first."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        return "tests/gpu runs the kernels themselves"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton was imported to compile; run this file with TRITON_INTERPRET=1"
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4) and version("triton") < "3.7":
        return "the interpreter of this Triton needs numpy before 2.4"
    os.environ["TRITON_INTERPRET"] = "1"
    return ""
