"""Small tokenizers trained on the spot, as folders and as GGUF fields, and the real ones a machine may have."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.text.tokenizer import Tokenizer, byte_characters

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "Grüße aus Köln: über Äpfel, Öl und süße Träume",
    "你好，世界。今天天气很好，我们去公园。",
    "emoji 🙂🙃🎉 family 👨‍👩‍👧 flags 🇩🇪",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
] * 3
CONTROLS = ("<|end|>", "<|start|>", "<s>", "</s>")
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
TOKENIZERS = os.environ.get("PACELINE_TOKENIZERS", "")


def byte_level_backend(vocab_size: int = 330) -> Any:
    """Byte-level merges, small enough that most characters beyond ASCII span several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(byte_characters())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_backend(*, prefix: bool = True) -> Any:
    """Spaces as `▁`, byte tokens for what the vocabulary lacks (all of the emoji), one leading space stripped."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator([text for text in CORPUS if "🙂" not in text], trainer)
    state = json.loads(trained.to_str())["model"]
    names = ["<unk>", *CONTROLS, *bytes_, *sorted(state["vocab"], key=state["vocab"].get)]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in state["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(fallback)
    backend.add_special_tokens(["<unk>", *CONTROLS])
    return backend


def word_backend() -> Any:
    """A decoder that has no table of bytes: WordPiece joins words by spaces."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", *CONTROLS], show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    return backend


BACKENDS = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "sentencepiece, no prefix": lambda: sentencepiece_backend(prefix=False),
    "words": word_backend,
}
BYTE_KINDS = ("byte-level", "sentencepiece", "sentencepiece, no prefix")


@cache
def backend(kind: str) -> Any:
    return BACKENDS[kind]()


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The trained tokenizer, written as a model folder and read back."""
    with TemporaryDirectory() as folder:
        write_folder(Path(folder), backend(kind))
        return Tokenizer.from_folder(folder)


def write_folder(folder: Path, backend: Any, **config: object) -> None:
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def gguf_fields(kind: str, **changes: object) -> dict[str, object]:
    """The fields a converter would write for one of the trained tokenizers."""
    source = backend(kind)
    model = json.loads(source.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    fields: dict[str, object] = {
        "tokens": names,
        "token_type": [_token_type(name) for name in names],
        "bos_token_id": names.index("<s>"),
        "eos_token_id": names.index("</s>"),
    }
    if kind == "byte-level":
        fields |= {"model": "gpt2", "pre": "gpt-2", "merges": [" ".join(merge) for merge in model["merges"]]}
    else:
        ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(model["merges"])))}
        scores = [float(-ranks.get(name, 10_000 + index)) for index, name in enumerate(names)]
        fields |= {
            "model": "llama",
            "scores": scores,
            "unknown_token_id": 0,
            "add_space_prefix": "no" not in kind,
        }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items()}


def _token_type(name: str) -> int:
    if name == "<unk>":
        return 2
    if name in CONTROLS:
        return 3
    return 6 if name.startswith("<0x") else 1


def real_tokenizers() -> list[Path]:
    """Folders with a tokenizer.json below PACELINE_TOKENIZERS."""
    return sorted(file.parent for file in Path(TOKENIZERS).glob("*/tokenizer.json")) if TOKENIZERS else []


needs_real_tokenizers = pytest.mark.skipif(
    not real_tokenizers(), reason="PACELINE_TOKENIZERS names no folder"
)


@cache
def real_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def added_token(text: str) -> Any:
    return AddedToken(text, normalized=False, special=False)
