"""Draft heads on disk: small models that guess the next tokens of a larger one from its hidden states.

Two kinds. `eagle` is the published EAGLE-3 layout (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`), `medusa` has a
residual block and an output matrix for each token ahead. What a head must be like follows from the model it is for:
every tensor is checked against that model's sizes before the engine starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError, Fields, some_of
from paceline.models.files.folder import CONFIG, WEIGHTS, ModelFolder
from paceline.models.files.hf_config import spec_from_config
from paceline.models.files.safetensors import write_safetensors
from paceline.models.files.stored import check_finite
from paceline.models.spec import ModelSpec

Shape = tuple[int, ...]
LAYER, OTHER_LAYER = "midlayer.", "layers.0."  # the second is what newer writers call it
EMBEDDING, TO_TARGET, IS_DRAFTED = "embed_tokens.weight", "d2t", "t2d"
NUM_TAPS = 3  # hidden states of the model that an eagle head reads


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """One head."""

    kind: str
    vocab_size: int  # of the model it is for
    hidden_size: int
    draft_vocab_size: int  # tokens it can guess
    layer: ModelSpec | None = None  # of an eagle head: sizes and rotation of its one layer
    taps: tuple[int, ...] = ()  # hidden states that are read: before the layer of this number
    num_heads: int = 0  # of a medusa head: tokens it guesses at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadFiles:
    """A head and its tensors, under their published names."""

    spec: HeadSpec
    tensors: Mapping[str, NDArray[np.float32]]
    to_target: NDArray[np.int64]  # the model's number of each token the head can guess


def head_kind(path: Path) -> str | None:
    """The kind of the head in a folder; None: it holds no head, but perhaps a model."""
    if not path.is_dir() or not (path / CONFIG).is_file():
        return None
    config = ModelFolder(path).config
    named = f"{config.get('architectures')} {config.get('model_type')}".lower()
    if "medusa" in named or "medusa_num_heads" in config:
        return "medusa"
    return "eagle" if "eagle" in named or "draft_vocab_size" in config else None


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads where its config does not say: low, middle and high."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))


def open_head(path: Path, target: ModelSpec) -> HeadFiles:
    """The head in a folder, for the model `target`. Raises CheckpointError naming what does not fit."""
    kind = head_kind(path)
    if kind is None:
        raise CheckpointError(f"{path}: is no draft head: {CONFIG} names neither eagle nor medusa")
    folder = ModelFolder(path)
    files = folder.weights()
    names = {_published(name): name for name in files.entries}
    fields = Fields(folder.config, str(path / CONFIG))
    spec = _head_spec(kind, fields, folder.config, target)
    tensors: dict[str, NDArray[np.float32]] = {}
    wanted = dict(head_tensors(spec))
    if EMBEDDING in names:
        wanted[EMBEDDING] = (target.vocab_size, spec.hidden_size)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CheckpointError(
            f"{path}: the head has no tensor {some_of(missing)}; train or download it again"
        )
    for name, shape in wanted.items():
        entry = files.entries[names[name]]
        if entry.shape != shape:
            raise CheckpointError(
                f"{path}: the tensor {name} has the shape {list(entry.shape)}, and a head for this model "
                f"(vocabulary {target.vocab_size}, hidden size {target.hidden_size}) has {list(shape)} there"
            )
        tensors[name] = files.tensor(names[name]).to_float32()
        check_finite(tensors[name], name)
    if TO_TARGET in names:
        offsets = files.integers(names[TO_TARGET])
        return HeadFiles(spec=spec, tensors=tensors, to_target=_ids(offsets, spec, path))
    if spec.draft_vocab_size != spec.vocab_size:
        raise CheckpointError(
            f"{path}: the head has no tensor {TO_TARGET}, which says what its {spec.draft_vocab_size} tokens are"
        )
    return HeadFiles(spec=spec, tensors=tensors, to_target=np.arange(spec.vocab_size))


def head_tensors(spec: HeadSpec) -> Iterator[tuple[str, Shape]]:
    """Every tensor of floats that a head has, with its shape ([out, in] for matrices)."""
    hidden = spec.hidden_size
    if spec.kind == "medusa":
        for number in range(spec.num_heads):
            yield f"medusa_head.{number}.0.linear.weight", (hidden, hidden)
            yield f"medusa_head.{number}.0.linear.bias", (hidden,)
            yield f"medusa_head.{number}.1.weight", (spec.draft_vocab_size, hidden)
        return
    layer = spec.layer
    assert layer is not None
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    yield "fc.weight", (hidden, NUM_TAPS * hidden)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"{LAYER}{norm}.weight", (hidden,)
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{LAYER}self_attn.{part}_proj.weight", (width, 2 * hidden)
    yield f"{LAYER}self_attn.o_proj.weight", (hidden, queries)
    for part in ("gate", "up"):
        yield f"{LAYER}mlp.{part}_proj.weight", (layer.intermediate_size, hidden)
    yield f"{LAYER}mlp.down_proj.weight", (hidden, layer.intermediate_size)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (spec.draft_vocab_size, hidden)


def new_head(kind: str, target: ModelSpec, draft_vocab: int, num_heads: int) -> HeadSpec:
    """A head for a model, with a layer of the model's own sizes."""
    if kind == "medusa":
        return _spec(kind, target, draft_vocab, num_heads=num_heads)
    layer = spec_from_config(_layer_config(target), "the head")
    return _spec(kind, target, draft_vocab, layer=layer, taps=usual_taps(target.num_layers))


