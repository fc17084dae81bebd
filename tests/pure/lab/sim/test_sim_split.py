"""`paceline tune --devices`: which splits are tried, and that links and bounds decide between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.cli.tune.flags import TuneOptions
from paceline.cli.tune.split import machines_for, run_split
from paceline.errors import InputError


def splits(tmp_path: Path, **given: Any) -> list[dict[str, float]]:
    target = tmp_path / "split.json"
    options: dict[str, Any] = {
        "slo": "itl_p99=50ms",
        "trace": "fixed:200x20",
        "arrivals": "poisson",
        "num_requests": 40,
    }
    run_split(TuneOptions(**{**options, "devices": 4, "seconds": 3600.0, "json": str(target), **given}))
    found: list[dict[str, float]] = json.loads(target.read_text())["splits"]
    return found


def test_sizes_divide_devices_and_model_and_fit() -> None:
    machines, too_small = machines_for(TuneOptions(devices=8, model="llama-3.1-70b"))
    assert [machine.ranks for machine in machines] == [2, 4, 8]
    assert too_small == [1]
    machines, too_small = machines_for(TuneOptions(devices=6, model="smollm2-135m"))
    assert [machine.ranks for machine in machines] == [1, 3] and not too_small


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="does not fit on a100"):
        machines_for(TuneOptions(devices=1, model="llama-3.1-70b", device="a100"))


@pytest.mark.slow
def test_a_loose_bound_takes_replicas_and_a_tight_one_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = splits(tmp_path)
    assert (loose[0]["ranks"], loose[0]["replicas"]) == (1, 4)
    assert "Best: 4 replicas of 1 rank." in capsys.readouterr().out
    # A token takes 4.5 ms on one: the weights are read once for each.
    tight = {entry["ranks"]: entry["rate"] for entry in splits(tmp_path, slo="itl_p50=3.5ms")}
    assert tight[1] == 0.0 < tight[2]


@pytest.mark.slow
def test_a_given_rate_is_shared_by_the_replicas(tmp_path: Path) -> None:
    found = splits(tmp_path, rate=8.0)
    assert [entry["rate"] for entry in found] == [8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    "flags", [("--cost-model", "x.json"), ("--verify", "http://127.0.0.1:1"), ("--link", "rope")]
)
def test_what_does_not_go_with_devices_is_refused(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", "--devices", "4", "--slo", "ttft=1s", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
