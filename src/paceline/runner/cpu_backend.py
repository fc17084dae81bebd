"""What computes steps on a CPU, with a model's weights in memory: a value, and how it is made.

What needs torch is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config.engine import MADE_ON_LOADING, EngineConfig, ModelConfig
from paceline.config.sized import with_encoder, with_pools
from paceline.config.speculative import DraftConfig
from paceline.core.counters import CPUWork
from paceline.core.parameters import CHOICE, CLASSIFY, CLS, LAST, MEAN
from paceline.core.standing import Pulse
from paceline.errors import ConfigError
from paceline.runner.machine_load import MANY_TOKENS, FreeCores
from paceline.runner.parallel.limits import BY_TORCH

if TYPE_CHECKING:
    from paceline.models.files.head_folder import HeadFiles
    from paceline.models.files.open import Checkpoint
    from paceline.models.spec import FurtherLayer, ModelSpec
    from paceline.runner.cpu import StepCompute
    from paceline.runner.drafts import Drafter
    from paceline.runner.encoder_step import ClassifierHead
    from paceline.runner.native.code import Code
    from paceline.runner.parallel.lead import Followers
    from paceline.runner.pictures import Pictures
    from paceline.runner.workers import Workers

DECODER_POOLS = (LAST, MEAN, CHOICE)
TORCH_TOKENS = 8192  # that torch computes together


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CPUBackend:
    """A way to compute steps on the CPU, with a model's weights in memory."""

    make_step: Callable[[EngineConfig], StepCompute]
    measure: Callable[[], tuple[float, float]]  # seconds of a step at least, and for each token more
    notices: tuple[str, ...]
    about: dict[str, str | int]  # for run logs
    further: tuple[FurtherLayer, ...] = ()  # of a model that guesses
    make_drafter: Callable[[EngineConfig, StepCompute], Drafter] | None = None  # None: what the config says
    pools: tuple[str, ...] = DECODER_POOLS  # kinds of vectors it can make
    # Seconds of a position of a picture's line, of both kinds; None: it sees no pictures.
    measure_pictures: Callable[[], tuple[float, float]] | None = None
    # Seconds of a token beside them, where `measure` only guesses.
    measure_token: Callable[[EngineConfig], float] | None = None
    followers: Followers | None = None  # the other ranks of the model

    def runner(self, config: EngineConfig, ends: tuple[int, ...], pulse: Pulse | None = None) -> Any:
        """What computes plans with these weights, on every rank."""
        from paceline.runner.cpu import CPURunner

        step = self.make_step(config)
        drafter = None if self.make_drafter is None else self.make_drafter(config, step)
        own = CPURunner(config, step, ends, pulse, drafter)
        if self.followers is None:
            return own
        from paceline.runner.parallel.lead import LeadRunner

        return LeadRunner(own, self.followers, config, ends)

    def close(self) -> None:
        if self.followers is not None:
            self.followers.close()

    def complete(self, config: EngineConfig, model: ModelConfig, spec: ModelSpec) -> EngineConfig:
        """With the kinds of vectors that it makes, and the work of its encoder of pictures, where it has one."""
        from paceline.runner.sizing import encoder_work

        config = with_pools(config, self.pools, only=spec.encoder is not None)
        if spec.vision is None or self.measure_pictures is None:
            return config
        token_s = self.measure()[1] if self.measure_token is None else self.measure_token(config)
        times = (self.measure_pictures(), token_s)
        return with_encoder(config, encoder_work(spec.vision, *times, model.encoder_cache_tokens, config))


def cpu_backend(
    model: ModelConfig,
    given: Mapping[str, Any],
    checkpoint: Checkpoint,
    drafts: DraftConfig | None,
    shared: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
) -> CPUBackend:
    """Read the weights for whatever computes this model."""
    from paceline.runner.guessers import open_guesser, why_torch

    if checkpoint.spec.encoder is not None:
        return encoder_backend(model, checkpoint, shared, on_progress)
    guesser = None if drafts is None or not drafts.model else open_guesser(drafts, checkpoint.spec, model)
    if guesser is not None:
        return _torch_backend(model, checkpoint, shared, on_progress, why_torch(model, guesser), guesser)
    found = _native_backend(model, checkpoint, shared, given, on_progress)
    if isinstance(found, CPUBackend):
        return found
    return _torch_backend(model, checkpoint, shared, on_progress, found)


