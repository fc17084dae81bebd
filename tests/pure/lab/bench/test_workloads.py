"""Workloads: the same requests everywhere, and clear words about what cannot run; the shapes and bursts they use."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.bench.demo_runs import LENGTHS, burst_traffic
from paceline.lab.bench.shapes import SHAPES, write_shape
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
from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import tensor_names

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


# ----------------------------------------------------------------
# Shapes: each is a model the engine understands, of the size its name says.


@pytest.mark.parametrize(
    "name, parameters",
    [("qwen3-0.6b", 0.596e9), ("llama-3.1-8b", 8.03e9), ("qwen3-30b-a3b", 30.5e9), ("tiny", 0.35e6)],
)
def test_a_shape_has_the_size_of_its_name(name: str, parameters: float, tmp_path: Path) -> None:
    options = write_shape(name, tmp_path)
    checkpoint = open_checkpoint(options["model"], load_format=options["load_format"])
    total = 0
    for _, shape in tensor_names(checkpoint.spec):
        size = 1
        for length in shape:
            size *= length
        total += size
    assert total == pytest.approx(parameters, rel=0.01)
    assert set(checkpoint.spec.group_windows) == {None}
    check_vocabulary(checkpoint.spec.vocab_size)


@pytest.mark.slow
def test_every_workload_fits_every_shape() -> None:
    workloads = [make_workload(name, OFFLINE, [(3500, 500)] * 1000) for name in OFFLINE]
    check_fits(workloads, 4096)
    assert all(shape["max_position_embeddings"] >= 4096 for shape in SHAPES.values())


# ----------------------------------------------------------------
# The bursts of the demonstration take about the time that was asked for, be it short or long.


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_requests_arrive_over_the_time_asked_for(seconds: float, seed: int) -> None:
    count = 60
    workload = burst_traffic(count, count / seconds, seed, LENGTHS["cpu"])
    assert len(workload) == count
    assert 0.6 * seconds < workload.duration_s < 1.5 * seconds


@pytest.mark.parametrize("seconds", [1.0, 4.0, 8.0])
def test_there_are_bursts_in_little_time_too(seconds: float) -> None:
    workload = burst_traffic(60, 60 / seconds, 0, LENGTHS["cpu"])
    assert np.diff(workload.arrival_s).max() > 0.2 * seconds, "a pause between two bursts"


def test_bursts_of_a_moment_are_no_mistake() -> None:
    assert len(burst_traffic(12, 10_000.0, 0, LENGTHS["cpu"])) == 12
