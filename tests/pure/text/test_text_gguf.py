"""Tokenizers of GGUF files and of checkpoints: real vocabularies written as a converter would write them."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Backend

from paceline.errors import InputError
from paceline.models.files.folder import TextParts
from paceline.models.files.open import Checkpoint
from paceline.text.chat_template import ChatTemplate
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.tokenizer import Tokenizer
from tests.pure.text.text_helpers import (
    CHATML,
    backend,
    gguf_fields,
    real_tokenizers,
    tokenizer,
    write_folder,
)

# Which cut the vocabulary of a folder was trained with, by a part of the folder's name.
CUTS = {"llama3": "llama-bpe", "qwen": "qwen2", "deepseek": "deepseek-v3", "smollm": "smollm"}
SAMPLES = [
    "  two  spaces   three\n\n\nnew\t\ttabs \r\n\r\n  x",
    "你好，世界 🙂 👨‍👩‍👧 naïve １２３ ½ ² नमस्ते دنیا ひらがな カタカナ",
    "def f(x):\n    return x**2 # 12345 678 (a.b,c!?) --- ***",
    "I'll they've DON'T 's 'S <b>bold</b>",
]


def known_cut(folder: Path) -> str | None:
    return next((cut for part, cut in CUTS.items() if part in folder.name), None)


@pytest.mark.parametrize(
    "folder", [each for each in real_tokenizers() if known_cut(each)], ids=lambda each: each.name
)
def test_real_byte_level_vocabularies_give_the_same_ids_from_gguf_fields(folder: Path) -> None:
    made = Tokenizer(read_gguf(fields_of(folder)))
    reference = Backend.from_file(str(folder / "tokenizer.json"))
    for text in SAMPLES:
        ids = made.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert made.decode(ids) == text


def fields_of(folder: Path) -> dict[str, object]:
    """A byte-level tokenizer.json as GGUF fields."""
    description: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    names = {index: text for text, index in description["model"]["vocab"].items()}
    types: dict[int, int] = {}
    for added in description["added_tokens"]:
        names[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    count = max(names) + 1
    merges = description["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": known_cut(folder),
        "tokens": [names.get(index, f"[PAD{index}]") for index in range(count)],
        "token_type": [types.get(index, 1) for index in range(count)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def test_user_defined_tokens_are_found_in_text_and_control_tokens_are_not() -> None:
    fields = gguf_fields("byte-level")
    tokens = [*cast("list[str]", fields["tokenizer.ggml.tokens"]), "\n\n\n", "<|tool|>"]
    types = [*cast("list[int]", fields["tokenizer.ggml.token_type"]), 4, 4]
    made = Tokenizer(read_gguf(gguf_fields("byte-level", tokens=tokens, token_type=types)))
    lines, marker = len(tokens) - 2, len(tokens) - 1
    assert lines in made.encode("a\n\n\nb") and marker not in made.encode("a<|tool|>b")
    assert made.decode(made.encode("a\n\n\nb<|tool|>")) == "a\n\n\nb<|tool|>"
    assert lines not in made.special_ids and marker in made.control_tokens.values()


# -- checkpoints -------------------------------------------------------------------------------------------


@dataclass
class Spec:
    vocab_size: int = 400
    eos_token_ids: tuple[int, ...] = (7,)


@dataclass
class Opened:
    """As much of a checkpoint as a tokenizer looks at."""

    text: TextParts
    path: Path = Path("nowhere")
    spec: Spec = field(default_factory=Spec)


def made_from(opened: Opened) -> Tokenizer:
    return Tokenizer.from_checkpoint(cast(Checkpoint, opened))


def test_a_checkpoint_gives_its_tokenizer_with_the_model_s_ends(tmp_path: Path) -> None:
    write_folder(tmp_path, backend("byte-level"))
    from_folder = made_from(Opened(TextParts(tokenizer_json=tmp_path / "tokenizer.json")))
    from_gguf = made_from(Opened(TextParts(gguf_fields=gguf_fields("byte-level"))))
    for made in (from_folder, from_gguf):
        assert made.vocab_size == 400 and {3, 7} <= set(made.eos_token_ids)
        assert made.encode("the dog", add_special_tokens=False) == tokenizer("byte-level").encode("the dog")


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        made_from(Opened(TextParts(), path=tmp_path))


def test_the_template_of_a_gguf_file_is_used_from_any_thread() -> None:
    fields = {**gguf_fields("byte-level"), "tokenizer.chat_template": CHATML}
    chat = ChatTemplate.for_tokenizer(Tokenizer(read_gguf(fields)))
    found: list[str] = []

    def render(name: str) -> None:
        found.append(chat.render([{"role": "user", "content": name * 50}] * 20).text)

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(text.count("<|start|>") for text in found) == [21] * 4
    assert sorted({text[15] for text in found}) == list("abcd")
