"""Text to token ids and back, for one model.

`encode` is for text from outside: it never gives a control token, whatever the text spells. `encode_template` is for
a rendered chat template, in which exactly the marked places are control tokens. Wraps the `tokenizers` library,
which drops Python's lock while it works; knows nothing of files, requests or sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InvalidRequest
from paceline.models.files.open import Checkpoint
from paceline.text.byte_table import ByteTable, byte_table
from paceline.text.folder_tokenizer import read_folder
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.parts import TokenizerParts, guarded, unique


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
    def from_gguf(cls, fields: Mapping[str, object], *, model_vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer inside a GGUF file, from the file's fields."""
        return cls(read_gguf(fields), model_vocab_size=model_vocab_size)

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
        self, text: str, *, add_special_tokens: bool = True, max_chars: int | None = None
    ) -> list[int]:
        """The ids of a text from outside. It is refused before any work when longer than `max_chars`."""
        ids = self._encode(text, max_chars)
        if add_special_tokens:
            return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids]
        return ids

    def encode_template(self, prompt: RenderedPrompt, *, max_chars: int | None = None) -> list[int]:
        """The ids of a rendered template: one pass over the whole text, control tokens where it says so."""
        pieces: list[str] = []
        done = 0
        for begin, end in prompt.controls:
            pieces.append(prompt.text[done:begin])
            pieces.append(guarded(self.control_tokens[prompt.text[begin:end]]))
            done = end
        pieces.append(prompt.text[done:])
        _check_length(prompt.text, max_chars)
        return self._encode("".join(pieces), None)

    def count(self, text: str, *, add_special_tokens: bool = True, max_chars: int | None = None) -> int:
        """How many tokens a text has."""
        return len(self.encode(text, add_special_tokens=add_special_tokens, max_chars=max_chars))

    def _encode(self, text: str, max_chars: int | None) -> list[int]:
        _check_length(text, max_chars)
        try:
            # The batch call is the one that lets other threads run meanwhile.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # what the library says of a text that has no UTF-8
            message = "the text holds half of a surrogate pair; send valid Unicode"
            raise InvalidRequest(message, param="prompt") from error
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


def _check_length(text: str, max_chars: int | None) -> None:
    if max_chars is not None and len(text) > max_chars:
        message = f"the prompt has {len(text)} characters; at most {max_chars} are accepted here"
        raise InvalidRequest(message, param="prompt")
