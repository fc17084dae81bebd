"""Which bytes each token stands for, for the two decoders nearly all language models use.

Byte-level vocabularies spell every byte as a printable character; SentencePiece-like ones write spaces as `▁` and
unknown characters as byte tokens `<0xE4>`. Both become one list of byte strings, so that text is the UTF-8 reading
of concatenated bytes. Any other decoder has no table and is left to the backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
