"""Lanes: what each row did, as stretches and shares, and the picture that is drawn from them."""

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.report.lanes import DECODE, EMPTY, PADDING, PROMPT, LaneRun, Lanes, plot_lanes
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import summarize

pytestmark = pytest.mark.slow


def lanes(*rows: str) -> Lanes:
    """Rows as text, a letter for each step of a second."""
    codes = {".": EMPTY, "p": PROMPT, "d": DECODE, "x": PADDING}
    table = np.array([[codes[letter] for letter in row] for row in rows], np.uint8).T
    start_s = np.arange(len(table), dtype=np.float64)
    return Lanes(start_s=start_s, end_s=start_s + 1.0, codes=table, num_slots=table.shape[1])


def record(label: str) -> RunRecord:
    one = np.zeros(1, np.int32)
    return RunRecord(
        label=label,
        config={},
        max_num_seqs=2,
        duration_s=4.0,
        arrival_s=np.zeros(1),
        admitted_s=np.zeros(1),
        first_token_s=np.ones(1),
        finished_s=np.full(1, 4.0),
        prompt_len=one + 3,
        output_len=one + 4,
        cached_tokens=one,
        preemptions=one,
        tenant=one,
        outcome=np.zeros(1, np.uint8),
    )


def test_steps_that_follow_each_other_are_one_stretch() -> None:
    found = lanes("pddd.dd", "..xx..x")
    assert found.stretches(0, PROMPT) == [(0.0, 1.0)]
    assert found.stretches(0, DECODE) == [(1.0, 3.0), (5.0, 2.0)]
    assert found.stretches(1, PADDING) == [(2.0, 2.0), (6.0, 1.0)]
    assert found.stretches(1, DECODE) == []


def test_useful_is_what_a_request_still_wanted() -> None:
    assert lanes("pdxx", "pddd", "....", "xxxx").useful_share == pytest.approx(6 / 16)
    assert lanes("").useful_share is None


@pytest.mark.parametrize("name", ["lanes.png", "lanes.svg"])
def test_the_picture_is_written_as_its_name_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        LaneRun(lanes=lanes("pdxx", "pddd"), summary=summarize(record(label)), arrival_s=[0.0])
        for label in ("static", "continuous")
    ]
    plot_lanes(runs, tmp_path / name, title="t")
    first = (tmp_path / name).read_bytes()
    assert first.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    plot_lanes(runs, tmp_path / name, title="t")
    assert (tmp_path / name).read_bytes() == first, "the same picture is the same file"


def test_without_a_step_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no steps"):
        plot_lanes([], tmp_path / "x.png", title=None)
