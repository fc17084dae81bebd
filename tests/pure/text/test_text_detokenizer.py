"""Incremental decoding: joined, the pieces are the final text, for every cut of the tokens and every prompt.

The mutant that decodes each token on its own dies here: an emoji is four tokens in these vocabularies, and every one
of them alone is a replacement character (`test_a_character_of_several_tokens_comes_out_once_and_whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.text.stream import Detokenizer
from paceline.text.tokenizer import Tokenizer
from tests.pure.text.text_helpers import (
    BYTE_KINDS,
    backend,
    needs_real_tokenizers,
    real_tokenizer,
    real_tokenizers,
    tokenizer,
)

texts = st.lists(
    st.one_of(
        st.text(max_size=6), st.sampled_from(["the dog", " 🙂", "世界", "👨‍👩‍👧", "ß", "  x", "<|end|>"])
    ),
    max_size=6,
).map("".join)


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The output pushed in groups of the given sizes (then one by one), and what the end releases."""
    found, at = [], 0
    for size in (*sizes, *([1] * len(ids))):
        if at >= len(ids):
            break
        found.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*found, detokenizer.flush()]


def final_text(made: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool) -> str:
    """The definition, without any incremental step: the output's bytes, and the strip rule at the start of a text."""
    shown = [index for index in output if not (skip and index in made.special_ids)]
    data = b"".join(made.token_bytes(index) for index in shown)
    before = b"".join(made.token_bytes(index) for index in prompt if not (skip and index in made.special_ids))
    assert made.table is not None
    if made.table.strips_space and not before:
        data = data.removeprefix(b" ")
    return data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), max_size=8))
def test_pieces_join_to_the_final_text_for_any_tokens(
    kind: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    made = tokenizer(kind)
    ids = st.lists(st.integers(0, made.vocab_size - 1), max_size=10)
    prompt, output = data.draw(ids), data.draw(ids)
    pieces = pieces_of(Detokenizer(made, prompt, skip_special_tokens=skip), output, sizes)
    assert "".join(pieces) == final_text(made, prompt, output, skip)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=texts, prompt=texts, sizes=st.lists(st.integers(1, 3), max_size=8))
def test_text_cut_at_any_token_comes_back_whole(kind: str, text: str, prompt: str, sizes: list[int]) -> None:
    made = tokenizer(kind)
    before = made.encode(prompt, add_special_tokens=False)
    ids = made.encode(prompt + text, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(made, before), ids, sizes)
    joined = "".join(pieces)
    assert joined == final_text(made, before, ids, True)
    assert "\ufffd" not in joined or "\ufffd" in prompt + text
    for piece in pieces:
        piece.encode()  # no half characters


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=st.text(min_size=1, max_size=12), data=st.data())
def test_a_prompt_that_ends_inside_a_character_never_shows(kind: str, text: str, data: st.DataObject) -> None:
    """Cut the tokens of a text anywhere: the output holds its own bytes only, orphans as replacement characters."""
    made = tokenizer(kind)
    ids = made.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(1, len(ids)))
    joined = "".join(pieces_of(Detokenizer(made, ids[:cut]), ids[cut:], []))
    assert joined == b"".join(made.token_bytes(index) for index in ids[cut:]).decode(errors="replace")


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_character_of_several_tokens_comes_out_once_and_whole(kind: str) -> None:
    made = tokenizer(kind)
    ids = made.encode("🙂", add_special_tokens=False)
    assert len(ids) >= 3
    pieces = [Detokenizer(made, [ids[0]]).push([index]) for index in ids]
    assert "🙂" not in pieces
    whole = Detokenizer(made, made.encode("a"))
    pieces = [whole.push([index]) for index in ids]
    assert [piece for piece in pieces if piece] in (["🙂"], [" ", "🙂"])
    assert pieces[-1] == "🙂" and whole.flush() == ""


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_an_unfinished_character_is_held_until_the_end(kind: str) -> None:
    made = tokenizer(kind)
    ids = made.encode("🙂", add_special_tokens=False)
    detokenizer = Detokenizer(made, made.encode("a"))
    assert "".join(detokenizer.push([index]) for index in ids[:-1]).strip() == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_the_first_space_stays_behind_a_prompt_and_goes_at_the_start_of_a_text() -> None:
    made = tokenizer("sentencepiece")
    ids = made.encode("the dog", add_special_tokens=False)  # begins with a space mark
    behind = Detokenizer(made, made.encode("a", add_special_tokens=False))
    assert behind.push(ids) + behind.flush() == " the dog"
    bos = made.control_tokens["<s>"]
    for prompt, skip, expected in (
        ([], True, "the dog"),
        ([bos], True, "the dog"),
        ([bos], False, " the dog"),
    ):
        start = Detokenizer(made, prompt, skip_special_tokens=skip)
        assert start.push(ids) + start.flush() == expected


