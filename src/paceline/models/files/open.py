"""Opening a model on disk, whatever its form: a Hugging Face folder, a GGUF file, or a config with random weights.

Owns `Checkpoint`, what the rest of the engine knows of a model on disk. Opening reads descriptions and headers;
a tensor's bytes come in when it is asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.parameters import MEAN
from paceline.models.files.config_fields import CheckpointError, Fields, shown
from paceline.models.files.fetch import packaged_model
from paceline.models.files.folder import CONFIG, ModelFolder, TextParts, text_of_folder, text_of_gguf
from paceline.models.files.gguf import GgufFile
from paceline.models.files.hf_config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    longest,
    yarn_attention_factor,
)
from paceline.models.files.pooling_config import EmbeddingDefaults, embedding_defaults
from paceline.models.files.quantized_folder import QuantizedFiles, read_kv_scales
from paceline.models.files.records import KINDS
from paceline.models.files.sampling_defaults import (
    FALLBACK,
    GenerationDefaults,
    generation_defaults,
    gguf_generation,
)
from paceline.models.files.stored import Entry, StoredTensor, tensor_names
from paceline.models.files.tensor_layout import Piece, locate_in_folder, locate_in_gguf
from paceline.models.spec import ExpertsSpec, ModelSpec, RopeSpec

# Weights made up from a tensor's name: the same name gives the same values, on every machine and in any order.
#
# For measuring and testing a model whose weights are not at hand. The text such a model writes means nothing.


SPREAD = 0.02
MADE_UP = "MADE-UP"  # type of a tensor whose values are made when they are asked for


def dummy_tensors(spec: ModelSpec) -> dict[str, Callable[[], StoredTensor]]:
    """A maker for each tensor of `spec`; nothing is held in between."""
    return {name: partial(_make, name, shape, spec) for name, shape in tensor_names(spec)}


def _make(name: str, shape: tuple[int, ...], spec: ModelSpec) -> StoredTensor:
    def values(_: StoredTensor) -> NDArray[np.float32]:
        if "norm" in name.lower():
            return np.full(shape, 1.0 - spec.norm_offset, np.float32)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
        drawn *= SPREAD
        return drawn

    return StoredTensor(name=name, shape=shape, dtype=MADE_UP, raw=np.zeros(0, np.uint8), decode=values)


LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """How much of a checkpoint is stored as one type."""

    num_tensors: int = 0
    num_bytes: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model on disk: what it is, its tensors by canonical name, and what text needs. A `TensorSource`."""

    spec: ModelSpec
    path: Path  # the folder or the file
    kind: str  # safetensors, gguf or dummy
    tensors: Mapping[str, Callable[[], StoredTensor]]
    generation: GenerationDefaults
    text: TextParts
    stored: Mapping[str, StoredType] = field(default_factory=dict)  # by type: what the files hold
    # By layer: of keys and of values, where the files bring any.
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    embedding: EmbeddingDefaults | None = None  # what the files say of the vectors of texts

    def pooled(self, asked: str = "auto") -> EmbeddingDefaults | None:
        """How texts become vectors, by the files or as asked; None: they do not."""
        found, options = self.embedding, self.spec.encoder
        if asked != "auto":
            found = replace(found or EmbeddingDefaults(kind=asked), kind=asked)
        elif found is None and options is not None and not options.labels:
            found = EmbeddingDefaults(kind=MEAN)
        return None if found is None else replace(found, width=self.spec.hidden_size)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str) -> StoredTensor:
        return self.tensors[name]()

    @property
    def quantized(self) -> list[str]:
        """The types of its matrices that are quantised in the files."""
        return sorted(name for name in self.stored if name.startswith(("Q", "IQ")) or name in KINDS)


def open_checkpoint(path: Path | str, *, load_format: str = "auto") -> Checkpoint:
    """The model at `path`, with everything its files claim checked."""
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    try:
        return _open(path, load_format)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path, load_format: str) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.is_dir():
        only = _only_gguf(path)
        if only is not None and load_format in ("auto", "gguf"):
            return _open_gguf(only)
        if load_format == "gguf":
            raise CheckpointError(f"{path}: is a folder; for the format gguf give the .gguf file itself")
        return _open_dummy(path) if load_format == "dummy" else _open_folder(path)
    if load_format in ("safetensors", "dummy"):
        raise CheckpointError(f"{path}: is a file; for the format {load_format} give the model's folder")
    return _open_gguf(path)


