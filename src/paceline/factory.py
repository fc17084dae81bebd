"""The only file that knows all classes: it puts an engine together from a config, a runner and a clock.

What needs torch is imported where it is used: the simulator builds engines too, and has no use for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paceline.audit.ring import DecisionRing
from paceline.config.engine import (
    MADE_ON_LOADING,
    EngineConfig,
    ModelConfig,
    PreemptionCosts,
    SchedulerConfig,
)
from paceline.config.model_set import SharedMemory
from paceline.config.options import pick
from paceline.config.sized import (
    Capacity,
    engine_config,
    weighs_preemption,
    with_costs,
    with_drafts,
    with_pools,
)
from paceline.config.speculative import ORACLE, DraftConfig, read_speculative_config
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.counters import CPUWork
from paceline.core.guide import GuideMaker
from paceline.core.plan import MediaRunner, Runner, StepChecker
from paceline.core.recorder import StepRecorder
from paceline.core.request import RequestHooks
from paceline.core.standing import Pulse, Sleeper
from paceline.core.store import NO_STORE_WORK, StoreWork
from paceline.engine.adapters import AdapterMemory, Adapters, first_adapters
from paceline.engine.decode_time import decode_seconds
from paceline.engine.engine import Engine
from paceline.engine.guides import Guides
from paceline.engine.media import Media
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.errors import ConfigError
from paceline.kv.block_pool import BlockPool
from paceline.kv.manager import KVManager
from paceline.kv.prefix import KeyMaker
from paceline.policy import Policy
from paceline.runner.cpu_backend import DECODER_POOLS, CPUBackend, check_encoder, cpu_backend
from paceline.runner.machine_load import FreeCores, MachineLoad, cores_allowed
from paceline.runner.parallel.limits import check_ranks
from paceline.scheduler.encodings import Encodings
from paceline.scheduler.invariants import InvariantViolation, SampledChecker
from paceline.scheduler.modes import make_mode
from paceline.scheduler.policy import make_policy
from paceline.scheduler.rows import Rows
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.state import SchedulerState
from paceline.text.vocabulary import guide_maker

if TYPE_CHECKING:
    import torch

    from paceline.models.files.open import Checkpoint
    from paceline.models.files.pooling_config import EmbeddingDefaults
    from paceline.runner.stores.store_level import StoreLevel
    from paceline.text.tokenizer import Tokenizer

NO_PROMPT_LIMIT = (
    "--max-num-prompt-tokens is for engines on a CPU; on a GPU steps keep a pace (--step-target-ms) or have one size "
    "(--max-num-batched-tokens)"
)
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
        encodings=Encodings(config.scheduler.encoder, make_pool),
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
    about: Mapping[str, object] | None = None,
    guide_maker: GuideMaker | None = None,
    make_adapters: Callable[[Scheduler], Adapters] = Adapters,
) -> Engine:
    """An engine around `runner`. Without `hooks` it makes prefix keys from token ids; without `make_checker`
    it checks the invariants every `config.check_every` steps and logs what it finds. `about` goes into the header of
    a run log. Without `guide_maker` no answer can be given a structure, without `make_adapters` none has an adapter."""
    clock = clock if clock is not None else MonotonicClock()
    hooks = hooks if hooks is not None else PrefixKeyHooks(KeyMaker(config.kv.block_size))
    scheduler = build_scheduler(config, clock, hooks, policy=policy, make_pool=make_pool)
    checker: StepChecker | None = None
    if make_checker is not None:
        checker = make_checker(scheduler)
    elif config.check_every:
        checker = SampledChecker(scheduler, config.check_every, _log_violation)
    if config.decision_log or config.run_log:
        from paceline.audit.run_recorder import open_recorders

        recorder = open_recorders(config, recorder, about or {})
    engine = Engine(
        scheduler,
        runner,
        clock=clock,
        hooks=hooks,
        depth=config.depth,
        recorder=recorder,
        checker=checker,
        ring=DecisionRing(config.decision_ring),
    )
    engine.guides = Guides(scheduler, guide_maker)
    engine.adapters = make_adapters(scheduler)
    if isinstance(hooks, PrefixKeyHooks):
        hooks.identity_of, engine.modules.keys_of = engine.adapters.identity_of, hooks.module_keys
        engine.use_prefix_key = hooks.use_key
        if config.scheduler.encoder is not None:
            engine.media = Media(scheduler, cast(MediaRunner, runner), hooks.media_key)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a model runs on."""

    device: str  # cpu, or a GPU's name
    dtype: str
    kv_dtype: str
    kv_bytes: int
    runner: dict[str, str | int]  # what computes steps: its name, and more about it
    quantization: str = "auto"  # as asked for


