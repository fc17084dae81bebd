"""Forms are read the same however they are cut, and what is not exactly one is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.batches.upload import (
    MAX_FIELD,
    MAX_NAME,
    MAX_PART_HEADER,
    MAX_PARTS,
    BadMultipart,
    FormReader,
    PartStart,
    boundary_of,
)

B = b"xyz"


def read(data: bytes, cuts: list[int] | None = None) -> list[tuple[str, str | None, bytes]]:
    """The parts of a form whose bytes come in pieces."""
    reader = FormReader(B)
    found: list[tuple[str, str | None, bytes]] = []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, end in pairwise(places):
        for event in reader.feed(data[start:end]):
            if isinstance(event, PartStart):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, before = found[-1]
                found[-1] = (name, filename, before + event)
    reader.finish()
    return found


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return (
        f'--xyz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
    )


@given(
    content=st.binary(max_size=300)
    | st.lists(st.sampled_from([b"\r\n", b"--", b"xy", b"z", b"\r\n--xy"])).map(b"".join),
    field=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_a_form_is_read_the_same_however_it_is_cut(content: bytes, field: bytes, cuts: list[int]) -> None:
    for value in (content, field):
        if b"\r\n--xyz" in b"\r\n" + value:
            return  # a client chooses another boundary then
    data = part("purpose", field) + part("file", content, "a.jsonl") + b"--xyz--\r\n"
    assert read(data, cuts) == [("purpose", None, field), ("file", "a.jsonl", content)]


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5))
def test_whatever_comes_is_read_or_refused(noise: bytes, cuts: list[int]) -> None:
    for data in (noise, part("file", noise, "a") + noise, b"--xyz\r\n" + noise + b"\r\n--xyz--"):
        try:
            read(data, cuts)
        except BadMultipart:
            continue


def test_names_may_be_quoted_escaped_or_extended() -> None:
    head = b"--xyz\r\nContent-Disposition: form-data; name=file; "
    tail = b"\r\n\r\nx\r\n--xyz--"
    assert read(head + rb'filename="a \"b\".jsonl"' + tail) == [("file", 'a "b".jsonl', b"x")]
    assert read(head + 'filename="für.jsonl"'.encode() + tail) == [("file", "für.jsonl", b"x")]
    assert read(head + b"filename*=UTF-8''f%C3%BCr" + tail) == [("file", "für", b"x")]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (b"--xy", "cut off"),
        (b"--other\r\n", "does not begin with the boundary"),
        (b"preamble\r\n--xyz--", "does not begin with the boundary"),
        (b"--xyzw\r\n", "neither a line end"),
        (part("file", b"x", "a"), "cut off"),
        (part("file", b"x", "a") + b"--xyz", "cut off"),
        (part("file", b"x", "a") + b"--xyz--epilogue", "behind the end"),
        (part("file", b"x", "a") + b"--xyz--\r\n--xyz\r\n", "behind the end"),
        (b"--xyz\r\n\r\nx\r\n--xyz--", "has no header"),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--", "needs the header"),
        (b"--xyz\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n--xyz--", "needs the header"),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--", "needs the header"),
        (b'--xyz\r\nContent-Disposition: form-data; name=""\r\n\r\nx\r\n--xyz--', "needs the header"),
        (b"--xyz\r\nContent-Disposition: form-data; name=a; name=b\r\n\r\nx\r\n--xyz--", "name twice"),
        (b'--xyz\r\nContent-Disposition: form-data; name="a\r\n\r\nx\r\n--xyz--', "parameters"),
        (b"--xyz\r\nno colon\r\n\r\nx\r\n--xyz--", "cannot be read"),
        (b"--xyz\r\nA: b\r\n folded\r\n\r\nx\r\n--xyz--", "cannot be read"),
        (b"--xyz\r\nA: 1\r\na: 2\r\n\r\nx\r\n--xyz--", "same header twice"),
        (b"--xyz\r\nA: \xff\r\n\r\nx\r\n--xyz--", "not UTF-8"),
        (b"--xyz\r\nContent-Disposition: form-data; name=a\r\n"
         b"Content-Transfer-Encoding: base64\r\n\r\nx\r\n--xyz--", "content-transfer-encoding"),
        (part("a" * (MAX_NAME + 1), b"x") + b"--xyz--", "at most 256"),
        (part("a\x00", b"x") + b"--xyz--", "cannot be read"),
        (b"--xyz\r\nContent-Disposition: form-data; name=a; filename*=latin-1''x\r\n\r\nx\r\n--xyz--", "UTF-8"),
        (b"--xyz\r\nContent-Disposition: form-data; name=a; filename*=UTF-8''%ff\r\n\r\nx\r\n--xyz--", "UTF-8"),
        (b"--xyz\r\nContent-Disposition: form-data; name=a; filename*=UTF-8''%0a\r\n\r\nx\r\n--xyz--", "printable"),
        (b"--xyz\r\nA: " + b"x" * MAX_PART_HEADER + b"\r\n\r\nx\r\n--xyz--", "larger than 4096"),
        (b"--xyz\r\nA: " + b"x" * 2 * MAX_PART_HEADER, "larger than 4096"),
        (part("a", b"x" * (MAX_FIELD + 1)) + b"--xyz--", "longer than 1024"),
        (b"".join(part(f"a{i}", b"x") for i in range(MAX_PARTS + 1)) + b"--xyz--", "more than 16 parts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cuts", [[], list(range(0, 10_000, 7))])
def test_what_is_no_form_is_refused(data: bytes, words: str, cuts: list[int]) -> None:
    with pytest.raises(BadMultipart, match=words):
        read(data, cuts)


def test_at_the_limits_a_form_is_read() -> None:
    head = b"Content-Disposition: form-data; name=a\r\nA: "
    padded = b"--xyz\r\n" + head + b"x" * (MAX_PART_HEADER - len(head)) + b"\r\n\r\nx\r\n--xyz--"
    assert read(padded) == [("a", None, b"x")]
    parts = [part(f"a{i}", b"x" * MAX_FIELD) for i in range(MAX_PARTS)]
    assert len(read(b"".join(parts) + b"--xyz--")) == MAX_PARTS
    assert read(b"--xyz--\r\n") == []


def test_little_is_kept_of_a_large_file() -> None:
    reader = FormReader(B)
    list(reader.feed(part("file", b"", "a")[:-2]))
    for _ in range(100):
        given = sum(len(event) for event in reader.feed(b"\r" * 10_000) if isinstance(event, bytes))
        assert given >= 10_000 - len(B) - 4


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=" + "a" * 71,
        "multipart/form-data; boundary=a; boundary=b",
        'multipart/form-data; boundary="a b "',
        "multipart/form-data; boundary=a\x00b",
        "multipart/form-data; boundary=\xe4",
    ],
)
def test_a_boundary_that_is_none_is_refused(content_type: str) -> None:
    with pytest.raises(BadMultipart):
        boundary_of(content_type)


def test_boundaries_as_clients_write_them() -> None:
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; Boundary="a b"') == b"a b"
    assert boundary_of("multipart/form-data; boundary=" + "a" * 70) == b"a" * 70
