"""Tokens to shown text: decoding and stop strings together, for one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.prompts import bad_word_ids
from paceline.text.stream import TextDelta, TextStream
from tests.pure.text.test_text_stop import cut_at, first_stop
from tests.pure.text.text_helpers import BYTE_KINDS, tokenizer

texts = st.lists(st.sampled_from(["the ", "dog", " 🙂", "世", "ab", "b", "\n"]), max_size=12).map("".join)
stop_lists = st.lists(st.sampled_from(["dog", "🙂", "ab", "b\n", "\n\n", "the dog", "世ab"]), max_size=3)


def run(stream: TextStream, ids: Sequence[int], size: int) -> tuple[str, TextDelta]:
    """Everything shown, and the last delta that said where it stopped (or the final one)."""
    shown = ""
    for at in range(0, len(ids), size):
        delta = stream.push(ids[at : at + size])
        shown += delta.text
        if delta.stopped_at is not None:
            return shown + stream.finish().text, delta
    last = stream.finish()
    return shown + last.text, last


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **fields)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=texts, stops=stop_lists, include=st.booleans(), size=st.integers(1, 7))
def test_shown_text_is_the_text_cut_at_the_first_stop(
    kind: str, text: str, stops: list[str], include: bool, size: int
) -> None:
    made = tokenizer(kind)
    prompt, ids = made.encode("a"), made.encode(text, add_special_tokens=False)
    whole, _ = run(TextStream(made, prompt, sampling()), ids, size)
    params = sampling(stop=tuple(stops), include_stop_str_in_output=include)
    stream = TextStream(made, prompt, params)
    shown, delta = run(stream, ids, size)
    assert shown == cut_at(whole, stops, include)
    found = first_stop(whole, stops)
    assert delta.stop_reason == (None if found is None else found[1])
    if found is not None:
        # The number of tokens is the smallest whose text holds the stop, however the tokens were grouped.
        texts_so_far = [run(TextStream(made, prompt, sampling()), ids[:n], 1)[0] for n in range(len(ids) + 1)]
        assert delta.stopped_at == next(n for n, seen in enumerate(texts_so_far) if first_stop(seen, stops))
        assert stream.num_output == delta.stopped_at


@pytest.mark.parametrize("size", [1, 2, 50])
def test_stops_count_only_behind_min_tokens(size: int) -> None:
    made = tokenizer("byte-level")
    ids = [*made.encode("dog dog dog", add_special_tokens=False)]
    ends = [n for n in range(len(ids) + 1) if made.decode(ids[:n]).endswith("dog")]
    for minimum, expected in ((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])):
        params = sampling(stop=("dog",), min_tokens=minimum)
        assert run(TextStream(made, [], params), ids, size)[1].stopped_at == expected


def test_the_token_that_ended_a_request_is_counted_and_shown_only_on_request() -> None:
    made = tokenizer("byte-level")
    ids = [*made.encode("the dog", add_special_tokens=False), made.control_tokens["<|end|>"]]
    for include, expected in ((False, "the dog"), (True, "the dog<|end|>")):
        params = sampling(skip_special_tokens=False, include_stop_str_in_output=include)
        stream = TextStream(made, [], params)
        delta = stream.push(ids, ends_with_stop_token=True)
        assert delta.text + stream.finish().text == expected
        assert stream.num_output == len(ids) and delta.stopped_at is None


def test_without_detokenize_there_is_no_text_but_a_count() -> None:
    made = tokenizer("byte-level")
    stream = TextStream(made, [], sampling(detokenize=False))
    assert stream.push([5, 6, 7]) == TextDelta(text="") and stream.finish() == TextDelta(text="")
    assert stream.num_output == 3


def test_stop_strings_need_text() -> None:
    """Refused by the parameters themselves, or at the latest here."""
    with pytest.raises(InvalidRequest, match="detokenize"):
        TextStream(tokenizer("byte-level"), [], sampling(detokenize=False, stop=("x",)))


def test_tokens_behind_a_stop_change_nothing() -> None:
    made = tokenizer("byte-level")
    stream = TextStream(made, [], sampling(stop=("dog",)))
    ids = made.encode("the dog and more", add_special_tokens=False)
    first = stream.push(ids)
    assert first.text == "the " and first.stop_reason == "dog"
    again = stream.push(ids)
    assert again == TextDelta(text="", stopped_at=first.stopped_at, stop_reason="dog")
    assert stream.finish() == TextDelta(text="")


def test_a_bad_id_ends_its_own_stream_only() -> None:
    made = tokenizer("byte-level")
    ids = made.encode("🙂🙂", add_special_tokens=False)
    good, bad = TextStream(made, [], sampling()), TextStream(made, [], sampling())
    good.push(ids[:2]), bad.push(ids[:2])
    with pytest.raises(InvalidRequest):
        bad.push([10**9])
    assert good.push(ids[2:]).text + good.finish().text == "🙂🙂"


# -- words that must not be produced -----------------------------------------------------------------------


def test_a_word_is_forbidden_with_and_without_a_space() -> None:
    made = tokenizer("byte-level")
    with_space = made.encode(" the", add_special_tokens=False)
    without = made.encode("the", add_special_tokens=False)
    found = bad_word_ids(made, ["the"])
    assert tuple(without) in found
    assert (tuple(with_space) in found) == (len(with_space) == len(without))
    assert bad_word_ids(made, ["  the"]) == found  # a space of one's own changes nothing
    assert bad_word_ids(made, ["the", "dog"])[: len(found)] == found


@pytest.mark.parametrize("word", ["", "  ", "x" * 257])
def test_empty_and_endless_words_are_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="bad word"):
        bad_word_ids(tokenizer("byte-level"), [word])
