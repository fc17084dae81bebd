"""Which adapters an engine has: those that requests may name, and those that are only still computed with.

Names are the business of who serves: here an adapter is a number. One that is let go of is refused to new requests at
once; its matrices go when the last request that has it has ended and no step under way can touch them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.config.engine import ModelConfig
from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.errors import ConfigError, InvalidAdapter, UnknownAdapter
from paceline.models.files.adapter import Adapter, open_adapter
from paceline.models.spec import ModelSpec
from paceline.scheduler.scheduler import Scheduler


class AdapterMemory(Protocol):
    """Where a runner keeps matrices of adapters, by number."""

    def put(self, number: int, adapter: Adapter) -> None: ...
    def drop(self, number: int) -> None: ...


class Adapters:
    """The adapters of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: AdapterMemory | None = None,
        read: Callable[[Path], Adapter] | None = None,
    ) -> None:
        """Without `memory` and `read` there are none, and none can be loaded."""
        self._scheduler = scheduler
        self._memory = memory
        self._read = read
        self._known: dict[int, AdapterInfo] = {}
        self._identities: dict[int, str] = {}  # of those in memory
        self._last = 0
        # Let go of: the last plan that may have a row of it; None while requests have it.
        self._leaving: dict[int, int | None] = {}

    @property
    def is_leaving(self) -> bool:
        return bool(self._leaving)

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._known.values())

    def load(self, name: str, folder: Path, *, number: int | None = None, identity: str = "") -> AdapterInfo:
        """Read a folder under the next number, or under one that the caller gives; numbers only go up.

        `identity`: what it must be, where it was read before. Raises InvalidAdapter.
        """
        if self._memory is None or self._read is None:
            raise InvalidAdapter(
                "this engine was started without adapters; start it with --enable-lora", param="lora_path"
            )
        number = self._last + 1 if number is None else number
        if number <= self._last:
            raise InvalidAdapter(f"the number {number} of an adapter was used before")
        adapter = self._read(folder)
        if identity and adapter.identity != identity:
            raise InvalidAdapter(
                f"{folder}: has changed since it was loaded; load it again", param="lora_path"
            )
        self._last = number
        self._memory.put(number, adapter)
        self._scheduler.set_adapter(number, adapter.identity)
        info = AdapterInfo(
            name=name, folder=str(folder), number=number, identity=adapter.identity, rank=adapter.rank
        )
        self._known[number] = info
        self._identities[number] = adapter.identity
        return info

    def unload(self, number: int) -> bool:
        """No new request may have it; False where there is none of that number."""
        if self._known.pop(number, None) is None:
            return False
        self._leaving[number] = None
        return True

    def identity_of(self, number: int) -> str:
        """What a number stands for; nothing where there is no such adapter in memory."""
        return self._identities.get(number, "")

    def check(self, number: int) -> None:
        """Raises UnknownAdapter for a number that requests may not have."""
        if number != NO_ADAPTER and number not in self._known:
            raise UnknownAdapter("the adapter is not loaded any more", param="model")

    def release(self, oldest: int, submitted: int) -> None:
        """Give memory back. `oldest`: the first plan under way; all before it are complete. `submitted`: the last."""
        used = {request.adapter for request in self._scheduler.state.requests.values()}
        for number, last in list(self._leaving.items()):
            if last is None and number not in used:
                last = self._leaving[number] = submitted
            if last is not None and last < oldest:
                assert self._memory is not None
                self._memory.drop(number)
                self._scheduler.set_adapter(number, "")
                del self._leaving[number], self._identities[number]


def first_adapters(
    model: ModelConfig, spec: ModelSpec, memory: AdapterMemory | None, scheduler: Scheduler
) -> Adapters:
    """The adapters of an engine, with those of the start in memory."""
    made = Adapters(scheduler, memory, lambda folder: open_adapter(folder, spec, model.max_lora_rank))
    for name, folder in model.first_adapters.items():
        try:
            made.load(name, Path(folder))
        except InvalidAdapter as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from None
    return made
