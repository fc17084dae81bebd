"""What a tokenizer consists of, however its file spells it: one plain value that both readers fill.

Control tokens (beginning and end of text, role marks, ...) are kept out of reach of ordinary text: inside the
backend they carry a guarded name that no text can spell, so a text that contains `<|im_start|>` is encoded
as those characters. Only `Tokenizer.encode_template` writes guarded names. Nothing here reads files.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# New in every process, so that no text from outside can contain a guarded name.
_SECRET = secrets.token_hex(12)
_BRACKET = "\U0010fffd"

# Vocabularies flag some of their markers as ordinary added tokens; no text has this shape by accident.
_MARKER = re.compile(r"<[|｜][^<>]*[|｜]>")

# Tokens that end an answer, whichever of them a file names as the end of text.
END_OF_TURN = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMarks:
    """What stands around two texts that are read as one."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    has_types: bool = False  # the second text, and what stands behind it, is of the second token type

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerParts:
    """Everything `Tokenizer` needs. Token ids index `tokens`; a hole in the vocabulary is None."""

    backend: Any  # tokenizers.Tokenizer whose control tokens have guarded names
    tokens: tuple[str | None, ...]  # as the file spells them
    decoder: Mapping[str, Any] | None  # description of the decoder, in the notation of tokenizer.json
    special_ids: frozenset[int]  # left out of decoded text on request
    added_ids: frozenset[int]  # added tokens, special or not
    control: Mapping[str, int]  # texts that only a chat template may turn into their token
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()  # put before a text encoded with special tokens
    suffix_ids: tuple[int, ...] = ()
    pair: PairMarks | None = None  # None: the texts stand side by side between prefix and suffix
    # `bos_token`, `eos_token`, ... for a chat template.
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def guarded(token_id: int) -> str:
    """The name a control token has inside the backend."""
    return f"{_BRACKET}{_SECRET}.{token_id}{_BRACKET}"


def is_marker(text: str) -> bool:
    """Whether a token is a marker by its looks: `<|...|>` or `<｜...｜>`."""
    return _MARKER.fullmatch(text) is not None


def unique(ids: list[int | None]) -> tuple[int, ...]:
    """The ids that are there, each once, in order."""
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
