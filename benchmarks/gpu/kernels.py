"""Times every kernel on one card against what was measured of the card in the same run, and prints one table.

    python -m benchmarks.gpu.kernels [--json FILE] [--card] [--steps] [--only decode,prefill,...]

`--card` adds the figures of card.py, `--steps` whole decode steps of two model shapes (step.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu import cases
from benchmarks.gpu.card import graph_microseconds, matrix_ceiling, measure_card, read_ceiling
from benchmarks.gpu.encoder_cases import encoder_cases
from benchmarks.gpu.step import LARGE, SMALL, step_milliseconds
from benchmarks.harness import Benchmark, Found, Given, flag, row, rows_of, table
from paceline.runner.gpu.kernels.decode_attention import DecodeTuning
from paceline.runner.gpu.kernels.prefill_attention import PrefillTuning
from paceline.runner.gpu.kernels.shared_attention import SharedTuning

bench = Benchmark(__doc__)
# Tile, warps, stages, programs on a multiprocessor.
FP8_TILES = (
    (32, 2, 6, 4),
    (32, 2, 4, 6),
    (32, 1, 4, 8),
    (64, 2, 3, 4),
    (64, 2, 4, 3),
    (64, 4, 3, 4),
    (64, 4, 4, 3),
)

# Queries of a tile, warps, stages.
PREFILL_TILES = (
    (64, 4, 3),
    (64, 4, 2),
    (64, 4, 4),
    (64, 8, 3),
    (128, 8, 2),
    (128, 8, 3),
    (128, 8, 4),
    (128, 4, 3),
)


def uniform_lengths() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return [int(length) for length in torch.randint(100, 1536, (256,), generator=generator)]


def batches(kv_dtype: torch.dtype) -> Iterator[cases.Case]:
    """Decode steps of any type of keys and values."""
    for group in (2, 4):
        yield cases.decode_case("uniform", uniform_lengths(), group=group, layers=6, kv_dtype=kv_dtype)
        yield cases.decode_case("skewed", cases.skewed_lengths(97, 100_000), group=group, kv_dtype=kv_dtype)
    for rows, layers in ((1024, 6), (256, 12), (64, 28), (8, 28), (1, 28)):
        yield cases.decode_case("equal", [144] * rows, layers=layers, kv_dtype=kv_dtype)


def decode_cases() -> Iterator[cases.Case]:
    yield from batches(cases.BF16)
    yield cases.decode_case("skewed", cases.skewed_lengths(256, 330_000), layers=4)
    yield cases.decode_case("one row", [32_000], layers=8)
    yield cases.plan_case(256)
    yield cases.plan_case(1024)


def prefill_cases() -> Iterator[cases.Case]:
    for group in (2, 4):
        for tokens in (1024, 2048, 3584, 4096):
            yield cases.prefill_case(tokens, group=group)
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                yield cases.sdpa_case(tokens, group=group, backend=backend)
    yield cases.prefill_case(1024, group=4, context=3072)
    yield cases.prefill_case(256, group=4, context=2048, spans=8)
    yield cases.prefill_case(512, group=2, spans=16)


def shared_cases() -> Iterator[cases.Case]:
    tunings = (
        SharedTuning(),
        SharedTuning(programs_per_multiprocessor=4),
        SharedTuning(query_rows=32, programs_per_multiprocessor=3),
        SharedTuning(query_rows=128, num_warps=8),
    )
    for tuning in tunings:
        for group in (2, 4):
            for trees, branches, length in ((1, 64, 8000), (32, 8, 2000), (8, 2, 4096)):
                yield cases.shared_case(trees, branches, length, group=group, tuning=tuning)


def narrow_prefill_cases() -> Iterator[cases.Case]:
    """Prompts over keys and values of eight bits, which each tile of queries turns into 16: larger tiles do that less
    often. Of four queries to a key, one span alone and four at once."""
    for tuning in PREFILL_TILES:
        for tokens, context, spans in ((3500, 0, 1), (1024, 2476, 1), (1024, 0, 4)):
            yield cases.prefill_case(
                tokens,
                group=4,
                context=context,
                spans=spans,
                kv_dtype=torch.float8_e4m3fn,
                tuning=PrefillTuning(query_rows=tuning[0], num_warps=tuning[1], num_stages=tuning[2]),
            )


def fp8_cases() -> Iterator[cases.Case]:
    """Keys and values of eight bits: at what 16 bits are timed at, and with other tiles than theirs."""
    fp8 = torch.float8_e4m3fn
    yield from batches(fp8)
    for tile, warps, stages, programs in FP8_TILES:
        tuning = DecodeTuning(
            tile=tile, num_warps=warps, num_stages=stages, programs_per_multiprocessor=programs
        )
        for name, lengths in (("uniform", uniform_lengths()), ("equal", [144] * 1024)):
            label = f"{name}, tile {tile}, {warps} warps, {stages} stages, {programs} programs"
            yield cases.decode_case(label, lengths, layers=6, tuning=tuning, kv_dtype=fp8)
    for tokens, group in ((1024, 2), (4096, 2), (1024, 4), (4096, 4)):
        yield cases.prefill_case(tokens, group=group, kv_dtype=fp8)
    yield cases.prefill_case(1024, group=4, context=3072, kv_dtype=fp8)


def small_cases() -> Iterator[cases.Case]:
    for tokens in (1, 256, 2048):
        yield from cases.small_cases(tokens, width=1024, heads=16, inner=3072)
    yield from cases.small_cases(2048, width=4096, heads=32, inner=14_336)
    yield cases.place_case(8000)


def sampling_cases() -> Iterator[cases.Case]:
    for rows in (1, 64, 256, 1024):
        for temperature in (0.0, 0.6):
            yield cases.sampling_case(rows, temperature)
    for rows in (1, 64, 256, 1024):
        yield cases.logprobs_case(rows, 151_936)


def product_cases() -> Iterator[cases.Case]:
    for columns, inner in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)):
        for rows in (1, 8, 16):
            yield from cases.product_cases(rows, columns, inner)
    yield from cases.product_cases(1, 28_672, 4096)
    yield from cases.product_cases(1, 4096, 14_336)


def quantized_cases() -> Iterator[cases.Case]:
    for columns, inner in ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)):
        for rows in (1, 8, 16, 32, 64):
            yield from cases.quantized_cases(rows, columns, inner)


def gated_cases() -> Iterator[cases.Case]:
    for tokens in (128, 192, 256, 384, 512, 640, 896, 1024, 1536, 2048, 4096, 8192, 12_288):
        yield from cases.gated_cases(tokens, 14_336, 4096)
        if tokens >= 512:  # below, the skinny product goes on
            yield from cases.gated_cases(tokens, 3072, 1024)


FAMILIES = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "shared": shared_cases,
    "fp8": fp8_cases,
    "fp8-prefill": narrow_prefill_cases,
    "small": small_cases,
    "sampling": sampling_cases,
    "products": product_cases,
    "gated": gated_cases,
    "quantised": quantized_cases,
    "encoders": encoder_cases,
}


def timed(case: cases.Case, ceilings: Mapping[str, float]) -> Found:
    """Microseconds of a call, and its rate beside the ceiling in the same unit."""
    microseconds = graph_microseconds(case.calls)
    found: Found = {"kernel": case.kernel, "shape": case.shape, "us": round(microseconds, 2)}
    if case.flops or case.num_bytes:
        unit = "TFLOP/s" if case.flops else "GB/s"
        rate = case.flops / microseconds / 1e6 if case.flops else case.num_bytes / microseconds / 1e3
        found |= {"rate": round(rate, 1), "unit": unit, "share": round(rate / ceilings[unit], 3)}
    return found


def decode_steps() -> Iterator[Found]:
    for model, sizes in ((SMALL, (1, 8, 64, 256, 1024)), (LARGE, (1, 8, 64, 256))):
        for rows, overlapped in product(sizes, (False, True)):
            milliseconds = step_milliseconds(model, rows, overlapped=overlapped)
            torch.cuda.empty_cache()
            how = "overlapped launches" if overlapped else "plain launches"
            found = {"model": model.name, "rows": rows, "launches": how, "ms": round(milliseconds, 3)}
            yield found | {"tok/s": round(rows / milliseconds * 1000)}


@bench.part(
    flag("--card", False, "also the figures of card.py"),
    flag("--steps", False, "also whole decode steps of two model shapes (step.py)"),
    flag("--only", ",".join(FAMILIES), "families of kernels"),
)
def kernels(given: Given) -> Found:
    families = given.only.split(",")
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: the families are {', '.join(FAMILIES)}")
    torch.manual_seed(0)
    read, at_random = read_ceiling()
    matrix = matrix_ceiling()
    print(f"ceilings: read {read:,.0f} GB/s, at random {at_random:,.0f} GB/s, {matrix:,.0f} TFLOP/s")
    named = {"read_GB_s": read, "random_16KB_read_GB_s": at_random, "matrix_TFLOP_s": matrix}
    result: Found = {"kernels": [], "ceilings": named}
    table("kernel", "shape", "us", "rate", "unit", "of the ceiling")
    for family in families:
        for case in FAMILIES[family]():
            result["kernels"].append(timed(case, {"GB/s": read, "TFLOP/s": matrix}))
            row(*result["kernels"][-1].values())
            del case
            torch.cuda.empty_cache()
    if given.steps:
        result["decode_steps"] = rows_of(decode_steps())
    if given.card:
        result["card"] = measure_card()
        for name, value in result["card"].items():
            print(f"{name}: {value:,.1f}", flush=True)
    return result


if __name__ == "__main__":
    bench.main()
