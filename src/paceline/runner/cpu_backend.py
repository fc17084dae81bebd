"""What computes steps on a CPU, with a model's weights in memory: a value, and how it is made for encoders.

What needs torch is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.config.engine import MADE_ON_LOADING, EngineConfig, ModelConfig
from paceline.config.speculative import DraftConfig
from paceline.core.counters import CPUWork
from paceline.core.pooling import CHOICE, CLASSIFY, CLS, LAST, MEAN
from paceline.core.standing import Pulse
from paceline.errors import ConfigError
from paceline.runner.machine_load import MANY_TOKENS, FreeCores

if TYPE_CHECKING:
    from paceline.models.files.open import Checkpoint
    from paceline.models.spec import FurtherLayer, ModelSpec
    from paceline.runner.cpu import StepCompute
    from paceline.runner.drafts import Drafter
    from paceline.runner.encoder_step import ClassifierHead
    from paceline.runner.native.code import Code

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
    pools: tuple[str, ...] = (LAST, MEAN, CHOICE)  # kinds of vectors it can make


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
    reason = objection(checkpoint.spec, model.quantization)
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
    head = _head(checkpoint)

    def make_step(config: EngineConfig) -> EncoderStep:
        life = (encoder.work, pulse, encoder.close)
        return EncoderStep(
            encoder, head, config.kv.block_size, MOST_TOKENS, lambda tokens: nullcontext(), *life
        )

    about: dict[str, str | int] = {"name": "native", "isa": code.isa.name, "kernels": code.isa.title}
    return CPUBackend(
        make_step=make_step,
        measure=lambda: (0.0, token_seconds(encoder)),
        notices=(),
        about={**about, "key": code.key, "threads": threads},
        pools=_pools(checkpoint.spec),
    )


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
    encoder, head, workers = Encoder(checkpoint.spec, checkpoint), _head(checkpoint), Workers(free)

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
        pools=_pools(checkpoint.spec),
    )


def _head(checkpoint: Checkpoint) -> ClassifierHead | None:
    from paceline.runner.encoder_step import ClassifierHead

    options = checkpoint.spec.encoder
    return ClassifierHead(checkpoint) if options is not None and options.labels else None


def _pools(spec: ModelSpec) -> tuple[str, ...]:
    assert spec.encoder is not None
    return (LAST, MEAN, CLS, *((CLASSIFY,) if spec.encoder.labels else ()))


def check_encoder(
    spec: ModelSpec, model: ModelConfig, given: Mapping[str, Any], drafts: DraftConfig | None
) -> bool:
    """Whether a model is an encoder; if so, options that are about what it does not have are refused."""
    if spec.encoder is None:
        if model.pooling == CLS:
            raise ConfigError(
                f"--pooling {CLS}: this model generates text; its first token sees no others; use {LAST}, {MEAN} "
                f"or, for a reranker, {CHOICE}"
            )
        return False
    wrong = {
        "--speculative-config": drafts is not None,
        "--enable-lora": model.has_adapters,
        "--kv-disk-dir": bool(model.kv_disk_dir or model.kv_store),
        "--mode": given.get("mode", "continuous") != "continuous",
        "--device cuda": model.device == "cuda",
        "--pooling choice": model.pooling == CHOICE,
        "--quantization int4": model.quantization == "int4",
    }
    for name in (name for name, is_given in wrong.items() if is_given):
        raise ConfigError(f"{name}: this model is an encoder, computed on a CPU; leave it out")
    return True
