"""What of a world runs out first: engines, cores of fronts, their ledgers. Shares of what there is, at the worst."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.lab.world.day import WINDOW_S, Day


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much of something was used when it was used most."""

    what: str
    region: str
    share: float
    hour: float  # UTC


def limits(day: Day) -> list[Limit]:
    """For each thing the region and the time in which most of it was used, the one that is closest to its end first."""
    world, curve = day.world, day.curve
    found: dict[str, Limit] = {}
    for window in day.windows:
        for number, region in enumerate(world.regions):
            alive = max(window.alive[number], 1e-9)
            ended_s = window.finished[number] / WINDOW_S
            shares = {
                "rows of engines": window.rows[number] / (alive * curve.max_rows),
                "what engines compute": ended_s / (alive * curve.rate),
                "cores of fronts, chunks": ended_s
                * curve.output_tokens
                / (region.front_cores * world.chunks_per_core_s),
                "cores of fronts, ledger": ended_s / (region.front_cores * world.entries_per_core_s),
            }
            for what, share in shares.items():
                if what not in found or share > found[what].share:
                    found[what] = Limit(what=what, region=region.name, share=share, hour=window.at_s / 3600.0)
    return sorted(found.values(), key=lambda limit: -limit.share)
