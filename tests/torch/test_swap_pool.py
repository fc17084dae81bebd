"""Swapped blocks beside the steps: what is staged in pieces, and when a ticket is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.plan import NO_SWAPS, Swaps
from paceline.runner.gpu import kv_pools, slab_memory
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.kv_pools import BlockParts, SwapPool

CPU = torch.device("cpu")


def swaps(ticket: int, blocks: list[int], places: list[int], group: int = 0) -> Swaps:
    column = np.full(len(blocks), ticket, np.int32)
    return Swaps(
        ticket=column,
        group=np.full(len(blocks), group, np.int32),
        block=np.array(blocks, np.int32),
        place=np.array(places, np.int32),
    )


def both(one: Swaps, two: Swaps) -> Swaps:
    names = ("ticket", "group", "block", "place")
    return Swaps(**{name: np.concatenate([getattr(one, name), getattr(two, name)]) for name in names})


def parts_of(blocks: torch.Tensor) -> BlockParts:
    """Of `blocks` [blocks, parts, words] that lie as in pools: those of a part behind one another."""
    number, parts, words = blocks.shape
    memory = blocks.transpose(0, 1).view(-1)
    return BlockParts(memory, [(part * number * words, words) for part in range(parts)])


def empty_blocks() -> BlockParts:
    return parts_of(torch.zeros(2, 8, 3, dtype=torch.int64).transpose(0, 1))


@pytest.mark.parametrize("at_once", [1, 2, 3, 64])
def test_blocks_of_two_groups_come_back_whole_in_pieces_of_any_size(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As pools give them: all layers of a block lie apart.
    groups = [torch.randint(0, 1 << 40, (layers, 12, 5)).transpose(0, 1) for layers in (4, 6)]
    monkeypatch.setattr(kv_pools, "STAGED_BYTES", at_once * 6 * 5 * 8)
    before = [group.clone() for group in groups]
    places = SwapPool([parts_of(group) for group in groups], 9, DeviceQueue(CPU))
    first, second = [3, 4, 9, 1, 11], [5, 6]
    places.swap(both(swaps(1, first, [7, 8, 0, 1, 4]), swaps(2, second, [3, 2], group=1)), NO_SWAPS)
    for group in groups:
        group.zero_()
    places.swap(NO_SWAPS, both(swaps(3, first, [7, 8, 0, 1, 4]), swaps(4, second, [3, 2], group=1)))
    assert torch.equal(groups[0][first], before[0][first]) and torch.equal(
        groups[1][second], before[1][second]
    )
    assert (
        not groups[0][[0, 2, 5, 6, 7, 8, 10]].any() and not groups[1][[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]].any()
    )


class Late(Mark):
    """A mark that is reached when it is waited for, or when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = False

    def wait(self) -> None:
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached


def test_a_ticket_is_reported_when_its_copy_is_done_and_an_empty_step_waits_for_one() -> None:
    class Slow(DeviceQueue):
        def mark(self) -> Mark:
            marks.append(Late())
            return marks[-1]

    marks: list[Late] = []
    places = SwapPool([empty_blocks()], 8, DeviceQueue(CPU))
    places._out.queue = Slow(CPU)
    for ticket in (1, 2, 3):
        places.swap(swaps(ticket, [ticket], [ticket]), NO_SWAPS)
    assert not len(places.completed(wait=False))
    assert places.completed(wait=True).tolist() == [1]
    marks[2].reached = True
    assert not len(places.completed(wait=False))  # in order: the one before it is not there yet
    marks[1].reached = True
    assert places.completed(wait=False).tolist() == [2, 3]
    places.swap(swaps(4, [4], [4]), NO_SWAPS)
    places.forget()
    assert not len(places.completed(wait=True))


class Slow(DeviceQueue):
    def mark(self) -> Mark:
        return Late()


def test_no_more_copies_are_queued_than_the_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pools, "MOST_QUEUED", 4)
    blocks = torch.arange(12 * 6).view(2, 12, 3).transpose(0, 1)
    places = SwapPool([parts_of(blocks)], 12, DeviceQueue(CPU))
    places._out.queue = Slow(CPU)
    several = both(swaps(1, [1, 2], [1, 2]), both(swaps(2, [3, 4], [3, 4]), swaps(3, [5], [5])))
    places.swap(several, NO_SWAPS)
    places.swap(swaps(4, [6, 7, 8, 9, 10], [6, 7, 8, 9, 10]), NO_SWAPS)
    assert (len(places._out.under_way), places._out.num_open) == (2, 4)
    host = places.places.tensors[0]
    assert torch.equal(host[1:5], blocks[1:5]) and not host[5:].any()
    done = []
    for _ in range(4):
        done += places.completed(wait=True).tolist()
        places.swap(NO_SWAPS, NO_SWAPS)  # the next step
    assert done == [1, 2, 3, 4] and torch.equal(host[1:11], blocks[1:11])


