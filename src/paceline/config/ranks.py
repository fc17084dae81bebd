"""Options of a model that is computed by several processes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.encoder import MediaOptions
from paceline.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(MediaOptions):
    """A part of `ModelConfig`."""

    tensor_parallel_size: int = option(
        1,
        "ranks: processes of this machine that hold a part of each layer; on a CPU so far",
        panel="Model",
        low=1,
        high=64,
    )
