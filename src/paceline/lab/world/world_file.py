"""A world as its file says it: regions with clocks, prices and distances, what bursts and what dies.

Owns the names in the file, their bounds and their errors, each with the field it is about. Reads plain values and no
file, and simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InputError

MOST_REPLICAS = 100_000
MOST_HOURS = 24.0 * 14
CHUNKS_PER_CORE_S = 25_000.0  # 40 us of a front's core for each chunk of a stream
ENTRIES_PER_CORE_S = 2_000.0  # of a ledger, one file for each front


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where replicas stand and requests come from."""

    name: str
    clock: float  # hours ahead of UTC
    replicas: int
    peak_rate: float  # requests/s at the busiest time of its day
    night: float  # share of that at the quietest
    peak_hour: float  # by its own clock
    device_hour_price: float
    front_cores: int

    def rate_at(self, utc_hour: float) -> float:
        away = math.cos(2.0 * math.pi * (utc_hour + self.clock - self.peak_hour) / 24.0)
        return self.peak_rate * (self.night + (1.0 - self.night) * (1.0 + away) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """More requests than the clock says, for a while."""

    region: int
    hour: float  # UTC, from the start
    minutes: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Racks of a region end at one moment; `racks` 0: all of them."""

    region: int
    hour: float
    racks: int
    back_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything a run depends on beside the curve of its replicas."""

    regions: tuple[Region, ...]
    trips_s: tuple[tuple[float, ...], ...]  # there and back, by region
    bursts: tuple[Burst, ...]
    deaths: tuple[Death, ...]
    model: str
    device: str
    ranks: int
    link: str
    trace: str
    engine: Mapping[str, Any]
    hours: float
    cell: int  # replicas behind one front
    rack: int  # replicas that die together
    follows_the_sun: bool
    ttft_slo_s: float
    token_slo_s: float
    chunks_per_core_s: float
    entries_per_core_s: float
    seed: int

    def rates_at(self, hour: float) -> list[float]:
        """Requests/s of each region, so many hours from the start, which is midnight UTC."""
        rates = [region.rate_at(hour) for region in self.regions]
        for burst in self.bursts:
            if burst.hour <= hour < burst.hour + burst.minutes / 60.0:
                rates[burst.region] *= burst.factor
        return rates

    @property
    def num_replicas(self) -> int:
        return sum(region.replicas for region in self.regions)


class WorldFields:
    """The fields of one mapping. Every mistake names the field; a field that is not known is a mistake too."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise InputError(f"{place or 'the world'}: must be a mapping of names to values")
        self._values = dict(value)
        self._place = place
        self._asked: list[str] = []

    def at(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def take(self, name: str, default: object = None) -> Any:
        self._asked.append(name)
        value = self._values.pop(name, None)
        if value is None and default is None:
            raise InputError(f"{self.at(name)}: is missing")
        return default if value is None else value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InputError(
                f"{self.at(name)}: must be a number from {low:g} to {high:g}, not {_shown(value)}"
            )
        return float(value)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.number(name, low, high, default)
        if value != int(value):
            raise InputError(f"{self.at(name)}: must be a whole number, not {value:g}")
        return int(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.take(name, default)
        if not isinstance(value, str) or not value:
            raise InputError(f"{self.at(name)}: must be a name, not {_shown(value)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.at(name)}: must be true or false, not {_shown(value)}")
        return value

    def list(self, name: str) -> Sequence[object]:
        value = self.take(name, ())
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InputError(f"{self.at(name)}: must be a list")
        return value

    def done(self) -> None:
        for name in self._values:
            known = ", ".join(sorted(set(self._asked)))
            raise InputError(f"{self.at(str(name))}: is not known; known names here are {known}")


def read_world(value: object) -> World:
    """The world that plain values describe."""
    fields = WorldFields(value, "")
    regions = _regions(fields.list("regions"))
    names = {region.name: index for index, region in enumerate(regions)}
    slo = WorldFields(fields.take("slo", {}), "slo")
    hours = fields.number("hours", 0.01, MOST_HOURS, 24.0)
    world = World(
        regions=regions,
        trips_s=_trips(fields.take("distances_ms", {}), names),
        bursts=tuple(
            _burst(each, f"bursts[{number}]", names) for number, each in enumerate(fields.list("bursts"))
        ),
        deaths=tuple(
            _death(each, f"deaths[{number}]", names) for number, each in enumerate(fields.list("deaths"))
        ),
        model=fields.text("model"),
        device=fields.text("device"),
        ranks=fields.whole("tensor_parallel_size", 1, 64, 1),
        link=fields.text("link", "nvlink4"),
        trace=fields.text("trace"),
        engine=_engine(fields.take("engine", {})),
        hours=hours,
        cell=fields.whole("cell", 1, 4096, 64),
        rack=fields.whole("rack", 1, 4096, 32),
        follows_the_sun=fields.flag("follow_the_sun", default=True),
        ttft_slo_s=slo.number("ttft_s", 1e-3, 1e4, 2.0),
        token_slo_s=slo.number("token_s", 1e-4, 1e2, 0.1),
        chunks_per_core_s=fields.number("chunks_per_core_s", 1.0, 1e9, CHUNKS_PER_CORE_S),
        entries_per_core_s=fields.number("entries_per_core_s", 1.0, 1e9, ENTRIES_PER_CORE_S),
        seed=fields.whole("seed", 0, 2**31, 0),
    )
    slo.done()
    fields.done()
    if not 1 <= world.num_replicas <= MOST_REPLICAS:
        raise InputError(
            f"regions: have {world.num_replicas:,} replicas together; at most are {MOST_REPLICAS:,}"
        )
    return world


def _regions(values: Sequence[object]) -> tuple[Region, ...]:
    if not values:
        raise InputError("regions: must have at least one")
    raw = [_mapping(value, f"regions[{number}]") for number, value in enumerate(values)]
    found: dict[str, Region] = {}
    for number, value in enumerate(raw):
        region = _region(_inherited(value, raw, f"regions[{number}]"), f"regions[{number}]")
        if region.name in found:
            raise InputError(f"regions[{number}].name: '{region.name}' is there twice")
        found[region.name] = region
    return tuple(found.values())


def _inherited(value: Mapping[str, Any], among: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """With what the region has that it is `like`, and that one's, and so on."""
    by_name = {str(each.get("name")): each for each in among}
    chain, each = [value], value
    while "like" in each:
        other = by_name.get(str(each["like"]))
        if other is None:
            raise InputError(f"{place}.like: there is no region '{each['like']}'")
        if any(other is known for known in chain):
            raise InputError(f"{place}.like: goes in a circle, back to '{other.get('name')}'")
        chain.append(other)
        each = other
    merged: dict[str, Any] = {}
    for link in reversed(chain):
        merged |= link
    merged.pop("like", None)
    return merged


def _region(value: Mapping[str, Any], place: str) -> Region:
    fields = WorldFields(value, place)
    region = Region(
        name=fields.text("name"),
        clock=fields.number("clock", -12.0, 14.0),
        replicas=fields.whole("replicas", 0, MOST_REPLICAS),
        peak_rate=fields.number("peak_rate", 0.0, 1e9),
        night=fields.number("night", 0.0, 1.0, 1.0),
        peak_hour=fields.number("peak_hour", 0.0, 24.0, 14.0),
        device_hour_price=fields.number("device_hour_price", 0.0, 1e6),
        front_cores=fields.whole("front_cores", 1, 10_000_000),
    )
    fields.done()
    return region


def _trips(value: object, names: Mapping[str, int]) -> tuple[tuple[float, ...], ...]:
    """There and back in seconds; a distance that is given once holds both ways."""
    trips = [[0.0 if one == other else math.inf for other in names.values()] for one in names.values()]
    rows = WorldFields(value, "distances_ms")
    for one in names:
        row = rows.take(one, {})
        columns = WorldFields(row, f"distances_ms.{one}")
        for other in names:
            trip = columns.number(other, 0.0, 1e5) if other in row else None
            if trip is not None:
                trips[names[one]][names[other]] = trips[names[other]][names[one]] = trip / 1e3
        columns.done()
    rows.done()
    for one, at in names.items():
        for other, there in names.items():
            if math.isinf(trips[at][there]):
                raise InputError(f"distances_ms.{one}.{other}: is missing")
    return tuple(map(tuple, trips))


def _burst(value: object, place: str, names: Mapping[str, int]) -> Burst:
    fields = WorldFields(value, place)
    burst = Burst(
        region=_region_number(fields, names),
        hour=fields.number("hour", 0.0, MOST_HOURS),
        minutes=fields.number("minutes", 0.01, 1e5),
        factor=fields.number("factor", 0.0, 100.0),
    )
    fields.done()
    return burst


def _death(value: object, place: str, names: Mapping[str, int]) -> Death:
    fields = WorldFields(value, place)
    death = Death(
        region=_region_number(fields, names),
        hour=fields.number("hour", 0.0, MOST_HOURS),
        racks=fields.whole("racks", 0, MOST_REPLICAS, 0),
        back_after_s=fields.number("back_after_s", 1.0, 1e7, 600.0),
    )
    fields.done()
    return death


def _region_number(fields: WorldFields, names: Mapping[str, int]) -> int:
    name = fields.text("region")
    if name not in names:
        raise InputError(f"{fields.at('region')}: there is no region '{name}'; there are {', '.join(names)}")
    return names[name]


def _engine(value: object) -> dict[str, Any]:
    """Options of the engine, which checks their names and bounds itself."""
    return dict(_mapping(value, "engine"))


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: must be a mapping of names to values")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
