"""A Hugging Face folder: which files it has, that they lie inside it, and the model they hold.

Reads descriptions and headers only. Pickled weights are never opened: they can run code. A link may leave the
folder only the way the hub's cache lays its files out, from a snapshot to the blobs of the same repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.models.files.config_fields import CheckpointError, Fields, read_json, shown
from paceline.models.files.hf_config import spec_from_config
from paceline.models.files.quantized_folder import QuantizedFiles, Scheme, read_scheme
from paceline.models.files.safetensors import SafetensorsFile, SafetensorsFiles
from paceline.models.spec import ModelSpec

CONFIG = "config.json"
GENERATION = "generation_config.json"
PROCESSOR, PROCESSORS = "preprocessor_config.json", "processor_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class ModelFolder:
    """One folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = self.json(CONFIG)
        if config is None:
            raise CheckpointError(
                f"{path}: has no {CONFIG}; give the folder of a Hugging Face model or a .gguf file"
            )
        self.config: Mapping[str, object] = config
        generation = self.json(GENERATION)
        self.generation = None if generation is None else Fields(generation, str(path / GENERATION))

    @cached_property
    def spec(self) -> ModelSpec:
        """What its config.json says."""
        return spec_from_config(self.config, str(self.path / CONFIG), self.generation, self._processor())

    def _processor(self) -> Fields | None:
        """How pictures are prepared: a file, or a part of another."""
        own, of_all = self.json(PROCESSOR), self.json(PROCESSORS)
        if own is not None:
            return Fields(own, str(self.path / PROCESSOR))
        return (
            None if of_all is None else Fields(of_all, str(self.path / PROCESSORS)).group("image_processor")
        )

    def file(self, name: str) -> Path | None:
        """The file of that name, or None where there is none; refuses links that lead out of the folder."""
        return file_in(self.path, name)

    def json(self, name: str) -> dict[str, object] | None:
        path = self.file(name)
        return None if path is None else read_json(path)

    @cached_property
    def scheme(self) -> Scheme | None:
        """How its config.json says that weights are quantised."""
        return read_scheme(self.config, str(self.path / CONFIG))

    def files(self) -> SafetensorsFile | SafetensorsFiles | QuantizedFiles:
        """Its tensors, quantised matrices as one each."""
        scheme = self.scheme  # before anything is opened
        return self.weights() if scheme is None else QuantizedFiles(self.weights(), scheme)

    def weights(self) -> SafetensorsFile | SafetensorsFiles:
        single = self.file(WEIGHTS)
        if single is not None:
            return SafetensorsFile(single)
        index = self.json(INDEX)
        if index is not None:
            return SafetensorsFiles(self._weight_map(index), str(self.path / INDEX))
        pickled = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLED)
        if pickled:
            raise CheckpointError(
                f"{self.path}: holds only pickled weights ({pickled[0]}), which can run code and are never opened; "
                "convert the model to safetensors (save_pretrained in transformers does)"
            )
        raise CheckpointError(f"{self.path}: has neither {WEIGHTS} nor {INDEX}; download the model again")

    def _weight_map(self, index: Mapping[str, object]) -> dict[str, Path]:
        where = self.path / INDEX
        named = index.get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{where}: weight_map must say which file each tensor is in")
        files = {name: self._shard(name, where) for name in dict.fromkeys(map(_text, named.values()))}
        return {tensor: files[_text(name)] for tensor, name in named.items()}

    def _shard(self, name: str, where: Path) -> Path:
        if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{where}: weight_map names {shown(name)}, not a .safetensors file in the folder"
            )
        path = self.file(name)
        if path is None:
            raise CheckpointError(
                f"{where}: weight_map names {name}, which is not there; download the model again"
            )
        return path


def file_in(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, or None where there is none; refuses links that lead out of the folder."""
    path, home = folder / name, folder.resolve()
    if not path.is_file():
        return None
    real = path.resolve()
    if real.parent != home and not is_own_blob(real, home):
        raise CheckpointError(f"{path}: is a link that leads out of the folder; copy the file into it")
    return path


def is_own_blob(real: Path, home: Path) -> bool:
    """Whether a snapshot's file is a blob of its repository, or one that the cache's repositories share."""
    snapshots, repository = home.parent, home.parent.parent
    if snapshots.name != "snapshots" or not repository.name.startswith("models--"):
        return False
    return real.parent == repository / "blobs" or real.parent.parent == repository.parent / "blobs"


def _text(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


# What turning text into tokens needs of a checkpoint: where the vocabulary is, and the chat templates.
#
# Only finds and hands over; what a template or a vocabulary means is for the text part.


TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
DEFAULT = "default"
MAX_TEMPLATE_BYTES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """One of `tokenizer_json` and `gguf_fields` is there, unless the checkpoint has no tokenizer."""

    tokenizer_json: Path | None = None
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)
    gguf_fields: Mapping[str, object] | None = None
    # By name; most models have only "default".
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None  # None: the file does not say
    add_eos: bool | None = None

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get(DEFAULT)


def text_of_folder(folder: ModelFolder) -> TextParts:
    config = folder.json(TOKENIZER_CONFIG) or {}
    fields = Fields(config, str(folder.path / TOKENIZER_CONFIG))
    return TextParts(
        tokenizer_json=folder.file(TOKENIZER),
        tokenizer_config=config,
        chat_templates=_templates_in(fields) | _template_files(folder),
        add_bos=fields.flag("add_bos_token") if fields.has("add_bos_token") else None,
        add_eos=fields.flag("add_eos_token") if fields.has("add_eos_token") else None,
    )


def text_of_gguf(values: Mapping[str, object], where: str) -> TextParts:
    fields = Fields(values, where)
    prefix = "tokenizer.chat_template"
    templates = {
        DEFAULT if name == prefix else name.removeprefix(f"{prefix}."): fields.text(name)
        for name in values
        if name == prefix or (name.startswith(f"{prefix}.") and isinstance(values[name], str))
    }
    flags = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token")
    add_bos, add_eos = (fields.flag(name) if fields.has(name) else None for name in flags)
    return TextParts(gguf_fields=values, chat_templates=templates, add_bos=add_bos, add_eos=add_eos)


def _templates_in(fields: Fields) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: one text, or a list of named ones."""
    value = fields.get("chat_template")
    if value is None:
        return {}
    if not isinstance(value, list):
        return {DEFAULT: fields.text("chat_template")}
    templates = {}
    for item in value:
        if not isinstance(item, dict):
            fields.refuse("chat_template", "must be a text or a list of named templates")
        entry = Fields(item, f"{fields.where}: chat_template")
        templates[entry.text("name")] = entry.text("template")
    return templates


def _template_files(folder: ModelFolder) -> dict[str, str]:
    """A separate file wins over what tokenizer_config.json says."""
    for name in TEMPLATE_FILES:
        path = folder.file(name)
        if path is None:
            continue
        if path.suffix == ".json":
            return _templates_in(Fields(read_json(path), str(path)))
        try:
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise CheckpointError(f"{path}: is larger than {MAX_TEMPLATE_BYTES} bytes")
            return {DEFAULT: path.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return {}
