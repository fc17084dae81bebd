"""A checkpoint's matrices on the device, in the type the model computes in.

Matrices of the same type go over as they lie in the file. Made-up weights are made up on the device: filling eight
billion values on the host would take longer than everything else a start does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.files.open import MADE_UP, SPREAD
from paceline.models.files.stored import StoredTensor
from paceline.models.layers import DenseLinear, Linear

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class DeviceStorage:
    """Every matrix on `device` as `dtype`. A matrix that serves as embedding and as output is kept once."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._tables: dict[str, Tensor] = {}

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        if len(weights) == 1 and weights[0].name in self._tables:
            return DenseLinear(self._tables[weights[0].name], None)
        parts = [self._moved(weight) for weight in weights]
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        return DenseLinear(matrix, None if bias is None else bias.to(self._device, self._dtype))

    def embedding(self, weight: StoredTensor) -> Linear:
        table = self._tables.setdefault(weight.name, self._moved(weight))
        return Embedding(table)

    def _moved(self, stored: StoredTensor) -> Tensor:
        if stored.dtype == MADE_UP:
            seed = hashlib.blake2b(stored.name.encode(), digest_size=7).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(seed, "little"))
            made = torch.empty(stored.shape, dtype=self._dtype, device=self._device)
            return made.normal_(0.0, SPREAD, generator=generator)
        kind = _STORED.get(stored.dtype)
        if kind is None or not stored.raw.size:
            values = stored.to_float32()
        else:
            raw = torch.from_numpy(stored.raw if stored.raw.flags.writeable else np.array(stored.raw))
            return raw.view(kind).view(stored.shape).to(self._device, self._dtype)
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, self._dtype)


class Embedding:
    """Token numbers to vectors."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table)
