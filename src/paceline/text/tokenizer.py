"""Text to token ids and back, for one model.

`encode` is for text from outside: it never gives a control token, whatever the text spells. `encode_template` is for
a rendered chat template, in which exactly the marked places are control tokens. Wraps the `tokenizers` library,
which drops Python's lock while it works; knows nothing of files, requests or sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InputError, InvalidRequest
from paceline.models.files.open import Checkpoint
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.tokenizer_parts import PairMarks, TokenizerParts, guarded, is_marker, unique


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A rendered chat template, and the places in it where the template itself wrote a control token."""

    text: str
    controls: tuple[tuple[int, int], ...] = ()  # (begin, end), ascending, without overlap


class Tokenizer:
    """The tokenizer of one model. Ids up to `vocab_size` are valid; those without a token decode to nothing."""

    def __init__(
        self,
        parts: TokenizerParts,
        *,
        model_vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._parts = parts
        self._backend = parts.backend
        # Models round their vocabulary up: the ids on top exist for the model only.
        holes = max(0, (model_vocab_size or 0) - len(parts.tokens))
        self._tokens: tuple[str | None, ...] = (*parts.tokens, *((None,) * holes))
        self.vocab_size = len(self._tokens)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = unique([*parts.eos_token_ids, *eos_token_ids])
        self.special_ids = parts.special_ids
        self.added_ids = parts.added_ids
        self.control_tokens: Mapping[str, int] = parts.control
        self.template_tokens: Mapping[str, str] = parts.template_tokens
        self.chat_template = parts.chat_template

    @classmethod
    def from_folder(cls, path: Path | str, *, model_vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer of a model folder (tokenizer.json and the files beside it)."""
        return cls(read_folder(Path(path)), model_vocab_size=model_vocab_size)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of an open checkpoint, with the ends of text its model knows of."""
        text, spec = checkpoint.text, checkpoint.spec
        if text.gguf_fields is not None:
            parts = read_gguf(text.gguf_fields)
        else:
            folder = checkpoint.path if text.tokenizer_json is None else text.tokenizer_json.parent
            parts = read_folder(folder)
        return cls(parts, model_vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)

    # -- text to ids ---------------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_chars: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """The ids of a text from outside. It is refused before any work when longer than `max_chars`."""
        if max_chars is not None and len(text) > max_chars:
            message = f"the {param} has {len(text)} characters; at most {max_chars} are accepted here"
            raise InvalidRequest(message, param=param)
        ids = self._encode(text, param)
        if add_special_tokens:
            return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids]
        return ids

    def encode_many(self, texts: Sequence[str], param: str = "prompt") -> list[list[int]]:
        """The ids of texts from outside, without those around a text."""
        try:
            # The batch call is the one that lets other threads run meanwhile.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:  # what the library says of a text that has no UTF-8
            message = "the text holds half of a surrogate pair; send valid Unicode"
            raise InvalidRequest(message, param=param) from error
        return [encoded.ids for encoded in found]

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        """What `encode` puts before and behind a text."""
        return self._parts.prefix_ids, self._parts.suffix_ids

    @property
    def pair_marks(self) -> PairMarks:
        """What stands around two texts that are read as one."""
        before, behind = self.around
        return self._parts.pair or PairMarks(before=tuple(before), behind=tuple(behind))

    def encode_template(self, prompt: RenderedPrompt) -> list[int]:
        """The ids of a rendered template: one pass over the whole text, control tokens where it says so."""
        pieces: list[str] = []
        done = 0
        for begin, end in prompt.controls:
            pieces.append(prompt.text[done:begin])
            pieces.append(guarded(self.control_tokens[prompt.text[begin:end]]))
            done = end
        pieces.append(prompt.text[done:])
        return self._encode("".join(pieces), "messages")

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """How many tokens a text has."""
        return len(self.encode(text, add_special_tokens=add_special_tokens))

    def _encode(self, text: str, param: str) -> list[int]:
        (ids,) = self.encode_many([text], param)
        return ids

    # -- ids to text ---------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become replacement characters."""
        self.check_ids(ids)
        shown = [index for index in ids if not (skip_special_tokens and index in self.special_ids)]
        table = self.table
        if table is None:
            return self.decode_tokens([self._tokens[index] for index in shown])
        data = b"".join([table.bytes_of[index] for index in shown])
        return data[table.strips_space and data.startswith(b" ") :].decode(errors="replace")

    def decode_tokens(self, tokens: Sequence[str | None]) -> str:
        """The text of tokens by the model's own decoder, for vocabularies that have no table of bytes."""
        present = [token for token in tokens if token is not None]
        if self._decoder is None:
            return " ".join(present)
        text: str = self._decoder.decode(present)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special tokens are their own text."""
        self.check_ids((token_id,))
        if self.table is not None:
            return self.table.bytes_of[token_id]
        return self.decode_tokens([self._tokens[token_id]]).encode()

    def token_text(self, token_id: int) -> str:
        """One token as readable text, for logprobs."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_name(self, token_id: int) -> str | None:
        """How the vocabulary spells a token; None for an id without one."""
        self.check_ids((token_id,))
        return self._tokens[token_id]

    def check_ids(self, ids: Iterable[int], *, param: str = "prompt") -> None:
        """Refuse anything that is not an id of this vocabulary."""
        limit = self.vocab_size
        for index in ids:
            if type(index) is not int or not 0 <= index < limit:
                message = f"token id {index!r} is not a whole number in [0, {limit})"
                raise InvalidRequest(message, param=param)

    @cached_property
    def table(self) -> ByteTable | None:
        """Bytes of every token, or None where the decoder is not one of bytes."""
        return byte_table(self._tokens, self._parts.decoder)

    @cached_property
    def _decoder(self) -> Any:
        """The model's own decoder, rebuilt from its description (None: tokens are joined by spaces)."""
        if self._parts.decoder is None:
            return None
        shell = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
        shell["decoder"] = self._parts.decoder
        return tokenizers.Tokenizer.from_str(json.dumps(shell)).decoder


# Which bytes each token stands for, for the two decoders nearly all language models use.
#
# Byte-level vocabularies spell every byte as a printable character; SentencePiece-like ones write spaces as `▁` and
# unknown characters as byte tokens `<0xE4>`. Both become one list of byte strings, so that text is the UTF-8 reading
# of concatenated bytes. Any other decoder has no table and is left to the backend.


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteTable:
    """`bytes_of[id]` is the token's bytes. `strips_space`: a text loses one leading space when it is decoded."""

    bytes_of: tuple[bytes, ...]
    strips_space: bool


def byte_table(tokens: Sequence[str | None], decoder: Mapping[str, Any] | None) -> ByteTable | None:
    """The table for a decoder described as in tokenizer.json, or None where bytes per token do not describe it."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteTable(bytes_of=tuple(_byte_level(tokens)), strips_space=False)
    if not _is_sentencepiece(steps, kinds):
        return None
    spaces = "Replace" in kinds
    table = _sentencepiece(tokens, spaces=spaces, byte_tokens="ByteFallback" in kinds)
    return ByteTable(bytes_of=tuple(table), strips_space="Strip" in kinds)


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return characters


def _byte_level(tokens: Sequence[str | None]) -> Iterable[bytes]:
    values = byte_characters()
    for token in tokens:
        try:
            yield bytes([values[character] for character in token or ""])
        except KeyError:  # an added token with other characters stands for itself
            yield (token or "").encode()


def _sentencepiece(tokens: Sequence[str | None], *, spaces: bool, byte_tokens: bool) -> Iterable[bytes]:
    for token in tokens:
        text = token or ""
        byte = _BYTE_TOKEN.fullmatch(text) if byte_tokens else None
        if byte is not None:
            yield bytes([int(byte[1], 16)])
        else:
            yield (text.replace(_SPACE_MARK, " ") if spaces else text).encode()


def _is_sentencepiece(steps: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> bool:
    """Replace, ByteFallback, Fuse and, last, Strip of one leading space: any of them, in this order."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if not kinds or kinds != [kind for kind in order if kind in kinds] or "Fuse" not in kinds:
        return False
    for step in steps:
        is_replace, is_strip = step["type"] == "Replace", step["type"] == "Strip"
        if is_replace and (step["pattern"] != {"String": _SPACE_MARK} or step["content"] != " "):
            return False
        if is_strip and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            return False
    return True


# Reads a tokenizer from a model folder: tokenizer.json and the files beside it.
#
# Owns what those files mean (added tokens, beginning and end of text, the chat template); encoding and decoding are
# elsewhere. The vocabulary is edited before the backend sees it, so that control tokens carry guarded names.


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
    prefix, suffix, pair = _around(description.get("post_processor"), config, lookup, named)
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
        pair=pair,
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
) -> tuple[tuple[int, ...], tuple[int, ...], PairMarks | None]:
    """The ids before and after a text, and around two: as tokenizer.json says, or by the flags of the config where it
    is silent."""
    before: list[int] = []
    after: list[int] = []
    pair: PairMarks | None = None
    is_told = False
    for step in (processor or {}).get("processors", [processor] if processor else []):
        if step["type"] == "TemplateProcessing":
            front, back = _template_ids(step, "single")
            pair = _pair_template(step)
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            front, back = [int(step["cls"][1])], [int(step["sep"][1])]
            is_bert = step["type"] == "BertProcessing"
            between = tuple(back) if is_bert else (*back, *back)
            pair = PairMarks(before=tuple(front), between=between, behind=tuple(back), has_types=is_bert)
        else:
            continue
        before, after, is_told = front + before, after + back, True
    if is_told:
        return tuple(before), tuple(after), pair
    begin = lookup.get(named.get("bos_token", "")) if config.get("add_bos_token") else None
    end = lookup.get(named.get("eos_token", "")) if config.get("add_eos_token") else None
    return unique([begin]), unique([end]), None


def _pair_template(step: Json) -> PairMarks | None:
    types = [item["Sequence"]["type_id"] for item in step.get("pair", ()) if "Sequence" in item]
    if len(types) != 2:
        return None
    before, between, behind = _template_ids(step, "pair")
    return PairMarks(
        before=tuple(before), between=tuple(between), behind=tuple(behind), has_types=types == [0, 1]
    )


def _template_ids(step: Json, name: str) -> list[list[int]]:
    """The ids before each sequence of a template, and behind the last."""
    sides: list[list[int]] = [[]]
    for item in step[name]:
        if "Sequence" in item:
            sides.append([])
        else:
            sides[-1] += (int(token) for token in step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return sides


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
