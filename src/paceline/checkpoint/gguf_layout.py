"""Where the tensors of a GGUF file lie under the names, fusions, stacks and row orders of that format.

Canonical names are those of `stored.tensor_names`. For the `llama` architecture the rows of q and k are stored so
that the two halves of each head alternate; they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.checkpoint.gguf import GgufFile
from paceline.checkpoint.layout import Piece, locate
from paceline.checkpoint.spec import ModelSpec
from paceline.checkpoint.stored import tensor_names

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
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def locate_in_gguf(spec: ModelSpec, file: GgufFile) -> dict[str, Piece]:
    """The piece for every tensor of `spec`."""
    interleaved = file.fields.get("general.architecture") == "llama"
    return locate(
        tensor_names(spec),
        file.shapes(),
        lambda name: _places(name, spec, interleaved),
        lambda name: IGNORED.fullmatch(name) is not None,
        str(file.path),
    )


def _places(name: str, spec: ModelSpec, interleaved: bool) -> Iterator[Piece]:
    if name in WHOLE:
        yield Piece(source=WHOLE[name])
        return
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    prefix, part, ending = f"blk.{match[1]}.", match[2], match[3]
    if expert := _EXPERT.fullmatch(part):
        yield Piece(source=f"{prefix}ffn_{expert[2]}_exps.{ending}", entry=int(expert[1]))
        yield Piece(source=f"{prefix}ffn_{expert[2]}.{expert[1]}.{ending}")
        return
    heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}.get(part, 0)
    names = SANDWICH_PARTS if spec.sandwich_norms else PARTS
    fused = _fused(prefix, part, ending, spec) if spec.architecture == "phi3" else None
    if fused is not None:
        yield fused
    if fused is None or part.startswith("self_attn."):
        source = f"{prefix}{names[part]}.{ending}"
        yield Piece(source=source, interleaved_heads=heads if interleaved else 0)


def _fused(prefix: str, part: str, ending: str, spec: ModelSpec) -> Piece | None:
    """Phi-3's attention in one matrix, and its gate and up in one that is called `ffn_up`."""
    queries, keys, inner = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.intermediate_size,
    )
    ranges = {
        "self_attn.q_proj": ("attn_qkv", 0, queries, queries + 2 * keys),
        "self_attn.k_proj": ("attn_qkv", queries, queries + keys, queries + 2 * keys),
        "self_attn.v_proj": ("attn_qkv", queries + keys, queries + 2 * keys, queries + 2 * keys),
        "mlp.gate_proj": ("ffn_up", 0, inner, 2 * inner),
        "mlp.up_proj": ("ffn_up", inner, 2 * inner, 2 * inner),
    }
    if part not in ranges:
        return None
    source, start, stop, total = ranges[part]
    return Piece(source=f"{prefix}{source}.{ending}", rows=(start, stop), of_rows=total)
