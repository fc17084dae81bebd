"""Products of eight bits on one card: checks them against their definitions, then times every way to cut them.

    python -m benchmarks.gpu.scaled [--rows 1,8,16,32,64] [--many 96,128,256,512,1024,4096] [--kind fp8|int8|int4]

The shapes are those of a layer of 8B. For each shape and number of rows it prints the fastest cuts, what the tables of
the source choose, torch's product of the same type and cuBLAS with 16 bits. The tables are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.card import graph_microseconds, read_ceiling
from benchmarks.gpu.cases import BF16, normal
from benchmarks.harness import Benchmark, Found, Given, flag, row, table
from paceline.runner.gpu.compile import compiling_only
from paceline.runner.gpu.device_layers import packed, quantized
from paceline.runner.gpu.kernels.gated_product import gated_product, gated_rows
from paceline.runner.gpu.kernels.packed_product import (
    MAX_PACKED_ROWS,
    PackedWeight,
    packed_product,
    packed_tuning,
    unpack,
)
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.row_product import RowNorm, RowTuning, row_product, scaled_row_tuning
from paceline.runner.gpu.kernels.scaled_product import (
    ScaledWeight,
    scaled_gated_tuning,
    scaled_matrix_product,
    scaled_product,
    scaled_tuning,
)
from paceline.runner.gpu.kernels.scaled_rows import ScaledRows, allocate_scaled_rows, quantize_rows
from paceline.runner.gpu.kernels.skinny_product import MAX_ROWS, ProductTuning
from tests.gpu import kernel_scaled_cases as checks
from tests.gpu.kernel_cases import Shape

bench = Benchmark(__doc__)
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
# Name, columns, inner, whether gate and up are in it, whether its parts may be summed by the norm behind it.
SHAPES = (
    ("qkv", 6144, 4096, False, False),
    ("output", 4096, 4096, False, True),
    ("gate_up", 14336, 4096, True, False),
    ("down", 4096, 14336, False, True),
)
HEAD = ("head", 128_256, 4096, False, False)
SPREAD = 2**28  # bytes of weights that calls go through in turn, far more than a cache holds
BEST = 4  # cuts that are printed
Variant = tuple[str, Callable[[int], object]]  # a label, and a call with the number of a matrix


def product_tunings(inner: int, *, gated: bool, narrow: bool) -> Iterator[ProductTuning]:
    for columns, warps in ((64, 4), (128, 8)):
        for step, stages in ((128, 4), (128, 6), (256, 3), (256, 4)):
            for parts in (1, 2, 4) if narrow else (1,):
                shared = (columns * (2 if gated else 1) + 64) * step * stages
                if shared <= 220_000 and inner % (step * parts) == 0:
                    yield ProductTuning(
                        columns=columns, inner=step, parts=parts, num_warps=warps, num_stages=stages
                    )


ROW_TUNINGS = [
    RowTuning(step=step, columns=columns, num_warps=warps)
    for step, columns, warps in (
        (1024, 4, 4),
        (1024, 8, 4),
        (2048, 2, 4),
        (2048, 4, 4),
        (2048, 8, 4),
        (2048, 4, 8),
        (2048, 8, 8),
        (4096, 2, 8),
        (4096, 4, 8),
    )
]


class Layer:
    """One shape: as many matrices as the cache cannot hold, and inputs for some number of rows."""

    def __init__(self, shape: tuple[str, int, int, bool, bool], kind: torch.dtype) -> None:
        self.name, self.columns, self.inner, self.gated, self.narrow = shape
        total = self.columns * (2 if self.gated else 1)
        self.copies = max(2, SPREAD // (total * self.inner))
        self.dense = [normal(total, self.inner) * self.inner**-0.5 for _ in range(self.copies)]
        self.packed: list[PackedWeight] = []
        self.weights: list[ScaledWeight] = []
        self.kind = kind
        self.num_bytes = total * self.inner
        if kind == torch.uint8:
            self.packed = [packed(matrix, BF16) for matrix in self.dense]
            self.num_bytes = total * (self.inner // 2 + self.inner // 32)
        else:
            self.weights = [quantized(matrix, kind) for matrix in self.dense]

    def rows(self, count: int) -> tuple[Tensor, ScaledRows]:
        x = normal(count, self.inner)
        rows = allocate_scaled_rows(count, self.inner, self.kind, x.device)
        quantize_rows(rows, x)
        return x, rows


def four_bits(layer: Layer, rows: int) -> Iterator[Variant]:
    """Ways to make a product with weights of four bits: as they are, or unpacked."""
    x = normal(rows, layer.inner)
    wide = normal(rows, layer.packed[0].shape[0])
    dense = torch.empty_like(layer.dense[0])
    if rows <= MAX_PACKED_ROWS:
        chosen = packed_tuning(rows, layer.columns, layer.inner, narrow=layer.narrow, gated=layer.gated)
        tiles = ((32, 2), (64, 4)) if rows <= MAX_ROWS else ((64, 4), (128, 8))
        stages = (3, 4, 6, 8) if rows <= MAX_ROWS else (2, 3)
        for (columns, warps), staged, parts in product(tiles, stages, (1, 2, 4)):
            if parts == 1 or layer.narrow:
                tuning = replace(
                    chosen, columns=columns, num_warps=warps, num_stages=staged, parts=parts, fewest_rows=8
                )
                yield _label(tuning), partial(_packed_product, layer, x, tuning)
        yield "chosen: " + _label(chosen), partial(_packed_product, layer, x, chosen)
    if rows > MAX_ROWS:
        yield "unpack", lambda which: unpack(dense, layer.packed[which])
    yield "bf16 cuBLAS", lambda which: torch.mm(x, layer.dense[which].T, out=wide)


def _packed_product(layer: Layer, x: Tensor, tuning: ProductTuning, which: int) -> None:
    sizes = (len(x), layer.columns)
    out = _outputs(sizes if tuning.parts == 1 else (tuning.parts, *sizes), tuning.parts == 1)
    packed_product(out, x, layer.packed[which], tuning=tuning, gated=layer.gated)


def few_rows(layer: Layer, rows: int) -> Iterator[Variant]:
    """Ways to make a product of up to 64 rows."""
    x, scaled = layer.rows(rows)
    for tuning in product_tunings(layer.inner, gated=layer.gated, narrow=layer.narrow):
        yield _label(tuning), partial(_product, layer, scaled, tuning)
    shape = (rows, layer.columns, layer.inner)
    chosen = scaled_gated_tuning(*shape) if layer.gated else scaled_tuning(*shape, narrow=layer.narrow)
    yield "chosen: " + _label(chosen), partial(_product, layer, scaled, chosen)
    yield from _others(layer, x, scaled)


def one_row(layer: Layer, rows: int) -> Iterator[Variant]:
    """Ways to make a product of one row, with the norm where a step has it."""
    x = normal(layer.inner)
    out = normal(layer.columns)
    norm = None
    if not layer.narrow:
        new = torch.empty_like(x)
        norm = RowNorm(residual=x.clone(), new_residual=new, weight=torch.ones_like(x).float(), epsilon=1e-6)
    chosen = scaled_row_tuning(layer.columns, layer.inner)
    for tuning in (*ROW_TUNINGS, chosen):
        label = f"row {tuning.columns} columns, step {tuning.step}, {tuning.num_warps} warps"

        def call(which: int, tuning: RowTuning = tuning) -> None:
            weight = layer.weights[which]
            row_product(out, x, weight, norm=norm, gated=layer.gated, tuning=tuning)

        yield ("chosen: " if tuning is chosen else "") + label, call
    yield (
        "bf16 row",
        lambda which: row_product(out, x, layer.dense[which], norm=norm, gated=layer.gated),
    )
    yield from few_rows(layer, rows)


def many_rows(layer: Layer, rows: int) -> Iterator[Variant]:
    x, scaled = layer.rows(rows)
    yield from _others(layer, x, scaled)
    wide = normal(rows, layer.columns * (2 if layer.gated else 1))
    yield "quantize rows", lambda which: quantize_rows(scaled, x)
    if layer.gated:
        inner = allocate_scaled_rows(rows, layer.columns, layer.kind, x.device)
        narrow = normal(rows, layer.columns)
        yield "gated rows", lambda which: gated_rows(inner, wide)
        yield "bf16 gated product", lambda which: gated_product(narrow, x, layer.dense[which])
    if layer.name == "qkv":
        weight = torch.ones(layer.inner, device="cuda")
        residual = x.clone()
        yield "norm of eight bits", lambda which: residual_norm(scaled, residual, x, weight, epsilon=1e-6)


def _others(layer: Layer, x: Tensor, scaled: ScaledRows) -> Iterator[Variant]:
    out = normal(len(x), layer.weights[0].q.shape[0])
    if layer.kind == torch.float8_e4m3fn:
        yield "torch", lambda which: scaled_matrix_product(out, scaled, layer.weights[which])
    yield "bf16 cuBLAS", lambda which: torch.mm(x, layer.dense[which].T, out=out)


def _product(layer: Layer, scaled: ScaledRows, tuning: ProductTuning, which: int) -> None:
    sizes = (len(scaled), layer.columns)
    out = _outputs(sizes if tuning.parts == 1 else (tuning.parts, *sizes), tuning.parts == 1)
    scaled_product(out, scaled, layer.weights[which], tuning=tuning, gated=layer.gated)


_kept: dict[tuple[int, ...], Tensor] = {}


def _outputs(sizes: tuple[int, ...], whole: bool) -> Tensor:
    """Allocated once: a graph must not."""
    return _kept.setdefault(sizes, torch.empty(sizes, dtype=BF16 if whole else torch.float32, device="cuda"))


def _label(tuning: ProductTuning) -> str:
    parts = f", {tuning.parts} parts" if tuning.parts > 1 else ""
    return (
        f"{tuning.columns} columns, step {tuning.inner}{parts}, {tuning.num_warps} warps, "
        f"{tuning.num_stages} stages"
    )


def check(kind: torch.dtype) -> None:
    """Every kernel at the sizes of 8B against its definition."""
    shape = Shape(device="cuda", dtype=BF16)
    if kind == torch.uint8:
        for (_, columns, inner, gated, narrow), rows in product(SHAPES, (1, 16, 33, 64)):
            tuning = packed_tuning(rows, columns, inner, narrow=narrow, gated=gated)
            checks.check_packed_product(shape, rows, columns, inner, 128, tuning, gated=gated)
        checks.check_packing(shape, 4096, 4096)
        return
    checks.check_quantize_rows(shape, 70, 4096, kind)
    checks.check_rows_that_are_not_finite(shape, kind)
    for parts in (0, 2):
        checks.check_norm_of_eight_bits(shape, 70, 4096, kind, parts=parts)
    checks.check_gated_rows(shape, 70, 14336, kind)
    for _, columns, inner, gated, narrow in SHAPES:
        for rows in (1, 16, 33, 64):
            if gated:
                tuning = scaled_gated_tuning(rows, columns, inner)
                checks.check_gated_scaled_product(shape, rows, columns, inner, tuning, kind)
            else:
                tuning = scaled_tuning(rows, columns, inner, narrow=narrow)
                checks.check_scaled_product(shape, rows, columns, inner, tuning, kind)
        checks.check_scaled_product(shape, 300, columns, inner, None, kind)
        checks.check_scaled_row_product(shape, columns, inner, kind, has_norm=not narrow, gated=gated)


def timed(layer: Layer, rows: int, variants: Sequence[Variant], ceiling: float) -> list[Found]:
    found: list[Found] = []
    for label, call in variants:
        try:
            us = graph_microseconds([partial(call, which) for which in range(layer.copies)], milliseconds=20)
        except Exception as error:  # a cut that does not fit the card is no reason to lose the others
            print(f"{layer.name} {rows} {label}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        share = layer.num_bytes / us / 1e3 / ceiling
        found.append(
            {"shape": layer.name, "rows": rows, "how": label, "us": round(us, 2), "share": round(share, 3)}
        )
    return sorted(found, key=lambda each: float(each["us"]))


def variants_of(layer: Layer, rows: int) -> Iterator[Variant]:
    if layer.packed:
        return four_bits(layer, rows)
    if rows > MAX_ROWS:
        return many_rows(layer, rows)
    return (one_row if rows == 1 else few_rows)(layer, rows)


def is_shown(place: int, each: Found) -> bool:
    cut = "columns" in each["how"] and "chosen" not in each["how"]
    return place < BEST or not cut


@bench.part(
    flag("--rows", "1,8,16,32,64", "rows of decode steps"),
    flag("--many", "96,128,256,512,1024,4096", "rows of larger steps"),
    flag("--kind", "fp8", "fp8, int8 or int4"),
    flag("--head", False, "also the output matrix"),
)
def scaled(given: Given) -> Found:
    torch.manual_seed(0)
    kind = KINDS[given.kind]
    check(kind)
    print("checked", flush=True)
    ceiling = read_ceiling()[0]
    print(f"read ceiling {ceiling:,.0f} GB/s", flush=True)
    few, many = ([int(part) for part in text.split(",") if part] for text in (given.rows, given.many))
    result: list[Found] = []
    table("shape", "rows", "how", "us", "of the ceiling")
    for shape in (*SHAPES, HEAD) if given.head else SHAPES:
        layer = Layer(shape, kind)
        plans = [(rows, list(variants_of(layer, rows))) for rows in few + many]
        own = [
            call for _, variants in plans for label, call in variants if label not in ("torch", "bf16 cuBLAS")
        ]
        with compiling_only():
            for call in own:
                call(0)
        for rows, variants in plans:
            ordered = timed(layer, rows, variants, ceiling)
            result += ordered
            for place, each in enumerate(ordered):
                if is_shown(place, each):
                    row(*each.values())
        del layer, plans
        _kept.clear()
        torch.cuda.empty_cache()
    return {"kind": given.kind, "read_GB_s": ceiling, "products": result}


if __name__ == "__main__":
    bench.main()
