"""What a simulation needs to know, as values: the machine, the engine's options, and what is done to it.

Owns the defaults that depend on the machine or the workload (KV blocks, block size, longest sequence). Reads
no command line and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from paceline.config.encoder import EncoderWork
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.options import from_values, pick
from paceline.config.speculative import DRAFT_BUCKETS, DraftConfig
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.fit import FittedCost, TimeSpread, preset_cost
from paceline.costs.network import LINKS, Link, rank_shape
from paceline.costs.presets import MODELS, DeviceSpec, ModelShape, as_held, kv_capacity_tokens
from paceline.costs.roofline import SIZES, encoder_work, preemption_costs, step_costs
from paceline.errors import InputError
from paceline.lab.sim.acceptance import Acceptance
from paceline.lab.sim.faults import FaultSpec
from paceline.lab.workload.workload import Workload
from paceline.routing.routers import DEFAULT_ROUTER, make_router

MAX_REPLICAS = 10_000
SLOW_STEP_S = 0.05  # a step of one tile that takes so long is no GPU's
LINE_ROWS = 64  # of the larger of two steps that tell what a token more costs
# Steps beside pictures aim at the time of PACE_STEPS steps in which PACE_ROWS rows decode.
PACE_ROWS, PACE_STEPS = 64, 3.5
SCALE_RULES = ("wanted", "keda")  # see `Autoscaler`
HOST_STEP_S = 3e-4  # planning a step; see benchmarks/engine_cost.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a device, or on several that divide it as ranks, and what its steps cost."""

    model: ModelShape
    device: DeviceSpec
    cost: CostModel
    ranks: int = 1
    link: Link = LINKS["nvlink4"]

    @classmethod
    def of(
        cls,
        model: ModelShape,
        device: DeviceSpec,
        cost: CostModel | None = None,
        *,
        ranks: int = 1,
        link: Link = LINKS["nvlink4"],
    ) -> Machine:
        """With the preset's costs unless others are given."""
        found = cost if cost is not None else preset_cost(model, device, ranks, link)
        return cls(model=model, device=device, cost=found, ranks=ranks, link=link)

    @property
    def kv_bytes_per_token(self) -> int:
        return as_held(self.model, self.device).kv_bytes_per_token

    @property
    def is_gpu(self) -> bool:
        return not self.device.name.startswith("cpu")

    @property
    def block_size(self) -> int:
        """Tokens per block that suit the device."""
        return 64 if self.is_gpu else 16

    def num_blocks(self, block_size: int) -> int:
        """Blocks that fit beside the weights, the null block included."""
        return kv_capacity_tokens(rank_shape(self.model, self.ranks), self.device) // block_size + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Who says how many replicas there are, between `least` and all, and what one takes to start."""

    rule: str
    least: int = 1
    start_s: float = 60.0
    ttft_s: float = 2.0  # that a request may wait for its first token
    itl_s: float = 0.1

    def __post_init__(self) -> None:
        if self.rule not in SCALE_RULES:
            raise InputError(f"--autoscale must be one of {', '.join(SCALE_RULES)}, not '{self.rule}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """One simulated deployment."""

    machine: Machine
    engine: EngineConfig
    num_replicas: int = 1
    router: str = DEFAULT_ROUTER
    scaling: Scaling | None = None  # replicas start and stop; else all are there
    host_step_s: float = HOST_STEP_S
    host_row_s: float = 0.0  # and for each decoding row
    request_s: float = 0.0  # from the arrival of a request to the moment an engine knows of it
    spread: TimeSpread = field(default_factory=TimeSpread)  # how far steps of one shape differ
    priorities: str = "none"  # see requests.draw_priorities
    deadline_s: tuple[float, float] | None = None  # after arrival, and more for each token asked for
    ttft_slo_ms: int | None = None  # what every request wants, unless its trace says otherwise
    itl_slo_ms: int | None = None
    on_infeasible: str = "try"  # what becomes of requests whose times cannot be kept: refuse, or try
    forecasts: bool = False  # ask of every request when its first token would come
    faults: FaultSpec = field(default_factory=FaultSpec)
    acceptance: Acceptance | None = None  # which drafts are right, where the engine makes any
    clairvoyant: bool = False  # eviction knows what will arrive
    num_adapters: int = 0  # that requests have, some of them much more often than others
    adapter_read_s: float = 0.05  # until the folder of one is in memory
    seed: int = 0
    check: bool = False  # check every invariant after every half of a step
    # Names and shares of models on one device; else there is one model.
    models: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.models and len(self.models) != self.num_replicas:
            raise InputError("--models share one device: leave --replicas out")
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise InputError(f"--replicas must lie between 1 and {MAX_REPLICAS}, not {self.num_replicas}")
        if self.scaling is not None and not 1 <= self.scaling.least < self.num_replicas:
            raise InputError(
                f"--autoscale needs fewer --min-replicas ({self.scaling.least}) than --replicas ({self.num_replicas})"
            )
        make_router(self.router)  # one that cannot be had is said now
        if not 0.0 <= self.host_step_s <= 10.0:
            raise InputError(f"--host-step-s must lie between 0 and 10 seconds, not {self.host_step_s:g}")

    def objectives(self, output_len: int) -> tuple[int | None, ...]:
        """Deadline, first token and between tokens, in ms, that a request of this length wants."""
        deadline_ms = None
        if self.deadline_s is not None:
            start_s, token_s = self.deadline_s
            deadline_ms = max(1, round(1e3 * (start_s + token_s * output_len)))
        return deadline_ms, self.ttft_slo_ms, self.itl_slo_ms

    @property
    def block_bytes(self) -> int:
        return self.engine.kv.block_size * self.machine.kv_bytes_per_token

    def described(self) -> dict[str, object]:
        """Plain values that name everything a run depends on but the workload."""
        return {
            "model": self.machine.model.name,
            "device": self.machine.device.name,
            **(
                {"ranks": self.machine.ranks, "link": self.machine.link.name}
                if self.machine.ranks > 1
                else {}
            ),
            "cost_model": type(self.machine.cost).__name__.lower(),
            "replicas": self.num_replicas,
            "router": self.router,
            **({} if self.scaling is None else {"autoscale": asdict(self.scaling)}),
            "depth": self.engine.depth,
            "host_step_s": self.host_step_s,
            **({"host_row_s": self.host_row_s} if self.host_row_s else {}),
            **({"request_s": self.request_s} if self.request_s else {}),
            **({"spread": _described(self.spread)} if self.spread != TimeSpread() else {}),
            "priorities": self.priorities,
            "faults": asdict(self.faults),
            **({} if self.acceptance is None else {"acceptance": self.acceptance.text}),
            **({"clairvoyant": True} if self.clairvoyant else {}),
            **(
                {"adapters": self.num_adapters, "adapter_read_s": self.adapter_read_s}
                if self.num_adapters
                else {}
            ),
            **({} if self.deadline_s is None else {"deadline_s": self.deadline_s}),
            **({"ttft_slo_ms": self.ttft_slo_ms} if self.ttft_slo_ms else {}),
            **({"itl_slo_ms": self.itl_slo_ms} if self.itl_slo_ms else {}),
            "on_infeasible": self.on_infeasible,
            **({"models": dict(self.models)} if self.models else {}),
            "seed": self.seed,
            "check": self.check,
            "scheduler": asdict(self.engine.scheduler),
            "kv": {name: value for name, value in asdict(self.engine.kv).items() if name != "groups"},
        }


def _described(spread: TimeSpread) -> str:
    parts = {"decode": spread.decode, "prompts": spread.prompts}
    return ", ".join(f"{name} {part[0]:.3g} to {part[-1]:.3g}" for name, part in parts.items() if part)


def host_costs(cost: CostModel, host_step_s: float | None = None) -> dict[str, Any]:
    """What a fitted model knows beside the times of steps, as fields of `SimConfig`; what is given goes first."""
    if isinstance(cost, FittedCost):
        known = {"request_s": cost.host.request_s, "spread": cost.spread}
        seen_s = cost.host.step_s
    else:
        known, seen_s = {}, None
    fallback_s = HOST_STEP_S if seen_s is None else seen_s
    return {**known, "host_step_s": fallback_s if host_step_s is None else host_step_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerLevels:
    """Memory and a disk that keep prefixes below the device."""

    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    disk_bytes_s: float = 3e9
    write_share: float = 0.5  # of what the disk can do, for writing

    def __post_init__(self) -> None:
        if self.disk_bytes and not self.host_bytes:
            raise InputError(
                "--disk-kv-gib: a disk is read and written through host memory; give --host-kv-gib too"
            )


def engine_config(
    machine: Machine,
    workload: Workload,
    given: Mapping[str, object],
    drafts: DraftConfig | None = None,
    levels: LowerLevels | None = None,
) -> EngineConfig:
    """An engine for `machine`: the options that are given, and for the rest what suits machine and workload.

    A cost model that was fitted to a run brings the sizes of its engine along. Beyond that, the KV cache is as large
    as the device allows, the longest sequence is the longest request that fits into it, the queue holds the whole
    workload, swapping has as many host blocks as device blocks, and prefixes are looked for where the workload names
    them.
    """
    recorded = machine.cost.engine if isinstance(machine.cost, FittedCost) else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    if "max_num_batched_tokens" in chosen:  # as on a server, it then is the size of all steps
        chosen.setdefault("max_num_prompt_tokens", 0)
    options = {**recorded, **chosen}
    block_size = from_values(KVConfig, {"block_size": machine.block_size, **options}).block_size
    kv_defaults = {
        "block_size": block_size,
        "num_blocks": machine.num_blocks(block_size),
        "enable_prefix_caching": workload.prefix_ids is not None,
    }
    kv = from_values(KVConfig, {**kv_defaults, **options})
    if options.get("preemption") == "swap" and "num_host_blocks" not in options:
        kv = replace(kv, num_host_blocks=kv.num_blocks)
    declared = SchedulerConfig()
    lengths = workload.prompt_len.astype(np.int64) + workload.output_len
    slots = (kv.num_blocks - 1) * kv.block_size
    scheduler_defaults: dict[str, object] = {
        "max_model_len": max(2, min(int(lengths.max(initial=2)), slots)),
        "max_queue": max(declared.max_queue, 2 * len(workload)),
        "max_queue_tokens": max(declared.max_queue_tokens, 2 * int(workload.prompt_len.sum(dtype=np.int64))),
    }
    if workload.images is not None:
        scheduler_defaults |= _paced(machine, options)
    scheduler = from_values(SchedulerConfig, {**scheduler_defaults, **options})
    if workload.images is not None:
        scheduler = replace(
            scheduler, encoder=_encoder_of(machine, workload, whole=scheduler.encode == "whole")
        )
    if scheduler.step_target_ms or scheduler.has_dial or scheduler.scheduling_policy == "deadline":
        sizes = _pace_sizes(machine.cost, scheduler.max_num_batched_tokens)
        scheduler = replace(scheduler, step_costs=step_costs(machine.cost, sizes))
    block_bytes = kv.block_size * machine.kv_bytes_per_token
    rows = max(1, min(scheduler.max_num_seqs, slots // max(1, int(lengths.mean()) if len(lengths) else 1)))
    costs = preemption_costs(machine.cost, block_bytes=block_bytes, num_rows=rows)
    if levels is not None and levels.host_bytes:
        kv = replace(
            kv,
            cache_on_host=True,
            num_host_blocks=max(1, int(levels.host_bytes / block_bytes)),
            num_disk_blocks=int(levels.disk_bytes / block_bytes),
        )
        disk_block_s = block_bytes / levels.disk_bytes_s
        costs = replace(costs, disk_block_s=disk_block_s, disk_write_s=disk_block_s / levels.write_share)
    scheduler = replace(scheduler, preemption_costs=costs)
    if drafts is not None:
        with_seconds = _with_sizes if machine.is_gpu else _with_line
        scheduler = replace(scheduler, drafts=with_seconds(drafts, machine.cost, scheduler))
    return EngineConfig(kv=kv, scheduler=scheduler, **pick(EngineConfig, options))


def _paced(machine: Machine, options: Mapping[str, object]) -> dict[str, object]:
    """A target of steps on a GPU, never stretched: what pictures cost others shows in the time between tokens."""
    is_chosen = "step_target_ms" in options or "max_num_batched_tokens" in options
    if not machine.is_gpu or is_chosen or options.get("mode", "continuous") != "continuous":
        return {}
    rows_s = machine.cost.step_seconds(StepShape(decode_rows=PACE_ROWS, logit_rows=PACE_ROWS))
    target_ms = 1e3 * PACE_STEPS * rows_s
    return {"step_target_ms": target_ms, "step_stretch": 1.0, "max_num_batched_tokens": SIZES[-1]}


def _encoder_of(machine: Machine, workload: Workload, *, whole: bool) -> EncoderWork:
    encoder = machine.model.encoder
    if encoder is None:
        known = ", ".join(name for name, shape in MODELS.items() if shape.encoder is not None)
        raise InputError(
            f"{workload.name} has pictures, and {machine.model.name} takes text only; try {known}"
        )
    return encoder_work(machine.cost, encoder, on_gpu=machine.is_gpu, whole=whole)


def _with_sizes(drafts: DraftConfig, cost: CostModel, scheduler: SchedulerConfig) -> DraftConfig:
    """With the sizes of a GPU's steps with drafts, and the seconds of each."""
    slots = scheduler.max_num_seqs
    most = max(scheduler.max_num_batched_tokens, slots) + slots
    sizes = (1, *(size for size in DRAFT_BUCKETS if size <= most))
    seconds = [cost.step_seconds(StepShape(decode_rows=size, logit_rows=size)) for size in sizes]
    return replace(drafts, sizes=sizes, seconds=tuple(np.maximum.accumulate(seconds).tolist()))


def _with_line(drafts: DraftConfig, cost: CostModel, scheduler: SchedulerConfig) -> DraftConfig:
    """With the seconds of small steps as a line over their tokens."""
    one_s, more_s = (
        cost.step_seconds(StepShape(decode_rows=rows, logit_rows=rows)) for rows in (1, 1 + LINE_ROWS)
    )
    token_s = max(0.0, more_s - one_s) / LINE_ROWS
    return replace(drafts, fixed_s=one_s - token_s, token_s=token_s)


def _pace_sizes(cost: CostModel, budget: int) -> tuple[int, ...]:
    """Sizes of steps that a pace may choose: those of a GPU's tiles, or finer ones where even the least takes long."""
    if cost.step_seconds(StepShape(prefill_tokens=SIZES[0], logit_rows=1)) < SLOW_STEP_S:
        return SIZES
    return (
        *range(min(16, budget), min(SIZES[0], budget), 4),
        *(size for size in SIZES if size < budget),
        budget,
    )
