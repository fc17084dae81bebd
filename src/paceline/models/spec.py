"""What a checkpoint says about its model: every option of the one decoder, as a plain value.

Made from a `config.json` or from GGUF fields, read by the decoder, the tokenizer check and the cost model. A new
architecture is a new set of options here wherever that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.costs.cost_model import ModelWork

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions of one kind of layer. Only the first `rotary_dim` entries of a head are turned."""

    rotary_dim: int
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0  # how much longer the context is than the one trained on
    trained_positions: int = 0  # of the unscaled model; 0 where the kind does not need it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin (yarn), already worked out
    # Pairs that turn by each of the numbers that say where a token of a picture is: its time, row and column in a
    # decoder, its row and column in an encoder. Empty: a token has one, its position.
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False  # the sections' pairs stand one by one: time, row, column, time, ...

    @property
    def axes(self) -> tuple[int, ...]:
        """Per pair: which of these numbers it turns by."""
        if not self.is_interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        half, step = self.rotary_dim // 2, len(self.sections)
        return tuple(pair % step if pair < step * self.sections[pair % step] else 0 for pair in range(half))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of the feed-forward part of some layers."""

    num_experts: int
    per_token: int
    intermediate_size: int
    normalize: bool  # weights of the chosen experts are made to sum to 1
    layers: tuple[int, ...]  # the layers that have experts


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """How an encoder reads pictures, and how its states become vectors for a decoder."""

    size: int  # pixels of a side of a patch
    side: int  # patches of a side of the picture that it was made for
    merge: int  # patches of a side of the square that becomes one vector
    width: int  # of a vector: that of the decoder
    frames: int = 0  # of a patch, all of them equal; 0: its product has no such dimension
    has_bias: bool = True  # the product that reads patches
    in_squares: bool = False  # patches come square by square, not row by row
    window: int = 0  # squares of a side of what a patch sees in some layers; 0: there is none
    is_interpolated: bool = False  # a patch may stand between places of the table of positions
    has_inner: bool = False  # the end is two products with an activation between them
    taps: tuple[int, ...] = ()  # layers behind which squares become vectors too, each with an end of its own
    # A byte times the scale, less the mean, over the deviation, is what a channel is read as.
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def outputs(self, units: int) -> int:
        """Vectors of a picture."""
        return units // self.merge**2

    @property
    def values(self) -> int:
        """Numbers that a decoder gets for a token: its vector, and those that its first layers add."""
        return self.width * (1 + len(self.taps))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What an encoder has beside the sizes that it shares with a decoder."""

    num_positions: int  # rows of its table of positions; of pictures 0, where it has none
    position_offset: int = 0  # the row of a text's first token
    num_types: int = 2
    is_biased: bool = True  # its products and norms
    norm_first: bool = False  # norms stand before the parts of a layer, and one behind the last
    # What the first layer reads is normed; with `norm_first` it then has no norm there.
    embedding_norm: bool = True
    is_rms: bool = False  # norms take no mean off and have no bias
    is_gated: bool = False  # activation(product) * another product
    reaches: tuple[int, ...] = ()  # per layer: tokens seen in each direction, 0 for all; nothing: all in all
    labels: tuple[str, ...] = ()  # of a classifier
    head: tuple[str, str] = ("", "")  # its two products, by the names of their tensors
    head_norm: str = ""  # between them
    head_activation: str = "tanh"  # behind the first
    head_mean: bool = False  # reads the mean of all tokens, not the first one
    prefix: str = ""  # that a model with a head puts before the names of its tensors
    patches: PatchSpec | None = None  # it reads pictures, not tokens
    local: tuple[bool, ...] = ()  # per layer: patches see their window only; nothing: all see all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One transformer: a decoder, unless it has the options of an encoder."""

    # llama, mistral, qwen2, qwen3, gemma3, phi3, mixtral, qwen3_moe; bert, xlm-roberta, modernbert.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # longest sequence the model was made for
    windows: tuple[int | None, ...]  # per layer: None sees everything, n the last n tokens
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]  # per layer: which of `ropes`
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to every norm weight (Gemma stores weight - 1)
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # norm over each head of q and k before the rotation
    sandwich_norms: bool = False  # norms behind attention and feed-forward as well (Gemma)
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    tied_embeddings: bool = False  # the output matrix is the embedding
    experts: ExpertsSpec | None = None
    # Its tokens see each other in both directions, and it makes vectors only.
    encoder: EncoderSpec | None = None
    vision: ModelSpec | None = None  # the encoder of its pictures
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """What a classifier scores."""
        return () if self.encoder is None else self.encoder.labels

    @property
    def has_turns(self) -> bool:
        """Whether tokens of pictures turn by more than their position."""
        return any(rope.sections for rope in self.ropes)

    @property
    def num_deep(self) -> int:
        """Layers, from the first on, that add vectors of pictures to what they computed."""
        seen = None if self.vision is None else self.vision.encoder
        return 0 if seen is None or seen.patches is None else len(seen.patches.taps)

    @property
    def softmax_scale(self) -> float:
        scale: float = self.attention_scale or self.head_dim**-0.5
        return scale

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """The windows that occur, each once, full attention first: one KV group each."""
        found = dict.fromkeys(self.windows)
        return tuple(sorted(found, key=lambda window: (window is not None, window or 0)))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Per layer: the KV group it belongs to."""
        groups = self.group_windows
        return tuple(groups.index(window) for window in self.windows)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


class FurtherLayer(NamedTuple):
    """A layer of a model that guesses, whose keys lie in the blocks of the model it guesses for."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def group(self, groups: Sequence[int | None]) -> int:
        """The KV group whose blocks it uses: that of its window, or the first, which keeps most."""
        return groups.index(self.window) if self.window in groups else 0


# What a token and a step of a model cost, counted from the shape its checkpoint declares.


def model_work(spec: ModelSpec, *, weight_bytes: int, kv_token_bytes: float) -> ModelWork:
    """`weight_bytes` are those of all tensors as they are kept."""
    num_layer = sum(_layer_parameters(spec, layer) for layer in range(spec.num_layers))
    num_head = spec.vocab_size * spec.hidden_size
    step_bytes = None
    if spec.experts is None:
        # Only a few rows of the embedding are read; where it is not the output matrix too, it is left out.
        unread = 0.0 if spec.tied_embeddings else num_head / (num_layer + 2 * num_head)
        step_bytes = weight_bytes * (1.0 - unread)
    return ModelWork(
        token_flops=2.0 * num_layer,
        product_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim,
        logit_flops=2.0 * num_head,
        kv_token_bytes=kv_token_bytes,
        step_bytes=step_bytes,
    )


def _layer_parameters(spec: ModelSpec, layer: int) -> int:
    """Weights that a token is multiplied with in one layer."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    if spec.experts is not None and spec.has_experts(layer):
        experts = spec.experts
        chosen = experts.per_token * 3 * spec.hidden_size * experts.intermediate_size
        return attention + chosen + spec.hidden_size * experts.num_experts
    return attention + 3 * spec.hidden_size * spec.intermediate_size
