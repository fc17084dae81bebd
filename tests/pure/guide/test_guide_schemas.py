"""Schemas that people wrote for something else compile."""

from __future__ import annotations

import pytest

from benchmarks.structures import kubernetes_schemas
from paceline.text.guide.check import verdict_of

RELEASE = "v1.31.0"


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.campaign)])
def test_the_schemas_of_kubernetes(every: int) -> None:
    pytest.importorskip("kubernetes_validate")
    schemas = list(kubernetes_schemas(RELEASE))[::every]
    faults = {name: error for name, structure in schemas if (error := verdict_of(structure).error)}
    assert len(schemas) > 500 // every
    assert len(faults) <= 0.05 * len(schemas), faults
