"""What a command line asks for, as a source of requests and plans for its runs.

Owns how the options work together: which file is what, how many requests there are, when they are due, when the loop is
open. Every mistake that can be found before something is sent is found here. Sends nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InputError
from paceline.lab.bench.bench_options import DEFAULT_OUTPUT, DEFAULT_REQUESTS, LoadOptions
from paceline.lab.bench.load.figures import METRICS
from paceline.lab.bench.load.generator import LoadPlan
from paceline.lab.bench.load.prompt_source import (
    CHAT,
    BodyForm,
    PicturedSource,
    RandomSource,
    Source,
    TextSource,
    TraceSource,
    is_trace,
    parse_size,
    read_prompts,
)
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.arrivals import (
    POISSON,
    AllAtOnce,
    Arrivals,
    GammaGaps,
    draw_arrivals,
    parse_arrivals,
)
from paceline.lab.workload.generators import find_generator
from paceline.lab.workload.workload import Floats

RANDOM = "random"
TEMPLATE_ROOM = 64  # tokens that a chat template may add to a prompt
MAX_REQUESTS = 10_000_000
RAMP_FORM = "FROM:TO:SECONDS, in requests per second, such as 1:20:60"
DRAWN_AHEAD = 10_000  # requests of a built-in workload, where time and not number ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A rate that moves in a straight line and then stays.

    Arrivals are drawn by rescaling time: those at one a second are mapped through the inverse of how many requests
    there should have been by then.
    """

    start: float
    end: float
    seconds: float

    def times(self, counts: Floats) -> Floats:
        """When this number of requests should have been sent."""
        slope = (self.end - self.start) / self.seconds
        total = (self.start + self.end) / 2 * self.seconds
        later: Floats = self.seconds + (counts - total) / self.end
        if slope == 0:
            return counts / self.start
        within = np.sqrt(np.maximum(self.start**2 + 2 * slope * np.minimum(counts, total), 0.0))
        return np.where(counts <= total, (within - self.start) / slope, later)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """How much load: one point of a curve."""

    rate: float | None = None
    ramp: Ramp | None = None
    max_concurrency: int | None = None

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.ramp is not None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return "all" if self.max_concurrency is None else f"{self.max_concurrency} users"

    def due_s(
        self, pattern: Arrivals | None, *, num_requests: int | None, duration_s: float | None, seed: int
    ) -> Floats:
        """Seconds after the start: of `num_requests`, or of those within `duration_s`, whichever ends first."""
        if not self.is_open:
            assert num_requests is not None
            return np.zeros(num_requests)
        count = num_requests if num_requests is not None else 256
        while True:
            times = self._draw(pattern or POISSON, count, seed)
            is_enough = duration_s is not None and times[-1] > duration_s
            if num_requests is not None or is_enough:
                break
            count *= 2
            if count > MAX_REQUESTS:
                raise InputError(
                    f"that would be more than {MAX_REQUESTS:,} requests; lower the rate or --duration"
                )
        return times if duration_s is None else times[times <= duration_s]

    def _draw(self, pattern: Arrivals, count: int, seed: int) -> Floats:
        if self.ramp is None:
            assert self.rate is not None
            return draw_arrivals(pattern, count, self.rate, seed)
        if not isinstance(pattern, GammaGaps):
            raise InputError("--ramp goes with --arrivals poisson, constant or gamma:CV; drop one of them")
        return self.ramp.times(draw_arrivals(pattern, count, 1.0, seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLoad:
    """Requests, and the ways to send them."""

    options: LoadOptions
    source: Source
    num_requests: int | None  # None: as many as there is time for
    ignore_eos: bool
    touched: int = 0  # requests of a trace that were cut or left out to fit the model
    keys: Mapping[str, str] = field(default_factory=dict)

    def fitted(self, max_model_len: int | None) -> RequestedLoad:
        """With the requests of a trace cut to what a model takes."""
        if max_model_len is None or not isinstance(self.source, TraceSource):
            return self
        workload, touched = self.source.workload.clipped(max(2, max_model_len - TEMPLATE_ROOM))
        return replace(
            self,
            source=TraceSource(workload, seed=self.options.seed),
            num_requests=None if self.num_requests is None else len(workload),
            touched=touched,
        )

    @property
    def sent(self) -> Source:
        """The requests as they are sent: with pictures, where there are any."""
        options = self.options
        if not options.images:
            return self.source
        return PicturedSource(
            self.source,
            count=options.images,
            size=parse_size(options.image_size),
            reuse=options.image_reuse,
            seed=options.seed,
        )

    @property
    def recorded_s(self) -> Floats | None:
        """Arrivals of a trace."""
        return self.source.workload.arrival_s if isinstance(self.source, TraceSource) else None

    def form(self, model: str) -> BodyForm:
        options = self.options
        return BodyForm(
            api=options.api,
            model=model,
            ignore_eos=self.ignore_eos,
            temperature=options.temperature,
            output_len=None if isinstance(self.source, RandomSource) else options.output_len,
            more=parse_object("--extra-body", options.extra_body),
        )

    def plan(self, point: LoadPoint, *, first_index: int = 0) -> LoadPlan:
        options = self.options
        due_s = self._due_s(point, options.seed + first_index)
        return LoadPlan(
            due_s=None if due_s is None else due_s.tolist(),
            max_concurrency=point.max_concurrency,
            num_requests=self.num_requests if due_s is None else None,
            duration_s=options.duration if due_s is None else None,
            timeout_s=options.timeout,
            retries=options.retries,
            first_index=first_index,
            keys=self.keys,
        )

    def arrivals(self, point: LoadPoint) -> str:
        """How requests came: what was asked for, or what that means here."""
        if not point.is_open and point.max_concurrency is not None:
            return "closed"
        if self.options.arrivals != "recorded" or (not point.is_open and self.recorded_s is not None):
            return self.options.arrivals
        return "poisson" if point.is_open else "all-at-once"

    def _due_s(self, point: LoadPoint, seed: int) -> Floats | None:
        """None is a closed loop."""
        options = self.options
        pattern = parse_arrivals(options.arrivals)
        if not point.is_open and point.max_concurrency is not None:
            return None
        if not point.is_open and self.recorded_s is not None and options.arrivals == "recorded":
            times = self.recorded_s / options.speed
            return times if options.duration is None else times[times <= options.duration]
        if isinstance(pattern, AllAtOnce) and point.is_open:
            raise InputError(
                "--arrivals all-at-once leaves nothing for --rate or --ramp to set; drop one of them"
            )
        if not point.is_open and not isinstance(pattern, AllAtOnce | None):
            raise InputError("--arrivals needs --rate or --ramp: how many requests per second")
        number = self.num_requests
        if number is None and not point.is_open:
            number = DEFAULT_REQUESTS
        return point.due_s(pattern, num_requests=number, duration_s=options.duration, seed=seed)


def requested_load(options: LoadOptions) -> RequestedLoad:
    """Read what the options name."""
    keys = _tenant_keys(options.tenant_keys)
    source, num_there = _source(options)
    if isinstance(source, TraceSource):
        _check_tenants(source.workload, keys)
    if options.images:
        parse_size(options.image_size)
        if options.api != CHAT:
            raise InputError(f"--images are parts of chat messages; leave out --api {options.api}")
    ends_early = isinstance(source, TextSource)  # its answers have no length to keep to
    return RequestedLoad(
        options=options,
        source=source,
        num_requests=_number(options, num_there),
        ignore_eos=not ends_early if options.ignore_eos is None else options.ignore_eos,
        keys=keys,
    )


def _source(options: LoadOptions) -> tuple[Source, int | None]:
    """Where requests come from, and how many there are; None: as many as are asked for."""
    name = options.workload
    if name == RANDOM:
        source = RandomSource(
            seed=options.seed,
            input_len=options.input_len,
            output_len=options.output_len or DEFAULT_OUTPUT,
            spread=options.spread,
            prefix_share=options.prefix_share,
            num_prefixes=options.num_prefixes,
        )
        return source, None
    is_file = find_generator(name) is None and os.path.exists(name)
    if is_file and not is_trace(Path(name)):
        prompts = read_prompts(Path(name))
        return TextSource(Path(name).name, prompts), len(prompts)
    count = options.num_prompts
    if count is None and not is_file:
        count = DEFAULT_REQUESTS if options.duration is None else DRAWN_AHEAD
    workload = load_workload(name, num_requests=count, seed=options.seed)
    return TraceSource(workload, seed=options.seed), len(workload)


def _number(options: LoadOptions, num_there: int | None) -> int | None:
    if options.num_prompts is not None:
        return options.num_prompts
    return None if options.duration is not None else num_there or DEFAULT_REQUESTS


def parse_ramp(text: str) -> Ramp:
    try:
        start, end, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"--ramp '{text}' is not understood; give {RAMP_FORM}") from None
    if not (0 <= start < 1e6 and 0 < end < 1e6 and 0 < seconds < 1e6):
        raise InputError(
            f"--ramp '{text}': rates must lie between 0 and a million, and the last one and the seconds above 0"
        )
    return Ramp(start=start, end=end, seconds=seconds)


def parse_bounds(text: str | None) -> dict[str, float]:
    """`ttft:1000 itl:50` (or with commas) as milliseconds by name."""
    bounds: dict[str, float] = {}
    for part in (text or "").replace(",", " ").split():
        name, _, value = part.partition(":")
        number = _float(value)
        if name not in METRICS or name in bounds or number is None or not 0 < number < math.inf:
            raise InputError(
                f"--goodput '{part}' is not understood; give each of {', '.join(METRICS)} at most once, in "
                "milliseconds, as in --goodput ttft:1000 tpot:50"
            )
        bounds[name] = number
    return bounds


def parse_percentiles(text: str) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        number = _float(part)
        if number is None or not 0 <= number <= 100:
            raise InputError(
                f"--percentiles '{part}' is not a percentile; give numbers such as 50,90,99,99.9"
            )
        found.append(number)
    return tuple(dict.fromkeys(found))


def parse_object(flag: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"{flag} is not valid JSON ({error}); give an object such as {{}}") from None
    if not isinstance(value, dict):
        raise InputError(f"{flag} is no JSON object; give one such as {{}}")
    return value


def _tenant_keys(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--tenant-keys {name}: cannot be read ({error})") from None
    keys = parse_object(f"--tenant-keys {name}", text)
    if not all(isinstance(key, str) for key in keys.values()):
        raise InputError(f"--tenant-keys {name}: every tenant needs a key that is text")
    return keys


def _check_tenants(workload: Workload, keys: Mapping[str, str]) -> None:
    lacking = [tenant for tenant in workload.tenants if tenant not in keys] if keys else []
    if lacking and len(workload.tenants) > 1 and "" not in keys:
        raise InputError(
            f'--tenant-keys names no key for {", ".join(lacking[:5])}; add one for each tenant, or "" for others'
        )


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
