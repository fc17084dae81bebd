"""Service of tenants and how far it grows apart, against a slow way to compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.report.summary import OUTPUT_COST, is_waiting, largest_gap, moments, service

Line = tuple[int, float, float, float, float, int, int]  # tenant, arrival, three waits, prompt, output


def record(lines: list[Line], outcome: str = "finished") -> RunRecord:
    columns = [np.array(column) for column in zip(*lines, strict=True)]
    tenant, arrival_s, wait_s, compute_s, decode_s, prompt, output = columns
    zeros = np.zeros(len(lines), np.int32)
    admitted_s = arrival_s + wait_s
    return RunRecord(
        label="run",
        config={},
        max_num_seqs=4,
        duration_s=float((admitted_s + compute_s + decode_s).max()),
        arrival_s=arrival_s,
        admitted_s=admitted_s,
        first_token_s=admitted_s + compute_s,
        finished_s=admitted_s + compute_s + decode_s,
        prompt_len=prompt,
        output_len=output,
        cached_tokens=zeros,
        preemptions=zeros,
        tenant=tenant,
        outcome=np.full(len(lines), OUTCOMES.index(outcome)),
    )


times = st.floats(0.0, 20.0)
lines = st.tuples(st.integers(0, 2), times, times, times, times, st.integers(1, 900), st.integers(1, 90))


@given(st.lists(lines, min_size=1, max_size=12), st.integers(0, 2))
def test_service_and_waiting_are_what_adding_up_gives(given_lines: list[Line], tenant: int) -> None:
    run, at_s = record(given_lines), np.linspace(0.1, 70.3, 40)
    expected, waiting = np.zeros(len(at_s)), np.zeros(len(at_s), np.bool_)
    for number, arrival_s, wait_s, compute_s, decode_s, prompt, output in given_lines:
        if number != tenant:
            continue
        admitted_s = arrival_s + wait_s
        first_s, span_s = admitted_s + compute_s, max(decode_s, 1e-9)
        expected += prompt * (at_s >= admitted_s)
        expected += OUTPUT_COST * output * np.clip((at_s - first_s) / span_s, 0.0, 1.0)
        waiting |= (at_s >= arrival_s) & (at_s < admitted_s)
    assert service(run, tenant, at_s) == pytest.approx(expected, rel=1e-6, abs=0.5)
    assert (is_waiting(run, tenant, at_s) == waiting).all()


def test_two_that_wait_grow_apart_by_what_one_gets() -> None:
    """Both wait for ten seconds; one is given a prompt of 500 tokens meanwhile, the other nothing."""
    both = [(0, 0.0, 10.0, 0.0, 1.0, 100, 1), (1, 0.0, 10.0, 0.0, 1.0, 100, 1)]
    assert largest_gap(record([*both, (0, 0.0, 5.0, 0.0, 0.0, 500, 1)])) == pytest.approx(502.0)
    assert largest_gap(record(both)) == 0.0


def test_a_tenant_that_does_not_wait_is_owed_nothing() -> None:
    alone = [(0, 0.0, 0.0, 0.0, 9.0, 900, 90), (1, 0.0, 9.0, 0.0, 1.0, 10, 1)]
    assert largest_gap(record(alone)) is None
    assert largest_gap(record(alone[:1])) is None


def test_a_refused_request_does_not_wait() -> None:
    run = record([(0, 0.0, 5.0, 0.0, 1.0, 10, 1)], outcome="refused")
    assert not is_waiting(run, 0, moments(5.0)).any()


def test_a_long_run_is_looked_at_less_closely() -> None:
    assert len(moments(10.0)) == 40 and len(moments(1e6)) == 4000 and len(moments(0.0)) == 1
