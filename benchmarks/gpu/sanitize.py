"""Runs small shapes of every kernel family once, for a tool that watches memory accesses.

    python -m benchmarks.gpu.sanitize                                       # compiles, so that the next is quick
    compute-sanitizer --tool memcheck python -m benchmarks.gpu.sanitize     # also: racecheck, initcheck, synccheck

Results are compared with the definitions as in the tests. A module whose kernels are not launched here is an error.
`--only FAMILY,...` runs some; `--device cpu` takes the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

# Each tensor in separate memory: its end is watched.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import paceline.runner.gpu.kernels
from benchmarks.harness import Benchmark, Given, flag
from paceline.runner.gpu.kernels.adapter_product import adapter_tuning
from paceline.runner.gpu.kernels.skinny_product import ProductTuning
from tests.gpu import kernel_adapter_cases as adapter_cases
from tests.gpu import kernel_cases, kernel_row_cases, kernel_small_cases
from tests.gpu import kernel_expert_cases as expert_cases
from tests.gpu import kernel_rule_cases as rule_cases
from tests.gpu import kernel_truncation_cases as truncation_cases
from tests.gpu.kernel_cases import Shape

bench = Benchmark(__doc__)
Family = Callable[[Shape], None]


def decode(shape: Shape) -> None:
    for window in (0, 70):
        kernel_cases.check_plan([5, 700, 64, 1, 0, 65], shape.device, window=window, target=5)
        kernel_cases.check_decode(shape, [1, 0, 64, 300, 65], window=window, target_chunks=4)
    kernel_cases.check_decode(replace(shape, group=4, head_dim=128), [130, 33], target_chunks=4)


def prefill(shape: Shape) -> None:
    spans = [(0, 1), (0, 70), (130, 67), (64, 0), (63, 2), (200, 9)]
    for window in (0, 70):
        kernel_cases.check_prefill(shape, spans, window=window)
    kernel_cases.check_prefill(replace(shape, group=4, head_dim=128), spans[:3])


def shared(shape: Shape) -> None:
    kernel_cases.check_cascade(shape, [(128, [1, 70, 64] * 3), (320, [5, 5])], alone=[9])


def elementwise(shape: Shape) -> None:
    for has_norm in (False, True):
        kernel_cases.check_rope_kv_write(shape, 9, rotary_dim=32, has_norm=has_norm)
    kernel_cases.check_place_kv(shape, 37, rotary_dim=32)
    for parts in (0, 1, 3):
        kernel_small_cases.check_residual_norm(shape, 3, 100, parts=parts)
    kernel_small_cases.check_gated_activation(shape, 3, 1100, "silu")
    kernel_small_cases.check_gated_activation(shape, 3, 1100, "gelu_tanh")


def products(shape: Shape) -> None:
    for has_norm, gated in ((False, False), (True, False), (True, True)):
        kernel_cases.check_row_product(shape, 6, 1100, has_norm=has_norm, gated=gated)
    for parts in (1, 2):
        tuning = ProductTuning(columns=64, inner=128, parts=parts, num_warps=4)
        kernel_small_cases.check_skinny_product(shape, 5, 128, 512, tuning)
    kernel_small_cases.check_gated_product(shape, 300, 256, 128)


def rows(shape: Shape) -> None:
    kernel_row_cases.check_decode_inputs(shape.device)
    kernel_row_cases.check_span_inputs(shape.device)
    kernel_row_cases.check_write_words(shape.device)
    kernel_row_cases.check_row_update(shape.device, rows=30, slots=20)


def sampling(shape: Shape) -> None:
    for vocabulary in (1000, 5001):
        kernel_row_cases.check_sampling(shape.device, slots=5, vocabulary=vocabulary, dtype=shape.dtype)
        kernel_row_cases.check_token_logprobs(shape.device, draws=5, vocabulary=vocabulary, dtype=shape.dtype)


def rules(shape: Shape) -> None:
    rule_cases.check_seen(shape.device, rows=5, width=70, vocabulary=5001)
    rule_cases.check_rules(shape.device, slots=6, vocabulary=5001)
    rule_cases.check_bans_that_would_leave_nothing(shape.device)
    rule_cases.check_unusable_logits_stay(shape.device)


def truncation(shape: Shape) -> None:
    truncation_cases.check_truncation(shape.device, slots=6, vocabulary=5001, dtype=torch.float32)
    truncation_cases.check_rows_that_are_not_finite(shape.device)


def experts(shape: Shape) -> None:
    for number, hidden, inner in ((8, 96, 72), (4, 128, 64)):
        layer = expert_cases.Mixture(
            device=shape.device, dtype=shape.dtype, experts=number, per_token=2, hidden=hidden, inner=inner
        )
        chosen, _ = layer.choices(40)
        expert_cases.check_plan(chosen, number, tile_rows=16)
        for tokens in (1, 40):
            expert_cases.check_product(layer, tokens)


def adapters(shape: Shape) -> None:
    product = adapter_cases.Product(
        device=shape.device, dtype=shape.dtype, inner=96, widths=(72, 40), ranks=(16, 32)
    )
    gated = replace(product, widths=(72, 72))
    tuning = replace(adapter_tuning(7, shape.dtype), inner=32)
    for of_tokens in ([-1], [0, 1, -1, 1, 0, 0, 1] * 6):
        adapter_cases.check_adapter_product(product, of_tokens, tuning=tuning)
        adapter_cases.check_gated_adapters(gated, of_tokens, tuning=tuning)


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        *(decode, prefill, shared, elementwise, products),
        *(rows, sampling, rules, truncation, experts, adapters),
    )
}


def watch_launches(device: str) -> set[str]:
    """The modules whose kernels are launched from now on."""
    name = "triton.runtime.jit" if device == "cuda" else "triton.runtime.interpreter"
    kind: Any = getattr(import_module(name), "JITFunction" if device == "cuda" else "InterpretedFunction")
    run, seen = kind.run, set()

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        seen.add(self.fn.__module__)
        return run(self, *args, **options)

    kind.run = noted
    return seen


def modules_with_kernels() -> set[str]:
    """Those that launch: `name[(grid)](...)` at the end of a function for the host."""
    folder = Path(paceline.runner.gpu.kernels.__file__).parent
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    return {
        f"{paceline.runner.gpu.kernels.__name__}.{name}"
        for name, text in texts.items()
        if "_kernel[(" in text
    }


@bench.part(flag("--only", ",".join(FAMILIES), "families"), flag("--device", "cuda", choices=("cuda", "cpu")))
def sanitize(given: Given) -> None:
    torch.manual_seed(0)
    seen = watch_launches(given.device)
    shape = Shape(device=given.device, dtype=torch.bfloat16 if given.device == "cuda" else torch.float32)
    chosen = given.only.split(",")
    for name in chosen:
        started_s = time.perf_counter()
        FAMILIES[name](shape)
        if given.device == "cuda":
            torch.cuda.synchronize()
        print(f"{name:12} {time.perf_counter() - started_s:6.1f} s", flush=True)
    missed = modules_with_kernels() - seen
    if len(chosen) == len(FAMILIES) and missed:
        raise SystemExit(f"no kernel of {', '.join(sorted(missed))} was launched")
    print(f"{len(seen)} modules with kernels, each result as defined")


if __name__ == "__main__":
    bench.main()
