"""Which simulations a command line asks for, and running them one after the other.

Owns the meaning of the options together: modes times rates, the sweep behind a plot, the progress bar. What a
simulation does is `lab.sim`'s business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cli.flags import split_list
from paceline.cli.sim.flags import BUILT_IN_REQUESTS, SWEEP_FACTORS, SimOptions
from paceline.config.encoder import ENCODE_PARTS
from paceline.config.engine import EVICTIONS
from paceline.config.speculative import read_speculative_config
from paceline.core.recorder import StepRecorder
from paceline.costs.network import link_of
from paceline.costs.presets import device_spec, model_shape
from paceline.errors import InputError
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import Slo, Summary, summarize
from paceline.lab.sim import Machine, SimConfig, engine_config, host_costs, parse_faults, simulate
from paceline.lab.sim.acceptance import Acceptance
from paceline.lab.sim.cost_files import load_cost_model
from paceline.lab.sim.settings import LowerLevels, Scaling
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.generators import GENERATORS
from paceline.lab.workload.servegen import PREFIX

if TYPE_CHECKING:
    from paceline.server.live.recording import Recording

BELADY = "belady"
GIB = 1 << 30
SLO_NAMES = ("ttft", "itl", "e2e")
Bar = Callable[[int, int, float], None]  # requests ended, requests in all, virtual seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation to be made."""

    label: str
    series: str  # what is compared at several rates: a mode, an eviction order, or both
    mode: str
    rate: float | None  # mean requests per second; None when all arrive at once
    workload: Workload
    config: SimConfig
    requested: bool  # False: a point that only the sweep behind a plot needs
    slo: Slo | None
    device_hour_price: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulation that was made. The record is kept where a timeline may be drawn from it."""

    run: Run
    summary: Summary
    record: RunRecord | None
    device_s: Mapping[str, float] = field(default_factory=dict)  # by model, where several share the device


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """The workload at one rate."""

    rate: float | None
    workload: Workload
    requested: bool


def plan_runs(options: SimOptions, engine: Mapping[str, Any]) -> list[Run]:
    """Every run of the command line, checked as far as it can be without running."""
    machines = machines_of(options)
    drafts = read_speculative_config(options.speculative_config)
    acceptance = None if drafts is None else Acceptance.read(options.acceptance)
    slo = parse_slo(options.slo)
    scaling = _scaling(options, slo)
    faults = parse_faults(options.faults)
    compared = _compared(options)
    models = parse_models(options.models)
    if models and options.replicas > 1:
        raise InputError("--models share one device; use --replicas 1")
    loads = _loads(options)
    several = sum(load.requested for load in loads) > 1
    runs = []
    for (series, chosen, clairvoyant, levels, router), machine in product(compared, machines):
        if len(machines) > 1:
            series = f"tp {machine.ranks}" if len(compared) == 1 else f"{series} tp {machine.ranks}"
        for load in loads:
            label = rate_label(series, load.rate) if several or not load.requested else series
            config = SimConfig(
                machine=machine,
                engine=engine_config(machine, load.workload, {**engine, **chosen}, drafts, levels),
                clairvoyant=clairvoyant,
                num_adapters=options.adapters,
                adapter_read_s=options.adapter_read_ms / 1e3,
                num_replicas=len(models) or options.replicas,
                models=models,
                router=router,
                scaling=scaling,
                **host_costs(machine.cost, options.host_step_s),
                host_row_s=options.host_row_us / 1e6,
                priorities=options.priorities,
                deadline_s=None if options.deadline_ms is None else (options.deadline_ms / 1e3, 0.0),
                ttft_slo_ms=options.ttft_slo_ms,
                itl_slo_ms=options.itl_slo_ms,
                on_infeasible=options.on_infeasible,
                forecasts=options.forecasts,
                faults=faults,
                acceptance=acceptance,
                seed=options.seed,
                check=options.check,
            )
            run = Run(
                label=label,
                series=series,
                mode=chosen["mode"],
                rate=load.rate,
                workload=load.workload,
                config=config,
                requested=load.requested,
                slo=slo,
                device_hour_price=None
                if options.device_hour_price is None
                else options.device_hour_price * machine.ranks,
            )
            runs.append(run)
    if options.log and (sum(run.requested for run in runs) > 1 or options.replicas > 1 or models):
        raise InputError(
            "--log records one engine in one run; give one mode, one eviction order, one rate and --replicas 1"
        )
    if options.log and any(run.config.clairvoyant for run in runs):
        raise InputError(
            "--log: a run with --eviction belady cannot be replayed; give --eviction reuse or lru"
        )
    return runs


class _RunColumn(NamedTuple):
    """What a column of results shows."""

    name: str
    chosen: dict[str, str]  # options of the engine
    clairvoyant: bool  # it knows what will arrive
    levels: LowerLevels | None  # below the device
    router: str


def _compared(options: SimOptions) -> list[_RunColumn]:
    """Modes, eviction orders, ways to encode pictures and routers, each with each. Where there are levels below the
    device, the first column is without them."""
    modes = split_list(options.modes, "--mode")
    orders = split_list(options.evictions, "--eviction")
    for order in orders:
        if order not in (*EVICTIONS, BELADY):
            raise InputError(
                f"--eviction '{order}' is not known; the orders are {', '.join((*EVICTIONS, BELADY))}"
            )
    encodings = split_list(options.encodings, "--encode")
    for encode in encodings:
        if encode not in ENCODE_PARTS:
            raise InputError(f"--encode '{encode}' is not known; give {' or '.join(ENCODE_PARTS)}")
    levels = _levels(options)
    found: list[_RunColumn] = []
    routers = split_list(options.routers, "--router")
    for mode, order, encode, router in product(modes, orders, encodings, routers):
        compared = ((mode, modes), (order, orders), (encode, encodings), (router, routers))
        names = [name for name, among in compared if len(among) > 1] or [mode]
        chosen = {"mode": mode, "eviction": "reuse" if order == BELADY else order, "encode": encode}
        if levels is not None and not found:
            found.append(_RunColumn(f"{order} alone", chosen, order == BELADY, None, router))
        found.append(_RunColumn(" ".join(names), chosen, order == BELADY, levels, router))
    return found


def _levels(options: SimOptions) -> LowerLevels | None:
    levels = LowerLevels(
        host_bytes=options.host_kv_gib * GIB,
        disk_bytes=options.disk_kv_gib * GIB,
        disk_bytes_s=options.disk_gbps * 1e9,
    )
    return levels if levels.host_bytes else None


def _scaling(options: SimOptions, slo: Slo | None) -> Scaling | None:
    if options.autoscale == "off":
        return None
    bounds = {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s} if slo is not None else {}
    given = {name: value for name, value in bounds.items() if value is not None}
    return Scaling(rule=options.autoscale, least=options.min_replicas, start_s=options.start_s, **given)


def recordings_of(runs: Sequence[Run]) -> dict[str, Recording]:
    """What the page will show of each run that was asked for, by its label."""
    from paceline.server.live.recording import Recording

    requested = [run for run in runs if run.requested]
    if any(run.config.num_replicas > 1 for run in requested):
        raise InputError("--ui shows one engine of a run; use --replicas 1")
    return {
        run.label: Recording(
            run.label,
            num_rows=run.config.engine.scheduler.max_num_seqs,
            device=f"{run.config.machine.model.name} on {run.config.machine.device.name}, simulated",
        )
        for run in requested
    }


def run_all(
    runs: Sequence[Run],
    log: Path | None,
    recordings: Mapping[str, Recording] | None = None,
    *,
    jobs: int = 1,
) -> list[Result]:
    """Run them, `jobs` at a time, and give what came of each in their order. What follows a run as it goes, a log or
    the page, is in this process, so that these run one after the other."""
    last_requested = {run.mode: run for run in runs if run.requested}
    results = []
    if log is not None or recordings:
        jobs = 1
    with _progress() as bar_for:
        records = _apart(runs, jobs, bar_for) if min(jobs, len(runs)) > 1 else None
        for run in runs:
            record = (
                next(records)
                if records is not None
                else simulate(
                    run.config,
                    run.workload,
                    label=run.label,
                    recorder=_recorder(run, log) if run.requested and log is not None else None,
                    watch=recordings[run.label].watch if recordings and run.requested else None,
                    on_progress=bar_for(run),
                )
            )
            summary = summarize(record, slo=run.slo, device_hour_price=run.device_hour_price)
            kept = record if last_requested[run.mode] is run else None
            spent: Any = record.config.get("device_s", {})
            results.append(Result(run=run, summary=summary, record=kept, device_s=spent))
    return results


def _apart(runs: Sequence[Run], jobs: int, bar_for: Callable[[Run], Bar]) -> Iterator[RunRecord]:
    """Records in the order of the runs, made in processes that share nothing. A bar is seen when its run has ended."""
    with ProcessPoolExecutor(min(jobs, len(runs)), mp_context=get_context("spawn")) as pool:
        for run, record in zip(runs, pool.map(_simulated, runs), strict=True):
            bar_for(run)(len(run.workload), len(run.workload), record.duration_s)
            yield record


def _simulated(run: Run) -> RunRecord:
    return simulate(run.config, run.workload, label=run.label)


def rate_label(mode: str, rate: float | None) -> str:
    return mode if rate is None else f"{mode} {rate:.4g}/s"


def parse_slo(text: str) -> Slo | None:
    """`ttft=1.0,itl=0.05,e2e=30` as a value; None when nothing is bounded."""
    bounds: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        seconds = _number(value)
        if name not in SLO_NAMES or f"{name}_s" in bounds or seconds is None or not 0 < seconds < math.inf:
            raise InputError(
                f"--slo '{part}' is not understood; give each bound once, in seconds, "
                "as in --slo ttft=1.0,itl=0.05,e2e=30"
            )
        bounds[f"{name}_s"] = seconds
    return Slo(**bounds) if bounds else None


def parse_models(text: str) -> tuple[tuple[str, float], ...]:
    """`a:0.5,b:0.5` as names and shares."""
    found: dict[str, float] = {}
    for part in split_list(text, "--models") if text else []:
        name, _, value = part.rpartition(":")
        share = _number(value)
        if not name or name in found or share is None or not 0.001 <= share < math.inf:
            raise InputError(
                f"--models '{part}' is not understood; give each name once with its share, as in a:0.5,b:0.5"
            )
        found[name] = share
    return tuple(found.items())


def parse_rates(text: str) -> list[float]:
    """`5,10,20` as numbers, in order; empty when the text is."""
    rates = []
    for part in split_list(text, "--rate") if text else []:
        rate = _number(part)
        if rate is None or not 0 < rate < math.inf:
            raise InputError(f"--rate '{part}' is not a rate; give requests per second, as in --rate 5,10,20")
        rates.append(rate)
    return sorted(set(rates))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def machine_of(model: str, device: str, cost_model: str) -> Machine:
    """The model on its device, with step times from the cost model that was named."""
    machine = Machine.of(model_shape(model), device_spec(device))
    if not cost_model:
        return machine
    return replace(machine, cost=load_cost_model(cost_model, machine.kv_bytes_per_token))


def machines_of(options: SimOptions) -> list[Machine]:
    """One for each number of ranks; a cost model that was fitted is of one device."""
    sizes = parse_ranks(options.tensor_parallel_sizes)
    if sizes == [1]:
        return [machine_of(options.model, options.device, options.cost_model)]
    if options.cost_model:
        raise InputError("--cost-model was fitted to one device: leave --tensor-parallel-size out")
    model, device, link = model_shape(options.model), device_spec(options.device), link_of(options.link)
    return [Machine.of(model, device, ranks=ranks, link=link) for ranks in sizes]


def parse_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers, in order."""
    parts = split_list(text, "--tensor-parallel-size")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(
            f"--tensor-parallel-size '{text}' is not understood; give numbers of devices, as in 1,2,4,8"
        )
    return sorted({int(part) for part in parts})


