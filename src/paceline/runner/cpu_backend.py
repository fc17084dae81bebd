"""What computes steps on a CPU, with a model's weights in memory: a value, and how it is made for encoders.

What needs torch is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.config.engine import MADE_ON_LOADING, EngineConfig, ModelConfig
from paceline.config.speculative import DraftConfig
from paceline.core.pooling import CHOICE, CLASSIFY, CLS, LAST, MEAN, OF_DECODERS
from paceline.core.standing import Pulse
from paceline.errors import ConfigError
from paceline.runner.machine_load import MANY_TOKENS, FreeCores

if TYPE_CHECKING:
    from paceline.models.files.open import Checkpoint
    from paceline.models.spec import FurtherLayer, ModelSpec
    from paceline.runner.cpu import StepCompute
    from paceline.runner.drafts import Drafter


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
    checkpoint: Checkpoint, life: tuple[Pulse, FreeCores], on_progress: Callable[[str, int, int], None]
) -> CPUBackend:
    if find_spec("torch") is None:
        raise ConfigError(
            "an encoder is computed with torch, which is not installed: pip install 'paceline[torch]'"
        )
    on_progress("starting torch", 0, 0)
    from paceline.models.encoder import Encoder
    from paceline.runner.encoder_step import EncoderStep, token_seconds
    from paceline.runner.workers import Workers

    pulse, free = life
    on_progress("loading weights", 0, 0)
    encoder, workers = Encoder(checkpoint.spec, checkpoint), Workers(free)
    options = checkpoint.spec.encoder
    assert options is not None

    def measure() -> tuple[float, float]:
        with workers.step(MANY_TOKENS):
            return 0.0, token_seconds(encoder)

    return CPUBackend(
        make_step=lambda config: EncoderStep(encoder, config.kv.block_size, workers, pulse),
        measure=measure,
        notices=(),
        about={"name": "torch", "version": version("torch"), "threads": free.most},
        pools=(LAST, MEAN, CLS, *((CLASSIFY,) if options.labels else ())),
    )


def check_encoder(
    spec: ModelSpec, model: ModelConfig, given: Mapping[str, Any], drafts: DraftConfig | None
) -> bool:
    """Whether a model is an encoder; if so, options that are about what it does not have are refused."""
    if spec.encoder is None:
        if model.pooling not in ("auto", *OF_DECODERS):
            raise ConfigError(
                f"--pooling {model.pooling}: this model generates text; its first token sees no others; "
                f"use {' or '.join(OF_DECODERS)}"
            )
        return False
    wrong = {
        "--speculative-config": drafts is not None,
        "--enable-lora": model.has_adapters,
        "--kv-disk-dir": bool(model.kv_disk_dir or model.kv_store),
        "--mode": given.get("mode", "continuous") != "continuous",
        "--device cuda": model.device == "cuda",
        "--pooling choice": model.pooling == CHOICE,
        "--quantization": model.quantization in MADE_ON_LOADING,
        "--cpu-backend native": model.cpu_backend == "native",
    }
    for name in (name for name, is_given in wrong.items() if is_given):
        raise ConfigError(f"{name}: this model is an encoder, computed in float32 on a CPU; leave it out")
    return True
