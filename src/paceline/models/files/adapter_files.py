"""Adapters: PEFT LoRA folders, or the same in memory, read and checked against the model they are for.

An adapter adds a product of two narrow matrices to some of a model's own. Everything about a folder is checked before
it counts: that its files lie where they may, that it asks for nothing beyond plain LoRA, that every tensor has its
matrix and every matrix it targets both of its tensors. What does not fit is one sentence with names; nothing is half
loaded. A folder's identity is a digest of the numbers that are computed with, so that it holds over restarts.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidAdapter
from paceline.models.files.config_fields import CheckpointError, Fields, read_json, shown, some_of
from paceline.models.files.folder import PICKLED, file_in
from paceline.models.files.safetensors import SafetensorsFile
from paceline.models.files.stored import check_finite
from paceline.models.spec import ModelSpec

Floats = NDArray[np.float32]
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 10_000_000
# What a model may be wrapped in; the rest of a tensor's name is that of the model's own matrix.
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\."
    r"(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_PATTERN = re.compile(r"\^?[\w.]+")
# Fields that change what is computed in a way that is not built, and what they are called.
_UNSUPPORTED = {
    "use_dora": "DoRA (use_dora)",
    "lora_bias": "biases (lora_bias)",
    "modules_to_save": "saved modules (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "target_parameters": "adapters of parameters, such as experts (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA (use_qalora)",
    "megatron_config": "Megatron layers (megatron_config)",
}
# Ways to begin training that change the model's own weights too, which the folder does not hold.
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """What is added to one product: x A^T B^T."""

    a: Floats  # [rank, inputs]
    b: Floats  # [outputs, rank], the scaling multiplied in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """One adapter, in the names of the decoder: layer and part (q, k, v, o, gate, up or down)."""

    identity: str  # a digest in hex digits, or as many random ones
    rank: int  # the largest of its matrices
    parts: Mapping[tuple[int, str], LowRank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedAdapter:
    """What a folder would hold. No other has its identity, not even one of the same numbers: a trainer publishes often,
    and to digest them all would take longer than to copy them."""

    identity: str
    config: Mapping[str, object]
    tensors: Mapping[str, Floats]


def published(config: Mapping[str, object], tensors: Mapping[str, Any]) -> PublishedAdapter:
    """Copies of tensors (of torch or numpy), which may change from here on. Raises InvalidAdapter."""
    copies: dict[str, Floats] = {}
    for name, values in tensors.items():
        if hasattr(values, "detach"):  # torch, which need not be there
            values = values.detach().float().cpu().numpy()
        try:
            copies[name] = np.array(values, np.float32)
        except (TypeError, ValueError):
            raise InvalidAdapter(
                f"lora_tensors: {shown(name)} is no array of numbers", param="lora_request"
            ) from None
    return PublishedAdapter(identity=secrets.token_hex(32), config=dict(config), tensors=copies)


class _Module(NamedTuple):
    """A matrix of the model that an adapter may target."""

    name: str  # self_attn.q_proj
    parts: tuple[tuple[str, int], ...]  # what it consists of, with the outputs of each
    inputs: int


def folder_below(root: Path, name: str) -> Path:
    """The folder that a client names, which must lie below `root` whatever links there are. Raises InvalidAdapter."""
    try:
        home = root.resolve(strict=True)
        found = (home / name).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InvalidAdapter(f"the adapter folder {shown(name)} cannot be read", param="lora_path") from None
    if found == home or not found.is_relative_to(home):
        raise InvalidAdapter(
            f"the adapter folder {shown(name)} does not lie below --lora-dir; name a folder inside it",
            param="lora_path",
        )
    if not found.is_dir():
        raise InvalidAdapter(f"there is no adapter folder {shown(name)} below --lora-dir", param="lora_path")
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (found / file).resolve().is_relative_to(home):
            raise InvalidAdapter(
                f"{file} of {shown(name)} is a link that leads out of --lora-dir; copy the file",
                param="lora_path",
            )
    return found


def open_adapter(path: Path, spec: ModelSpec, max_rank: int) -> Adapter:
    """The adapter in a folder, for the model `spec`. Raises InvalidAdapter naming what does not fit."""
    try:
        fields = _config(path)
        weights = file_in(path, ADAPTER_WEIGHTS)
        if weights is None:
            _refuse_weights(path)
        file = SafetensorsFile(weights)
        shapes = {name: entry.shape for name, entry in file.entries.items()}
        given = _Given(str(path), fields, shapes, lambda name: file.tensor(name).to_float32())
        rank, parts = _read(given, spec, max_rank)
        return Adapter(identity=_digest(parts), rank=rank, parts=parts)
    except CheckpointError as error:
        raise InvalidAdapter(str(error), param="lora_path") from None


def make_adapter(source: PublishedAdapter, spec: ModelSpec, max_rank: int) -> Adapter:
    """The same of one that is in memory already."""
    try:
        fields = _plain(Fields(source.config, "peft_config"))
        shapes = {name: values.shape for name, values in source.tensors.items()}
        given = _Given("lora_tensors", fields, shapes, source.tensors.__getitem__)
        rank, parts = _read(given, spec, max_rank)
        return Adapter(identity=source.identity, rank=rank, parts=parts)
    except CheckpointError as error:
        raise InvalidAdapter(str(error), param="lora_request") from None


class _Given(NamedTuple):
    """A folder or what stands for one."""

    where: str
    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Floats]

    def values(self, name: str) -> Floats:
        values = np.array(self.read(name), np.float32)
        check_finite(values, name, "adapter")
        return values


def _read(given: _Given, spec: ModelSpec, max_rank: int) -> tuple[int, dict[tuple[int, str], LowRank]]:
    """The largest rank, and the matrices."""
    path, fields = given.where, given.fields
    rank = fields.integer("r")
    modules = {(layer, module.name): module for layer, module in _modules(spec)}
    found = _matched(list(given.shapes), modules, path)
    _check_complete(found, _targets(fields, modules), path)
    parts: dict[tuple[int, str], LowRank] = {}
    largest = 0
    for (layer, name), (name_a, name_b) in sorted(found.items()):
        module = modules[layer, name]
        own_rank, scale = _scaling(fields, rank, f"model.layers.{layer}.{name}")
        if own_rank > max_rank:
            raise CheckpointError(
                f"{path}: has rank {own_rank}, and --max-lora-rank is {max_rank}; start with "
                f"--max-lora-rank {own_rank} to allow it"
            )
        largest = max(largest, own_rank)
        outputs = sum(width for _, width in module.parts)
        wanted = {name_a: (own_rank, module.inputs), name_b: (outputs, own_rank)}
        for tensor, shape in wanted.items():
            stored = given.shapes[tensor]
            if stored != shape:
                raise CheckpointError(
                    f"{path}: the tensor {tensor} has the shape {list(stored)}, and rank {own_rank} "
                    f"({Path(fields.where).name}) for this model makes it {list(shape)}"
                )
        a, b = (given.values(tensor) for tensor in wanted)
        with np.errstate(over="ignore"):
            b = b * np.float32(scale)
        check_finite(b, f"{name_b} times its scaling", "adapter")
        at = 0
        for part, width in module.parts:
            parts[layer, part] = LowRank(a, np.ascontiguousarray(b[at : at + width]))
            at += width
    return largest, parts


def _config(path: Path) -> Fields:
    """The folder's description."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a folder; give the folder of a PEFT LoRA adapter")
    config = file_in(path, ADAPTER_CONFIG)
    if config is None:
        raise CheckpointError(f"{path}: has no {ADAPTER_CONFIG}; give the folder of a PEFT LoRA adapter")
    return _plain(Fields(read_json(config, MAX_CONFIG_BYTES), str(config)))


