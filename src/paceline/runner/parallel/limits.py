"""What a model on several ranks does not have yet. Refused by name, before anything is loaded; never ignored."""

from __future__ import annotations

from paceline.config.engine import MADE_ON_LOADING, ModelConfig
from paceline.config.speculative import DraftConfig
from paceline.errors import ConfigError
from paceline.models.files.open import Checkpoint
from paceline.runner.parallel.shards import check_size

FLAG = "--tensor-parallel-size"
BY_TORCH = "steps are computed by torch in float32: the native CPU kernels know no ranks"


def check_ranks(
    model: ModelConfig,
    checkpoint: Checkpoint,
    drafts: DraftConfig | None,
    *,
    on_gpu: bool,
) -> None:
    """Raise ConfigError for what ranks cannot do, and for a number of them that does not divide the model."""
    size, spec = model.tensor_parallel_size, checkpoint.spec
    if size == 1:
        return
    if on_gpu:
        raise ConfigError(f"{FLAG} {size}: ranks compute on a CPU only so far; add --device cpu")
    if spec.encoder is not None:
        raise ConfigError(f"{FLAG} {size}: this model is an encoder, which has one rank; leave it out")
    if spec.vision is not None:
        raise ConfigError(f"{FLAG} {size}: this model sees pictures, which has one rank; leave it out")
    wrong = {
        f"--cpu-backend {model.cpu_backend}": model.cpu_backend == "native",
        f"--quantization {model.quantization}": model.quantization in MADE_ON_LOADING,
        "a head or a model that drafts (--speculative-config)": drafts is not None and bool(drafts.model),
        "--enable-lora": model.has_adapters,
        "--kv-disk-dir": model.kv_disk_dir is not None,
        "--kv-store": model.kv_store is not None,
        "--context-reuse blend": model.context_reuse == "blend",
    }
    for name in (name for name, is_given in wrong.items() if is_given):
        raise ConfigError(f"{name} does not go with {FLAG} {size} yet: leave one of them out")
    check_size(spec, checkpoint, size)
