"""What a command line asks for, as a source of requests and plans for its runs.

Owns how the options work together: which file is what, how many requests there are, when the loop is open. Every
mistake that can be found before something is sent is found here. Sends nothing.
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
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.bench.bench_options import DEFAULT_OUTPUT, DEFAULT_REQUESTS, LoadOptions
from paceline.lab.bench.load.figures import METRICS
from paceline.lab.bench.load.generator import LoadPlan
from paceline.lab.bench.load.pacing import ArrivalPlan, Ramp, check_pattern
from paceline.lab.bench.load.prompt_source import (
    BodyForm,
    RandomSource,
    Source,
    TextSource,
    TraceSource,
    is_trace,
    read_prompts,
)
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.arrivals import parse_arrivals
from paceline.lab.workload.generators import find_generator

RANDOM = "random"
TEMPLATE_ROOM = 64  # tokens that a chat template may add to a prompt
DRAWN_AHEAD = 10_000  # requests of a built-in workload, where time and not number ends the run


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLoad:
    """Requests, and the ways to send them."""

    options: LoadOptions
    source: Source
    num_requests: int | None  # None: as many as there is time for
    recorded_s: NDArray[np.float64] | None  # arrivals of a trace
    ignore_eos: bool
    touched: int = 0  # requests of a trace that were cut or left out to fit the model
    keys: Mapping[str, str] = field(default_factory=dict)

    def fitted(self, max_model_len: int | None) -> AskedLoad:
        """With the requests of a trace cut to what a model takes."""
        if max_model_len is None or not isinstance(self.source, TraceSource):
            return self
        workload, touched = self.source.workload.clipped(max(2, max_model_len - TEMPLATE_ROOM))
        return replace(
            self,
            source=TraceSource(workload, seed=self.options.seed),
            num_requests=None if self.num_requests is None else len(workload),
            recorded_s=workload.arrival_s,
            touched=touched,
        )

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

    def _due_s(self, point: LoadPoint, seed: int) -> NDArray[np.float64] | None:
        """None is a closed loop."""
        options = self.options
        pattern = parse_arrivals(options.arrivals)
        if not point.is_open and point.max_concurrency is not None:
            return None
        if not point.is_open and self.recorded_s is not None and options.arrivals == "recorded":
            times = self.recorded_s / options.speed
            return times if options.duration is None else times[times <= options.duration]
        check_pattern(pattern, has_rate=point.is_open)
        pace = ArrivalPlan(pattern=pattern, rate=point.rate, ramp=point.ramp)
        number = self.num_requests
        if number is None and not point.is_open:
            number = DEFAULT_REQUESTS
        return pace.due_s(num_requests=number, duration_s=options.duration, seed=seed)


def ask_load(options: LoadOptions) -> AskedLoad:
    """Read what the options name."""
    keys = _tenant_keys(options.tenant_keys)
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
        return AskedLoad(
            options=options,
            source=source,
            num_requests=_number(options, None),
            recorded_s=None,
            ignore_eos=options.ignore_eos is not False,
            keys=keys,
        )
    is_file = find_generator(name) is None and os.path.exists(name)
    if is_file and not is_trace(Path(name)):
        return _text_load(options, keys)
    return _trace_load(options, keys, is_file=is_file)


def _text_load(options: LoadOptions, keys: Mapping[str, str]) -> AskedLoad:
    path = Path(options.workload)
    prompts = read_prompts(path)
    return AskedLoad(
        options=options,
        source=TextSource(path.name, prompts),
        num_requests=_number(options, len(prompts)),
        recorded_s=None,
        ignore_eos=options.ignore_eos is True,
        keys=keys,
    )


def _trace_load(options: LoadOptions, keys: Mapping[str, str], *, is_file: bool) -> AskedLoad:
    asked = options.num_prompts
    if asked is None and not is_file:
        asked = DEFAULT_REQUESTS if options.duration is None else DRAWN_AHEAD
    workload: Workload = load_workload(options.workload, num_requests=asked, seed=options.seed)
    _check_tenants(workload, keys)
    return AskedLoad(
        options=options,
        source=TraceSource(workload, seed=options.seed),
        num_requests=_number(options, len(workload)),
        recorded_s=workload.arrival_s,
        ignore_eos=options.ignore_eos is not False,
        keys=keys,
    )


def _number(options: LoadOptions, num_there: int | None) -> int | None:
    if options.num_prompts is not None:
        return options.num_prompts
    return None if options.duration is not None else num_there or DEFAULT_REQUESTS


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
