"""Steps captured once for a series of sizes (buckets) and replayed with one launch each.

A batch of another size takes the next larger bucket: unused slots point to the dummy row, unused tokens are stored
nowhere. Steps that are not replayed are launched in the same buckets, so that their products have the same sizes and
their results the same bits. Capturing goes on, with a notice, where memory runs out for one size.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from paceline.config.speculative import DRAFT_BUCKETS

SLOT_BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip
# Steps with prompts: tokens, and decoding rows among them. Larger ones take longer than launching them does.
TOKEN_BUCKETS = (
    64, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792,
    2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096,
)  # fmt: skip
FEW_SLOTS, MANY_SLOTS = 32, 256
_WARM_STEPS = (256, 1024, 4096)  # tokens of steps that are run whole at the start, beside the largest
LONG_STEP = 1024  # tokens from which on it does not matter that decoding rows are few
MAX_SPANS = 256  # of a step with prompts that is replayed

_logger = logging.getLogger("paceline")


class DecodeKind(NamedTuple):
    """What a decode step does beyond the plain one."""

    with_rules: bool = False  # some rows have logit rules
    shared: bool = False  # beginnings that several rows share are computed once for each group
    undrawn: bool = False  # it ends with the logits, and a graph of its own draws
    adapted: bool = False  # some rows have adapters


KINDS = (
    DecodeKind(),
    DecodeKind(with_rules=True),
    DecodeKind(shared=True),
    DecodeKind(undrawn=True),
    DecodeKind(shared=True, undrawn=True),
)
# Rows with rules beside rows with adapters are drawn apart: fewer graphs.
ADAPTED_KINDS = tuple(kind._replace(adapted=True) for kind in KINDS if not kind.with_rules)


class DecodeKey(NamedTuple):
    """A step in which every row decodes."""

    slots: int
    kind: DecodeKind


class DrawKey(NamedTuple):
    """The draw of a decode step of the kind `undrawn`."""

    slots: int
    with_rules: bool
    guided: bool


DRAWS = ((False, True), (True, True), (True, False))  # with rules, guided


class DraftKey(NamedTuple):
    """A step in which rows decode and verify drafts: each has some of the tokens, as the device lays them out."""

    tokens: int
    slots: int
    undrawn: bool  # it ends with the logits, and a graph of its own draws: rows have rules, or guides
    adapted: bool = False  # rows have adapters


class DraftDrawKey(NamedTuple):
    """The draw of a step with drafts of the kind `undrawn`."""

    tokens: int
    slots: int
    with_rules: bool
    guided: bool


class MixedKey(NamedTuple):
    """Hidden states of a step with prompts; sampling is launched separately."""

    tokens: int
    slots: int
    adapted: bool = False  # rows have adapters


class EncodeKey(NamedTuple):
    """States of the texts of an encoder."""

    tokens: int


Key = EncodeKey | DecodeKey | DrawKey | DraftKey | DraftDrawKey | MixedKey
Step = tuple[Key, Callable[[], object]]  # what is captured under a key


def is_adapted(key: Key) -> bool:
    """Whether it is a step with adapters, whose products are others."""
    if isinstance(key, DecodeKey):
        return key.kind.adapted
    return isinstance(key, DraftKey | MixedKey) and key.adapted


def slot_buckets(max_slots: int) -> list[int]:
    """The batch sizes of decode steps: the largest is the most rows there can be."""
    return [bucket for bucket in SLOT_BUCKETS if bucket < max_slots] + [max_slots]


def slot_bucket(num_rows: int, max_slots: int) -> int:
    """The bucket a decode step is computed in, from a graph or not."""
    buckets = slot_buckets(max_slots)
    return buckets[bisect_left(buckets, num_rows)]


def decode_kinds(can_share: bool, *, adapted: bool) -> list[DecodeKind]:
    """Those a model has; `adapted`: also those of steps with adapters."""
    kinds = KINDS + ADAPTED_KINDS if adapted else KINDS
    return [kind for kind in kinds if can_share or not kind.shared]


def decode_keys(max_slots: int, *, can_share: bool, adapted: bool = False) -> list[DecodeKey]:
    kinds = decode_kinds(can_share, adapted=adapted)
    return [DecodeKey(slots, kind) for slots in slot_buckets(max_slots) for kind in kinds]


def draw_keys(max_slots: int) -> list[DrawKey]:
    return [DrawKey(slots, *draw) for slots in slot_buckets(max_slots) for draw in DRAWS]


def mixed_keys(max_slots: int, max_tokens: int, *, adapted: bool = False) -> list[MixedKey]:
    pairs = set()
    for bucket in (bucket for bucket in TOKEN_BUCKETS if bucket <= max_tokens):
        few = (FEW_SLOTS,) if bucket < LONG_STEP else ()
        mosts = {min(bucket, most, max_slots) for most in (*few, MANY_SLOTS, max_slots)}
        pairs |= {MixedKey(bucket, most, adapted) for most in mosts}
    return sorted(pairs)


def draft_keys(max_slots: int, max_tokens: int, *, undrawn: bool, adapted: bool = False) -> list[DraftKey]:
    """Rows that have many drafts are fewer: where it is drawn at once there is a graph with fewer slots too."""
    found = set()
    for bucket in (bucket for bucket in DRAFT_BUCKETS if bucket <= max_tokens):
        found.add(DraftKey(bucket, min(bucket, max_slots), undrawn, adapted))
        if not undrawn:
            found.add(DraftKey(bucket, min(max(1, bucket // 4), max_slots), False, adapted))
    return sorted(found)


def draft_key(keys: list[DraftKey], num_rows: int, num_drafts: int) -> DraftKey | None:
    """The smallest of `keys` with room for a step, or the largest, for fewer drafts; None: no rows fit."""
    at = bisect_left(keys, (num_rows + num_drafts,))
    fitting = next((key for key in keys[at:] if key.slots >= num_rows), keys[-1] if keys else None)
    return fitting if fitting is not None and fitting.slots >= num_rows else None


def mixed_key(keys: list[MixedKey], num_tokens: int, num_slots: int) -> MixedKey | None:
    """The smallest of `keys` with room for a step; None if there is none."""
    at = bisect_left(keys, MixedKey(num_tokens, 0))
    return next((key for key in keys[at:] if key.slots >= num_slots), None)


class StepGraphs:
    """Graphs by key."""

    def __init__(self) -> None:
        # The type too: as tuples, keys of two kinds may be equal.
        self._graphs: dict[tuple[type, Key], torch.cuda.CUDAGraph] = {}

    def capture(self, steps: Sequence[Step], stream: torch.cuda.Stream) -> None:
        """Capture each of `steps` in `stream`; one of each size is run before, outside of a graph."""
        by_size = {(type(key), key[0], is_adapted(key)): step for key, step in steps}
        for step in by_size.values():
            step()  # loads the products of its size: that must not happen inside a capture
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        gc.disable()  # a kernel that is collected during a capture would end it
        pool = None
        try:
            # The largest first: others fit into its memory.
            for key, step in sorted(steps, key=lambda pair: -pair[0][0]):
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        step()
                except torch.OutOfMemoryError:
                    _logger.warning("no memory for the graph of %s: such steps are launched one by one", key)
                    continue
                pool = pool or graph.pool()
                self._graphs[type(key), key] = graph
        finally:
            gc.enable()

    def capture_again(self, steps: Sequence[Step], stream: torch.cuda.Stream | None) -> None:
        """All of them, where any was captured: memory that they know is elsewhere."""
        if self._graphs and stream is not None:
            self._graphs.clear()
            self.capture(steps, stream)

    def replay(self, key: Key) -> bool:
        """Run a captured step; False if there is none."""
        graph = self._graphs.get((type(key), key))
        if graph is None:
            return False
        graph.replay()
        return True


def spans_of(num_tokens: int, longest: int) -> tuple[int, int]:
    """A number of tokens as spans of equal length: how many, and how long."""
    number = max(1, num_tokens // longest)
    return number, min(num_tokens, longest)


def warm_slots(max_slots: int) -> set[int]:
    """Numbers of decoding rows that launch all there is between them."""
    return {1, *(min(bucket, max_slots) for bucket in (2, 16, 32, 64, 128)), max_slots}


def warm_shapes(max_slots: int, largest: int, longest: int) -> list[tuple[int, int]]:
    """Numbers of spans and tokens of each, of steps that launch all there is between them."""
    shapes = [(1, 1), (1, 2), (2, 17), (min(max_slots, 64), 1)]
    shapes += [(min(max_slots, 256), 16), (min(max_slots, 512), 8), (max_slots, 4)]
    shapes += [spans_of(size, longest) for size in (*_WARM_STEPS, largest)]
    return [(number, count) for number, count in shapes if number * count <= largest and number <= max_slots]
