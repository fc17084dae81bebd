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
from paceline.text.stream import TextStream
from tests.pure.text.test_text_stop import cut_at, first_stop
from tests.pure.text.text_helpers import BYTE_KINDS, tokenizer

texts = st.lists(st.sampled_from(["the ", "dog", " 🙂", "世", "ab", "b", "\n"]), max_size=12).map("".join)
stop_lists = st.lists(st.sampled_from(["dog", "🙂", "ab", "b\n", "\n\n", "the dog", "世ab"]), max_size=3)


def run(stream: TextStream, ids: Sequence[int], size: int) -> str:
    """Everything shown; no token is pushed behind a stop string."""
    shown = ""
    for at in range(0, len(ids), size):
        shown += stream.push(ids[at : at + size])
        if stream.stopped_at is not None:
            break
    return shown + stream.finish()


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **fields)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=texts, stops=stop_lists, include=st.booleans(), size=st.integers(1, 7))
def test_shown_text_is_the_text_cut_at_the_first_stop(
    kind: str, text: str, stops: list[str], include: bool, size: int
) -> None:
    made = tokenizer(kind)
    prompt, ids = made.encode("a"), made.encode(text, add_special_tokens=False)
    whole = run(TextStream(made, prompt, sampling()), ids, size)
    params = sampling(stop=tuple(stops), include_stop_str_in_output=include)
    stream = TextStream(made, prompt, params)
    assert run(stream, ids, size) == cut_at(whole, stops, include)
    found = first_stop(whole, stops)
    assert stream.stop_reason == (None if found is None else found[1])
    if found is not None:
        # The number of tokens is the smallest whose text holds the stop, however the tokens were grouped.
        texts_so_far = [run(TextStream(made, prompt, sampling()), ids[:n], 1) for n in range(len(ids) + 1)]
        assert stream.stopped_at == next(n for n, seen in enumerate(texts_so_far) if first_stop(seen, stops))
        assert stream.num_output == stream.stopped_at


@pytest.mark.parametrize("size", [1, 2, 50])
def test_stops_count_only_behind_min_tokens(size: int) -> None:
    made = tokenizer("byte-level")
    ids = [*made.encode("dog dog dog", add_special_tokens=False)]
    ends = [n for n in range(len(ids) + 1) if made.decode(ids[:n]).endswith("dog")]
    for minimum, expected in ((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])):
        stream = TextStream(made, [], sampling(stop=("dog",), min_tokens=minimum))
        run(stream, ids, size)
        assert stream.stopped_at == expected


def test_the_token_that_ended_a_request_is_counted_and_shown_only_on_request() -> None:
    made = tokenizer("byte-level")
    ids = [*made.encode("the dog", add_special_tokens=False), made.control_tokens["<|end|>"]]
    for include, expected in ((False, "the dog"), (True, "the dog<|end|>")):
        params = sampling(skip_special_tokens=False, include_stop_str_in_output=include)
        stream = TextStream(made, [], params)
        assert stream.push(ids, ends_with_stop_token=True) + stream.finish() == expected
        assert stream.num_output == len(ids) and stream.stopped_at is None


def test_tokens_behind_a_stop_change_nothing() -> None:
    made = tokenizer("byte-level")
    stream = TextStream(made, [], sampling(stop=("dog",)))
    ids = made.encode("the dog and more", add_special_tokens=False)
    assert stream.push(ids) == "the " and stream.stop_reason == "dog"
    stopped_at = stream.stopped_at
    assert stream.push(ids) == stream.finish() == ""
    assert (stream.stopped_at, stream.stop_reason) == (stopped_at, "dog")


def test_a_bad_id_ends_its_own_stream_only() -> None:
    made = tokenizer("byte-level")
    ids = made.encode("🙂🙂", add_special_tokens=False)
    good, bad = TextStream(made, [], sampling()), TextStream(made, [], sampling())
    good.push(ids[:2]), bad.push(ids[:2])
    with pytest.raises(InvalidRequest):
        bad.push([10**9])
    assert good.push(ids[2:]) + good.finish() == "🙂🙂"


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


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=texts, put_in=texts, stops=stop_lists)
def test_text_that_is_put_in_shows_everything_and_no_stop_ends_in_it(
    kind: str, text: str, put_in: str, stops: list[str]
) -> None:
    """Also behind a stop: what its end has hidden is text when the answer goes on."""
    one = tokenizer(kind)
    stream = TextStream(one, [], sampling(stop=tuple(stops)))
    ids = one.encode(text, add_special_tokens=False)
    shown = stream.push(ids)
    taken = len(ids) if stream.stopped_at is None else stream.stopped_at
    inserted = one.encode(put_in, add_special_tokens=False)
    shown += stream.inject(inserted)
    if inserted or taken < len(ids) or stream.num_output > taken:
        assert stream.stopped_at is None and stream.num_output == taken + len(inserted)
    shown += stream.finish()
    if stream.stopped_at is None:
        assert shown == one.decode([*ids[:taken], *inserted])


def test_a_stop_token_that_was_hidden_is_text_when_the_answer_goes_on() -> None:
    one = tokenizer(BYTE_KINDS[0])
    ids = one.encode("the dog", add_special_tokens=False)
    stream = TextStream(one, [], sampling())
    hidden = stream.push(ids, ends_with_stop_token=True)
    assert hidden == one.decode(ids[:-1])
    assert hidden + stream.inject(ids) + stream.finish() == one.decode([*ids, *ids])
