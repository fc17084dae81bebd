"""Words that must not be produced, as the token sequences that would spell them. Follows vLLM's rule."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InvalidRequest
from paceline.text.tokenizer import Tokenizer

MAX_WORD_CHARS = 256


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Id sequences for each word: as it begins a text, and as it follows a space where that is another token.

    The second counts only where the space changes the first token and not the number of tokens; otherwise it is
    the same word behind a space token, which the first sequence forbids already.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip()
        if not text or len(word) > MAX_WORD_CHARS:
            message = f"a bad word has 1 to {MAX_WORD_CHARS} characters, not only spaces"
            raise InvalidRequest(message, param="bad_words")
        plain = tuple(tokenizer.encode(text, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
        if plain:
            found.append(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)