def _native_backend(
    model: ModelConfig,
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    given: Mapping[str, Any],
    on_progress: Callable[[str, int, int], None],
) -> CPUBackend | str:
    """The native kernels, or why they are not used. Raises ConfigError where they are asked for by name."""
    made = model.quantization in MADE_ON_LOADING
    if model.tensor_parallel_size > 1:
        return BY_TORCH
    if model.cpu_backend == "torch":
        if made:
            raise ConfigError(f"--quantization {model.quantization} needs --cpu-backend native")
        return ""
    from paceline.runner.native.code import KernelsUnavailable, host_code
    from paceline.runner.native.model import build_model, expected_seconds, objection
    from paceline.runner.native.step import NativeStep, token_seconds

    block_size = int(given.get("block_size", 16))
    reason = objection(checkpoint, block_size, model.quantization, model.cpu_kv_dtype)
    if not reason:
        try:
            code = host_code(lambda stage: on_progress(stage, 0, 0))
        except KernelsUnavailable as error:
            reason = str(error)
    if reason:
        if model.cpu_backend == "native":
            raise ConfigError(f"--cpu-backend native: {reason}; --cpu-backend torch computes it with torch")
        if made:
            raise ConfigError(f"--quantization {model.quantization} needs the native CPU kernels: {reason}")
        return f"steps are computed by torch, not by the native CPU kernels: {reason}"
    loaded = build_model(
        checkpoint, checkpoint.spec.max_positions, partial(on_progress, "loading weights"), model.quantization
    )
    pulse, free = life
    threads = min(model.cpu_threads or free.most, free.most)
    eyes = native_eyes(model, checkpoint, code, threads, life, on_progress)

    def make_step(config: EngineConfig) -> NativeStep:
        step = NativeStep(loaded, config, code, threads, free, pulse, kv_dtype=model.cpu_kv_dtype)
        step.see(eyes.make(config))
        return step

    return CPUBackend(
        make_step=make_step,
        measure=lambda: expected_seconds(loaded, threads),
        measure_pictures=eyes.measure,
        measure_token=lambda config: token_seconds(make_step(config), config),
        notices=(*eyes.notices, *native_notices(model, checkpoint, threads)),
        about=about_native(code, threads),
    )


def _torch_backend(
    model: ModelConfig,
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
    notice: str,
    guesser: HeadFiles | Checkpoint | None = None,
) -> CPUBackend:
    """Plain torch; `notice`: why not the native kernels. `guesser` makes drafts."""
    if find_spec("torch") is None:
        what = notice or "--cpu-backend torch needs torch"
        raise ConfigError(f"{what}; torch is not installed: pip install 'paceline[torch]'")
    on_progress("starting torch", 0, 0)
    from paceline.models.load import build_decoder
    from paceline.runner.guessers import build_guesser, model_drafter
    from paceline.runner.torch_step import TorchStep, choose_storage, measure_step
    from paceline.runner.workers import Workers

    pulse, free = life
    note = partial(on_progress, "loading weights")
    if model.tensor_parallel_size > 1:
        return _torch_ranks(model, checkpoint, life, note, notice)
    storage, notices = choose_storage(model, checkpoint)
    decoder = build_decoder(checkpoint, checkpoint.spec.max_positions, storage, note)
    net = None if guesser is None else build_guesser(model, guesser, decoder)
    on_progress("measuring steps", 0, 0)
    workers = Workers(free)
    eyes = torch_eyes(checkpoint, free, workers)

    def measure() -> tuple[float, float]:
        with workers.step(MANY_TOKENS):  # what is measured runs as large steps will
            return measure_step(decoder, is_busy=free.load.is_busy)

    def make_step(config: EngineConfig) -> TorchStep:
        return TorchStep(decoder, config.kv, workers, pulse, net, model.cpu_kv_dtype, eyes.make(config))

    return CPUBackend(
        make_step=make_step,
        measure=measure,
        measure_pictures=eyes.measure,
        notices=(*notices, *([notice] if notice else [])),
        about={"name": "torch", "version": version("torch"), "threads": free.most},
        further=() if net is None else net.layers,
        make_drafter=None if net is None else partial(model_drafter, net),
    )


def _torch_ranks(
    model: ModelConfig,
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    note: Callable[[int, int], None],
    notice: str,
) -> CPUBackend:
    """The lead's part of a model on several ranks, and the followers with theirs."""
    from paceline.runner.parallel.gloo import lead_decoder
    from paceline.runner.parallel.lead import Followers
    from paceline.runner.torch_step import TorchStep, measure_step
    from paceline.runner.workers import Workers

    pulse, free = life
    followers = Followers(model, checkpoint.path, model.tensor_parallel_size, free.most, pulse)
    try:
        decoder = lead_decoder(checkpoint, followers, note)
    except BaseException:
        followers.close()
        raise
    workers = Workers(free)

    def measure() -> tuple[float, float]:
        with followers.measuring(), workers.step(MANY_TOKENS):
            return measure_step(decoder, is_busy=free.load.is_busy)

    def make_step(config: EngineConfig) -> TorchStep:
        return TorchStep(decoder, config.kv, workers, pulse, kv_dtype=model.cpu_kv_dtype)

    return CPUBackend(
        make_step=make_step,
        measure=measure,
        notices=(notice,),
        about={
            "name": "torch",
            "version": version("torch"),
            "threads": free.most,
            "ranks": followers.size,
        },
        followers=followers,
    )


