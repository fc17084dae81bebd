"""Parts beside each other: every part once, errors raised after all have ended, and no part with more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from paceline.runner.workers import Workers  # noqa: E402


@pytest.fixture
def workers() -> Iterator[Workers]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield Workers()
    torch.set_num_threads(before)


def test_every_part_is_done_once_by_threads_that_compute_alone(workers: Workers) -> None:
    meet = threading.Barrier(3, timeout=30)
    seen: list[tuple[int, int, int]] = []

    def work(part: int) -> None:
        if part < 3:  # no thread can take two of these
            meet.wait()
        torch.ones(8).sum()  # a thread takes its number over with the first thing it computes
        seen.append((part, threading.get_ident(), torch.get_num_threads()))

    workers.run(work, range(10))

    assert sorted(part for part, _, _ in seen) == list(range(10))
    assert len({thread for _, thread, _ in seen}) == 3
    assert {threads for _, _, threads in seen} == {1}
    assert torch.get_num_threads() == 3


def test_a_single_part_has_all_threads(workers: Workers) -> None:
    seen: list[int] = []
    workers.run(lambda part: seen.append(torch.get_num_threads()), [0])
    assert seen == [3]


def test_an_error_is_told_after_the_others_have_ended(workers: Workers) -> None:
    done: list[int] = []

    def work(part: int) -> None:
        if part == 4:
            raise ValueError("part 4")
        done.append(part)

    with pytest.raises(ValueError, match="part 4"):
        workers.run(work, range(12))
    assert sorted(done) == [part for part in range(12) if part != 4]
    assert torch.get_num_threads() == 3
