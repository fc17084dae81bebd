"""A parameter that is declared in `core/sampling.py` is read by the CPU's sampler and by the GPU's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline.runner
from paceline.core.sampling import PARAMETERS

RUNNER = Path(paceline.runner.__file__).parent
# The modules in which each sampler reads the parameters of a row that joins.
SAMPLERS = {
    "cpu": ("sampling/sampler.py", "sampling/processors.py", "device_rows.py"),
    "gpu": ("gpu/token_sampling.py",),
}
# Parameters that decide no draw: how long a request is, its branches and its times, and what it is drafted from.
SCHEDULED = {"max_tokens", "n", "deadline_ms", "ttft_slo_ms", "itl_slo_ms", "on_infeasible", "prediction"}
SCHEDULED |= {"on_stop", "hold_s", "kv_keep", "pooling", "pin", "cache_share"}


NATIVE = "native/token_sampling.py"
# Rows with these are no plain ones (`Sampler.wanted`), or they decide only where an answer ends.
NOT_NATIVE = {
    "logprobs",
    "min_tokens",
    "structured_outputs",
    "stop_token_ids",
    "ignore_eos",
    "prompt_logprobs",
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_parameter_of_the_draw_is_read_by(sampler: str) -> None:
    """One that the device cannot apply yet is read where rows are chosen that the host samples (`_is_for_host`)."""
    read = {
        node.attr
        for name in SAMPLERS[sampler]
        for node in ast.walk(ast.parse((RUNNER / name).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ("params", "sampling")
    }
    drawn = {name for name, parameter in PARAMETERS.items() if not parameter.is_text} - SCHEDULED
    assert drawn <= read, f"not read: {sorted(drawn - read)}"


def attributes(code: ast.AST, *names: str) -> set[str]:
    """What is read of variables, or of attributes, with one of these names."""
    return {
        node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute)
        if (isinstance(node.value, ast.Name) and node.value.id in names)
        or (isinstance(node.value, ast.Attribute) and node.value.attr in names)
    }


def test_native_kernels_settle_no_row_with_a_parameter_that_they_do_not_read() -> None:
    """They draw for all plain rows: a parameter is read there, or keeps its rows from being plain."""
    read = attributes(ast.parse((RUNNER / NATIVE).read_text()), "wanted")
    for node in ast.parse((RUNNER / "sampling/processors.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("always_needs_rules", "uses_penalties"):
            read |= attributes(node, "params")
    drawn = {name for name, parameter in PARAMETERS.items() if not parameter.is_text} - SCHEDULED - NOT_NATIVE
    drawn = {"key" if name == "seed" else name for name in drawn}
    assert drawn <= read, f"not read: {sorted(drawn - read)}"
