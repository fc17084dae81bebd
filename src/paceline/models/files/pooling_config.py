"""What a model's files say about the vector of a text: the settings that sentence-transformers writes.

`modules.json` lists the parts, `1_Pooling/config.json` says which states are pooled, and
`config_sentence_transformers.json` has prompts by name. Parts that we do not compute are refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.parameters import CHOICE, CLS, LAST, MEAN
from paceline.models.files.config_fields import CheckpointError, Fields, parse_json, read_json, shown
from paceline.models.files.folder import ModelFolder, is_own_blob

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
TOKENIZER, NO_LENGTH = "tokenizer_config.json", 10**9
MAX_MODULES_BYTES = 2**20
_KINDS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
}
# What newer files say in one field.
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST, "last": LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingDefaults:
    """How texts become vectors unless a request says otherwise."""

    kind: str
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)  # text put before an input, by name
    default_prompt: str = ""  # the name of one of them, or nothing
    token_ids: tuple[int, ...] = ()  # of choice: the token that says no, and the one that says yes
    width: int = 0  # numbers of a vector
    # Tokens that the model was trained with; longer inputs are cut there if asked.
    max_length: int | None = None


def embedding_defaults(folder: ModelFolder) -> EmbeddingDefaults | None:
    """None: the files say nothing of vectors."""
    path = folder.file(MODULES)
    if path is None:
        return None
    kind, normalize = None, False
    token_ids: tuple[int, ...] = ()
    for entry in _modules(path):
        name = entry.text("type").rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(_part(folder, entry.text("path")))
        elif name == "LogitScore":
            part = _part(folder, entry.text("path"))
            kind, token_ids = CHOICE, (_token(part, "false_token_id"), _token(part, "true_token_id"))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CheckpointError(
                f"{path}: has a part {shown(name)}, which is not computed here; use a model of Transformer, "
                "Pooling and Normalize"
            )
    if kind is None:
        raise CheckpointError(f"{path}: has no Pooling, which says what the vector of a text is")
    prompts, default = _prompts(folder)
    return EmbeddingDefaults(
        kind=kind,
        normalize=normalize,
        prompts=prompts,
        default_prompt=default,
        token_ids=token_ids,
        max_length=_longest(folder),
    )


def _longest(folder: ModelFolder) -> int | None:
    """Newer files have it only with the tokenizer, where a number without sense stands for none."""
    length = folder.json(LENGTH)
    if length is not None:
        own = Fields(length, str(folder.path / LENGTH)).optional_integer("max_seq_length")
        if own is not None:
            return own
    most = (folder.json(TOKENIZER) or {}).get("model_max_length")
    return most if isinstance(most, int) and 0 < most < NO_LENGTH else None


def _modules(path: Path) -> list[Fields]:
    if path.stat().st_size > MAX_MODULES_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_MODULES_BYTES} bytes")
    entries = parse_json(b'{"parts": %b}' % path.read_bytes(), str(path)).get("parts")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{path}: is not a list of parts")
    return [Fields(entry, f"{path}: part {index}") for index, entry in enumerate(entries)]


def _part(folder: ModelFolder, part: str) -> Fields:
    """The settings of one of the parts."""
    where = folder.path / part / "config.json"
    if Path(part).name != part or not where.is_file():
        raise CheckpointError(f"{where}: there is no such file; download the model again")
    home, real = folder.path.resolve(), where.resolve()
    if real.parent != home / part and not is_own_blob(real, home):
        raise CheckpointError(f"{where}: is a link that leads out of the folder; copy the file into it")
    return Fields(read_json(where), str(where))


def _token(fields: Fields, name: str) -> int:
    return fields.integer(name, minimum=0)


def _kind(fields: Fields) -> str:
    if fields.has("pooling_mode"):
        named = fields.get("pooling_mode")
        names = [named] if isinstance(named, str) else list(fields.sequence("pooling_mode"))
        chosen = [_NAMES.get(str(name), "") for name in names]
    else:
        modes = [name for name in fields.names() if name.startswith("pooling_mode_") and fields.flag(name)]
        chosen = [_KINDS.get(name, "") for name in modes]
    if len(chosen) != 1 or not chosen[0]:
        raise CheckpointError(f"{fields.where}: pooling must be one of {', '.join(_KINDS)}")
    return chosen[0]


def _prompts(folder: ModelFolder) -> tuple[dict[str, str], str]:
    values = folder.json(PROMPTS)
    if values is None:
        return {}, ""
    where = str(folder.path / PROMPTS)
    fields, found = Fields(values, where), values.get("prompts") or {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(f"{where}: prompts must be texts by name")
    default = "" if values.get("default_prompt_name") is None else fields.text("default_prompt_name")
    if default and default not in found:
        raise CheckpointError(
            f"{where}: default_prompt_name names {shown(default)}, which is not among its prompts"
        )
    return dict(found), default
