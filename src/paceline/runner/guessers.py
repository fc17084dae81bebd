"""Models that make drafts for another: which are there, whether they fit, and the drafter around them.

Opening needs no torch: a head for another model is refused before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.engine import MADE_ON_LOADING, EngineConfig, ModelConfig
from paceline.config.sized import Capacity
from paceline.config.speculative import HEAD_KINDS, MODEL_METHODS, DraftConfig
from paceline.errors import ConfigError
from paceline.models.files.fetch import resolve
from paceline.models.files.head_folder import HeadFiles, head_kind, open_head
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.spec import ModelSpec
from paceline.runner.drafts import Drafter, History, NgramDrafter

if TYPE_CHECKING:
    from paceline.models.decoder import Decoder
    from paceline.models.draft_head import DraftNet
    from paceline.runner.cpu import StepCompute


def open_guesser(drafts: DraftConfig, target: ModelSpec, model: ModelConfig) -> HeadFiles | Checkpoint:
    """The head, or the smaller model, that makes drafts. Raises where it is not for the model `target`."""
    path = resolve(drafts.model, None, model.download_dir)
    kind = head_kind(path) or "draft_model"
    if drafts.method in MODEL_METHODS and drafts.method != kind:
        raise ConfigError(
            f"--speculative-config: {drafts.model} is for the method {kind}, not for {drafts.method}"
        )
    if kind in HEAD_KINDS:
        return open_head(path, target)
    checkpoint = open_checkpoint(path, load_format="dummy" if model.load_format == "dummy" else "auto")
    own = checkpoint.spec.vocab_size
    if own != target.vocab_size:
        raise ConfigError(
            f"--speculative-config: model.embed_tokens.weight of {drafts.model} has {own} tokens, the model has "
            f"{target.vocab_size}: a draft model must have the same vocabulary"
        )
    return checkpoint


def why_torch(model: ModelConfig, guesser: HeadFiles | Checkpoint) -> str:
    """What is said about the steps; raises where something else is asked for."""
    name = f"{guesser.spec.kind} head" if isinstance(guesser, HeadFiles) else "draft model"
    if model.cpu_backend == "native":
        raise ConfigError(
            f"--cpu-backend native computes no {name}; leave it at auto, or use drafts without a model"
        )
    if model.quantization in MADE_ON_LOADING:
        raise ConfigError(
            f"--quantization {model.quantization} needs the native CPU kernels, which compute no {name}"
        )
    return f"steps are computed by torch, not by the native CPU kernels: these compute no {name}"


def build_guesser(model: ModelConfig, guesser: HeadFiles | Checkpoint, decoder: Decoder) -> DraftNet:
    from paceline.models.draft_head import DraftModel, build_head
    from paceline.models.load import build_decoder
    from paceline.runner.torch_step import choose_storage

    positions = decoder.spec.max_positions
    if isinstance(guesser, HeadFiles):
        return build_head(guesser, decoder.parts.embedding, positions)
    return DraftModel(build_decoder(guesser, positions, choose_storage(model, guesser)[0]))


def model_drafter(net: DraftNet, config: EngineConfig, step: StepCompute) -> Drafter:
    from paceline.runner.model_drafts import ModelDrafter
    from paceline.runner.torch_step import TorchStep

    drafts = config.scheduler.drafts
    assert drafts is not None and isinstance(step, TorchStep)
    others = NgramDrafter(History() if drafts.method == "history" else None, beside_model=True)
    return ModelDrafter(step, net, Capacity.of(config).num_rows, others)
