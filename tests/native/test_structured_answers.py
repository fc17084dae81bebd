"""Every answer with a form has it, whatever else happens to its request."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.structured_answers import answered
from paceline import LLM, SamplingParams
from tests.kernels import host_code
from tests.model_folder import write_model
from tests.native.structured_forms import GRAMMARS, REGEXES, SCHEMAS, forms
from tests.torch.gguf_reference import smollm2_path

CONTEXT, BLOCK_SIZE = 512, 16


def test_there_are_enough_forms() -> None:
    assert len(SCHEMAS) >= 60 and len(REGEXES) >= 20 and len(GRAMMARS) >= 10


@pytest.mark.parametrize(
    ("clients", "drafts", "blocks", "rounds"),
    [
        pytest.param(16, "auto", 36, 1, id="drafts and preemption"),
        pytest.param(3, "off", 200, 1, id="plain"),
        pytest.param(16, "auto", 36, 8, id="many", marks=pytest.mark.campaign),
        pytest.param(1, "auto", 200, 3, id="alone", marks=pytest.mark.campaign),
    ],
)
def test_answers_have_their_form(tmp_path: Path, clients: int, drafts: str, blocks: int, rounds: int) -> None:
    host_code()
    folder = write_model(tmp_path / "model", max_position_embeddings=CONTEXT)
    options = {"max_num_seqs": clients, "num_gpu_blocks_override": blocks, "block_size": BLOCK_SIZE}
    llm = LLM(str(folder), load_format="dummy", speculative_config=drafts, **options)
    draw, whole, cut_off, preempted = random.Random(1), 0, 0, 0
    for number in range(rounds):
        asked = [each for compact in (True, False) for each in forms(compact=compact)]
        draw.shuffle(asked)
        params = [
            SamplingParams(
                max_tokens=200,
                temperature=draw.choice((0.0, 1.0)),
                seed=number,
                n=draw.choice((1, 1, 2)),
                logprobs=draw.choice((None, 2)),
                repetition_penalty=draw.choice((1.0, 1.3)),
                structured_outputs=structure,
            )
            for structure, _ in asked
        ]
        outputs = llm.generate(["Say: " * draw.randrange(1, 9) for _ in asked], params, use_tqdm=False)
        for (structure, is_right), output in zip(asked, outputs, strict=True):
            preempted += 0 if output.metrics is None else output.metrics.preemptions
            for part in output.outputs:
                assert part.finish_reason in ("stop", "length"), (structure, part.error)
                cut_off += part.finish_reason == "length"
                whole += part.finish_reason == "stop"
                assert part.finish_reason == "length" or is_right(part.text), (structure, part.text)
    llm.shutdown()
    assert whole > 100 * rounds and cut_off < 0.15 * whole, (whole, cut_off)
    assert preempted > 0 or blocks > 100


SMOLLM2 = smollm2_path()
MODELS = [
    pytest.param(None, 100, id="random model"),
    pytest.param(
        SMOLLM2,
        300,
        id="SmolLM2",
        marks=[
            pytest.mark.campaign,
            pytest.mark.skipif(
                SMOLLM2 is None or not SMOLLM2.exists(), reason="SmolLM2 is not on this machine"
            ),
        ],
    ),
]


@pytest.mark.parametrize(("model", "answers"), MODELS)
def test_a_sample_of_the_benchmark(model: Path | None, answers: int) -> None:
    """One client and 16, with forks: `python -m benchmarks.structured_answers`. Whether so few requests are preempted
    is a matter of timing."""
    host_code()
    rows = asyncio.run(answered(model, answers, (1, 16)))
    assert [row["examples"] for row in rows] == [[], []]
    assert all(row["complete"] > 0.7 * row["answers"] and row["forks"] for row in rows), rows