def _loads(options: SimOptions) -> list[SimulatedLoad]:
    """The workload at every rate asked for, and around a single one if a curve is to be drawn."""
    rates = parse_rates(options.rate)
    if not rates:
        return _recorded_loads(options)
    requested = set(rates)
    if options.plot and len(rates) == 1:
        rates = [rates[0] * factor for factor in SWEEP_FACTORS]
    return [
        SimulatedLoad(rate=rate, workload=_load(options, rate), requested=rate in requested) for rate in rates
    ]


def _recorded_loads(options: SimOptions) -> list[SimulatedLoad]:
    """Arrivals as they are; around them, if a curve is to be drawn, the same with time compressed."""
    workload = _load(options, None)
    rate = workload.rate if 0 < workload.rate < math.inf else None
    if not options.plot:
        return [SimulatedLoad(rate=rate, workload=workload, requested=True)]
    if rate is None:
        raise InputError(
            f"--plot draws curves over the rate, but the requests of {workload.name} all arrive at once; "
            "give --rate"
        )
    return [
        SimulatedLoad(
            rate=rate * factor,
            workload=replace(workload, arrival_s=workload.arrival_s / factor) if factor != 1.0 else workload,
            requested=factor == 1.0,
        )
        for factor in SWEEP_FACTORS
    ]


