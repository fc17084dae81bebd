"""What the ranks of a model do with each other's numbers. A model on one rank is alone.

A sum over ranks has one definition: in the order of the ranks, in float32, rounded once. Sums of libraries add in an
order that follows from the size of the tensor, from three ranks on, and with it from the batch; this one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Together(Protocol):
    """The ranks of one model. Every rank calls the same, in the same order, with tensors of the same shape."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks have, on every rank."""
        ...

    def gather(self, columns: Tensor, width: int) -> Tensor:
        """[tokens, part] of every rank beside each other: [tokens, width]. The last part may be narrower."""
        ...


class Alone:
    """One rank."""

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, columns: Tensor, width: int) -> Tensor:
        return columns


class Exchange:
    """Ranks whose tensors can be brought together: the two operations, given that of `everyone`."""

    def everyone(self, mine: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, in their order."""
        raise NotImplementedError

    def sum(self, partial: Tensor) -> Tensor:
        parts = self.everyone(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(partial.dtype)

    def gather(self, columns: Tensor, width: int) -> Tensor:
        part = part_width(width, self.size)
        whole = torch.cat(list(self.everyone(F.pad(columns, (0, part - columns.shape[1])))), dim=1)
        return whole[:, :width]

    @property
    def size(self) -> int:
        raise NotImplementedError


def part_width(width: int, size: int) -> int:
    """How many of `width` columns a rank has; the last may have fewer."""
    return -(-width // size)
