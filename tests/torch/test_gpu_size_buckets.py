"""Which captured size a step takes: the smallest that holds it, and none where none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest
import torch

from paceline.runner.gpu.graphs import (
    DRAWS,
    KINDS,
    DraftDrawKey,
    Key,
    MixedKey,
    StepGraphs,
    decode_keys,
    draft_key,
    draft_keys,
    draw_keys,
    mixed_key,
    mixed_keys,
    slot_bucket,
    slot_buckets,
)


@pytest.mark.parametrize("most", [1, 3, 16, 1000, 1024, 5000])
def test_every_batch_has_a_bucket_and_no_smaller_one_holds_it(most: int) -> None:
    buckets = slot_buckets(most)
    assert buckets == sorted(set(buckets)) and buckets[-1] == most
    for rows in range(1, most + 1):
        bucket = slot_bucket(rows, most)
        assert bucket >= rows and not [other for other in buckets if rows <= other < bucket]


def test_decode_steps_of_every_kind_are_captured_for_every_bucket() -> None:
    keys = decode_keys(100, can_share=True)
    assert {key.slots for key in keys} == set(slot_buckets(100))
    assert len(keys) == len(KINDS) * len(slot_buckets(100))
    assert not any(key.kind.shared for key in decode_keys(100, can_share=False))


@pytest.mark.parametrize("most_slots, most_tokens", [(1024, 8192), (16, 512), (2, 64), (300, 2048)])
def test_a_step_with_prompts_takes_the_smallest_that_holds_it(most_slots: int, most_tokens: int) -> None:
    keys = mixed_keys(most_slots, most_tokens)
    assert keys == sorted(keys) and all(key.slots <= min(key.tokens, most_slots) for key in keys)
    for tokens in range(1, most_tokens + 1, 37):
        for slots in {0, 1, min(tokens, most_slots) // 2, min(tokens - 1, most_slots)}:
            key = mixed_key(keys, tokens, slots)
            holding = [one for one in keys if one.tokens >= tokens and one.slots >= slots]
            assert key == (min(holding) if holding else None)


def test_a_long_step_is_rounded_up_by_less_than_a_tile_of_256_tokens() -> None:
    keys = mixed_keys(1024, 8192)
    for tokens in range(1793, 4097):
        key = mixed_key(keys, tokens, 256)
        assert key is not None and key.tokens - tokens < 256


def test_larger_steps_are_launched_by_themselves() -> None:
    keys = mixed_keys(1024, 8192)
    assert mixed_key(keys, 4097, 0) is None
    assert mixed_key(keys, 4096, 1024) == MixedKey(4096, 1024)


@pytest.mark.parametrize("most_slots, most_tokens", [(1024, 2048), (3, 51), (300, 2048), (1, 9)])
@pytest.mark.parametrize("undrawn", [False, True])
def test_a_step_with_drafts_takes_the_smallest_that_holds_it(
    most_slots: int, most_tokens: int, undrawn: bool
) -> None:
    keys = draft_keys(most_slots, most_tokens, undrawn=undrawn)
    assert keys == sorted(keys) and all(key.tokens <= most_tokens for key in keys)
    assert {key.undrawn for key in keys} == {undrawn}
    for rows in {1, (most_slots + 1) // 2, most_slots}:
        for drafts in (0, 1, rows, 4 * rows, 7 * rows):
            key = draft_key(keys, rows, drafts)
            holding = [one for one in keys if one.tokens >= rows + drafts and one.slots >= rows]
            # Where a step is too large, as many of its drafts as there is room for are verified.
            assert key == (min(holding) if holding else keys[-1])
            assert key is not None and key.tokens >= rows


def test_more_rows_than_any_step_with_drafts_has_are_not_drafted_for() -> None:
    assert draft_key(draft_keys(4000, 2048, undrawn=False), 2049, 0) is None
    assert draft_key(draft_keys(8, 1, undrawn=False), 1, 3) is None


def test_keys_of_two_kinds_never_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tuples some are equal: a draw of one row with rules, and a step of one row with drafts."""
    ran: list[str] = []

    class Graph:
        replay: Callable[[], None]

        def pool(self) -> int:
            return 1

    captured: list[Graph] = []

    @contextmanager
    def capture(graph: Graph, **_: object) -> Iterator[None]:
        before = len(ran)
        yield
        graph.replay = partial(ran.append, ran[before])
        captured.append(graph)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    keys: list[Key] = [*decode_keys(16, can_share=True, adapted=True), *draw_keys(16)]
    for adapted in (False, True):
        keys += mixed_keys(16, 256, adapted=adapted)
        for undrawn in (False, True):
            drafted = draft_keys(16, 64, undrawn=undrawn, adapted=adapted)
            keys += [
                *drafted,
                *(DraftDrawKey(key.tokens, key.slots, *draw) for key in drafted for draw in DRAWS),
            ]
    keys = list({repr(key): key for key in keys}.values())
    graphs = StepGraphs()
    graphs.capture([(key, partial(ran.append, repr(key))) for key in keys], cast(torch.cuda.Stream, None))
    assert len(captured) == len(keys)
    for key in keys:
        assert graphs.replay(key)
        assert ran[-1] == repr(key)
