"""Several models in one server: what each of them is, and how they share the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config.engine import ModelConfig
from paceline.config.options import CheckedOptions, option
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare(CheckedOptions):
    """What a model gets of a device that several share; names as in a file of --models."""

    name: str = option("", "what requests call it; default: the name of its file or folder")
    share: float = option(1.0, "its part of the device's time, against those of the others", low=0.001)
    pinned: bool = option(False, "it never sleeps")
    idle_sleep_s: float | None = option(
        None, "seconds without a request after which it sleeps; default: never", low=0.01
    )
    sleep_level: int = option(
        1, "how deep it sleeps when idle; 1: weights stay in host memory, 2: dropped", low=1, high=2
    )
    kv_floor_bytes: int | None = option(
        None, "memory of its KV cache that no other model takes; default: its longest request", low=1
    )
    kv_ceiling_bytes: int | None = option(
        None, "most memory of its KV cache; default: all that models share", low=1
    )

    def __post_init__(self) -> None:
        CheckedOptions.__post_init__(self)
        if self.pinned and self.idle_sleep_s is not None:
            raise ConfigError(
                f"the model {self.name!r:.80} is pinned and never sleeps: leave idle_sleep_s out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Memory that the KV of several models shares, in slabs, as one of them sees it (docs/decisions/0052-slabs.md)."""

    num_slabs: int  # with the one that no model has
    slab_bytes: int
    kv_slabs: int  # those beside the weights of all models, about
    part: float  # of this model, where nothing says more
    floor_bytes: int | None = None
    ceiling_bytes: int | None = None
    device: Any = None  # the allocation; None: numbers only

    def sizes(
        self, given: Mapping[str, Any], per_block: int, longest: int, exact: int | None
    ) -> dict[str, Any]:
        """`given` with the blocks of a model; `exact`: bytes of its KV cache, neither more nor less."""
        count = self.slab_bytes // per_block
        if not count:
            raise ConfigError(f"a slab of {self.slab_bytes} bytes holds no KV block of {per_block}")
        if "num_blocks" in given:
            exact = given["num_blocks"] * per_block
        floor = self._slabs(exact or self.floor_bytes or 1)
        most = max(floor, floor if exact else int(self.kv_slabs * self.part))
        block_size = given["block_size"]
        if "max_model_len" not in given:
            longest = max(2, min(longest, (most * count - 1) * block_size))
        needed = -(-(-(-longest // block_size) + 1) // count)
        ceiling = min(floor if exact else self.num_slabs, self._slabs(self.ceiling_bytes or 1 << 62))
        if max(needed, floor) > min(ceiling, self.num_slabs - 1):
            raise ConfigError(
                f"a request of --max-model-len {longest} takes {needed * self.slab_bytes / 2**30:.2f} GiB of KV cache, "
                f"and this model may have {min(ceiling, self.num_slabs - 1) * self.slab_bytes / 2**30:.2f}: give a "
                "shorter length, or more memory (kv_ceiling_bytes, kv_cache_memory_bytes, memory_bytes)"
            )
        blocks = {"num_blocks": self.num_slabs * count, "slab_blocks": count}
        floor = max(needed, floor)
        return {
            **given,
            **blocks,
            "least_blocks": floor * count,
            "most_slabs": ceiling,
            "max_model_len": longest,
        }

    def _slabs(self, num_bytes: int) -> int:
        return -(-num_bytes // self.slab_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of a server: which it is, the engine options that were given for it, and its share."""

    model: ModelConfig
    given: Mapping[str, Any] = field(default_factory=dict)
    share: ModelShare = field(default_factory=ModelShare)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSet:
    """The models of one server, in the order they are listed; the first answers requests that name none."""

    entries: Sequence[ModelEntry]
    memory_bytes: int | None = None  # of weights and KV of the models awake at a time; None: all fit

    @property
    def is_one(self) -> bool:
        return len(self.entries) == 1
