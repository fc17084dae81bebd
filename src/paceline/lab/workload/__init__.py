"""Requests for the simulator and the benchmarks: trace readers and generators fitted to public traces.

`load_workload` takes a built-in name or the path of a trace file and returns a `Workload`, which is plain
columns: arrival times, lengths, tenants, ids of prompt blocks. Nothing here knows of engines or tokens.

Reading is in `traces`, drawing in `generators`, arrival patterns in `arrivals`.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from paceline.errors import InputError
from paceline.lab.workload.arrivals import POISSON, AllAtOnce, Arrivals, draw_arrivals, parse_arrivals
from paceline.lab.workload.generators import GENERATORS, SHAPE_FORMS, find_generator
from paceline.lab.workload.servegen import PREFIX, read_servegen
from paceline.lab.workload.traces import read_trace
from paceline.lab.workload.workload import Workload, WorkloadSummary, describe

__all__ = ["Workload", "WorkloadSummary", "describe", "load_workload"]

BUILT_IN = f"{', '.join(GENERATORS)}, {SHAPE_FORMS}"


def load_workload(
    source: str,
    *,
    num_requests: int | None = None,
    seed: int = 0,
    rate: float | None = None,
    speed: float = 1.0,
    arrivals: str = "recorded",
) -> Workload:
    """Requests from a built-in generator or a trace file.

    source: a built-in name (`azure-conv`, `azure-code`, `mooncake`, `multi-tenant`, `fixed:512x128`,
        `uniform:100-1024x100-1024`), `servegen:PATH` for a folder or archive of ServeGen clients, or else the
        path of a trace file, whose format is found from its content. A file that bears a built-in's name is
        reached as `./mooncake`.
    num_requests: the first this many; None means all of a file, or as many as the trace a generator was
        fitted to. More than a file holds is an error.
    seed: decides everything that is drawn. A file read with its recorded arrivals draws nothing.
    rate: redraw the arrivals at this number of requests per second, lengths and order kept. ServeGen clients
        keep their patterns and shares, and have this rate together in every window.
    speed: divide the recorded times (2 is twice as fast). Not together with rate.
    arrivals: `recorded`, `poisson`, `constant`, `gamma:CV` (gaps of that coefficient of variation),
        `onoff:ON_S,OFF_S[,BURST_FACTOR]` (mean rate over a whole cycle; BURST_FACTOR times the mean while
        on, by default so much that nothing arrives while off), `all-at-once`. With a rate, `recorded` means
        `poisson`; without one, a redraw keeps the mean rate of the source.
    """
    _check_numbers(num_requests, seed, rate, speed)
    pattern = parse_arrivals(arrivals)
    _check_together(pattern, rate, speed)
    if source.startswith(PREFIX):
        workload = read_servegen(Path(source[len(PREFIX) :]), num_requests, seed, rate)
        rate = None if pattern is None else rate
    else:
        workload = _load(source, num_requests, seed)
    if speed != 1.0:
        workload = replace(workload, arrival_s=workload.arrival_s / speed)
    return _with_arrivals(workload, pattern, rate, seed)


def _load(source: str, num_requests: int | None, seed: int) -> Workload:
    generator = find_generator(source)
    if generator is not None:
        return generator.draw(num_requests or generator.num_requests, seed)
    if not os.path.exists(source):  # unlike Path.exists, says no to names no file can have
        raise _unknown(source)
    workload = read_trace(Path(source))
    if num_requests is None:
        return workload
    if num_requests > len(workload):
        raise InputError(
            f"{source}: holds {len(workload)} requests, {num_requests} were asked for; ask for fewer"
        )
    return workload.head(num_requests)


def _with_arrivals(workload: Workload, pattern: Arrivals | None, rate: float | None, seed: int) -> Workload:
    if pattern is None and rate is None:
        return workload
    pattern = pattern or POISSON
    mean_rate = rate if rate is not None else workload.rate
    if not isinstance(pattern, AllAtOnce) and not (0 < mean_rate < math.inf):
        raise InputError(
            f"{workload.name}: its arrivals have no mean rate that a redraw could keep; give a rate as well"
        )
    return replace(workload, arrival_s=draw_arrivals(pattern, len(workload), mean_rate, seed))


def _check_numbers(num_requests: int | None, seed: int, rate: float | None, speed: float) -> None:
    if num_requests is not None and num_requests < 1:
        raise InputError(f"the number of requests must be at least 1, not {num_requests}")
    if seed < 0:
        raise InputError(f"the seed must not be negative, but is {seed}")
    if rate is not None and not 1e-6 <= rate <= 1e9:
        raise InputError(f"the rate must lie between 0.000001 and 1000000000 requests per second, not {rate}")
    if not 1e-6 <= speed <= 1e6:
        raise InputError(f"the speed must be a factor between 0.000001 and 1000000, not {speed}")


def _check_together(pattern: Arrivals | None, rate: float | None, speed: float) -> None:
    if rate is not None and speed != 1.0:
        raise InputError(
            "rate and speed exclude each other: rate redraws the arrivals that speed would scale"
        )
    if isinstance(pattern, AllAtOnce) and (rate is not None or speed != 1.0):
        raise InputError("arrivals 'all-at-once' leave nothing for rate or speed to set; drop one of them")


def _unknown(source: str) -> InputError:
    near = get_close_matches(source, GENERATORS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return InputError(f"'{source}' is neither a file nor a built-in workload{hint} (built in: {BUILT_IN})")
