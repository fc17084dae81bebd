"""What reading requests loads: no tensors, and nothing of a web framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "fastapi", "pydantic", "uvicorn", "starlette")


@pytest.mark.parametrize("module", ["paceline.server.api.routes", "paceline.cli.run_batch.run"])
def test_what_importing_the_api_does_not_load(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
