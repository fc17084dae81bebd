"""The only file that knows all classes: it puts an engine together from a config, a runner and a clock.

What needs torch is imported where it is used: the simulator builds engines too, and has no use for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from paceline.audit.ring import DecisionRing
from paceline.config.engine import (
    Capacity,
    EngineConfig,
    GroupSpec,
    KVConfig,
    ModelConfig,
    PreemptionCosts,
    SchedulerConfig,
)
from paceline.config.options import pick
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.plan import Runner, StepChecker
from paceline.core.pulse import Pulse
from paceline.core.recorder import BothRecorders, StepRecorder
from paceline.core.request import RequestHooks
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.errors import ConfigError
from paceline.kv.block_pool import BlockPool
from paceline.kv.manager import KVManager
from paceline.kv.prefix import KeyMaker
from paceline.policy import Policy
from paceline.runner.machine_load import MANY_TOKENS, FreeCores, MachineLoad, cores_allowed
from paceline.scheduler.invariants import InvariantViolation, SampledChecker
from paceline.scheduler.modes import make_mode
from paceline.scheduler.policy import make_policy
from paceline.scheduler.rows import Rows
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.state import SchedulerState

if TYPE_CHECKING:
    from paceline.models.files.open import Checkpoint
    from paceline.text.tokenizer import Tokenizer

MEASURED_STEPS = 3  # of which the shortest counts
TYPICAL_ROWS = 32  # that decode together on a CPU, for the time of a step

_logger = logging.getLogger("paceline")


def build_scheduler(
    config: EngineConfig,
    clock: Clock,
    hooks: RequestHooks,
    *,
    policy: Policy | None = None,
    make_pool: Callable[..., BlockPool] = BlockPool,
) -> Scheduler:
    """A scheduler with its own row table and KV cache."""
    capacity = Capacity.of(config)
    mode = make_mode(config.scheduler)
    # A padded rectangle has no use for a shared beginning: every row computes all of it.
    kv_config = replace(config.kv, enable_prefix_caching=False) if mode.keeps_finished else config.kv
    kv = KVManager(
        kv_config,
        capacity,
        max_chunk=config.scheduler.largest_step,
        at_once=mode.keeps_finished,
        make_pool=make_pool,
    )
    rows = Rows(capacity.num_rows, config.scheduler.max_model_len)
    state = SchedulerState(
        config.scheduler,
        kv,
        rows,
        policy=policy if policy is not None else make_policy(config.scheduler),
        mode=mode,
        clock=clock,
        hooks=hooks,
    )
    return Scheduler(state)


def build_engine(
    config: EngineConfig,
    runner: Runner,
    *,
    clock: Clock | None = None,
    hooks: RequestHooks | None = None,
    recorder: StepRecorder | None = None,
    policy: Policy | None = None,
    make_pool: Callable[..., BlockPool] = BlockPool,
    make_checker: Callable[[Scheduler], StepChecker] | None = None,
) -> Engine:
    """An engine around `runner`. Without hooks of its own it makes prefix keys from token ids; without a checker of
    its own it looks at the invariants every `config.check_every` steps and logs what it finds."""
    clock = clock if clock is not None else MonotonicClock()
    hooks = hooks if hooks is not None else PrefixKeyHooks(KeyMaker(config.kv.block_size))
    scheduler = build_scheduler(config, clock, hooks, policy=policy, make_pool=make_pool)
    checker: StepChecker | None = None
    if make_checker is not None:
        checker = make_checker(scheduler)
    elif config.check_every:
        checker = SampledChecker(scheduler, config.check_every, _log_violation)
    return Engine(
        scheduler,
        runner,
        clock=clock,
        hooks=hooks,
        depth=config.depth,
        recorder=_recorders(config, recorder),
        checker=checker,
        ring=DecisionRing(config.decision_ring),
    )


def _recorders(config: EngineConfig, given: StepRecorder | None) -> StepRecorder | None:
    """Who records the steps: the one given, the decision log and the run log if there are to be any."""
    recorders = [] if given is None else [given]
    if config.decision_log:
        from paceline.audit.trail import Retention, TrailDb, TrailWriter

        retention = Retention(
            max_bytes=config.decision_log_bytes,
            max_files=config.decision_log_files,
            max_age_s=config.decision_log_days * 86400.0,
        )
        recorders.append(TrailWriter(TrailDb(config.decision_log, retention)))
    if config.run_log:
        from paceline.audit.run_recorder import RunRecorder
        from paceline.audit.runlog import run_header

        sizes = {"max_bytes": config.run_log_bytes, "max_files": config.run_log_files}
        recorders.append(RunRecorder(config.run_log, run_header(config), **sizes))
    return reduce(BothRecorders, recorders) if recorders else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a model runs on."""

    device: str  # cpu, or a GPU's name
    dtype: str
    kv_dtype: str
    kv_bytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model that is ready to serve."""

    engine: Engine
    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    hardware: Hardware
    notices: tuple[str, ...]  # what an operator should know, a sentence each
    pulse: Pulse  # beats while a step computes
    free: FreeCores | None  # how many threads compute steps; None: a GPU does


# Stage, parts that are done and of how many; 0 of 0: not known.
LoadProgress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    return None


def load_model(
    model: ModelConfig,
    given: Mapping[str, Any],
    recorder: StepRecorder | None = None,
    *,
    interactive: bool = True,
    relatives: Sequence[int] = (),
    on_progress: LoadProgress = _silent,
) -> LoadedModel:
    """Open a model, build its engine on this machine's GPU or CPU, and size what `given` leaves open.

    `given` holds fields of `KVConfig`, `SchedulerConfig` and `EngineConfig` by name. `interactive`: a reader waits for
    each token, so that a step must not take long; else for the last one. `relatives` are processes whose use of the
    cores counts as our own. `on_progress` is told of each stage, from any thread.
    """
    load = MachineLoad(relatives=relatives)  # from here on: loading shows how busy the machine is
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint

    # Raises at once for a bad policy option.
    make_policy(SchedulerConfig(**pick(SchedulerConfig, given)))
    if given.get("run_log"):
        from paceline.audit.run_recorder import check_run_log

        check_run_log(given["run_log"])
    # Before torch is loaded: what is wrong with a model is told at once.
    path = resolve(model.model, model.revision, model.download_dir)
    checkpoint = open_checkpoint(path, load_format=model.load_format)
    tokenizer = None if model.skip_tokenizer_init else _tokenizer(model, checkpoint)

    on_progress("starting torch", 0, 0)
    from paceline.runner.device import choose_device

    ends = checkpoint.spec.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids
    on_gpu, pulse = choose_device(model) == "cuda", Pulse()
    free = FreeCores(load, most=cores_allowed())
    if on_gpu:
        config, runner, hardware, notices = _on_gpu(
            model, given, checkpoint, ends, on_progress, interactive=interactive
        )
    else:
        config, runner, hardware, notices = _on_cpu(
            model, given, checkpoint, ends, (pulse, free), on_progress
        )
    return LoadedModel(
        engine=build_engine(config, runner, recorder=recorder),
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        hardware=hardware,
        notices=notices,
        pulse=pulse,
        free=None if on_gpu else free,
    )


Built = tuple[EngineConfig, Runner, Hardware, tuple[str, ...]]


def _on_cpu(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    ends: tuple[int, ...],
    life: tuple[Pulse, FreeCores],
    on_progress: LoadProgress,
) -> Built:
    from paceline.models.load import build_decoder
    from paceline.runner.cpu import CPURunner
    from paceline.runner.device import choose_storage
    from paceline.runner.kv_tensors import block_bytes
    from paceline.runner.sizing import (
        block_seconds,
        choose_sizes,
        line_costs,
        line_preemption_costs,
        measure_step,
    )
    from paceline.runner.workers import Workers

    storage, notices = choose_storage(model, checkpoint)
    decoder = build_decoder(
        checkpoint, checkpoint.spec.max_positions, storage, partial(on_progress, "loading weights")
    )
    on_progress("measuring steps", 0, 0)
    pulse, free = life
    workers = Workers(free)
    with workers.step(MANY_TOKENS):  # what is measured runs as large steps will
        config = _engine_config(checkpoint, choose_sizes(model, decoder, given, is_busy=free.load.is_busy))
        # Without either, the budget of a CPU keeps steps short already.
        if config.scheduler.step_target_ms or config.scheduler.has_dial:
            decoding = partial(_decode_seconds, lambda small: CPURunner(small, decoder, ends))
            costs = line_costs(*measure_step(decoder), config.scheduler.max_num_batched_tokens, decoding)
            config = replace(config, scheduler=replace(config.scheduler, step_costs=costs))
    kv_bytes = config.kv.num_blocks * block_bytes(checkpoint.spec, config.kv.block_size)
    hardware = Hardware(device="cpu", dtype="float32", kv_dtype="float32", kv_bytes=kv_bytes)
    runner = CPURunner(config, decoder, ends, pulse, workers)
    if _weighs_preemption(config):
        block_s = block_seconds(config, runner.copy_out_and_back)
        rows = min(config.scheduler.max_num_seqs, TYPICAL_ROWS)
        with workers.step(MANY_TOKENS):
            config = _with_costs(config, line_preemption_costs(*measure_step(decoder), rows, block_s))
    return config, runner, hardware, notices


def _decode_seconds(make_runner: Callable[[EngineConfig], Runner], rows: int, context: int) -> float:
    """How long a step takes in which so many rows decode that read so much; on a small engine of its own."""
    length, block_size = context + MEASURED_STEPS + 2, 16
    blocks = rows * (-(-length // block_size)) + 1
    config = EngineConfig(
        kv=KVConfig(num_blocks=blocks, block_size=block_size, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=rows * context, max_model_len=length, watermark=0.0
        ),
        depth=0,
    )
    engine = build_engine(config, make_runner(config))
    for _ in range(rows):
        engine.add(
            [1] * context, SamplingParams(max_tokens=MEASURED_STEPS + 1, temperature=0.0, ignore_eos=True)
        )
    engine.step()  # the prompts, all at once
    taken = []
    for _ in range(MEASURED_STEPS):
        started_s = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started_s)
    engine.close()
    return min(taken)


def _on_gpu(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    ends: tuple[int, ...],
    on_progress: LoadProgress,
    *,
    interactive: bool,
) -> Built:
    import torch

    from paceline.runner.gpu import build
    from paceline.runner.gpu.kv_pools import device_block_bytes
    from paceline.runner.gpu.step_times import device_preemption_costs, with_pace
    from paceline.runner.sizing import block_seconds

    if given.get("max_num_prompt_tokens"):
        raise ConfigError(
            "--max-num-prompt-tokens is for engines on a CPU; on a GPU steps keep a pace (--step-target-ms) or have "
            "one size (--max-num-batched-tokens)"
        )
    device, spec = torch.device("cuda", torch.cuda.current_device()), checkpoint.spec
    dtype = build.choose_dtype(model, checkpoint)
    kv_dtype = build.choose_kv_dtype(model, dtype)
    parts = build.load_parts(checkpoint, device, dtype, partial(on_progress, "loading weights"))
    on_progress("preparing kernels", 0, 0)
    config = _engine_config(checkpoint, build.choose_gpu_sizes(model, spec, given, device, dtype))
    runner = build.make_runner(model, config, spec, parts, ends, device, kv_dtype)
    wanted = given.get("step_target_ms") or config.scheduler.has_dial
    if wanted or (interactive and "max_num_batched_tokens" not in given):
        config = replace(config, scheduler=with_pace(config.scheduler, runner, spec, kv_dtype.itemsize))
    if _weighs_preemption(config):
        block_s = block_seconds(config, runner.copy_out_and_back)
        config = _with_costs(config, device_preemption_costs(runner, config.scheduler, block_s))
    hardware = Hardware(
        device=torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype="fp8_e4m3" if kv_dtype == torch.float8_e4m3fn else str(kv_dtype).removeprefix("torch."),
        kv_bytes=config.kv.num_blocks * device_block_bytes(spec, kv_dtype),
    )
    return config, runner, hardware, ()


def _weighs_preemption(config: EngineConfig) -> bool:
    """Whether anything is decided by what preemption costs; if not, nothing is measured."""
    return config.kv.num_host_blocks > 0 or config.scheduler.scheduling_policy != "fcfs"


def _with_costs(config: EngineConfig, costs: PreemptionCosts) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, preemption_costs=costs))


def _engine_config(checkpoint: Checkpoint, sizes: Mapping[str, Any]) -> EngineConfig:
    windows = checkpoint.spec.group_windows
    return EngineConfig(
        kv=KVConfig(**pick(KVConfig, sizes), groups=tuple(GroupSpec(window=window) for window in windows)),
        scheduler=_scheduler_config(sizes),
        **pick(EngineConfig, sizes),
    )


def _scheduler_config(sizes: Mapping[str, Any]) -> SchedulerConfig:
    config = SchedulerConfig(**pick(SchedulerConfig, sizes))
    # A pace and a dial learn in their own way; padded batches have one size.
    if config.step_target_ms or config.has_dial or config.mode != "continuous":
        return config
    return replace(config, learned_steps=sizes.get("learned_steps"))


def _tokenizer(model: ModelConfig, checkpoint: Checkpoint) -> Tokenizer:
    from paceline.text.tokenizer import Tokenizer

    if model.tokenizer is None:
        return Tokenizer.from_checkpoint(checkpoint)
    return Tokenizer.from_folder(model.tokenizer, model_vocab_size=checkpoint.spec.vocab_size)


def _log_violation(violation: InvariantViolation) -> None:
    _logger.error("an invariant does not hold: %s", violation)