def encoder_backend(
    model: ModelConfig,
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
) -> CPUBackend:
    """The native kernels for an encoder, or torch where they do not cover it."""
    from paceline.runner.native.code import KernelsUnavailable, host_code
    from paceline.runner.native.encoder import objection

    made, reason = model.quantization in MADE_ON_LOADING, ""
    if model.cpu_backend == "torch":
        if made:
            raise ConfigError(f"--quantization {model.quantization} needs --cpu-backend native")
        return _torch_encoder(checkpoint, life, on_progress, "")
    reason = objection(checkpoint, model.quantization)
    if not reason:
        try:
            code = host_code(lambda stage: on_progress(stage, 0, 0))
        except KernelsUnavailable as error:
            reason = str(error)
    if not reason:
        return _native_encoder(model, checkpoint, life, on_progress, code)
    if model.cpu_backend == "native":
        raise ConfigError(f"--cpu-backend native: {reason}; --cpu-backend torch computes it with torch")
    if made:
        raise ConfigError(f"--quantization {model.quantization} needs the native CPU kernels: {reason}")
    return _torch_encoder(checkpoint, life, on_progress, f"texts are computed by torch: {reason}")


def _native_encoder(
    model: ModelConfig,
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
    code: Code,
) -> CPUBackend:
    from paceline.runner.encoder_step import EncoderStep, token_seconds
    from paceline.runner.native.encoder import MOST_TOKENS, NativeEncoder

    pulse, free = life
    threads = min(model.cpu_threads or free.most, free.most)
    encoder = NativeEncoder(
        checkpoint,
        code,
        threads,
        free,
        quantization=model.quantization,
        pulse=pulse,
        on_matrix=partial(on_progress, "loading weights"),
    )
    head = classifier_head(checkpoint)

    def make_step(config: EngineConfig) -> EncoderStep:
        life = (encoder.work, pulse, encoder.close)
        return EncoderStep(
            encoder, head, config.kv.block_size, MOST_TOKENS, lambda tokens: nullcontext(), *life
        )

    return CPUBackend(
        make_step=make_step,
        measure=lambda: (0.0, token_seconds(encoder)),
        notices=(),
        about=about_native(code, threads),
        pools=encoder_pools(checkpoint.spec),
    )


def about_native(code: Code, threads: int) -> dict[str, str | int]:
    """The native kernels, for run logs."""
    about: dict[str, str | int] = {"name": "native", "isa": code.isa.name, "kernels": code.isa.title}
    return {**about, "key": code.key, "threads": threads}


def native_notices(model: ModelConfig, checkpoint: Checkpoint, threads: int) -> list[str]:
    """What an operator should know of a decoder on the native kernels."""
    from paceline.runner.native.arena import AS_STORED

    notices = []
    rounded = [name for name in checkpoint.quantized if name not in AS_STORED]
    if rounded and model.quantization != "none":
        notices.append(f"weights of {', '.join(rounded)} are computed as 8 bits with a scale for 32 inputs")
    if model.cpu_threads and model.cpu_threads > threads:
        notices.append(f"--cpu-threads {model.cpu_threads}: {threads} are used, one for each core there is")
    return notices


def _torch_encoder(
    checkpoint: Checkpoint,
    life: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
    notice: str,
) -> CPUBackend:
    if find_spec("torch") is None:
        what = notice or "--cpu-backend torch needs torch"
        raise ConfigError(f"{what}; torch is not installed: pip install 'paceline[torch]'")
    on_progress("starting torch", 0, 0)
    import torch

    from paceline.models.encoder import Encoder
    from paceline.runner.encoder_step import EncoderStep, token_seconds
    from paceline.runner.workers import Workers

    pulse, free = life
    on_progress("loading weights", 0, 0)
    encoder, head, workers = Encoder(checkpoint.spec, checkpoint), classifier_head(checkpoint), Workers(free)

    def measure() -> tuple[float, float]:
        with workers.step(MANY_TOKENS):
            return 0.0, token_seconds(encoder)

    def work() -> CPUWork:
        return CPUWork(threads=torch.get_num_threads())

    def make_step(config: EngineConfig) -> EncoderStep:
        return EncoderStep(encoder, head, config.kv.block_size, TORCH_TOKENS, workers.step, work, pulse)

    return CPUBackend(
        make_step=make_step,
        measure=measure,
        notices=(notice,) if notice else (),
        about={"name": "torch", "version": version("torch"), "threads": free.most},
        pools=encoder_pools(checkpoint.spec),
    )


