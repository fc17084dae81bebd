"""Opening a model on disk, whatever its form: a Hugging Face folder, a GGUF file, or a config with random weights.

Owns `Checkpoint`, what the rest of the engine knows of a model on disk. Opening reads descriptions and headers;
a tensor's bytes come in when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folder import ModelFolder
from paceline.checkpoint.generation import GenerationDefaults, generation_defaults
from paceline.checkpoint.hf_layout import locate_in_folder
from paceline.checkpoint.layout import Piece
from paceline.checkpoint.spec import ModelSpec
from paceline.checkpoint.stored import StoredTensor
from paceline.checkpoint.text_parts import TextParts, text_of_folder

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


class Checkpoint:
    """A model on disk: what it is, its tensors by canonical name, and what text needs. A `TensorSource`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        path: Path,
        kind: str,
        tensors: Mapping[str, Callable[[], StoredTensor]],
        generation: GenerationDefaults,
        text: TextParts,
    ) -> None:
        self.spec = spec
        self.path = path  # the folder or the file
        self.kind = kind  # safetensors, gguf or dummy
        self.generation = generation
        self.text = text
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> StoredTensor:
        return self._tensors[name]()


def open_checkpoint(path: Path | str, *, load_format: str = "auto") -> Checkpoint:
    """The model at `path`, with everything its files claim checked."""
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    return _open_folder(path)


def _open_folder(path: Path) -> Checkpoint:
    folder = ModelFolder(path)
    files = folder.weights()
    pieces = locate_in_folder(folder.spec, files.shapes(), str(path))
    return Checkpoint(
        spec=folder.spec,
        path=path,
        kind="safetensors",
        tensors=_cut_from(files.tensor, pieces),
        generation=generation_defaults(folder.generation),
        text=text_of_folder(folder),
    )


def _cut_from(
    stored: Callable[[str], StoredTensor], pieces: Mapping[str, Piece]
) -> dict[str, Callable[[], StoredTensor]]:
    def cut(name: str, piece: Piece) -> Callable[[], StoredTensor]:
        return lambda: piece.cut(name, stored(piece.source))

    return {name: cut(name, piece) for name, piece in pieces.items()}
