"""Bodies are read strictly: what is good is what `json` reads, what is bad is refused with its code."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.errors import Refusal
from paceline.server.http.strict_json import MAX_DEPTH, read_object

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner), max_leaves=20
)


@given(st.dictionaries(st.text(max_size=20), values, max_size=10), st.booleans())
def test_good_objects_come_back(body: dict[str, Any], ensure_ascii: bool) -> None:
    assert read_object(json.dumps(body, ensure_ascii=ensure_ascii).encode()) == body


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(Refusal):
        assert isinstance(read_object(data), dict)


@given(st.integers(1, 80), st.sampled_from(["[]", "{}", "mixed"]), st.text(alphabet='[{"\\', max_size=5))
def test_depth_counts_brackets_outside_of_strings(depth: int, kind: str, noise: str) -> None:
    value: Any = noise
    for level in range(depth - 1):
        value = (
            {"a": value, "b": noise} if kind == "{}" or (kind == "mixed" and level % 2) else [noise, value]
        )
    data = json.dumps({"a": value}).encode()
    if depth <= MAX_DEPTH:
        assert read_object(data) == {"a": value}
    else:
        with pytest.raises(Refusal) as refused:
            read_object(data)
        assert refused.value.code == "too_deep"


def test_long_strings_of_escapes_are_read_in_linear_time() -> None:
    text = '\\"' * 400_000
    data = json.dumps({"a": text, "b": [[]] * 40}).encode()
    assert read_object(data)["a"] == text
    with pytest.raises(Refusal):
        read_object(data[: len(data) // 2])


def test_surrogate_pairs_are_whole_or_refused() -> None:
    assert read_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    for bad in (b'{"a": "\\ude00\\ud83d"}', b'{"a": ["\\ud83d"]}', b'{"a": {"\\uDfff": 1}}'):
        with pytest.raises(Refusal) as refused:
            read_object(bad)
        assert refused.value.code == "invalid_unicode"
