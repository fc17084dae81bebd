"""Tokens kept in columns: each branch gets its own back, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.events import TokenEvents
from paceline.llm.collector import TokenColumns


def events(entries: list[tuple[int, int, int]], time_s: float = 0.0) -> TokenEvents:
    """Entries are request, token and index."""
    requests, tokens, index = zip(*entries, strict=True)
    return TokenEvents(
        seq=1,
        time_s=time_s,
        requests=np.array(requests, np.int64),
        tokens=np.array(tokens, np.int32),
        index=np.array(index, np.int64),
    )


def test_tokens_and_times_come_back_with_the_end() -> None:
    columns = TokenColumns(8)
    columns.open(5)
    assert columns.take(events([(5, 70, 0)], 1.0)) is None
    assert columns.take(events([(5, 71, 1)], 2.5)) is None
    assert columns.close(5) == ([70, 71], 1.0, 2.5)
    assert not columns.open_ids


def test_an_unknown_request_is_left_to_others() -> None:
    columns = TokenColumns(8)
    columns.open(5)
    others = columns.take(events([(9999, 1, 0), (5, 2, 0), (0, 3, 0)]))
    assert others is not None and others.tolist() == [True, False, True]
    columns.close(5)
    others = columns.take(events([(5, 3, 1)]))  # a late token
    assert others is not None and others.all()


def test_a_place_is_clean_for_its_next_owner() -> None:
    columns = TokenColumns(4)
    columns.open(1)
    columns.take(events([(1, 7, 0)]))
    columns.close(1)
    columns.open(2)
    assert columns.close(2)[0] == []


@given(st.lists(st.integers(1, 900), min_size=1, max_size=200), st.randoms(use_true_random=False))
@settings(max_examples=settings().max_examples * 6 // 10)
def test_every_branch_gets_its_own_tokens(gaps: list[int], rng: object) -> None:
    """Ids go up by any amount; branches open, take tokens in any order, and close at any time."""
    columns, number = TokenColumns(40), 0
    expected: dict[int, list[int]] = {}
    for gap in gaps:
        number += gap
        columns.open(number)
        expected[number] = []
        chosen = [name for name in expected if rng.random() < 0.5 and len(expected[name]) < 40]  # type: ignore[attr-defined]
        if chosen:
            entries = [(name, name * 3 + len(expected[name]), len(expected[name])) for name in chosen]
            assert columns.take(events(entries)) is None
            for name, token, _ in entries:
                expected[name].append(token)
        if rng.random() < 0.4:  # type: ignore[attr-defined]
            name = rng.choice(list(expected))  # type: ignore[attr-defined]
            assert columns.close(name)[0] == expected.pop(name)
    for name, tokens in expected.items():
        assert columns.close(name)[0] == tokens
