"""What turning text into tokens needs of a checkpoint: where the vocabulary is, and the chat templates.

Only finds and hands over; what a template or a vocabulary means is for the text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.fields import Fields, read_json
from paceline.checkpoint.folder import ModelFolder

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
    chat_templates: Mapping[str, str] = field(
        default_factory=dict
    )  # by name; most models have only "default"
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
    """A file of its own wins over what tokenizer_config.json says."""
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