def _open_folder(path: Path) -> Checkpoint:
    folder = ModelFolder(path)
    spec, files = folder.spec, folder.files()
    weights = files.source if isinstance(files, QuantizedFiles) else files
    pieces = locate_in_folder(spec, files.entries, str(path))
    return Checkpoint(
        spec=spec,
        path=path,
        kind="safetensors",
        tensors=_cut_from(files.tensor, pieces),
        generation=FALLBACK if folder.generation is None else generation_defaults(folder.generation),
        text=text_of_folder(folder),
        stored=_by_type(files.entries.values()),
        kv_scales=read_kv_scales(weights, str(path)),
        embedding=embedding_defaults(folder),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    spec = spec_from_gguf(file)
    fields, recommended = file.fields, FALLBACK
    known = packaged_model(path)
    if known is not None:
        fields, recommended = known.changed(fields), known.generation
    return Checkpoint(
        spec=spec,
        path=path,
        kind="gguf",
        tensors=_cut_from(file.tensor, locate_in_gguf(spec, file)),
        generation=gguf_generation(fields, str(path)) or recommended,
        text=text_of_gguf(fields, str(path)),
        stored=_by_type(file.entries.values()),
    )


def _open_dummy(path: Path) -> Checkpoint:
    """Only the description is read; for measuring a model whose weights are not here."""
    folder = ModelFolder(path)
    if folder.scheme is not None:
        raise CheckpointError(
            f"{path}: the model is quantised, and random weights are not; leave quantization_config out of its "
            "config.json and give --quantization"
        )
    return Checkpoint(
        spec=folder.spec,
        path=path,
        kind="dummy",
        tensors=dummy_tensors(folder.spec),
        # Made-up weights are measured, not talked to: neutral sampling adds no work to a step.
        generation=GenerationDefaults()
        if folder.generation is None
        else generation_defaults(folder.generation),
        text=text_of_folder(folder),
        embedding=embedding_defaults(folder),
    )


def _only_gguf(folder: Path) -> Path | None:
    """The .gguf file of a folder that holds one and no config.json."""
    found = [] if (folder / CONFIG).exists() else sorted(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _by_type(entries: Iterable[Entry]) -> dict[str, StoredType]:
    found: dict[str, StoredType] = {}
    for entry in entries:
        before, num_bytes = found.get(entry.dtype, StoredType()), entry.end - entry.begin
        found[entry.dtype] = StoredType(
            num_tensors=before.num_tensors + 1, num_bytes=before.num_bytes + num_bytes
        )
    return found


def _cut_from(
    stored: Callable[[str], StoredTensor], pieces: Mapping[str, Piece]
) -> dict[str, Callable[[], StoredTensor]]:
    def cut(name: str, piece: Piece) -> StoredTensor:
        return piece.cut(name, stored(piece.source))

    return {name: partial(cut, name, piece) for name, piece in pieces.items()}


# A GGUF file's fields turned into a `ModelSpec`.
#
# Writers of the format change weights where that suits them, and a spec says what is left to do: Gemma's norms have
# their 1 added already, so that the offset is 0. What was reordered is put back by `tensor_layout`.


ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "qwen3moe")
NAMES = {"qwen3moe": "qwen3_moe"}  # where a spec calls it otherwise
GEMMA_PATTERN = 6  # five layers with a window, then one without
GEMMA_LOCAL_THETA = 10_000.0
GEMMA_27B_LAYERS = 62
# Llama 3's stretching, which these files keep as finished factors (`rope_freqs.weight`) without its settings.
LLAMA3_TRAINED, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The model that the file describes."""
    general = Fields(file.fields, str(file.path))
    architecture = general.text("general.architecture")
    if architecture not in ARCHITECTURES:
        general.refuse(
            "general.architecture",
            f"{shown(architecture)} is not supported; supported are {', '.join(ARCHITECTURES)}",
        )
    if general.integer("split.count", 1, minimum=0) > 1:
        general.refuse(
            "split.count", "says that this is one of several parts; join them with gguf-split --merge"
        )
    own = _own_fields(general, file, architecture)
    embedding = file.entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] > MAX_VOCABULARY:
        raise CheckpointError(
            f"{file.path}: has no token_embd.weight of two dimensions, so it holds no model"
        )
    return _spec(file, own, architecture, embedding.shape[0], general)


def _spec(file: GgufFile, own: Fields, architecture: str, vocab_size: int, general: Fields) -> ModelSpec:
    hidden = own.integer("embedding_length", maximum=MAX_WIDTH)
    heads = own.integer("attention.head_count", maximum=MAX_WIDTH)
    kv_heads = own.integer("attention.head_count_kv", heads, maximum=heads)
    if heads % kv_heads:
        own.refuse("attention.head_count_kv", f"of {kv_heads} does not divide attention.head_count, {heads}")
    head_dim = own.integer("attention.key_length", hidden // heads or None, maximum=MAX_WIDTH)
    if own.integer("attention.value_length", head_dim) != head_dim:
        own.refuse("attention.value_length", f"differs from attention.key_length, {head_dim}; not supported")
    layers = own.integer("block_count", maximum=MAX_LAYERS)
    gemma = architecture == "gemma3"
    windows = _windows(own, layers, gemma=gemma)
    rope = _rope(own, file, architecture, head_dim)
    ropes, layer_ropes = _per_layer(rope, own, windows, gemma=gemma)
    experts = _experts(file, own, architecture, layers)
    biases = [f"blk.0.attn_{part}.bias" in file.entries for part in ("q", "output")]
    width = own.integer(
        "feed_forward_length", experts.intermediate_size if experts else None, maximum=MAX_WIDTH
    )
    return ModelSpec(
        architecture="mixtral"
        if experts and architecture == "llama"
        else NAMES.get(architecture, architecture),
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=longest(rope, own.integer("context_length"), stretched=True),
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
        norm_eps=own.number("attention.layer_norm_rms_epsilon", above=0),
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias=biases[0],
        output_bias=biases[1],
        qk_norm="blk.0.attn_q_norm.weight" in file.entries,
        sandwich_norms=gemma,
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=_gemma_scale(own, hidden, heads, head_dim, layers) if gemma else 0.0,
        tied_embeddings="output.weight" not in file.entries,
        experts=experts,
        bos_token_id=general.optional_integer("tokenizer.ggml.bos_token_id", minimum=0),
        eos_token_ids=_end_tokens(general),
    )


def _own_fields(general: Fields, file: GgufFile, architecture: str) -> Fields:
    """The fields of the architecture, without its name in front."""
    prefix = f"{architecture}."
    values = {
        name.removeprefix(prefix): value for name, value in file.fields.items() if name.startswith(prefix)
    }
    own = Fields(values, f"{general.where}: {architecture}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if own.number(name, 0.0):
            own.refuse(name, "is set, and soft caps are not supported")
    return own


def _windows(own: Fields, layers: int, *, gemma: bool) -> tuple[int | None, ...]:
    window = own.integer("attention.sliding_window", 0, minimum=0)
    if not window:
        return (None,) * layers
    if not gemma:
        return (window,) * layers
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # per layer: whether it has a window
        if len(pattern) != layers:
            own.refuse("attention.sliding_window_pattern", f"must have {layers} entries, not {len(pattern)}")
        return tuple(window if has_window else None for has_window in pattern)
    every = own.integer("attention.sliding_window_pattern", GEMMA_PATTERN)
    return tuple(window if (layer + 1) % every else None for layer in range(layers))


def _per_layer(
    rope: RopeSpec, own: Fields, windows: tuple[int | None, ...], *, gemma: bool
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """Gemma's layers with a window turn by a separate theta and are not stretched."""
    if not gemma:
        return (rope,), (0,) * len(windows)
    theta = own.number("rope.freq_base_swa", GEMMA_LOCAL_THETA, above=0)
    local = RopeSpec(rotary_dim=rope.rotary_dim, theta=theta)
    wanted = [rope if window is None else local for window in windows]
    ropes = tuple(dict.fromkeys(wanted))
    return ropes, tuple(ropes.index(one) for one in wanted)


def _rope(own: Fields, file: GgufFile, architecture: str, head_dim: int) -> RopeSpec:
    default_theta = 1_000_000.0 if architecture == "gemma3" else 10_000.0
    theta = own.number("rope.freq_base", default_theta, above=0)
    rotary_dim = own.integer("rope.dimension_count", head_dim, maximum=head_dim)
    if rotary_dim % 2 or (architecture == "llama" and rotary_dim != head_dim):
        own.refuse("rope.dimension_count", f"of {rotary_dim} is not supported for heads of {head_dim}")
    if any(name.startswith("rope_factors_") for name in file.entries):
        raise CheckpointError(f"{file.path}: has long-context factors (longrope), which are not supported")
    if "rope_freqs.weight" in file.entries:
        return _llama3(own, file, theta, rotary_dim)
    kind = own.text("rope.scaling.type", "none")
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 1.0, above=0), above=0)
    if kind == "none" and not own.has("rope.scale_linear"):
        return RopeSpec(rotary_dim=rotary_dim, theta=theta)
    if kind in ("none", "linear"):
        return RopeSpec(rotary_dim=rotary_dim, theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        own.refuse(
            "rope.scaling.type", f"{shown(kind)} is not supported; supported are none, linear and yarn"
        )
    return RopeSpec(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        trained_positions=own.integer("rope.scaling.original_context_length", own.integer("context_length")),
        beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
        beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
        attention_factor=yarn_attention_factor(factor) * own.number("rope.scaling.attn_factor", 1.0, above=0),
    )


def _llama3(own: Fields, file: GgufFile, theta: float, rotary_dim: int) -> RopeSpec:
    """Settings whose factors are those in the file; a file whose factors come from elsewhere is refused."""
    stored = file.tensor("rope_freqs.weight").to_float32().reshape(-1)
    trained = own.integer("rope.scaling.original_context_length", LLAMA3_TRAINED)
    factor = float(stored.max()) if stored.size else 0.0
    if stored.size == rotary_dim // 2 and factor >= 1 and math.isfinite(factor):
        expected = llama3_factors(theta, rotary_dim, factor, trained)
        if np.allclose(stored, expected, rtol=1e-4):
            return RopeSpec(
                rotary_dim=rotary_dim,
                theta=theta,
                kind="llama3",
                factor=factor,
                trained_positions=trained,
                low_freq_factor=LLAMA3_LOW,
                high_freq_factor=LLAMA3_HIGH,
            )
    raise CheckpointError(
        f"{file.path}: rope_freqs.weight holds factors that are not Llama 3's; not supported"
    )


def llama3_factors(theta: float, rotary_dim: int, factor: float, trained: int) -> np.ndarray:
    """By what Llama 3 divides each frequency."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (trained / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    long = np.where(wavelength > trained / LLAMA3_LOW, factor, between)
    return np.where(wavelength < trained / LLAMA3_HIGH, 1.0, long)


def _gemma_scale(own: Fields, hidden: int, heads: int, head_dim: int, layers: int) -> float:
    """The largest Gemma 3 divides by its width per head; the format has no field for it."""
    if own.has("attention.scale"):
        return own.number("attention.scale", above=0)
    return float((hidden / heads if layers == GEMMA_27B_LAYERS else head_dim) ** -0.5)


def _experts(file: GgufFile, own: Fields, architecture: str, layers: int) -> ExpertsSpec | None:
    count = own.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS // layers)
    if not count:
        return None
    width_name = (
        "expert_feed_forward_length" if own.has("expert_feed_forward_length") else "feed_forward_length"
    )
    return ExpertsSpec(
        num_experts=count,
        per_token=own.integer("expert_used_count", maximum=count),
        intermediate_size=own.integer(width_name, maximum=MAX_WIDTH),
        normalize=own.flag("expert_weights_norm", True),
        layers=tuple(layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.entries),
    )


def _end_tokens(general: Fields) -> tuple[int, ...]:
    """The end of a text, and the end of a turn where the file tells them apart."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [general.optional_integer(name, minimum=0) for name in names]
    return tuple(dict.fromkeys(token for token in found if token is not None))
