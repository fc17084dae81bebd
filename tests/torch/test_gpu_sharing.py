"""Which rows share a beginning on a GPU: the groups that spare most reading, found by the host from block tables."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

import torch

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.runner.gpu.host_rows import HostRows, SharingRows, best_groups
from paceline.runner.gpu.kernels.shared_attention import MAX_GROUPS

BLOCK = 64


def tables(paths: list[str]) -> NDArray[np.int32]:
    """Block tables from one letter for each block; the same letters up to a place are the same block there."""
    known: dict[str, int] = {}
    table = np.zeros((len(paths), max(map(len, paths)) + 1), np.int32)
    for row, path in enumerate(paths):
        for end in range(1, len(path) + 1):
            table[row, end - 1] = known.setdefault(path[:end], len(known) + 1)
    return table


def found(paths: list[str]) -> set[tuple[tuple[int, ...], int]]:
    whole = np.array([len(path) for path in paths])
    groups = best_groups(tables(paths), whole)
    return {(tuple(sorted(group.rows.tolist())), group.length // BLOCK) for group in groups}


def test_one_beginning_of_all() -> None:
    assert found(["aaaab", "aaaac", "aaaad"]) == {((0, 1, 2), 4)}
    assert found(["aaab", "aaac"]) == set(), "too short"


def test_trees_below_a_common_beginning() -> None:
    trees = ["aaaa" + letter * 8 + end for letter in "xyz" for end in "123"]
    assert found(trees) == {((0, 1, 2), 12), ((3, 4, 5), 12), ((6, 7, 8), 12)}
    shallow = ["a" * 12 + letter + end for letter in "xyz" for end in "123"]
    assert found(shallow) == {(tuple(range(9)), 12)}, "a block more for each of three is not worth a part"


def test_rows_outside_of_a_tree_share_what_is_left() -> None:
    assert found(["aaaabbbbbbbb1", "aaaabbbbbbbb2", "aaaabbbbbbbb3", "aaaac", "aaaad"]) == {
        ((0, 1, 2), 12),
        ((3, 4), 4),
    }


def test_a_row_that_ends_early_limits_only_its_own_group() -> None:
    assert found(["a" * 20, "a" * 20, "a" * 20, "a" * 5]) == {((0, 1, 2), 20)}


def test_random_tables() -> None:
    """Groups are disjoint, have what they share, and spare at least as much as all rows or each child together."""
    random = np.random.default_rng(5)
    for _ in range(300):
        number = int(random.integers(2, 12))
        paths = ["".join(random.choice(list("ab"), int(random.integers(5, 14)))) for _ in range(number)]
        paths = ["aaaa" + path if random.random() < 0.8 else path for path in paths]
        table, whole = tables(paths), np.array([len(path) for path in paths])
        groups = best_groups(table, whole)
        members = [row for group in groups for row in group.rows.tolist()]
        assert len(members) == len(set(members))
        for group in groups:
            blocks = group.length // BLOCK
            assert len(group.rows) >= 2 and group.length >= 256 and (whole[group.rows] >= blocks).all()
            assert (table[group.rows, :blocks] == table[group.rows[0], :blocks]).all()
        spared = sum(group.spared for group in groups)
        for depth in range(5, 9):
            alike: dict[str, list[int]] = {}
            for row, path in enumerate(paths):
                alike.setdefault(path[:depth] if len(path) >= depth else f"alone {row}", []).append(row)
            simple = sum((len(rows) - 1) * depth * BLOCK for rows in alike.values())
            assert spared >= simple


def host_rows(**kv: object) -> HostRows:
    config = EngineConfig(
        kv=KVConfig(block_size=BLOCK, num_blocks=200, groups=(GroupSpec(**kv),)),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=128, max_model_len=4096),
        depth=1,
    )
    return HostRows(config, torch.device("cpu"))


def sharing_of(rows: HostRows, trees: int, branches: int, blocks: int) -> list[SharingRows]:
    """Rows of `trees`, each with `branches` that share so many blocks; every second tree's rows stand first."""
    table = rows.memory["table0"].host
    for row in range(trees * branches):
        table[row, :blocks] = 1 + row % trees + trees * np.arange(blocks)
        table[row, blocks] = 1000 + row
        rows.num_tokens[row] = BLOCK * blocks + 5
        rows.decoding[row] = True
    rows._renew_slots()
    return rows.sharing


def test_groups_stand_in_the_first_slots_and_reach_the_device() -> None:
    rows = host_rows()
    groups = sharing_of(rows, trees=40, branches=2, blocks=20)
    assert len(groups) == MAX_GROUPS and all(group.length == 20 * BLOCK for group in groups)
    rows.memory.send()
    sent = {
        name: rows.memory.column(f"shared_{name}").numpy() for name in ("row", "first", "count", "length")
    }
    slots, shared = rows.memory.column("slot_rows").numpy(), rows.memory.column("shared").numpy()
    assert sent["count"].tolist() == [2] * MAX_GROUPS and sent["length"].tolist() == [20 * BLOCK] * MAX_GROUPS
    for number, group in enumerate(groups):
        first = sent["first"][number]
        assert slots[first : first + 2].tolist() == group.rows.tolist() and sent["row"][number] in group.rows
    members = {row for group in groups for row in group.rows.tolist()}
    assert {row for row in range(80) if shared[row]} == members
    assert sorted(rows.decode.tolist()) == list(range(80)) and len(set(slots[:80].tolist())) == 80
    rows.decoding[:] = False
    rows._renew_slots()
    rows.memory.send()
    assert not rows.sharing and not sent["count"].any() and not shared.any()


def test_too_little_to_spare_and_windows_share_nothing() -> None:
    assert not sharing_of(host_rows(), trees=2, branches=3, blocks=60)
    assert sharing_of(host_rows(), trees=2, branches=4, blocks=60)
    assert not sharing_of(host_rows(window=4096), trees=2, branches=4, blocks=60)
