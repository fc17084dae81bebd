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
        1, "how deep it sleeps when idle; 1: weights stay in memory, 2: dropped", low=1, high=2
    )

    def __post_init__(self) -> None:
        CheckedOptions.__post_init__(self)
        if self.pinned and self.idle_sleep_s is not None:
            raise ConfigError(
                f"the model {self.name!r:.80} is pinned and never sleeps: leave idle_sleep_s out"
            )


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