def _load(options: SimOptions, rate: float | None) -> Workload:
    num_requests = options.num_requests
    if num_requests is None and (options.trace in GENERATORS or options.trace.startswith(PREFIX)):
        num_requests = BUILT_IN_REQUESTS
    return load_workload(
        options.trace,
        num_requests=num_requests,
        seed=options.seed,
        rate=rate,
        speed=options.speed,
        arrivals=options.arrivals,
    )


def _recorder(run: Run, path: Path) -> StepRecorder:
    from paceline.audit.runlog import BEGAN, RunLogWriter, run_header

    named = {"seed": run.config.seed, "workload": run.workload.name, "label": run.label}
    header = run_header(run.config.engine, **named, **{BEGAN: 0.0})
    return RunLogWriter(path, header)


@contextmanager
def _progress() -> Iterator[Callable[[Run], Bar]]:
    """Bars on standard error; nothing at all when that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda run: lambda ended, total, now_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "{task.completed:,.0f}/{task.total:,.0f} requests, {task.fields[virtual_s]:,.1f} s simulated in"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def bar_for(run: Run) -> Bar:
            task = progress.add_task(run.label, total=len(run.workload), virtual_s=0.0)

            def update(ended: int, total: int, now_s: float) -> None:
                progress.update(task, completed=ended, total=total, virtual_s=now_s)

            return update

        yield bar_for