class ModelPlace(NamedTuple):
    """Where a model lies in memory that models share."""

    home: range = range(0)  # slabs of its weights, and behind them
    num_adapter_slabs: int = 0  # those of its adapters


NOWHERE = ModelPlace()


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
    cpu_work: Callable[[], CPUWork]
    sleeper: Sleeper
    store_work: Callable[[], StoreWork] = lambda: NO_STORE_WORK  # of a disk
    place: ModelPlace = NOWHERE
    embedding: EmbeddingDefaults | None = None  # how texts become vectors; None: they do not


# Stage, parts that are done and of how many; 0 of 0: not known.
LoadProgress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None: ...


def load_model(
    model: ModelConfig,
    given: Mapping[str, Any],
    recorder: StepRecorder | None = None,
    *,
    interactive: bool = True,
    relatives: Sequence[int] = (),
    on_progress: LoadProgress = _silent,
    shared: SharedMemory | None = None,
) -> LoadedModel:
    """Open a model, build its engine on this machine's GPU or CPU, and size what `given` leaves open.

    `given` holds fields of `KVConfig`, `SchedulerConfig` and `EngineConfig` by name. `interactive`: a reader waits for
    each token, so that a step must not take long; else for the last one. `relatives` are processes whose use of the
    cores counts as our own. `on_progress` is called for each stage, from any thread. `shared`: of several models.
    """
    load = MachineLoad(relatives=relatives)  # from here on: loading shows how busy the machine is
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint

    drafts = read_speculative_config(model.speculative_config)  # raises at once for a bad option
    make_policy(SchedulerConfig(**pick(SchedulerConfig, given)))
    if given.get("run_log"):
        from paceline.audit.run_recorder import check_run_log

        check_run_log(given["run_log"])
    # Before torch is loaded: mistakes in a model are reported at once.
    path = resolve(model.model, model.revision, model.download_dir)
    checkpoint = open_checkpoint(path, load_format=model.load_format)
    if model.quantization in MADE_ON_LOADING and checkpoint.quantized:
        raise ConfigError(
            f"--quantization {model.quantization}: the weights of this file are quantised already "
            f"({', '.join(checkpoint.quantized)}); leave it at auto"
        )
    tokenizer = None if model.skip_tokenizer_init else _tokenizer(model, checkpoint)

    from paceline.runner.device import choose_device

    ends = checkpoint.spec.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids
    check_encoder(checkpoint.spec, model, given, drafts)
    on_gpu = choose_device(model) == "cuda"
    check_ranks(model, checkpoint, drafts, on_gpu=on_gpu)
    pulse, free = Pulse(), FreeCores(load, most=max(1, cores_allowed() // model.tensor_parallel_size))
    if on_gpu:
        built = _on_gpu(model, given, checkpoint, ends, drafts, on_progress, shared, interactive=interactive)
    else:
        built = _on_cpu(model, given, checkpoint, ends, drafts, (pulse, free), on_progress)
    config, runner, hardware, notices, cpu_work, sleeper, adapter_memory, disk, place = built
    engine = build_engine(
        config,
        runner,
        hooks=None if disk is None else PrefixKeyHooks(KeyMaker(config.kv.block_size, disk.store.key)),
        recorder=recorder,
        about={"runner": hardware.runner},
        guide_maker=guide_maker(tokenizer, on_gpu=on_gpu),
        make_adapters=partial(first_adapters, model, checkpoint.spec, adapter_memory),
    )
    engine.ends = tuple(ends)
    notices += _attach(engine, disk, sleeper)
    return LoadedModel(
        engine=engine,
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        hardware=hardware,
        notices=notices,
        pulse=pulse,
        free=None if on_gpu else free,
        cpu_work=cpu_work,
        store_work=(lambda: NO_STORE_WORK) if disk is None else disk.work,
        sleeper=sleeper,
        place=place,
        embedding=checkpoint.pooled(model.pooling),
    )


def _attach(engine: Engine, disk: StoreLevel | None, sleeper: Sleeper) -> tuple[str, ...]:
    """What an engine has beside its runner, which ends with it; returns notices."""
    engine.on_close = getattr(sleeper, "close", engine.on_close)  # of other ranks
    if disk is None:
        return ()
    engine.on_close = disk.close
    engine.before_plan = disk.tell if disk.is_shared else None
    return disk.attach(engine.scheduler)


class Built(NamedTuple):
    """An engine's parts on one device."""

    config: EngineConfig
    runner: Runner
    hardware: Hardware
    notices: tuple[str, ...]
    cpu_work: Callable[[], CPUWork]
    sleeper: Sleeper
    adapters: AdapterMemory | None = None
    disk: StoreLevel | None = None
    place: ModelPlace = NOWHERE


def _on_cpu(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    ends: tuple[int, ...],
    drafts: DraftConfig | None,
    shared: tuple[Pulse, FreeCores],
    on_progress: LoadProgress,
) -> Built:
    load = partial(cpu_backend, model, given, checkpoint, drafts, shared, on_progress)
    backend = load()
    try:
        return _with_backend(model, given, checkpoint, ends, drafts, shared[0], load, backend)
    except BaseException:
        backend.close()  # other ranks would outlive a program that goes on
        raise


def _with_backend(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    ends: tuple[int, ...],
    drafts: DraftConfig | None,
    pulse: Pulse,
    load: Callable[[], CPUBackend],
    backend: CPUBackend,
) -> Built:
    from paceline.runner.cpu import CPUSleeper
    from paceline.runner.sizing import block_bytes, block_seconds, choose_sizes, line_costs
    from paceline.runner.stores.store_level import StoreLevel

    sized, spec = (model, checkpoint.spec)
    if backend.followers is not None:
        sized, spec = backend.followers.sizes(model, spec)
    sizes = choose_sizes(sized, spec, given, backend.measure, backend.further)
    config = engine_config(checkpoint.spec.group_windows, sizes)
    config = backend.complete(config, model, checkpoint.spec)
    if drafts is not None:
        if drafts.method == ORACLE:
            raise ConfigError("--speculative-config oracle is for measurements on a GPU")
        fixed_s, token_s = backend.measure()
        config = with_drafts(config, replace(drafts, fixed_s=fixed_s, token_s=token_s))
    # Without either, the budget of a CPU keeps steps short already.
    if config.scheduler.step_target_ms or config.scheduler.has_dial:

        def small_engine(small: EngineConfig) -> Engine:
            return build_engine(small, backend.runner(small, ends))

        decoding = partial(decode_seconds, config.kv, small_engine)
        costs = line_costs(*backend.measure(), config.scheduler.max_num_batched_tokens, decoding)
        config = replace(config, scheduler=replace(config.scheduler, step_costs=costs))
    kv_dtype = model.cpu_kv_dtype
    per_block = block_bytes(spec, config.kv.block_size, backend.further, kv_dtype)
    about = {name: value for name, value in backend.about.items() if name != "threads"}
    known = (kv_dtype, about, model.quantization, _drafting(drafts))
    disk = StoreLevel.open(model, config, per_block, checkpoint, known)
    config = config if disk is None else disk.with_places(config)
    hardware = Hardware(
        device="cpu",
        dtype="float32",
        kv_dtype=kv_dtype,
        kv_bytes=config.kv.num_blocks * per_block,
        runner=backend.about,
        quantization=model.quantization,
    )

    sleeper = CPUSleeper(load, lambda weights: weights.runner(config, ends, pulse), backend, disk)
    runner = sleeper.open()
    if weighs_preemption(config):
        block_s = block_seconds(config, sleeper.copy_out_and_back)
        rows = min(config.scheduler.max_num_seqs, TYPICAL_ROWS)
        fixed_s, token_s = backend.measure()
        step_s = fixed_s + token_s * rows
        prices = PreemptionCosts(token_s=token_s, block_s=block_s, step_s=step_s)
        config = with_costs(config, prices if disk is None else disk.with_rates(prices))
    adapters = sleeper if model.has_adapters else None
    return Built(config, runner, hardware, backend.notices, sleeper.work, sleeper, adapters, disk)


def _on_gpu(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    ends: tuple[int, ...],
    drafts: DraftConfig | None,
    on_progress: LoadProgress,
    shared: SharedMemory | None,
    *,
    interactive: bool,
) -> Built:
    on_progress("starting torch", 0, 0)
    import torch

    from paceline.runner.gpu import build, encoder_runner, picture_encoder
    from paceline.runner.gpu.adapters import AdapterRoom
    from paceline.runner.gpu.drafts.device_head import further_layers
    from paceline.runner.gpu.kv_pools import device_block_bytes
    from paceline.runner.gpu.runner import GPURunner
    from paceline.runner.gpu.slab_memory import GPUSleeper, OwnHome, SlabHome
    from paceline.runner.gpu.step_times import measured_config
    from paceline.runner.guessers import open_guesser
    from paceline.runner.stores.store_level import StoreLevel

    if given.get("max_num_prompt_tokens"):
        raise ConfigError(NO_PROMPT_LIMIT)
    device, spec = torch.device("cuda", torch.cuda.current_device()), checkpoint.spec
    if spec.encoder is not None:
        sized, asleep, name, dtype = encoder_runner.open_encoder(model, given, checkpoint)
        return Built(sized, asleep.open(), _gpu_hardware(model, name, dtype, dtype, 0), (), CPUWork, asleep)
    opened = open_guesser(drafts, spec, model) if drafts is not None and drafts.model else None
    dtype = build.choose_dtype(model, checkpoint)
    kv_dtype = build.choose_kv_dtype(model, dtype)
    room = AdapterRoom.of(model, given.get("max_loras", 0))
    scaled = kv_dtype if room is None else None  # adapters know nothing of a file's scales
    note = partial(on_progress, "loading weights")
    load = partial(build.load_parts, checkpoint, device, dtype, note, model.quantization, scaled)
    home: OwnHome | SlabHome = shared.device.home() if shared is not None else OwnHome(device)
    parts = load(home)
    note = partial(on_progress, "loading the draft model")
    guesser = build.load_guesser(opened, device, dtype, note, model.quantization, kv_dtype)
    on_progress("preparing kernels", 0, 0)
    if room is not None and given.get("mode", "continuous") == "continuous":
        given = {**given, "max_loras": room.places}
    eyes = picture_encoder.load_eyes(checkpoint, device, dtype, drafts, graphs=not model.enforce_eager)
    sizes = build.choose_gpu_sizes(model, spec, given, device, dtype, guesser, room, shared)
    if room is not None:
        room = replace(room, memory=home.beside(room.pool_bytes(spec, dtype)))
    config = with_pools(engine_config(spec.group_windows, sizes), DECODER_POOLS, only=False)
    config = picture_encoder.with_eyes(config, model, eyes)
    per_block = device_block_bytes(spec, kv_dtype, further_layers(guesser))
    name, scales = torch.cuda.get_device_name(device), sorted(checkpoint.kv_scales.items())
    known = (name, torch.__version__, dtype, kv_dtype, scales, model.quantization, _drafting(drafts))
    disk = StoreLevel.open(model, config, per_block, checkpoint, known)
    config = config if disk is None else disk.with_places(config)
    config = config if drafts is None else with_drafts(config, drafts)
    more: dict[str, Any] = {"kv_dtype": kv_dtype, "guesser": guesser, "adapter_room": room}
    more |= {"memory": None if shared is None else shared.device, "eyes": eyes}
    runner = GPURunner(config, spec, parts, ends, device=device, graphs=not model.enforce_eager, **more)
    config = picture_encoder.with_eyes(config, model, eyes, runner)
    has_pace = bool(given.get("step_target_ms")) or (interactive and "max_num_batched_tokens" not in given)
    config = measured_config(config, runner, drafts, disk, has_pace=has_pace)
    runner.host_places.pin_rest()
    hardware = _gpu_hardware(model, name, dtype, kv_dtype, config.kv.num_blocks * per_block)
    moving = runner if disk is None else disk.start(runner, runner.host_places)
    if isinstance(home, OwnHome):
        home.blank.append(runner.kv_bytes)
    sleeper = GPUSleeper(home, load, moving, runner.capture_again)
    place = NOWHERE if isinstance(home, OwnHome) else ModelPlace(home.slabs, home.num_beside)
    return Built(config, moving, hardware, (), CPUWork, sleeper, runner.adapters, disk, place)


def _drafting(drafts: DraftConfig | None) -> tuple[str, str] | None:
    """What KV depends on: a head or a draft model keeps some of its own."""
    return None if drafts is None else (drafts.method, drafts.model)


def _gpu_hardware(
    model: ModelConfig, name: str, dtype: torch.dtype, kv_dtype: torch.dtype, kv_bytes: int
) -> Hardware:
    kind = str(kv_dtype).removeprefix("torch.")
    return Hardware(
        device=name,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype="fp8_e4m3" if kind == "float8_e4m3fn" else kind,
        kv_bytes=kv_bytes,
        runner={"name": "gpu"},
        quantization=model.quantization,
    )


def _tokenizer(model: ModelConfig, checkpoint: Checkpoint) -> Tokenizer:
    from paceline.text.tokenizer import Tokenizer

    if model.tokenizer is None:
        return Tokenizer.from_checkpoint(checkpoint)
    return Tokenizer.from_folder(model.tokenizer, model_vocab_size=checkpoint.spec.vocab_size)


def _log_violation(violation: InvariantViolation) -> None:
    _logger.error("an invariant does not hold: %s", violation)