def test_an_empty_step_waits_for_what_comes_back_before_what_goes() -> None:
    places = SwapPool([empty_blocks()], 8, DeviceQueue(CPU))
    places._out.queue, places._back.queue = Slow(CPU), Slow(CPU)
    places.swap(swaps(1, [1], [1]), NO_SWAPS)
    places.swap(NO_SWAPS, swaps(2, [2], [2]))
    assert places.completed(wait=True).tolist() == [2]
    assert places.completed(wait=True).tolist() == [1]


class Driver:
    """Pins what it is asked to, up to a limit."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.areas: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert start % slab_memory.PAGE == 0 == size % slab_memory.PAGE and start not in self.areas
        if sum(self.areas.values()) + size > self.most:
            return 2
        self.areas[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.areas[start]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(slab_memory, "PIECE_BYTES", 8192)
    return made


def test_memory_is_pinned_in_whole_pages_and_given_back(driver: Driver) -> None:
    # Places of 1.5 and 4.5 pages: two of them fill whole pages.
    blocks = [torch.zeros(4, parts, 256, dtype=torch.int64) for parts in (3, 9)]
    places = slab_memory.HostPlaces(blocks, 20, pin=True)
    assert places.num_pinned == 0 and [tuple(group.shape) for group in places.tensors] == [
        (20, 3, 256),
        (20, 9, 256),
    ]
    places.pin(1)
    assert places.num_pinned == places.piece == 2
    places.tensors[0][19] = 7  # of a fetch that came before the thread
    places.pin_rest()
    assert places._state.thread is not None
    places._state.thread.join()
    assert places.num_pinned == 20 and len(driver.areas) == 20
    assert places.tensors[0][19].eq(7).all()
    del places
    assert not driver.areas


def test_what_is_not_pinned_yet_is_not_copied_to(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.arange(12 * 1024).view(2, 12, 512).transpose(0, 1)
    pool = SwapPool([parts_of(blocks)], 6, DeviceQueue(CPU))
    pool.places = slab_memory.HostPlaces([blocks], 6, pin=True)
    pool.places.pin(1)
    assert pool.places.num_pinned == 1
    pool.swap(both(swaps(1, [3], [0]), swaps(2, [4, 5], [0, 1])), NO_SWAPS)
    assert pool.completed(wait=True).tolist() == [1] and pool.take_failed().tolist() == [2]
    assert not len(pool.take_failed())
    assert torch.equal(pool.places.tensors[0][0], blocks[3]) and not pool.places.tensors[0][1].any()


def test_a_driver_that_pins_no_more_leaves_the_rest_out(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.most = 3 * 8192
    places = slab_memory.HostPlaces([torch.zeros(2, 1024, dtype=torch.int64)], 5, pin=True)
    places.pin(5)
    assert places.num_pinned == 3 and "3 of 5 KV blocks" in caplog.text


def test_without_places_nothing_is_taken() -> None:
    places = SwapPool([empty_blocks()], 0, DeviceQueue(CPU))
    assert places.places.tensors == [] and places._out.staged == [] == places._back.staged


def test_a_block_on_the_host_is_bytes_to_a_store() -> None:
    groups = [torch.randint(0, 1 << 40, (4, 12, 5)).transpose(0, 1)]
    pool = SwapPool([parts_of(group) for group in groups], 9, DeviceQueue(CPU))
    pool.swap(swaps(1, [3, 4], [7, 8]), NO_SWAPS)
    pool.completed(wait=True)
    block = np.zeros(4 * 5 * 8, np.uint8)
    pool.places.pack(7, block)
    assert block.tobytes() == groups[0][3].contiguous().numpy().tobytes()
    pool.places.unpack(2, block)
    pool.swap(NO_SWAPS, swaps(2, [9], [2]))
    pool.completed(wait=True)
    assert torch.equal(groups[0][9], groups[0][3])
