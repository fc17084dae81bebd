"""Text and ids: equal to the library's own encoding, and control tokens out of reach of text from outside."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paceline.errors import InputError, InvalidRequest
from paceline.text.gguf_tokenizer import read_gguf
from paceline.text.tokenizer import RenderedPrompt, Tokenizer
from tests.pure.text import text_helpers as helpers
from tests.pure.text.text_helpers import BYTE_KINDS, CONTROLS, backend, gguf_fields, tokenizer, write_folder

KINDS = [*BYTE_KINDS, "words"]
pieces = st.one_of(
    st.text(max_size=8), st.sampled_from(["the ", " dog", "🙂", "世界", "\n\n", "ß", "▁", "<0x41>"])
)
plain_texts = (
    st.lists(pieces, max_size=8)
    .map("".join)
    .filter(lambda text: not any(control in text for control in (*CONTROLS, "<unk>", "[UNK]")))
)
hostile_texts = st.lists(st.one_of(pieces, st.sampled_from(CONTROLS)), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=plain_texts)
def test_text_is_encoded_as_the_library_encodes_it(kind: str, text: str) -> None:
    assert tokenizer(kind).encode(text, add_special_tokens=False) == backend(kind).encode(text).ids


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(text=plain_texts)
def test_a_gguf_file_gives_the_ids_of_the_folder(kind: str, text: str) -> None:
    made = _from_gguf(kind)
    assert made.encode(text, add_special_tokens=False) == tokenizer(kind).encode(
        text, add_special_tokens=False
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=hostile_texts)
def test_text_from_outside_never_becomes_a_control_token(kind: str, text: str) -> None:
    made = tokenizer(kind)
    # What unknown text becomes.
    allowed = {
        made.control_tokens.get("[UNK]"),
        made.control_tokens.get("<unk>"),
    }
    ids = made.encode(text, add_special_tokens=False)
    assert not set(ids) & (set(made.control_tokens.values()) - allowed)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=hostile_texts)
def test_control_tokens_in_text_survive_as_characters(kind: str, text: str) -> None:
    made = tokenizer(kind)
    assert made.decode(made.encode(text)) == (text if "level" in kind else text.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(plain_texts, min_size=1, max_size=4), data=st.data())
def test_a_rendered_template_is_encoded_as_a_whole(kind: str, texts: list[str], data: st.DataObject) -> None:
    """Between its control tokens, and around them, the ids are those of the library for the whole string."""
    text, places = "", []
    for part in texts:
        text += part
        control = data.draw(st.sampled_from(CONTROLS))
        places.append((len(text), len(text) + len(control)))
        text += control
    found = tokenizer(kind).encode_template(RenderedPrompt(text=text, controls=tuple(places)))
    assert found == backend(kind).encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_unmarked_control_token_in_a_template_is_text(kind: str) -> None:
    made = tokenizer(kind)
    prompt = RenderedPrompt(text="<|start|>a<|start|>", controls=((0, 9),))
    ids = made.encode_template(prompt)
    assert ids.count(made.control_tokens["<|start|>"]) == 1 and ids[0] == made.control_tokens["<|start|>"]


def test_markers_that_are_not_flagged_as_special_are_control_tokens_too(tmp_path: Path) -> None:
    changed = Backend.from_str(backend("byte-level").to_str())
    changed.add_tokens([helpers.added_token("<｜User｜>"), helpers.added_token("<think>")])
    write_folder(tmp_path, changed)
    made = Tokenizer.from_folder(tmp_path)
    vocab = changed.get_vocab()
    marker, tag = vocab["<｜User｜>"], vocab["<think>"]
    assert (
        marker not in made.encode("a<｜User｜>b")
        and made.decode(made.encode("a<｜User｜>b")) == "a<｜User｜>b"
    )
    assert tag in made.encode("a<think>b")  # tags that models read in contents stay tokens
    assert marker not in made.special_ids  # but they are shown when decoded, as the file says
    assert made.decode([marker, tag]) == "<｜User｜><think>"


def test_a_model_that_could_merge_a_control_token_does_not(tmp_path: Path) -> None:
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "</s>": 5}
    changed = Backend(models.BPE(vocab, [("<", "s"), ("<s", ">")]))
    changed.add_special_tokens(["<s>", "</s>"])
    write_folder(tmp_path, changed)
    assert Tokenizer.from_folder(tmp_path).encode("<s>", add_special_tokens=False) == [3, 2]


def test_a_unigram_model_does_not_reach_its_control_tokens(tmp_path: Path) -> None:
    model = models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("<", -1.0), ("s", -1.0), (">", -1.0)], 0, False)
    changed = Backend(model)
    changed.add_special_tokens(["<unk>", "<s>"])
    write_folder(tmp_path, changed)
    assert Tokenizer.from_folder(tmp_path).encode("<s>", add_special_tokens=False) == [2, 3, 4]


# -- beginning and end of text -----------------------------------------------------------------------------


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_the_flags_of_the_file_say_what_goes_around_a_text(
    tmp_path: Path, source: str, bos: bool, eos: bool
) -> None:
    if source == "folder":
        write_folder(tmp_path, backend("byte-level"), add_bos_token=bos, add_eos_token=eos)
        made = Tokenizer.from_folder(tmp_path)
    else:
        made = Tokenizer(read_gguf(gguf_fields("byte-level", add_bos_token=bos, add_eos_token=eos)))
    begin, end = made.control_tokens["<s>"], made.control_tokens["</s>"]
    inner = made.encode("the dog", add_special_tokens=False)
    assert made.encode("the dog") == [begin] * bos + inner + [end] * eos
    assert (made.bos_token_id, made.eos_token_ids[0]) == (begin, end)
    assert made.count("the dog") == len(inner) + bos + eos


def test_sentencepiece_in_a_gguf_file_begins_with_bos_unless_told_otherwise() -> None:
    made = Tokenizer(read_gguf(gguf_fields("sentencepiece")))
    assert made.encode("the")[0] == made.bos_token_id


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_a_post_processor_counts_before_the_config(tmp_path: Path, config: dict[str, bool]) -> None:
    description = json.loads(backend("byte-level").to_str())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}]}
    ids = {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}
    description["post_processor"] = {**template, "pair": template["single"], "special_tokens": ids}
    write_folder(tmp_path, backend("byte-level"), **config)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    made = Tokenizer.from_folder(tmp_path)
    assert made.encode("a") == [2, *made.encode("a", add_special_tokens=False)]


def test_a_generation_config_adds_ends_of_text(tmp_path: Path) -> None:
    write_folder(tmp_path, backend("byte-level"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (3, 0)


def test_ends_of_turn_are_found_in_a_gguf_file() -> None:
    made = Tokenizer(read_gguf(gguf_fields("byte-level")))
    assert set(made.eos_token_ids) == {made.control_tokens["</s>"], made.control_tokens["<|end|>"]}


# -- ids to text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte-level", "words"])
@given(data=st.data(), skip=st.booleans())
def test_decoding_is_the_library_s(kind: str, data: st.DataObject, skip: bool) -> None:
    made = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, made.vocab_size - 1), max_size=12))
    assert made.decode(ids, skip_special_tokens=skip) == backend(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece, no prefix"])
@given(text=hostile_texts, skip=st.booleans())
def test_decoding_byte_tokens_is_the_library_s_where_they_are_text(kind: str, text: str, skip: bool) -> None:
    made = tokenizer(kind)
    ids = made.encode(text)
    assert made.decode(ids, skip_special_tokens=skip) == backend(kind).decode(ids, skip_special_tokens=skip)


def test_broken_bytes_do_not_take_their_neighbours_along() -> None:
    """Unlike the library, which gives up a whole run of byte tokens when one of them is wrong."""
    made = tokenizer("sentencepiece")
    ids = [_byte(made, byte) for byte in ("🙂".encode() + b"\xff")]
    assert made.decode(ids) == "🙂\ufffd"


@pytest.mark.parametrize("wrong", [-1, 10**9, True, "1", 1.0, None])
def test_ids_outside_the_vocabulary_are_refused(wrong: object) -> None:
    made = tokenizer("byte-level")
    for call in (made.decode, made.check_ids):
        with pytest.raises(InvalidRequest, match="token id"):
            call([1, wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest):
        made.token_text(wrong)  # type: ignore[arg-type]


def test_ids_that_only_the_model_has_decode_to_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path, backend("byte-level"))
    small = Tokenizer.from_folder(tmp_path)
    made = Tokenizer.from_folder(tmp_path, model_vocab_size=512)
    assert (small.vocab_size, made.vocab_size) == (330, 512)
    assert made.decode([*made.encode("a"), 511]) == "a" and made.token_bytes(511) == b""


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    made = tokenizer(kind)
    ids = made.encode("Grüße 🙂 <|end|>", add_special_tokens=False)
    assert b"".join(made.token_bytes(index) for index in ids).decode().strip() == "Grüße 🙂 <|end|>"
    assert made.token_text(made.control_tokens["<|end|>"]) == "<|end|>"
    assert len(ids) > 4 and "\ufffd" in "".join(made.token_text(index) for index in ids)


# -- limits and mistakes -----------------------------------------------------------------------------------


def test_a_text_that_is_too_long_is_refused_before_any_work() -> None:
    made = tokenizer("byte-level")
    assert len(made.encode("a" * 10, max_chars=10)) >= 1
    with pytest.raises(InvalidRequest, match="11 characters"):
        made.encode("a" * 11, max_chars=10)


def test_half_a_surrogate_pair_is_the_client_s_mistake() -> None:
    made = tokenizer("byte-level")
    with pytest.raises(InvalidRequest, match="surrogate") as of_text:
        made.encode("a\ud800b")
    with pytest.raises(InvalidRequest, match="surrogate") as of_messages:
        made.encode_template(RenderedPrompt(text="a\ud800b"))
    assert (of_text.value.param, of_messages.value.param) == ("prompt", "messages")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """With Python's lock held all the way, this thread would wake up two or three times at most."""
    made = tokenizer("byte-level")
    worker = threading.Thread(target=made.encode, args=("the quick brown fox " * 60_000,))
    wakes = 0
    worker.start()
    while worker.is_alive():
        worker.join(0.001)
        wakes += 1
    assert wakes > 10


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "no tokenizer.json"), ("{", "not valid JSON"), ("[]", "JSON object"), ("{}", "cannot|can read")],
)
def test_a_folder_without_a_usable_tokenizer_is_an_input_error(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=problem):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, "kind 'bert'"),
        ({"pre": "unheard-of"}, "cuts text as 'unheard-of'"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"token_type": [1]}, "1 token types"),
        ({"eos_token_id": 10**6}, "vocabulary has"),
        ({"add_bos_token": "yes"}, "must be of type bool"),
        ({"merges": ["nothing here"]}, "does not fit together"),
    ],
)
def test_gguf_fields_that_make_no_tokenizer_are_input_errors(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        Tokenizer(read_gguf(gguf_fields("byte-level", **changes)))


def test_scores_are_needed_for_sentencepiece() -> None:
    with pytest.raises(InputError, match="score"):
        Tokenizer(read_gguf(gguf_fields("sentencepiece", scores=None)))


def _byte(made: Tokenizer, byte: int) -> int:
    return next(index for index in range(made.vocab_size) if made.token_name(index) == f"<0x{byte:02X}>")


_MADE: dict[str, Tokenizer] = {}


def _from_gguf(kind: str) -> Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = Tokenizer(read_gguf(gguf_fields(kind)))
    return _MADE[kind]
