"""Where each tensor the decoder wants lies in a file that may call, fuse, stack or order it differently.

A `Piece` is a whole stored tensor, some rows of it, or one entry of a stack. Rows are whole in every format we
read, quantised ones too, so that all of this works on bytes and never decodes. Knows no format's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError, some_of
from paceline.models.files.encoder import VISION, is_other_head, modern_place, vision_place
from paceline.models.files.gguf import GgufFile
from paceline.models.files.quantized_folder import KV_SCALE
from paceline.models.files.stored import Entry, StoredTensor, tensor_names
from paceline.models.spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the stored tensor `source`: first the entry of the stack, then the rows, then their order."""

    source: str
    entry: int | None = None  # of a stack of equal tensors
    rows: tuple[int, int] | None = None
    of_rows: int = 0  # with `rows`: how many the stored tensor must have
    interleaved_heads: int = 0  # heads whose rows lie (first half, second half) pair by pair

    def shape(self, stored: Shape) -> Shape | None:
        """The shape of this part of a tensor of shape `stored`; None where there is no such part."""
        if self.entry is not None:
            if len(stored) < 2 or self.entry >= stored[0]:
                return None
            stored = stored[1:]
        if self.rows is not None:
            if not stored or stored[0] != self.of_rows:
                return None
            stored = (self.rows[1] - self.rows[0], *stored[1:])
        if self.interleaved_heads and (not stored or stored[0] % (2 * self.interleaved_heads)):
            return None
        return stored

    def cut(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """This part of `tensor`, which is the stored tensor `source`, as the tensor `name`."""
        shape = self.shape(tensor.shape)
        assert shape is not None, (name, tensor.shape)
        raw = tensor.raw
        if self.entry is not None:
            raw = raw.reshape(tensor.shape[0], -1)[self.entry]
        if self.rows is not None:
            raw = raw.reshape(self.of_rows, -1)[self.rows[0] : self.rows[1]].reshape(-1)
        if self.interleaved_heads:
            raw = _halves_apart(raw, shape[0], self.interleaved_heads)
        return replace(tensor, name=name, shape=shape, raw=raw)


def locate(
    wanted: Iterable[tuple[str, Shape]],
    stored: Mapping[str, Entry],
    places: Callable[[str], Iterable[Piece]],
    ignored: Callable[[str], bool],
    where: str,
) -> dict[str, Piece]:
    """The piece for every wanted tensor: the first of `places(name)` whose source exists.

    Whatever is missing, misshapen or left over is one error that names all of it.
    """
    pieces: dict[str, Piece] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for name, shape in wanted:
        piece = next((place for place in places(name) if place.source in stored), None)
        if piece is None:
            missing.append(name)
            continue
        used.add(piece.source)
        pieces[name] = piece
        found = stored[piece.source].shape
        if piece.shape(found) != shape:
            misshapen.append(f"{piece.source} {list(found)} (for {name} {list(shape)})")
    extra = [name for name in stored if name not in used and not ignored(name)]
    faults = {"missing": missing, "of another shape": misshapen, "not part of the model": extra}
    problems = [f"{len(names)} {fault}: {some_of(names)}" for fault, names in faults.items() if names]
    if problems:
        raise CheckpointError(f"{where}: the tensors do not fit the model described; {'; '.join(problems)}")
    return pieces


def _halves_apart(raw: NDArray[np.uint8], rows: int, heads: int) -> NDArray[np.uint8]:
    """Rows ordered (0, half, 1, half + 1, ...) in each head, put back to (0, 1, ..., half, half + 1, ...)."""
    half = rows // heads // 2
    width = math.prod(raw.shape) // rows
    ordered = raw.reshape(heads, half, 2, width).swapaxes(1, 2)
    result = np.ascontiguousarray(ordered).reshape(-1)
    result.flags.writeable = False
    return result


# Where the tensors of a Hugging Face folder lie under the names, fusions and stacks its writers use.
#
# Canonical names are those of `stored.tensor_names`. Covers fused attention and feed-forward matrices (Phi-3), two
# spellings of experts (Mixtral's w1, w2, w3 and stacks of three dimensions), and a language model beside a vision
# one.


_ATTENTION = re.compile(r"(model\.layers\.\d+\.self_attn\.)([qkv])_proj\.(weight|bias)")
_DENSE = re.compile(r"(model\.layers\.\d+\.mlp\.)(gate|up)_proj\.weight")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")
_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MIXTRAL_PART = {"gate": "w1", "up": "w3", "down": "w2"}
# Buffers that older versions stored, and what belongs to images.
_BUFFER = re.compile(r"(.*\.)?rotary(_pos)?_emb\.(\w+_)?inv_freq|vision\..*\.position_ids")
_OF_PICTURES = ("model.vision_model.", "model.connector.", "model.visual.", "visual.")  # computed here
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def locate_in_folder(spec: ModelSpec, stored: Mapping[str, Entry], where: str) -> dict[str, Piece]:
    """The piece for every tensor of `spec`; `Piece.source` is the name in the files."""
    plain = _plain_names(stored, where, "" if spec.encoder is None else spec.encoder.prefix)
    pieces = locate(
        tensor_names(spec),
        {name: stored[source] for name, source in plain.items()},
        lambda name: _places(name, spec),
        _ignored(spec),
        where,
    )
    return {name: replace(piece, source=plain[piece.source]) for name, piece in pieces.items()}


def _places(name: str, spec: ModelSpec) -> Iterator[Piece]:
    if spec.encoder is not None and spec.encoder.norm_first:
        yield _modern(name, spec)
        return
    if name.startswith(VISION) and spec.vision is not None:
        yield _of_pictures(name, spec.vision)
        return
    yield Piece(source=name)
    if match := _ATTENTION.fullmatch(name):
        yield _fused_attention(f"{match[1]}qkv_proj.{match[3]}", match[2], spec)
    elif match := _DENSE.fullmatch(name):
        yield _half(f"{match[1]}gate_up_proj.weight", match[2], spec.intermediate_size)
    elif match := _ROUTER.fullmatch(name):
        yield Piece(source=f"{match[1]}block_sparse_moe.gate.weight")
    elif match := _EXPERT.fullmatch(name):
        yield from _expert(match, spec)


def _of_pictures(name: str, spec: ModelSpec) -> Piece:
    source, index, count = vision_place(name, spec.architecture)
    return _part(VISION + source, index, count, spec.hidden_size)


def _modern(name: str, spec: ModelSpec) -> Piece:
    source, index, count = modern_place(name)
    return _part(source, index, count, spec.hidden_size if count == 3 else spec.intermediate_size)


def _part(source: str, index: int, count: int, width: int) -> Piece:
    """One of several matrices that lie one behind the other."""
    if count == 1:
        return Piece(source=source)
    return Piece(source=source, rows=(index * width, (index + 1) * width), of_rows=count * width)


def _fused_attention(source: str, part: str, spec: ModelSpec) -> Piece:
    """Queries, keys and values lie one behind the other."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    start = {"q": 0, "k": queries, "v": queries + keys}[part]
    width = queries if part == "q" else keys
    return Piece(source=source, rows=(start, start + width), of_rows=queries + 2 * keys)


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


def _plain_names(stored: Mapping[str, Entry], where: str, prefix: str) -> dict[str, str]:
    """Stored names by the name they have without a prefix for the language model."""
    plain: dict[str, str] = {}
    before = "model." if "embed_tokens.weight" in stored else ""  # of a model that was saved without its head
    for source in stored:
        name = before + source.removeprefix("language_model.").removeprefix(prefix)
        for part in ("model.language_model.", "model.text_model."):
            if name.startswith(part):
                name = "model." + name.removeprefix(part)
        if name.startswith(_OF_PICTURES):
            name = VISION + name.removeprefix("model.")
        if name in plain:
            raise CheckpointError(f"{where}: {plain[name]} and {source} are both the tensor {name}")
        plain[name] = source
    return plain


def _ignored(spec: ModelSpec) -> Callable[[str], bool]:
    def ignored(name: str) -> bool:
        if spec.encoder is not None:
            return is_other_head(name)
        if name == "lm_head.weight":
            return spec.tied_embeddings
        return (_BUFFER.fullmatch(name) or KV_SCALE.fullmatch(name)) is not None or (
            spec.architecture == "gemma3" and name.startswith(_VISION)
        )

    return ignored


# Where the tensors of a GGUF file lie under the names, fusions, stacks and row orders of that format.
#
# Canonical names are those of `stored.tensor_names`. For the `llama` architecture the rows of q and k are stored so
# that the two halves of each head alternate; they are put back.


WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# With norms on both sides, what others call `post_attention_layernorm` is the norm behind attention.
SANDWICH_PARTS = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_GGUF_FUSED = re.compile(r"(?:self_attn\.([qkv])|mlp\.(gate|up))_proj")


def locate_in_gguf(spec: ModelSpec, file: GgufFile) -> dict[str, Piece]:
    """The piece for every tensor of `spec`."""
    interleaved = file.fields.get("general.architecture") == "llama"
    return locate(
        tensor_names(spec),
        file.entries,
        lambda name: _gguf_places(name, spec, interleaved),
        lambda name: IGNORED.fullmatch(name) is not None,
        str(file.path),
    )


def _gguf_places(name: str, spec: ModelSpec, interleaved: bool) -> Iterator[Piece]:
    if name in WHOLE:
        yield Piece(source=WHOLE[name])
        return
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    prefix, part, ending = f"blk.{match[1]}.", match[2], match[3]
    if expert := _GGUF_EXPERT.fullmatch(part):
        yield Piece(source=f"{prefix}ffn_{expert[2]}_exps.{ending}", entry=int(expert[1]))
        yield Piece(source=f"{prefix}ffn_{expert[2]}.{expert[1]}.{ending}")
        return
    heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}.get(part, 0)
    names = SANDWICH_PARTS if spec.sandwich_norms else PARTS
    # Phi-3 has attention in one matrix, and gate and up in one that is called `ffn_up`.
    if spec.architecture == "phi3" and (fused := _GGUF_FUSED.fullmatch(part)):
        if fused[2]:
            yield _half(f"{prefix}ffn_up.{ending}", fused[2], spec.intermediate_size)
            return
        yield _fused_attention(f"{prefix}attn_qkv.{ending}", fused[1], spec)
    source = f"{prefix}{names[part]}.{ending}"
    yield Piece(source=source, interleaved_heads=heads if interleaved else 0)
