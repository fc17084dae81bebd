"""The flags that commands which load a model share, and what they become: engine options and sampling.

Options of the engine come by name from `config`; sampling is declared here and checked by `SamplingParams`, so that
no bound is written twice. Imports nothing heavy: help and mistakes are answered before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.generation import FALLBACK
from paceline.cli.answer import ANSWER_TOKENS
from paceline.cli.options import Flag, Panel
from paceline.cli.shared_flags import BUDGET, KV_BLOCKS
from paceline.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig, option
from paceline.errors import InputError, InvalidRequest
from paceline.llm.arguments import split_arguments

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, under the names of `SamplingParams`. None: as the model's makers recommend."""

    max_tokens: int | None = option(None, "most tokens of an answer", kind=int, basic=True)
    temperature: float | None = option(
        None, "0: the most likely token; higher: more varied", kind=float, basic=True
    )
    top_p: float | None = option(
        None, "sample from the likeliest tokens with this total probability", kind=float, basic=True
    )
    top_k: int | None = option(None, "sample from this number of the likeliest tokens; 0: all", kind=int)
    min_p: float | None = option(
        None, "leave out tokens less likely than this share of the likeliest one", kind=float
    )
    repetition_penalty: float | None = option(None, "above 1: repeat earlier tokens less often", kind=float)
    stop: tuple[str, ...] | None = option(
        None, "text that ends an answer; can be given several times", kind=tuple
    )


SAMPLING = Panel(
    title="Sampling",
    config=SamplingOptions,
    optional=True,
    flags=(
        Flag(name="max_tokens", default=f"the model's own, else {ANSWER_TOKENS}"),
        Flag(name="temperature", default=f"the model's own, else {FALLBACK.temperature}"),
        Flag(name="top_p", default=f"the model's own, else {FALLBACK.top_p}"),
        Flag(name="top_k", default="the model's own, else 0"),
        Flag(name="min_p"),
        Flag(name="repetition_penalty"),
        Flag(name="stop", metavar="TEXT"),
    ),
)
MODEL = Panel(
    title="Model",
    config=ModelConfig,
    optional=True,
    flags=(
        Flag(name="model", also=("-m",), metavar="MODEL", default="SmolLM2-135M-Instruct"),
        Flag(name="tokenizer", metavar="FOLDER"),
        Flag(name="revision", metavar="NAME"),
        Flag(name="download_dir", metavar="FOLDER"),
        Flag(name="load_format"),
        Flag(name="device"),
        Flag(name="dtype"),
        Flag(name="quantization"),
        Flag(name="kv_cache_dtype"),
        Flag(name="kv_cache_memory_bytes", default="2G, at most a quarter of free memory; on a GPU the rest"),
        Flag(name="gpu_memory_utilization"),
        Flag(name="enforce_eager"),
    ),
)
ENGINE = (
    Panel(
        title="Engine",
        config=SchedulerConfig,
        optional=True,
        flags=(Flag(name="max_model_len", default="what model and KV cache allow"),),
    ),
    KV_BLOCKS,
)
BATCH = Panel(
    title="Engine",
    config=SchedulerConfig,
    optional=True,
    flags=(
        Flag(name="max_num_seqs", default="128"),
        *BUDGET,
    ),
)


def seed_panel(default: str) -> Panel:
    """`--seed`, whose meaning when absent differs between talking and computing."""
    return Panel(
        title="Sampling", config=ModelConfig, optional=True, flags=(Flag(name="seed", default=default),)
    )


# What every command takes that talks to a model.
TALKING = (SAMPLING, seed_panel("random"), MODEL, *ENGINE)


def engine_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave of the options `LLM` and `AsyncLLM` take, checked as far as that needs no model."""
    known = {
        spec.name
        for config in (ModelConfig, KVConfig, SchedulerConfig, EngineConfig)
        for spec in fields(config)
    }
    given = {name: value for name, value in values.items() if name in known and value is not None}
    split_arguments(None, given)
    return given


def find_model(engine: Mapping[str, Any]) -> None:
    """Fetch the model where it is not here; a name that is none is said before torch is imported."""
    from paceline.checkpoint.names import bring_here

    bring_here(engine.get("model"), engine.get("revision"), engine.get("download_dir"))


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave of sampling, checked."""
    names = [spec.name for spec in fields(SamplingOptions)]
    given = {name: values[name] for name in names if values.get(name) is not None}
    checked_sampling(given)
    return given


def checked_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling from what was given; a mistake is told under the name of its flag."""
    from paceline.core.sampling import SamplingParams

    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        name = error.param or ""
        text = str(error)
        if name and text.startswith(name):
            text = "--" + name.replace("_", "-") + text.removeprefix(name)
        raise InputError(text) from error