def _plain(fields: Fields) -> Fields:
    """A description, once it is known to ask for nothing but plain LoRA."""
    if fields.text("peft_type", "LORA") != "LORA":
        fields.refuse("peft_type", f"is {shown(fields.get('peft_type'))}; only LORA is computed")
    for name, what in _UNSUPPORTED.items():
        if fields.get(name):
            raise CheckpointError(f"{fields.where}: {what} cannot be computed; train the adapter without")
    if fields.text("bias", "none") != "none":
        raise CheckpointError(
            f"{fields.where}: biases (bias) cannot be computed; train the adapter with bias none"
        )
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_THE_MODEL):
        fields.refuse(
            "init_lora_weights",
            f"is {shown(begun)}, which changes the model's own weights; convert the adapter to plain LoRA",
        )
    return fields


def _refuse_weights(path: Path) -> NoReturn:
    pickled = sorted(each.name for each in path.iterdir() if each.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{path}: holds only pickled weights ({pickled[0]}), which can run code and are never opened; save the "
            "adapter as safetensors (save_pretrained in peft does)"
        )
    raise CheckpointError(f"{path}: has no {ADAPTER_WEIGHTS}; save or download the adapter again")


def _modules(spec: ModelSpec) -> Iterator[tuple[int, _Module]]:
    """Every matrix that can have an adapter, by layer, under the names the model's own folder has."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    heads, gated = (("q", queries), ("k", keys), ("v", keys)), (("gate", inner), ("up", inner))
    fused = spec.architecture == "phi3"
    for layer in range(spec.num_layers):
        for parts, whole in ((heads, "self_attn.qkv_proj"), (gated, "mlp.gate_up_proj")):
            if parts is gated and spec.has_experts(layer):
                continue
            if fused:
                yield layer, _Module(whole, parts, hidden)
            else:
                group = whole.partition(".")[0]
                for part in parts:
                    yield layer, _Module(f"{group}.{part[0]}_proj", (part,), hidden)
        yield layer, _Module("self_attn.o_proj", (("o", hidden),), queries)
        if not spec.has_experts(layer):
            yield layer, _Module("mlp.down_proj", (("down", hidden),), inner)


Key = tuple[int, str]


def _matched(names: Sequence[str], modules: Mapping[Key, _Module], path: str) -> dict[Key, tuple[str, str]]:
    """The two tensors of every matrix that has any."""
    halves: dict[Key, dict[str, str]] = {}
    strange: list[str] = []
    for name in names:
        match = _TENSOR.fullmatch(name)
        key = (int(match[1]), f"{match[2]}.{match[3]}") if match and len(match[1]) < 6 else None
        if match is None or key is None or key not in modules:
            strange.append(name)
            continue
        if match[4] in halves.setdefault(key, {}):
            raise CheckpointError(f"{path}: {halves[key][match[4]]} and {name} are both the same tensor")
        halves[key][match[4]] = name
    if strange:
        raise CheckpointError(f"{path}: {_why_strange(strange)}: {some_of(strange)}")
    if not halves:
        raise CheckpointError(f"{path}: holds no tensor; save or download the adapter again")
    alone = [name for pair in halves.values() if len(pair) == 1 for name in pair.values()]
    if alone:
        raise CheckpointError(
            f"{path}: a matrix needs both lora_A and lora_B, and only one is there: {some_of(alone)}"
        )
    return {key: (pair["A"], pair["B"]) for key, pair in halves.items()}


def _why_strange(names: Sequence[str]) -> str:
    """What kind of tensor it is that matches nothing."""
    first = names[0]
    kinds = {
        "lora_magnitude_vector": "DoRA cannot be computed",
        "lora_embedding": "adapters of embeddings cannot be computed",
        ".experts.": "adapters of experts cannot be computed",
        ".bias": "biases cannot be computed",
    }
    return next(
        (why for word, why in kinds.items() if word in first),
        f"{len(names)} tensors match no matrix of this model that can have an adapter",
    )


def _targets(fields: Fields, modules: Mapping[Key, _Module]) -> set[Key]:
    """The matrices that the description names; none where it is a pattern, which the tensors must answer for."""
    named, left_out = fields.get("target_modules"), fields.get("exclude_modules") or []
    if not isinstance(named, list) or not isinstance(left_out, list):
        return set()
    layers = fields.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    found: set[Key] = set()
    for target in named:
        if not isinstance(target, str):
            fields.refuse("target_modules", f"must name modules, not {shown(target)}")
        mine = {key for key in modules if _is_named(_full_name(key), target)}
        if not mine:
            fields.refuse(
                "target_modules",
                f"names {shown(target)}, which is no matrix of this model that can have an adapter",
            )
        found |= mine
    if isinstance(layers, list):
        found = {key for key in found if key[0] in layers}
    return {key for key in found if not any(_is_named(_full_name(key), str(name)) for name in left_out)}


def _check_complete(found: Mapping[Key, object], targets: set[Key], path: str) -> None:
    missing = [_full_name(key) for key in sorted(targets - set(found))]
    if missing:
        raise CheckpointError(
            f"{path}: target_modules names {len(missing)} matrices without tensors: {some_of(missing)}"
        )


def _full_name(key: Key) -> str:
    return f"model.layers.{key[0]}.{key[1]}"


def _is_named(full: str, name: str) -> bool:
    return full == name or full.endswith("." + name)


def _scaling(fields: Fields, rank: int, module: str) -> tuple[int, float]:
    """A matrix's rank, and what its product is multiplied by."""
    own_rank = _pattern(fields, "rank_pattern", module)
    alpha = _pattern(fields, "alpha_pattern", module)
    if own_rank is None:
        whole = rank
    elif own_rank != int(own_rank) or own_rank < 1:
        fields.refuse("rank_pattern", f"must hold whole numbers from 1, not {shown(own_rank)}")
    else:
        whole = int(own_rank)
    alpha = fields.number("lora_alpha", 8) if alpha is None else alpha
    return whole, alpha / (math.sqrt(whole) if fields.flag("use_rslora", default=False) else whole)


def _pattern(fields: Fields, name: str, module: str) -> float | None:
    """The value of the first entry that names a module; None: none does."""
    group, values = fields.group(name), fields.get(name)
    if group is None or not isinstance(values, Mapping):
        return None
    for key in values:
        # A key is a pattern; those that are written are names, and nothing else is evaluated.
        if not _PATTERN.fullmatch(key):
            fields.refuse(name, f"must name modules, not {shown(key)}")
        plain = key.removeprefix("^")
        if (module == plain) if key.startswith("^") else _is_named(module, plain):
            return group.number(key)
    return None


def _digest(parts: Mapping[tuple[int, str], LowRank]) -> str:
    total = hashlib.sha256()
    for (layer, part), pair in sorted(parts.items()):
        total.update(f"{layer}.{part}:{pair.a.shape}:{pair.b.shape};".encode())
        total.update(np.ascontiguousarray(pair.a, "<f4").tobytes())
        total.update(np.ascontiguousarray(pair.b, "<f4").tobytes())
    return total.hexdigest()
