"""Reads a tokenizer from a model folder: tokenizer.json and the files beside it.

Owns what those files mean (added tokens, beginning and end of text, the chat template); encoding and decoding are
elsewhere. The vocabulary is edited before the backend sees it, so that control tokens carry guarded names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InputError
from paceline.text.tokenizer_parts import TokenizerParts, guarded, is_marker, unique

MAX_FILE_BYTES = 256 * 2**20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

Json = dict[str, Any]


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer of a model folder. Raises InputError when a file is missing or makes no sense."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{folder} has no tokenizer.json; a model folder needs one (tokenizer.model is not read)"
        )
    description = _read_json(file)
    config = _read_json(folder / "tokenizer_config.json")
    try:
        return _parts(description, config, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file} is not a tokenizer this version can read: {error}") from error


def _parts(description: Json, config: Json, folder: Path) -> TokenizerParts:
    named = _named_tokens(config)
    added = _added_tokens(description, config)
    ids = {entry["content"]: int(entry["id"]) for entry in added}
    for entry in added:
        entry["special"] = bool(entry["special"] or entry["content"] in named.values())
    special = {entry["content"] for entry in added if entry["special"]}
    control = {text: ids[text] for text in ids if text in special or is_marker(text)}
    tokens = _token_names(description["model"], added)
    special_ids = frozenset(int(entry["id"]) for entry in added if entry["special"])
    lookup = {**{text: index for index, text in enumerate(tokens) if text is not None}, **ids}
    prefix, suffix = _around(description.get("post_processor"), config, lookup, named)
    end = [lookup.get(named.get("eos_token", "")), *_generation_ends(folder)]
    return TokenizerParts(
        backend=_backend(description, added, control),
        tokens=tokens,
        decoder=description.get("decoder"),
        special_ids=special_ids,
        added_ids=frozenset(ids.values()),
        control=control,
        bos_token_id=lookup.get(named.get("bos_token", "")),
        eos_token_ids=unique(end),
        prefix_ids=prefix,
        suffix_ids=suffix,
        template_tokens=named,
        chat_template=_chat_template(config, folder),
    )


def _read_json(file: Path) -> Json:
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB; that is no tokenizer file")
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} must hold a JSON object")
    return value


def _named_tokens(config: Json) -> dict[str, str]:
    """bos_token, eos_token and the others, as text; the file writes them as strings or as objects."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and (name in _NAMED or name.endswith("_token")):
            found[name] = text
    return found


def _added_tokens(description: Json, config: Json) -> list[Json]:
    """The added tokens of tokenizer.json, and those only tokenizer_config.json knows, by id."""
    added = {int(entry["id"]): dict(entry) for entry in description.get("added_tokens", [])}
    for key, entry in config.get("added_tokens_decoder", {}).items():
        if int(key) not in added:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
            added[int(key)] = {**flags, **entry, "id": int(key)}
    return [added[key] for key in sorted(added)]


def _token_names(model: Json, added: list[Json]) -> tuple[str | None, ...]:
    vocab = model["vocab"]
    names: dict[int, str] = {}
    if isinstance(vocab, dict):
        names = {int(index): text for text, index in vocab.items()}
    else:
        names = {index: piece[0] for index, piece in enumerate(vocab)}
    names.update({int(entry["id"]): entry["content"] for entry in added})
    return tuple(names.get(index) for index in range(max(names, default=-1) + 1))


# -- the backend -------------------------------------------------------------------------------------------


def _backend(description: Json, added: list[Json], control: Mapping[str, int]) -> Any:
    """The backend, with every control token under its guarded name and out of reach of the model."""
    guards = {text: guarded(token_id) for text, token_id in control.items()}
    entries = [
        {
            **entry,
            "content": guards[entry["content"]],
            "special": True,
            "normalized": False,
            "single_word": False,
        }
        if entry["content"] in guards
        else entry
        for entry in added
    ]
    edited = {
        **description,
        "added_tokens": entries,
        "model": _guarded_model(description["model"], guards),
        "post_processor": None,  # what goes before and after a text is ours to add
        "truncation": None,
        "padding": None,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(edited, ensure_ascii=False))
    except Exception as error:  # the backend has no specific error type
        raise ValueError(error) from error


def _guarded_model(model: Json, guards: Mapping[str, str]) -> Json:
    changed = dict(model)
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        changed["vocab"] = {guards.get(text, text): index for text, index in vocab.items()}
    else:
        changed["vocab"] = [[guards.get(piece[0], piece[0]), *piece[1:]] for piece in vocab]
    if "merges" in model:
        changed["merges"] = [merge for merge in model["merges"] if not _touches(merge, guards)]
    if model.get("unk_token") in guards:
        changed["unk_token"] = guards[model["unk_token"]]
    return changed


def _touches(merge: str | list[str], guards: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in guards or left in guards or right in guards


# -- beginning and end of text -----------------------------------------------------------------------------


def _around(
    processor: Json | None, config: Json, lookup: Mapping[str, int], named: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a text: as tokenizer.json says, or by the flags of the config where it is silent."""
    before: list[int] = []
    after: list[int] = []
    is_told = False
    for step in (processor or {}).get("processors", [processor] if processor else []):
        if step["type"] == "TemplateProcessing":
            front, back = _template_ids(step)
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            front, back = [int(step["cls"][1])], [int(step["sep"][1])]
        else:
            continue
        before, after, is_told = front + before, after + back, True
    if is_told:
        return tuple(before), tuple(after)
    begin = lookup.get(named.get("bos_token", "")) if config.get("add_bos_token") else None
    end = lookup.get(named.get("eos_token", "")) if config.get("add_eos_token") else None
    return unique([begin]), unique([end])


def _template_ids(step: Json) -> tuple[list[int], list[int]]:
    before: list[int] = []
    after: list[int] = []
    side = before
    for item in step["single"]:
        if "Sequence" in item:
            side = after
        else:
            side.extend(int(token) for token in step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return before, after


def _generation_ends(folder: Path) -> list[int | None]:
    """The end-of-text ids of generation_config.json: an instruct model may name several."""
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    values = ends if isinstance(ends, list) else [ends]
    return [value for value in values if isinstance(value, int)]


def _chat_template(config: Json, folder: Path) -> str | None:
    """The template beside the tokenizer: a separate file first, then the config's (the one called default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
