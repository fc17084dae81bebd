"""What a world's file says, and that every mistake in it names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.cli.sim.world import load_world
from paceline.errors import InputError
from paceline.lab.world.world_file import read_world
from tests.pure.lab.world.world_helpers import description, world

EXAMPLE = Path(__file__).parents[4] / "examples" / "world.yaml"


def changed(path: str, value: object) -> dict[str, Any]:
    """The small world with one field changed; a number in the path is a place in a list."""
    found: Any = description(
        bursts=[{"region": "west", "hour": 0, "minutes": 1, "factor": 2}],
        deaths=[{"region": "west", "hour": 0}],
    )
    at, names = found, path.split(".")
    for name in names[:-1]:
        at = at[int(name) if name.isdigit() else name]
    last = names[-1]
    at[int(last) if last.isdigit() else last] = value
    return dict(found)


def test_a_region_is_like_another_but_for_what_it_says_itself() -> None:
    west, east = world().regions
    assert (east.clock, east.replicas, east.device_hour_price) == (
        12.0,
        west.replicas,
        west.device_hour_price,
    )
    assert west.rate_at(12.0) == pytest.approx(200.0) and west.rate_at(0.0) == pytest.approx(100.0)
    assert east.rate_at(0.0) == pytest.approx(200.0)


def test_a_distance_holds_both_ways() -> None:
    assert world().trips_s == ((0.0, 0.1), (0.1, 0.0))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("planet", "mars", "planet: is not known; known names here are bursts, cell"),
        ("regions.0.prise", 3, r"regions\[0\].prise: is not known"),
        ("regions.0.device_hour_price", -3, r"regions\[0\].device_hour_price: must be a number from 0"),
        ("regions.1.peak_rate", "many", r"regions\[1\].peak_rate: must be a number"),
        ("regions.1.replicas", 1.5, r"regions\[1\].replicas: must be a whole number"),
        ("regions.1.like", "north", r"regions\[1\].like: there is no region 'north'"),
        ("regions.0.like", "east", r"regions\[0\].like: goes in a circle, back to 'west'"),
        ("regions.1.name", "west", "like: goes in a circle|is there twice"),
        ("regions.0", ["west"], r"regions\[0\]: must be a mapping"),
        ("regions", [], "regions: must have at least one"),
        ("regions", "all", "regions: must be a list"),
        ("distances_ms", {}, "distances_ms.west.east: is missing"),
        ("distances_ms.north", {"west": 3}, "distances_ms.north: is not known"),
        ("distances_ms.west.north", 3, "distances_ms.west.north: is not known"),
        ("distances_ms.west.east", -1, "distances_ms.west.east: must be a number"),
        ("bursts.0.region", "north", r"bursts\[0\].region: there is no region 'north'; there are west, east"),
        ("bursts.0.factor", float("nan"), r"bursts\[0\].factor: must be a number"),
        ("deaths.0.racks", -1, r"deaths\[0\].racks: must be a number"),
        ("deaths.0.when", 3, r"deaths\[0\].when: is not known"),
        ("slo.ttft", 3, "slo.ttft: is not known"),
        ("engine", [1], "engine: must be a mapping"),
        ("follow_the_sun", "yes", "follow_the_sun: must be true or false"),
        ("hours", 0, "hours: must be a number"),
        ("model", 3, "model: must be a name"),
    ],
)
def test_a_mistake_names_its_field(path: str, value: object, field: str) -> None:
    with pytest.raises(InputError, match=field):
        read_world(changed(path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regions: &all [*all]", "regions[0]: must be a mapping"),
        ("model: [", "is not YAML"),
        ("3", "must be a mapping"),
        ("model: a\ntrace: b", "regions: must have at least one"),
    ],
)
def test_a_bad_file_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "world.yaml"
    path.write_text(text)
    assert run(["sim", "--world", str(path)]) == 2
    seen = capsys.readouterr()
    assert message in seen.err and len(seen.err.splitlines()) == 1 and not seen.out


def test_the_example_is_a_world_of_ten_thousand_replicas() -> None:
    found = load_world(EXAMPLE)
    assert (found.num_replicas, len(found.regions), found.hours) == (10_000, 3, 24.0)
    assert found.deaths[0].racks * found.rack == 32
