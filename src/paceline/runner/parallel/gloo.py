"""Ranks on CPUs that exchange tensors through gloo: on this machine alone, found by a file in a private folder.

Only gathers are gloo's; sums are made in the order of the ranks from what was gathered (`models.together`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.files.open import Checkpoint
from paceline.models.layers import LEAST_DENSE_ROWS
from paceline.models.load import DenseStorage, build_decoder
from paceline.models.together import Exchange, Together
from paceline.runner.parallel.lead import Followers
from paceline.runner.parallel.shards import ShardedSource

LOOPBACK = "127.0.0.1"
# A rank that is gone is noticed by its socket; this is only for one that neither computes nor ends.
LONGEST = timedelta(hours=1)
TO_MEET = timedelta(seconds=60)  # for ranks that have all said that they are here


class GlooRanks(Exchange):
    """One of the ranks of a model."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """Returns when all ranks are there."""
        self._size = size
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TO_MEET
        store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
        self._options: Any = distributed.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        self._options.timeout = LONGEST
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, options)

    @property
    def size(self) -> int:
        return self._size

    def everyone(self, mine: Tensor) -> Sequence[Tensor]:
        mine = mine.contiguous()
        found = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([found], [mine], self._options).wait(LONGEST)
        return found


def lead_decoder(
    checkpoint: Checkpoint, followers: Followers, on_layer: Callable[[int, int], None]
) -> Decoder:
    """The lead's part, once the followers have theirs."""
    followers.wait_until_here()
    together = GlooRanks(followers.folder, 0, followers.size)
    decoder = rank_decoder(checkpoint, 0, together, followers.size, on_layer)
    followers.wait_until_loaded()
    return decoder


def rank_decoder(
    checkpoint: Checkpoint,
    rank: int,
    together: Together,
    size: int,
    on_layer: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The part of a model that one rank holds, in float32."""
    source = ShardedSource(checkpoint, rank, size)
    storage = DenseStorage(LEAST_DENSE_ROWS)
    return build_decoder(source, checkpoint.spec.max_positions, storage, on_layer, together)