def classifier_head(checkpoint: Checkpoint) -> ClassifierHead | None:
    from paceline.runner.encoder_step import ClassifierHead

    options = checkpoint.spec.encoder
    return ClassifierHead(checkpoint) if options is not None and options.labels else None


def encoder_pools(spec: ModelSpec) -> tuple[str, ...]:
    assert spec.encoder is not None
    return (LAST, MEAN, CLS, *((CLASSIFY,) if spec.encoder.labels else ()))


class Eyes(NamedTuple):
    """How pictures are encoded, if they are."""

    make: Callable[[EngineConfig], Pictures | None] = lambda config: None
    measure: Callable[[], tuple[float, float]] | None = None  # see `position_seconds`
    notices: tuple[str, ...] = ()


def native_eyes(
    model: ModelConfig,
    checkpoint: Checkpoint,
    code: Code,
    threads: int,
    life: tuple[Pulse, FreeCores],
    on_progress: Callable[[str, int, int], None],
) -> Eyes:
    """The encoder of a model's pictures on the native kernels, or in torch where they do not cover it."""
    vision = checkpoint.spec.vision
    if vision is None or vision.encoder is None:
        return Eyes()
    from paceline.models.files.encoder import VISION
    from paceline.runner.native.encoder import objection
    from paceline.runner.native.picture_encoder import NativePictureEncoder
    from paceline.runner.pictures import Pictures, position_seconds

    # What 4 bits would cost an encoder is not known.
    quantization = "int8" if model.quantization in MADE_ON_LOADING else model.quantization
    reason, (pulse, free) = objection(checkpoint, quantization, VISION), life
    if reason:
        return torch_eyes(
            checkpoint, free, notice=f"pictures are encoded by torch: of their encoder, {reason}"
        )
    encoder, patches = (
        NativePictureEncoder(
            checkpoint,
            code,
            threads,
            free,
            quantization=quantization,
            pulse=pulse,
            on_matrix=partial(on_progress, "loading the encoder of pictures"),
        ),
        vision.encoder.patches,
    )
    assert patches is not None

    def make(config: EngineConfig) -> Pictures | None:
        work = config.scheduler.encoder
        return (
            None
            if work is None
            else Pictures(encoder, work, patches, spent=encoder.work, close=encoder.close)
        )

    return Eyes(make, lambda: position_seconds(encoder, patches))


def torch_eyes(
    checkpoint: Checkpoint, free: FreeCores, workers: Workers | None = None, notice: str = ""
) -> Eyes:
    """The encoder of a model's pictures, computed by torch. `notice`: why."""
    vision = checkpoint.spec.vision
    if vision is None or vision.encoder is None:
        return Eyes()
    if find_spec("torch") is None:
        what = notice or "pictures are encoded by torch"
        raise ConfigError(f"{what}; torch is not installed: pip install 'paceline[torch]'")
    from paceline.models.encoder import Encoder
    from paceline.models.files.encoder import VISION
    from paceline.runner.pictures import Pictures, position_seconds
    from paceline.runner.workers import Workers

    hands = Workers(free) if workers is None else workers
    encoder, patches = Encoder(vision, checkpoint, VISION), vision.encoder.patches
    assert patches is not None

    def make(config: EngineConfig) -> Pictures | None:
        work = config.scheduler.encoder
        return None if work is None else Pictures(encoder, work, patches, hands.step)

    def measure() -> tuple[float, float]:
        with hands.step(MANY_TOKENS):
            return position_seconds(encoder, patches)

    return Eyes(make, measure, (notice,) if notice else ())


def check_encoder(
    spec: ModelSpec, model: ModelConfig, given: Mapping[str, Any], drafts: DraftConfig | None
) -> None:
    """Of an encoder, options that are about what it does not have are refused."""
    if spec.encoder is None:
        if model.pooling == CLS:
            raise ConfigError(
                f"--pooling {CLS}: this model generates text; its first token sees no others; use {LAST}, {MEAN} "
                f"or, for a reranker, {CHOICE}"
            )
        return
    wrong = {
        "--speculative-config": drafts is not None,
        "--enable-lora": model.has_adapters,
        "--kv-disk-dir": bool(model.kv_disk_dir or model.kv_store),
        "--mode": given.get("mode", "continuous") != "continuous",
        "--pooling choice": model.pooling == CHOICE,
        "--quantization int4": model.quantization == "int4",
    }
    for name in (name for name, is_given in wrong.items() if is_given):
        raise ConfigError(f"{name}: this model is an encoder, which has none of that; leave it out")
