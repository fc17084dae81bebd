"""Where the tensors of a Hugging Face folder lie under the names, fusions and stacks its writers use.

Canonical names are those of `stored.tensor_names`. Covers fused attention and feed-forward matrices (Phi-3), two
spellings of experts (Mixtral's w1, w2, w3 and stacks of three dimensions), and a language model beside a vision one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.layout import Piece, Shape, locate
from paceline.checkpoint.spec import ModelSpec
from paceline.checkpoint.stored import tensor_names

_ATTENTION = re.compile(r"(model\.layers\.\d+\.self_attn\.)([qkv])_proj\.(weight|bias)")
_DENSE = re.compile(r"(model\.layers\.\d+\.mlp\.)(gate|up)_proj\.weight")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")
_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MIXTRAL_PART = {"gate": "w1", "up": "w3", "down": "w2"}
# Buffers that older versions stored, and what belongs to images.
_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(\w+_)?inv_freq")
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def locate_in_folder(spec: ModelSpec, stored: Mapping[str, Shape], where: str) -> dict[str, Piece]:
    """The piece for every tensor of `spec`; `Piece.source` is the name in the files."""
    plain = _plain_names(stored, where)
    pieces = locate(
        tensor_names(spec),
        {name: stored[source] for name, source in plain.items()},
        lambda name: _places(name, spec),
        _ignored(spec),
        where,
    )
    return {name: replace(piece, source=plain[piece.source]) for name, piece in pieces.items()}


def _places(name: str, spec: ModelSpec) -> Iterator[Piece]:
    yield Piece(source=name)
    if match := _ATTENTION.fullmatch(name):
        yield _fused_attention(match, spec)
    elif match := _DENSE.fullmatch(name):
        yield _half(f"{match[1]}gate_up_proj.weight", match[2], spec.intermediate_size)
    elif match := _ROUTER.fullmatch(name):
        yield Piece(source=f"{match[1]}block_sparse_moe.gate.weight")
    elif match := _EXPERT.fullmatch(name):
        yield from _expert(match, spec)


def _fused_attention(match: re.Match[str], spec: ModelSpec) -> Piece:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    start = {"q": 0, "k": queries, "v": queries + keys}[match[2]]
    width = queries if match[2] == "q" else keys
    return Piece(
        source=f"{match[1]}qkv_proj.{match[3]}", rows=(start, start + width), of_rows=queries + 2 * keys
    )


def _expert(match: re.Match[str], spec: ModelSpec) -> Iterator[Piece]:
    assert spec.experts is not None
    prefix, expert, part = match[1], int(match[2]), match[3]
    yield Piece(source=f"{prefix}block_sparse_moe.experts.{expert}.{_MIXTRAL_PART[part]}.weight")
    for stack in (f"{prefix}mlp.experts.", f"{prefix}block_sparse_moe.experts."):
        if part == "down":
            yield Piece(source=f"{stack}down_proj", entry=expert)
        else:
            yield _half(f"{stack}gate_up_proj", part, spec.experts.intermediate_size, expert)


def _half(source: str, part: str, width: int, entry: int | None = None) -> Piece:
    """Gate and up lie one behind the other."""
    start = 0 if part == "gate" else width
    return Piece(source=source, entry=entry, rows=(start, start + width), of_rows=2 * width)


def _plain_names(stored: Mapping[str, Shape], where: str) -> dict[str, str]:
    """Stored names by the name they have without a prefix for the language model."""
    plain: dict[str, str] = {}
    for source in stored:
        name = source.removeprefix("language_model.")
        if name.startswith("model.language_model."):
            name = "model." + name.removeprefix("model.language_model.")
        if name in plain:
            raise CheckpointError(f"{where}: {plain[name]} and {source} are both the tensor {name}")
        plain[name] = source
    return plain


def _ignored(spec: ModelSpec) -> Callable[[str], bool]:
    def ignored(name: str) -> bool:
        if name == "lm_head.weight":
            return spec.tied_embeddings
        return _BUFFER.fullmatch(name) is not None or (
            spec.architecture == "gemma3" and name.startswith(_VISION)
        )

    return ignored
