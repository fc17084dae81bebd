"""Builds a tokenizer from the `tokenizer.ggml.*` fields of a GGUF file.

Two kinds of vocabulary: `gpt2` (byte-level merges as listed) and `llama` (SentencePiece with scores, where the
merge order is the order of the scores and unknown characters fall back to byte tokens). The file's own flags say
whether a text begins with BOS and ends with EOS. Reading the file is not done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from paceline.errors import InputError
from paceline.text.tokenizer_parts import END_OF_TURN, TokenizerParts, guarded, is_marker, unique

# How text is cut before byte-pair merging, by the names GGUF files use (`tokenizer.ggml.pre`).
#
# The patterns are facts about trained vocabularies: a model saw its training text cut exactly so. A name missing
# here is refused by the reader rather than guessed, since a wrong cut gives other tokens without any error.


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
    **dict.fromkeys(("phi-2", "olmo", "mpt", "jina-v2-code", "gpt2"), "gpt-2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), "llama-bpe"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
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


Value = TypeVar("Value", str, bool)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_gguf(fields: Mapping[str, object]) -> TokenizerParts:
    """The tokenizer a GGUF file carries. Raises InputError when it has none that this version knows."""
    model = _field(fields, "model", str, "")
    if model not in ("gpt2", "llama"):
        raise InputError(
            f"the GGUF file has a tokenizer of kind {model!r}; this version reads gpt2 and llama"
        )
    tokens = _strings(fields, "tokens")
    types = _token_types(fields, tokens)
    control = {
        text: index
        for index, text in enumerate(tokens)
        if types[index] in (_CONTROL, _UNKNOWN) or (types[index] == _USER_DEFINED and is_marker(text))
    }
    add_bos = model == "llama"
    if model == "gpt2":
        entry = _pre_tokenizer_name(fields)
        add_bos = entry in BEGINS_WITH_BOS
        backend = _byte_level(fields, tokens, control, entry)
    else:
        backend = _sentencepiece(fields, tokens, types, control)
    _add_tokens(backend, tokens, types, control)
    ids = {
        name: _token_id(fields, name, len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    ends = [ids["eos"], ids["eot"], ids["eom"], *(control[text] for text in control if text in END_OF_TURN)]
    template = fields.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=backend,
        tokens=tuple(tokens),
        decoder=_decoder(model, fields),
        special_ids=frozenset(index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)),
        added_ids=frozenset(
            index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        ),
        control=control,
        bos_token_id=ids["bos"],
        eos_token_ids=unique(ends),
        prefix_ids=unique([ids["bos"]]) if _field(fields, "add_bos_token", bool, add_bos) else (),
        suffix_ids=unique([ids["eos"]]) if _field(fields, "add_eos_token", bool, False) else (),
        template_tokens=_template_tokens(ids, tokens),
        chat_template=template if isinstance(template, str) else None,
    )


def _template_tokens(ids: Mapping[str, int | None], tokens: Sequence[str]) -> dict[str, str]:
    found = {name: ids[key] for key, name in _NAMED.items()}
    return {name: tokens[index] for name, index in found.items() if index is not None}


# -- the backend -------------------------------------------------------------------------------------------


def _pre_tokenizer_name(fields: Mapping[str, object]) -> str:
    name = _field(fields, "pre", str, "default")
    entry = canonical(name)
    if entry is None:
        known = ", ".join(known_names())
        raise InputError(
            f"the GGUF file cuts text as {name!r}, which this version does not know (it knows {known})"
        )
    return entry


def _byte_level(
    fields: Mapping[str, object], tokens: Sequence[str], control: Mapping[str, int], entry: str
) -> Any:
    pairs = [merge.partition(" ")[::2] for merge in _strings(fields, "merges")]
    merges = [
        (left, right) for left, right in pairs if control.keys().isdisjoint((left, right, left + right))
    ]
    backend = _build(
        vocab=_guarded_vocab(tokens, control),
        merges=merges,
        ignore_merges=entry in WHOLE_PIECES,
    )
    backend.pre_tokenizer = pre_tokenizer(entry)
    return backend


def _sentencepiece(
    fields: Mapping[str, object], tokens: Sequence[str], types: Sequence[int], control: Mapping[str, int]
) -> Any:
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):  # type: ignore[arg-type]
        raise InputError("the GGUF file has no score for each of its tokens; convert the model again")
    pieces = {text: index for index, text in enumerate(tokens) if types[index] in (_NORMAL, _USER_DEFINED)}
    unknown = _token_id(fields, "unknown", len(tokens))
    backend = _build(
        vocab=_guarded_vocab(tokens, control),
        merges=_merges_by_score(pieces, scores),  # type: ignore[arg-type]
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else _backend_name(unknown, tokens, control),
    )
    escape: list[Any] = [normalizers.Replace(" ", "▁")]
    if _field(fields, "add_space_prefix", bool, True):
        escape.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(escape)
    return backend


def _merges_by_score(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first; ties in the order of the vocabulary."""
    merges: list[tuple[str, str]] = []
    for text in sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text])):
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in pieces]
        pairs = [pair for pair in cuts if pair[1] in pieces]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges.extend(pairs)
    return merges


def _build(*, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), **options))
    except Exception as error:  # the backend has no specific error type
        raise InputError(f"the GGUF file's vocabulary does not fit together: {error}") from error


def _guarded_vocab(tokens: Sequence[str], control: Mapping[str, int]) -> dict[str, int]:
    return {_backend_name(index, tokens, control): index for index in range(len(tokens))}


def _backend_name(index: int, tokens: Sequence[str], control: Mapping[str, int]) -> str:
    return guarded(index) if tokens[index] in control else tokens[index]


def _add_tokens(
    backend: Any, tokens: Sequence[str], types: Sequence[int], control: Mapping[str, int]
) -> None:
    plain = [
        text for index, text in enumerate(tokens) if types[index] == _USER_DEFINED and text not in control
    ]
    backend.add_special_tokens([AddedToken(guarded(index), normalized=False) for index in control.values()])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain if text])


def _decoder(model: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """The decoder in the notation of tokenizer.json."""
    if model == "gpt2":
        return {"type": "ByteLevel"}
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if _field(fields, "add_space_prefix", bool, True):
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


# -- fields ------------------------------------------------------------------------------------------------


def _field(fields: Mapping[str, object], name: str, kind: type[Value], default: Value) -> Value:
    value = fields.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, kind):
        raise InputError(
            f"tokenizer.ggml.{name} of the GGUF file must be of type {kind.__name__}, not {value!r}"
        )
    return value


def _strings(fields: Mapping[str, object], name: str) -> list[str]:
    value = fields.get(f"tokenizer.ggml.{name}")
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(text, str) for text in value)
    ):
        raise InputError(f"the GGUF file has no tokenizer.ggml.{name}; it holds no usable tokenizer")
    return list(value)


def _token_types(fields: Mapping[str, object], tokens: Sequence[str]) -> list[int]:
    value = fields.get("tokenizer.ggml.token_type")
    if value is None:
        return [_NORMAL] * len(tokens)
    types = [int(kind) for kind in value]  # type: ignore[attr-defined]
    if len(types) != len(tokens):
        raise InputError(f"the GGUF file has {len(types)} token types for {len(tokens)} tokens")
    return types


def _token_id(fields: Mapping[str, object], name: str, count: int) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise InputError(
            f"tokenizer.ggml.{name}_token_id is {value!r}, but the vocabulary has {count} tokens"
        )
    return value
