"""Opening a model on disk, whatever its form: a Hugging Face folder, a GGUF file, or a config with random weights.

Owns `Checkpoint`, what the rest of the engine knows of a model on disk. Opening reads descriptions and headers;
a tensor's bytes come in when it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.pooling import MEAN
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import packaged_model
from paceline.models.files.folder import CONFIG, ModelFolder, TextParts, text_of_folder, text_of_gguf
from paceline.models.files.gguf import GgufFile
from paceline.models.files.gguf_model import spec_from_gguf
from paceline.models.files.layout import Piece, locate_in_folder, locate_in_gguf
from paceline.models.files.pooling import EmbeddingDefaults, embedding_defaults
from paceline.models.files.quantized_folder import QuantizedFiles, read_kv_scales
from paceline.models.files.records import KINDS
from paceline.models.files.sampling_defaults import (
    FALLBACK,
    GenerationDefaults,
    generation_defaults,
    gguf_generation,
)
from paceline.models.files.stored import Entry, StoredTensor, tensor_names
from paceline.models.spec import ModelSpec

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