@pytest.mark.parametrize("kind", [*BYTE_KINDS, "words"])
def test_special_tokens_are_shown_or_not_as_asked(kind: str) -> None:
    made = tokenizer(kind)
    end = made.control_tokens["<|end|>"]
    ids = [*made.encode("the", add_special_tokens=False), end]
    prompt = made.encode("dog", add_special_tokens=False)
    assert Detokenizer(made, prompt).push(ids).strip() == "the"
    shown = Detokenizer(made, prompt, skip_special_tokens=False).push(ids)
    assert shown.strip().replace(" ", "") == "the<|end|>"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_bad_id_is_refused_and_leaves_the_rest_as_it_was(kind: str) -> None:
    made = tokenizer(kind)
    ids = made.encode("🙂", add_special_tokens=False)
    detokenizer, neighbour = Detokenizer(made), Detokenizer(made)
    detokenizer.push(ids[:2]), neighbour.push(ids[:2])
    with pytest.raises(InvalidRequest):
        detokenizer.push([ids[2], made.vocab_size])
    assert detokenizer.push(ids[2:]) == neighbour.push(ids[2:]) == "🙂"


# -- decoders without a table of bytes ---------------------------------------------------------------------


@given(data=st.data())
def test_words_join_as_the_library_joins_them(data: st.DataObject) -> None:
    made = tokenizer("words")
    ids = data.draw(st.lists(st.integers(5, made.vocab_size - 1), min_size=1, max_size=30))
    cut = data.draw(st.integers(0, len(ids) - 1))
    pieces = pieces_of(Detokenizer(made, ids[:cut]), ids[cut:], [])
    whole, before = backend("words").decode(ids), backend("words").decode(ids[:cut])
    assert "".join(pieces) == whole[len(before) :]


def test_added_tokens_stand_together_where_no_spaces_are_asked_for() -> None:
    made = tokenizer("words")
    ids = [made.control_tokens[name] for name in ("<|start|>", "<|end|>")] + made.encode(
        "the", add_special_tokens=False
    )
    for spaces, expected in ((True, "<|start|> <|end|> the"), (False, "<|start|><|end|> the")):
        detokenizer = Detokenizer(made, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(pieces_of(detokenizer, ids, [])) == expected


# -- vocabularies of real models ---------------------------------------------------------------------------

SAMPLES = [
    "Hello world, it's 12345 o'clock.\n\n\tTabs  and   spaces",
    "你好，世界 🙂 👨‍👩‍👧 naïve नमस्ते دنیا",
    "<|im_start|>user\n<s>[INST] <start_of_turn> <｜User｜> </s>",
]


@needs_real_tokenizers
@pytest.mark.parametrize("folder", real_tokenizers(), ids=lambda folder: folder.name)
@pytest.mark.parametrize("text", SAMPLES)
def test_real_vocabularies_stream_what_they_encode(folder: Path, text: str) -> None:
    made = real_tokenizer(folder)
    ids = made.encode(text, add_special_tokens=False)
    assert not set(ids) & set(made.control_tokens.values())
    detokenizer = Detokenizer(made, made.encode("a"))
    joined = "".join(pieces_of(detokenizer, ids, [])).removeprefix(" ")
    assert joined == text == made.decode(ids)
