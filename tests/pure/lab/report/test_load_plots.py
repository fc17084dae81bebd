"""Pictures of load: there when there is something to draw, refused when not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.report.plots import MOST_BARS, GoodputPoint, plot_gantt, plot_goodput
from paceline.lab.report.run_record import OUTCOMES, RunRecord

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
PNG = b"\x89PNG"


def record(count: int, *, num_failed: int = 0) -> RunRecord:
    arrival_s = np.linspace(0.0, 5.0, count)
    outcome = np.zeros(count, dtype=np.uint8)
    outcome[:num_failed] = OUTCOMES.index("failed")
    answered = outcome == 0
    whole = np.zeros(count, dtype=np.int32)
    return RunRecord(
        label="made up",
        config={},
        max_num_seqs=1,
        duration_s=6.0,
        arrival_s=arrival_s,
        admitted_s=np.full(count, np.nan),
        first_token_s=np.where(answered, arrival_s + 0.1, np.nan),
        finished_s=np.where(answered, arrival_s + 0.4, np.nan),
        prompt_len=whole,
        output_len=whole,
        cached_tokens=whole,
        preemptions=whole,
        tenant=whole,
        outcome=outcome,
    )


@pytest.mark.parametrize(("count", "num_failed"), [(1, 0), (30, 4), (5, 5), (MOST_BARS + 100, 0)])
def test_requests_are_drawn_whatever_became_of_them(count: int, num_failed: int, tmp_path: Path) -> None:
    path = tmp_path / "gantt.png"
    plot_gantt(record(count, num_failed=num_failed), path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("is_rate", [True, False])
def test_goodput_is_drawn(is_rate: bool, tmp_path: Path) -> None:
    path = tmp_path / "goodput.png"
    points = [GoodputPoint(load=load, completed=load, good=load / 2) for load in (4.0, 1.0, 2.0)]
    plot_goodput(points, path, is_rate=is_rate)
    assert path.read_bytes().startswith(PNG)


def test_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one load"):
        plot_goodput([], tmp_path / "x.png")
    with pytest.raises(InputError, match="no requests to draw"):
        plot_gantt(record(0), tmp_path / "x.png")
