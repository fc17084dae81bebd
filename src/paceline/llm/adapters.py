"""`LoRARequest`: which adapter a prompt is answered with, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, InvalidRequest
from paceline.models.files.adapter_files import published


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and number, and the PEFT folder it is read from when it is first used.

    Without a folder it is one of `lora_modules`, by its name. With `load_inplace` the folder is read again; requests
    under way keep what they began with.

    An adapter that is in memory, as a trainer has it, is given as `lora_tensors`, under the names that the file would
    have, and `peft_config`, what `adapter_config.json` would hold. Tensors are copied when it is first used; with
    `load_inplace` they are taken again. It finds no prefix that another has left, not even one of the same numbers.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    load_inplace: bool = False
    lora_tensors: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    peft_config: Mapping[str, object] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.lora_tensors is None) != (self.peft_config is None):
            raise InvalidRequest("lora_tensors and peft_config go together", param="lora_request")
        if self.lora_tensors is not None and self.lora_path:
            raise InvalidRequest(
                "give either lora_path or lora_tensors with peft_config, not both", param="lora_request"
            )
        if not self.lora_name:
            raise InvalidRequest("lora_name must not be empty", param="lora_request")
        if self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id must be at least 1, not {self.lora_int_id}", param="lora_request"
            )


class NamedAdapters:
    """The adapters that callers of one engine have named, by their own numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._given = {info.name: info for info in engine.adapters.infos()}
        self._known: dict[int, AdapterInfo] = {}

    def number(self, request: LoRARequest | None) -> int:
        """The engine's number of an adapter, which is read if it is not there. Raises InvalidAdapter."""
        if request is None:
            return NO_ADAPTER
        if not isinstance(request, LoRARequest):
            raise InvalidRequest("lora_request must be a LoRARequest", param="lora_request")
        known = self._known.get(request.lora_int_id)
        if not request.lora_path and request.lora_tensors is None:
            return self._named(request.lora_name, known).number
        if known is not None and not request.load_inplace:
            if known.folder != (str(Path(request.lora_path)) if request.lora_path else ""):
                raise InvalidRequest(
                    f"lora_int_id {request.lora_int_id} is the adapter of {known.folder or 'tensors in memory'}; give "
                    "another number, or load_inplace=True to replace it",
                    param="lora_request",
                )
            return known.number
        info = self._load(request)
        if known is not None:
            self._engine.unload_adapter(known.number)
        self._known[request.lora_int_id] = info
        return info.number

    def _load(self, request: LoRARequest) -> AdapterInfo:
        adapters = self._engine.adapters
        if request.lora_tensors is None or request.peft_config is None:
            return adapters.load(request.lora_name, Path(request.lora_path))
        return adapters.publish(request.lora_name, published(request.peft_config, request.lora_tensors))

    def _named(self, name: str, known: AdapterInfo | None) -> AdapterInfo:
        found = self._given.get(name, known)
        if found is None:
            raise ConfigError(f"there is no adapter {name}: give lora_path, or lora_modules at the start")
        return found
