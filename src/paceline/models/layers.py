"""The parts a decoder layer is made of: linear layers, norms, feed-forward, experts.

Every part maps [tokens, features] to [tokens, features]; none knows rows, blocks or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# A product of fewer rows is summed in another order by some libraries: of one row by all we met, of three by MKL on AMD
# processors. Where a token's numbers must not depend on its batch, products have at least these (docs/decisions/0009).
LEAST_ROWS = 4
# The same for matrices of float32 as large as those of a model (measured on a Xeon, up to 15 rows).
LEAST_DENSE_ROWS = 16

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Linear(Protocol):
    """x [tokens, in] -> [tokens, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """A matrix product in the type of the weight. With `least_rows` it is never made for fewer: zeros fill up."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, least_rows: int = 1) -> None:
        self.weight = weight
        self.bias = bias
        self._least_rows = least_rows

    def __call__(self, x: Tensor) -> Tensor:
        missing = self._least_rows - len(x)
        if missing > 0:
            padded = F.pad(x, (0, 0, 0, missing))
            return F.linear(padded, self.weight, self.bias)[: len(x)]
        return F.linear(x, self.weight, self.bias)


class Embedding:
    """Token numbers [tokens] to vectors [tokens, hidden]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight)


class RMSNorm:
    """Divide by the root of the mean square, then scale. A weight of two dimensions has a row for each head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)
        return F.rms_norm(x, (x.shape[-1],), None, self._eps) * self.weight


# The name of a product, its input and its output, which is changed in place.
AddTo = Callable[[str, Tensor, Tensor], None]


class FeedForward:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor, add: AddTo | None = None) -> Tensor:
        """`add`: what adapters add to the two products."""
        both = self.gate_up(x)
        if add is not None:
            add("gate_up", x, both)
        gate, up = both.chunk(2, dim=-1)
        inner = self._activation(gate) * up
        out = self.down(inner)
        if add is not None:
            add("down", inner, out)
        return out


class Experts:
    """Each token goes through the few feed-forward parts its router likes best."""

    def __init__(
        self, router: Linear, experts: list[FeedForward], per_token: int, *, normalize: bool
    ) -> None:
        self.router = router
        self.experts = experts
        self._per_token = per_token
        self._normalize = normalize

    def __call__(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        chosen_weight, chosen = weights.topk(self._per_token, dim=-1)
        if self._normalize:
            chosen_weight = chosen_weight / chosen_weight.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        # In order, so that sums do not depend on the other rows of the batch.
        for index in torch.unique(chosen).tolist():
            token, place = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[index](x[token]) * chosen_weight[token, place, None])
        return out
