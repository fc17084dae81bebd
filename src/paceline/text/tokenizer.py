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

from paceline.errors import InvalidRequest
from paceline.models.files.open import Checkpoint
from paceline.text.folder_tokenizer import read_folder
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.tokenizer_parts import TokenizerParts, guarded, unique


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

    @property
    def suffix_ids(self) -> Sequence[int]:
        """What `encode` puts behind a text."""
        return self._parts.suffix_ids

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
        try:
            # The batch call is the one that lets other threads run meanwhile.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # what the library says of a text that has no UTF-8
            message = "the text holds half of a surrogate pair; send valid Unicode"
            raise InvalidRequest(message, param=param) from error
        ids: list[int] = encoded.ids
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