def _spec(kind: str, target: ModelSpec, draft_vocab: int, **parts: Any) -> HeadSpec:
    return HeadSpec(
        kind=kind,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab,
        **parts,
    )


def write_head(
    path: Path,
    files: HeadFiles,
    target: ModelSpec,
    about: Mapping[str, Any],
) -> None:
    """Write a head as a folder; `about` (how it was made, and its figures) goes into the config and the weights."""
    spec = files.spec
    path.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = dict(files.tensors)
    if spec.draft_vocab_size != spec.vocab_size:
        is_drafted = np.zeros(spec.vocab_size, np.bool_)
        is_drafted[files.to_target] = True
        arrays[TO_TARGET] = files.to_target - np.arange(len(files.to_target))
        arrays[IS_DRAFTED] = is_drafted
    config: dict[str, Any] = {**_layer_config(target), "draft_vocab_size": spec.draft_vocab_size}
    if spec.kind == "medusa":
        config |= {"architectures": ["MedusaModel"], "model_type": "medusa"}
        config |= {"medusa_num_heads": spec.num_heads, "medusa_num_layers": 1}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(spec.taps)}}
    config["paceline"] = dict(about)
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    write_safetensors(path / WEIGHTS, arrays, {"format": "pt", **metadata})
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _published(name: str) -> str:
    return LAYER + name.removeprefix(OTHER_LAYER) if name.startswith(OTHER_LAYER) else name


def _head_spec(kind: str, fields: Fields, config: Mapping[str, object], target: ModelSpec) -> HeadSpec:
    draft_vocab = fields.integer("draft_vocab_size", target.vocab_size, maximum=target.vocab_size)
    if kind == "medusa":
        num_heads = fields.integer("medusa_num_heads", maximum=64)
        return _spec(kind, target, draft_vocab, num_heads=num_heads)
    plain = {**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    layer = spec_from_config(plain, fields.where)
    nested = fields.group("eagle_config")
    taps = (nested.get("eagle_aux_hidden_state_layer_ids") if nested is not None else None) or fields.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    chosen = tuple(taps) if isinstance(taps, list) else usual_taps(target.num_layers)
    if len(chosen) != NUM_TAPS or not all(
        isinstance(tap, int) and 0 <= tap <= target.num_layers for tap in chosen
    ):
        fields.refuse(
            "eagle_aux_hidden_state_layer_ids", f"must be {NUM_TAPS} layers of 0 to {target.num_layers}"
        )
    return _spec(kind, target, draft_vocab, layer=layer, taps=chosen)


def _ids(offsets: NDArray[np.int64], spec: HeadSpec, path: Path) -> NDArray[np.int64]:
    """`d2t` holds what is added to a draft token's number."""
    if offsets.shape != (spec.draft_vocab_size,):
        raise CheckpointError(
            f"{path}: the tensor {TO_TARGET} has the shape {list(offsets.shape)}, not [{spec.draft_vocab_size}]"
        )
    ids = offsets + np.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= spec.vocab_size or len(np.unique(ids)) < len(ids):
        raise CheckpointError(
            f"{path}: the tensor {TO_TARGET} must name {len(ids)} different tokens of the model's {spec.vocab_size}"
        )
    return ids


def _layer_config(target: ModelSpec) -> dict[str, object]:
    """The config of one plain layer of the target's sizes."""
    rope = target.ropes[target.layer_ropes[0]]
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": rope.theta,
        "hidden_act": "silu",
    }
