"""Paceline: an LLM inference engine built around continuous batching.

    from paceline import LLM, SamplingParams

Names are loaded when they are first used, so that importing `paceline` stays quick and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.core.sampling import RequestOutputKind, SamplingParams
    from paceline.core.structure import Structure
    from paceline.llm.adapters import LoRARequest
    from paceline.llm.async_llm import AsyncLLM
    from paceline.llm.llm import LLM
    from paceline.llm.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Structure",
    "__version__",
]

_MODULES = {
    "LLM": "paceline.llm.llm",
    "AsyncLLM": "paceline.llm.async_llm",
    "CompletionOutput": "paceline.llm.outputs",
    "LoRARequest": "paceline.llm.adapters",
    "Logprob": "paceline.llm.outputs",
    "RequestOutput": "paceline.llm.outputs",
    "RequestOutputKind": "paceline.core.sampling",
    "SamplingParams": "paceline.core.sampling",
    "Structure": "paceline.core.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
