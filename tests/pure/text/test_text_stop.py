"""Stop strings against their definition, character by character, for every cut of the text.

The mutant that shows a prefix of a stop string early dies by `test_only_what_may_become_a_stop_is_held_back`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.text.stream import StopMatcher

stop_lists = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4)
texts = st.text("abc🙂", max_size=30)
cuts = st.lists(st.integers(0, 5), max_size=12)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to end ends, and the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def cut_at(text: str, stops: Sequence[str], include: bool) -> str:
    found = first_stop(text, stops)
    if found is None:
        return text
    end, stop = found
    return text[:end] if include else text[: end - len(stop)]


def split(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@given(stops=stop_lists, text=texts, sizes=cuts, include=st.booleans())
@example(stops=["abab", "ba"], text="ababab", sizes=[3], include=False)
@example(stops=["aab", "ab"], text="aaab", sizes=[1, 1, 1], include=False)
def test_text_is_cut_at_the_first_stop(stops: list[str], text: str, sizes: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    results = [matcher.push(piece) for piece in split(text, sizes)]
    shown = "".join(result.emit for result in results) + matcher.flush()
    assert shown == cut_at(text, stops, include)
    found = first_stop(text, stops)
    assert [result.stop for result in results if result.stop is not None] == (
        [] if found is None else [found[1]]
    )


@given(stops=stop_lists, text=texts)
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, character in enumerate(text, start=1):
        result = matcher.push(character)
        shown += result.emit
        if result.stop is not None:
            return
        prefixes = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((size for size in range(1, at + 1) if text[at - size : at] in prefixes), default=0)
        assert shown == text[: at - held]


@given(stops=stop_lists, text=texts, sizes=cuts)
def test_stops_that_may_not_stop_are_let_through(stops: list[str], text: str, sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    results = [matcher.push(piece, may_stop=False) for piece in split(text, sizes)]
    assert not any(result.stop is not None for result in results)
    assert "".join(result.emit for result in results) + matcher.flush() == text


def test_a_stop_that_began_before_it_may_stop_still_counts() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab", may_stop=False).emit == "x"
    result = matcher.push("cd")
    assert (result.emit, result.stop) == ("", "abc")


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n\nb").emit == "a"
    assert matcher.push("c").emit == "" and matcher.push("\n\n").stop is None
    assert matcher.flush() == ""


@pytest.mark.parametrize("include", [True, False])
def test_without_stop_strings_text_goes_straight_through(include: bool) -> None:
    matcher = StopMatcher([], include_stop=include)
    assert matcher.push("anything").emit == "anything" and matcher.flush() == ""
