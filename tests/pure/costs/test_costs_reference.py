"""The table of docs/reference/costs.md: predictions of the H200 presets beside what was measured.

Computed here, so that the page cannot drift from the code; `python tests/pure/costs/test_costs_reference.py`
prints it. The workloads need no scheduler: all requests arrive at once and all rows fit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.costs.cost_model import StepShape, span_context_products
from paceline.costs.presets import ModelShape, device_spec, model_shape
from paceline.costs.roofline import Roofline

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "costs.md"
MAX_STEP_TOKENS = 16_384
Lengths = list[tuple[int, int]]  # (prompt, output) of every request


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """vLLM 0.26.0 on one H200: tokens per second with its defaults, and tuned where that was measured."""

    workload: str
    model: str
    default: float
    tuned: float | None


MEASURED = [
    Measured(workload=workload, model=model, default=default, tuned=tuned)
    for model, rows in {
        "qwen3-0.6b": [
            ("decode-b1", 412, 420),
            ("decode-b8", 2795, None),
            ("decode-b64", 15_480, 17_528),
            ("decode-b256", 27_602, 32_150),
            ("decode-b1024", 19_551, 38_912),
            ("nano", 20_221, 22_265),
            ("prefill-64x3500", 330_530, 350_010),
        ],
        "llama-3.1-8b": [
            ("decode-b1", 202, 206),
            ("decode-b8", 1589, None),
            ("decode-b64", 10_629, 10_696),
            ("decode-b256", 23_850, 23_735),
            ("decode-b1024", 19_359, 28_552),
            ("nano", 9684, 9721),
            ("prefill-64x3500", 41_004, 41_063),
        ],
    }.items()
    for workload, default, tuned in rows
]


def lengths_of(workload: str) -> Lengths:
    if workload.startswith("decode-b"):
        return [(16, 256)] * int(workload.removeprefix("decode-b"))
    if workload == "prefill-64x3500":
        return [(3500, 1)] * 64
    # 256 requests of 100 to 1,024 tokens in and out, drawn as the public benchmark draws them.
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(draw.randint(100, 1024))
        for _ in range(prompts[-1]):
            draw.randint(0, 10_000)
    return [(prompt, draw.randint(100, 1024)) for prompt in prompts]


def steps_of(lengths: Lengths) -> Iterator[StepShape]:
    """Prompts first, in steps of at most MAX_STEP_TOKENS, then all rows decode until each has its length."""
    products = sum(span_context_products(0, prompt) for prompt, _ in lengths)
    total = sum(prompt for prompt, _ in lengths)
    num_steps = -(-total // MAX_STEP_TOKENS)
    for i in range(num_steps):
        yield StepShape(
            prefill_tokens=total * (i + 1) // num_steps - total * i // num_steps,
            prefill_context_products=products // num_steps,
            logit_rows=-(-len(lengths) // num_steps),
        )
    for i in range(1, max(output for _, output in lengths)):
        live = [prompt + i for prompt, output in lengths if output > i]
        yield StepShape(decode_rows=len(live), decode_context=sum(live), logit_rows=len(live))


def floor_seconds(model: ModelShape, shape: StepShape) -> float:
    """Perfect kernels on this card, no host: the longer of a pass over the weights (4.22 TB/s) and the
    arithmetic (790 TFLOP/s), then the KV reads and the attention products one after the other."""
    weights = model.layers * model.layer_parameters
    head = model.head_parameters
    read_s = 2 * (weights + head) / 4.22e12
    multiply_s = 2 * (weights * shape.tokens + head * shape.logit_rows) / 790e12
    kv_s = shape.decode_context * model.kv_bytes_per_token / 4.22e12
    products = 4 * model.layers * model.heads * model.head_dim * shape.prefill_context_products
    return max(read_s, multiply_s) + kv_s + products / 790e12


def tokens_counted(workload: str, lengths: Lengths) -> int:
    prompts = sum(prompt for prompt, _ in lengths) if workload.startswith("prefill") else 0
    return prompts + sum(output for _, output in lengths)


def table() -> str:
    lines = [
        "| model | workload | tok/s of | vLLM default | vLLM tuned | predicted | floor | vLLM / predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in MEASURED:
        lengths = lengths_of(row.workload)
        model = model_shape(row.model)
        steps = list(steps_of(lengths))
        roofline = Roofline(model, device_spec("h200"))
        tokens = tokens_counted(row.workload, lengths)
        predicted = tokens / sum(roofline.step_seconds(shape) for shape in steps)
        floor = tokens / sum(floor_seconds(model, shape) for shape in steps)
        best = max(row.default, row.tuned or 0.0)
        counted = "total" if row.workload.startswith("prefill") else "output"
        tuned = f"{row.tuned:,.0f}" if row.tuned else "-"
        lines.append(
            f"| {row.model} | {row.workload} | {counted} | {row.default:,.0f} | {tuned} "
            f"| {predicted:,.0f} | {floor:,.0f} | {best / predicted:.2f} |"
        )
    return "\n".join(lines)


def shares() -> list[str]:
    """The H200's curves as shares of what its memory or its arithmetic would allow, a row per layer size."""
    device = device_spec("h200")
    rows = []
    for curve in device.matmul_curves:
        seconds = curve.seconds_per_parameter()
        shares = (device.seconds_per_parameter(count, 2) / seconds(count) for count in curve.rows)
        rows.append(" | ".join(f"{share:.2f}" for share in shares))
    return rows


def test_the_page_shows_what_the_code_predicts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page
    for row in shares():
        assert row in page


def test_the_workload_is_the_public_one() -> None:
    lengths = lengths_of("nano")
    assert sum(output for _, output in lengths) == 133_966


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.model}-{row.workload}")
def test_predictions_lie_between_the_measured_engine_and_the_floor(row: Measured) -> None:
    """A tenth of slack: the engine may beat an estimate that was made for other kernels, never the floor."""
    model, steps = model_shape(row.model), list(steps_of(lengths_of(row.workload)))
    roofline = Roofline(model, device_spec("h200"))
    tokens = tokens_counted(row.workload, lengths_of(row.workload))
    predicted = tokens / sum(roofline.step_seconds(shape) for shape in steps)
    floor = tokens / sum(floor_seconds(model, shape) for shape in steps)
    best = max(row.default, row.tuned or 0.0)
    assert 0.9 * best <= predicted <= floor


if __name__ == "__main__":
    print(table(), *shares(), sep="\n")
