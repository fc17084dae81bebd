"""Workloads: the same requests everywhere, and clear words about what cannot run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.lab.bench.workloads import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    OFFLINE,
    ONLINE,
    BenchWorkload,
    check_fits,
    check_vocabulary,
    make_workload,
    online_fixed,
    read_lengths,
    select,
)

# Of every arrival, prompt and output, and how many requests, prompt tokens and output tokens there are. Figures that
# were measured on these workloads are compared with ours: none of this may ever change.
KNOWN = {
    "nano": ("09c0fafa10dad25d", 256, 142_827, 133_966),
    "decode-b1": ("45f79e9f56af583a", 1, 16, 256),
    "decode-b8": ("3a2048cca435e7b9", 8, 128, 2_048),
    "decode-b64": ("3c49e75fa0173952", 64, 1_024, 16_384),
    "decode-b256": ("4c8a1a8cb4ec6322", 256, 4_096, 65_536),
    "decode-b1024": ("690d22f0b9803892", 1_024, 16_384, 262_144),
    "prefix-2048x256": ("71a703592b0c5d4b", 256, 557_056, 16_384),
    "prefill-64x3500": ("c16aa8d519de17c5", 64, 224_000, 64),
}
TRACE = [(1 + index % 40, 1 + index % 7) for index in range(4800)]


def digest(workload: BenchWorkload) -> tuple[str, int, int, int]:
    state = hashlib.sha256()
    for request in workload.requests:
        state.update(repr((request.arrival_s, request.prompt, request.num_output)).encode())
    sizes = (len(workload.requests), workload.num_prompt_tokens, workload.num_output_tokens)
    return (state.hexdigest()[:16], *sizes)


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_gives_the_same_requests_for_ever(name: str) -> None:
    assert digest(make_workload(name, OFFLINE)) == KNOWN[name]


def test_decode_is_greedy_and_the_rest_is_drawn() -> None:
    assert make_workload("decode-b8", OFFLINE).temperature == 0.0
    assert make_workload("prefill-64x3500", OFFLINE).temperature == 0.6


def test_a_trace_gives_its_lengths_cut_to_what_fits() -> None:
    trace = [(LONGEST_PROMPT + 9, LONGEST_OUTPUT + 9), *TRACE]
    requests = make_workload("azure-conv-1000", OFFLINE, trace).requests
    assert len(requests) == 1000
    assert (len(requests[0].prompt), requests[0].num_output) == (LONGEST_PROMPT, LONGEST_OUTPUT)
    assert [(len(request.prompt), request.num_output) for request in requests[1:]] == TRACE[:999]


@pytest.mark.parametrize(
    "name, first, count, rate", [("azure-conv@8", 2000, 240, 8), ("azure-conv@32", 4000, 800, 32)]
)
def test_arrivals_keep_their_rate(name: str, first: int, count: int, rate: int) -> None:
    requests = make_workload(name, ONLINE, TRACE).requests
    assert [(len(request.prompt), request.num_output) for request in requests] == TRACE[first : first + count]
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert 0.8 < count / rate / arrivals[-1] < 1.25


def test_a_size_and_a_rate_make_a_workload() -> None:
    made = online_fixed(20.0, 50, 32, 16)
    assert made.name == "32x16@20" and made.longest == 48
    assert len({tuple(request.prompt) for request in made.requests}) == 50


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    assert read_lengths(path) == [(374, 44)]


def test_names_are_taken_apart() -> None:
    chosen = select(" nano, decode-b1,nano", OFFLINE, has_trace=False)
    assert (chosen.names, chosen.without_trace) == (("nano", "decode-b1"), ())
    everything = select("all", OFFLINE, has_trace=False)
    assert set(everything.names) | {"azure-conv-1000"} == set(OFFLINE)
    assert everything.without_trace == ("azure-conv-1000",)
    assert select("all", OFFLINE, has_trace=True).names == tuple(OFFLINE)


@pytest.mark.parametrize(
    "asked, says",
    [("nanp", "did you mean nano?"), ("x", "known: nano, decode-b1"), (" , ", "name a workload")],
)
def test_unknown_names_are_answered_with_the_known_ones(asked: str, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("?", r"\?")):
        select(asked, OFFLINE, has_trace=True)


def test_what_cannot_run_is_told_before_it_does() -> None:
    with pytest.raises(InputError, match="takes requests 3,000 to 3,500 of its trace.*has 10"):
        make_workload("azure-conv@20", ONLINE, TRACE[:10])
    workload = make_workload("decode-b1", OFFLINE)
    check_fits([workload], 272)
    with pytest.raises(InputError, match="decode-b1 has a request of 272 tokens.*takes 271"):
        check_fits([workload], 271)
    check_vocabulary(10_002)
    with pytest.raises(InputError, match="vocabulary has 10,001"):
        check_vocabulary(10_001)
