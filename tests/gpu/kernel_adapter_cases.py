"""Random adapters in a pool, and the comparison with the definition; used on the GPU and through the interpreter.

What shrink leaves to expand is NaN before every case, so that whatever is used without having been written shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runner.gpu.kernels.adapter_product import (
    NOTHING,
    PANEL,
    UNIT,
    AdaptedProduct,
    AdaptedTokens,
    AdapterPool,
    AdapterTuning,
    allocate_adapted,
    expand,
    expand_gated,
    plan_adapters,
    shrink,
)
from paceline.runner.gpu.kernels.gated_product import Activation

LAYERS, BEFORE = 2, 1  # parts of the layer in front of those that are computed


@dataclass(frozen=True, kw_only=True)
class Product:
    """Sizes of a product, the ranks of its adapters (multiples of 16), and where the case lives."""

    device: str
    dtype: torch.dtype
    inner: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...]

    def matrices(self) -> list[list[tuple[Tensor, Tensor] | None]]:
        """A and B of each adapter and part; the second part of every third adapter is missing."""

        def pair(rank: int, width: int) -> tuple[Tensor, Tensor]:
            a = torch.randn(rank, self.inner, device=self.device) * self.inner**-0.5
            b = torch.randn(width, rank, device=self.device) * rank**-0.5
            return a.to(self.dtype), b.to(self.dtype)

        return [
            [
                None if number % 3 == 1 and part == 1 else pair(rank, width)
                for part, width in enumerate(self.widths)
            ]
            for number, rank in enumerate(self.ranks)
        ]

    def pool(self, matrices: list[list[tuple[Tensor, Tensor] | None]], layer: int) -> AdapterPool:
        """All of them behind one another, in the table as parts of `layer`; the first place is that of no adapter."""
        shape = (1 + len(matrices), LAYERS, BEFORE + len(self.widths))
        table = torch.full(shape, NOTHING, dtype=torch.int32)
        kept: list[Tensor] = [torch.full((UNIT,), torch.nan, dtype=self.dtype, device=self.device)]
        for number, parts in enumerate(matrices):
            for part, pair in enumerate(parts):
                if pair is not None:
                    table[1 + number, layer, BEFORE + part] = sum(each.numel() for each in kept) // UNIT
                    a, b = pair
                    panels = b.view(len(b), -1, PANEL).transpose(0, 1)
                    kept += [a.reshape(-1), panels.reshape(-1)]
        ranks = torch.tensor((0, *self.ranks), dtype=torch.int32, device=self.device)
        return AdapterPool(
            entries=torch.cat(kept),
            table=table.to(self.device),
            panels=ranks // PANEL,
            most_panels=max(self.ranks) // PANEL,
        )


def reference_adapter_product(
    x: Tensor,
    out: Tensor,
    of_tokens: Sequence[int],
    matrices: list[list[tuple[Tensor, Tensor] | None]],
    widths: Sequence[int],
) -> Tensor:
    """In float64, but for the roundings between the two products and behind them."""
    result = out.double().clone()
    for token, adapter in enumerate(of_tokens):
        column = 0
        for part, width in enumerate(widths):
            pair = matrices[adapter][part] if adapter >= 0 else None
            if pair is not None:
                low = (pair[0].double() @ x[token].double()).to(x.dtype).double()
                result[token, column : column + width] += pair[1].double() @ low
            column += width
    return result


def adapted_tokens(
    product: Product,
    matrices: list[list[tuple[Tensor, Tensor] | None]],
    of_tokens: Sequence[int],
    tuning: AdapterTuning,
) -> AdaptedTokens:
    """The adapter of each token, or -1; parts in the second layer."""
    adapted = allocate_adapted(product.pool(matrices, 1), len(of_tokens))
    chosen = 1 + torch.tensor(of_tokens, dtype=torch.int32, device=product.device)
    plan_adapters(adapted, chosen, tuning=tuning)
    adapted.low.fill_(torch.nan)
    return adapted


def assert_near(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    allowed = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    error = float(((found.double() - right).norm(dim=1) / right.norm(dim=1)).max())
    assert error < allowed, f"relative error {error:.2e} against {allowed:.0e}"


def check_adapter_product(
    product: Product,
    of_tokens: Sequence[int],
    *,
    tuning: AdapterTuning,
    parts: bool = False,
    overlapped: bool = False,
) -> None:
    """`parts`: into float32, as products leave it for a norm to sum."""
    tokens, device = len(of_tokens), product.device
    matrices = product.matrices()
    x = torch.randn(tokens, product.inner, device=device).to(product.dtype)
    out = torch.randn(tokens, sum(product.widths), device=device).to(
        torch.float32 if parts else product.dtype
    )
    expected = reference_adapter_product(x, out, of_tokens, matrices, product.widths)
    untouched = out.clone()
    adapted = adapted_tokens(product, matrices, of_tokens, tuning)
    for layer, right in ((0, untouched.double()), (1, expected)):  # the first layer has no adapters
        out.copy_(untouched)
        which = AdaptedProduct(layer=layer, first=BEFORE, inner=product.inner, widths=product.widths)
        shrink(x, adapted, which, tuning=tuning, overlapped=overlapped)
        expand(out, adapted, which, tuning=tuning, overlapped=overlapped)
        assert_near(out, right, product.dtype)
    plain = [token for token, adapter in enumerate(of_tokens) if adapter < 0]
    assert torch.equal(out[plain], untouched[plain])


def check_gated_adapters(
    product: Product,
    of_tokens: Sequence[int],
    *,
    tuning: AdapterTuning,
    activation: Activation = "silu",
    overlapped: bool = False,
) -> None:
    """Of gate and up, also of tokens without an adapter."""
    tokens, device, width = len(of_tokens), product.device, product.widths[0]
    matrices = product.matrices()
    x = torch.randn(tokens, product.inner, device=device).to(product.dtype)
    wide = torch.randn(tokens, 2 * width, device=device).to(product.dtype)
    adapted = adapted_tokens(product, matrices, of_tokens, tuning)
    with_adapters = reference_adapter_product(x, wide, of_tokens, matrices, product.widths)
    for layer, gates in ((0, wide.double()), (1, with_adapters)):  # the first layer has no adapters
        gate, up = gates[:, :width], gates[:, width:]
        right = up * (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh"))
        out = torch.full((tokens, width), torch.nan, dtype=product.dtype, device=device)
        which = AdaptedProduct(layer=layer, first=BEFORE, inner=product.inner, widths=product.widths)
        shrink(x, adapted, which, tuning=tuning, overlapped=overlapped)
        expand_gated(out, wide, adapted, which, activation=activation, tuning=tuning, overlapped=overlapped)
        assert_near(out, right, product.dtype)
