"""How text is cut before byte-pair merging, by the names GGUF files use (`tokenizer.ggml.pre`).

The patterns are facts about trained vocabularies: a model saw its training text cut exactly so. A name missing here
is refused by the reader rather than guessed, since a wrong cut gives other tokens without any error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Each name: the patterns that cut, one after the other.
_CUTS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SAME_AS = {
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "jina-v2-code": "gpt-2",
    "gpt2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "stablelm2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
}
# Vocabularies in which a whole piece that is a token is never merged from parts.
WHOLE_PIECES = frozenset(("llama-bpe", "tekken"))
# Models that begin a text with their beginning-of-text token unless the file says otherwise.
BEGINS_WITH_BOS = frozenset(("llama-bpe", "tekken"))


def known_names() -> Iterable[str]:
    return sorted((*_CUTS, *_SAME_AS))


def canonical(name: str) -> str | None:
    """The entry a name stands for, or None where it is not known."""
    entry = _SAME_AS.get(name, name)
    return entry if entry in _CUTS else None


def pre_tokenizer(entry: str) -> Any:
    """The cutting step of a byte-level vocabulary, for a name that `canonical` gave."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _CUTS[entry]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
