"""Minutes of mixed traffic on a real server: afterwards nothing is lost, nothing is left over, nothing has grown."""

from __future__ import annotations

import json
import os

import pytest

from tests.soak.__main__ import report
from tests.soak.judge import Limits, judge
from tests.soak.run import run_soak

MINUTES = float(os.environ.get("SOAK_MINUTES", "3"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.mark.campaign
def test_nothing_is_lost_and_nothing_is_left_over() -> None:
    evidence, figures = run_soak(MINUTES, SEED)
    failures = judge(evidence, Limits(growth_mib=16.0))
    shown = json.dumps(report(evidence, figures, failures), indent=1)
    assert not failures, f"again with SOAK_SEED={SEED}: {shown}"
