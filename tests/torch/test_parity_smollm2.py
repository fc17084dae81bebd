"""SmolLM2 from its GGUF file against transformers; skipped where the file is not here.

Name it with PACELINE_SMOLLM2, or fetch it with `paceline pull smollm2`. benchmarks/parity_smollm2.py does the same with
more prompts and measures perplexity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.models.quantized import QuantizedStorage, fast_product
from paceline.runner.native.model import build_model
from paceline.text.tokenizer import Tokenizer
from tests.bits import Circumstances, Prompt, Record, differences
from tests.native.runs import record_native
from tests.torch.bits import record
from tests.torch.english_prompts import PROMPTS
from tests.torch.gguf_reference import file_values, in_halves, smollm2_path, transformers_model
from tests.torch.parity import TOLERANCE, greedy_reference

PATH = smollm2_path()
NUM_NEW = 24
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(PATH is None or not PATH.exists(), reason="SmolLM2 is not on this machine"),
]


def path() -> Path:
    assert PATH is not None
    return PATH


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(path())


@cache
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_checkpoint(checkpoint())
    return [tuple(tokenizer.encode(text)) for text in PROMPTS]


@pytest.mark.parametrize(
    "name, stored, num_heads",
    [
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.29.self_attn.q_proj.weight", "blk.29.attn_q.weight", 9),
        ("model.layers.3.self_attn.k_proj.weight", "blk.3.attn_k.weight", 3),
        ("model.layers.3.self_attn.v_proj.weight", "blk.3.attn_v.weight", 0),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight", 0),
        ("model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight", 0),
        ("model.norm.weight", "output_norm.weight", 0),
    ],
)
def test_tensors_are_those_of_the_file(name: str, stored: str, num_heads: int) -> None:
    expected = file_values(path(), stored)
    if num_heads:
        assert not np.array_equal(in_halves(expected, num_heads), expected)
        expected = in_halves(expected, num_heads)
    assert np.array_equal(checkpoint().tensor(name).to_float32(), expected)


def test_greedy_text_is_that_of_transformers() -> None:
    model = transformers_model(checkpoint())
    decoder = build_decoder(checkpoint(), 512)
    chosen = prompts()[:8]
    outputs = record(decoder, chosen, Circumstances(), num_new=NUM_NEW).outputs
    for prompt, output in zip(chosen, outputs, strict=True):
        reference = greedy_reference(model, prompt, NUM_NEW, eos=())
        pairs = zip(output, reference.output, strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert first is None or reference.gaps[first] < TOLERANCE, (prompt, first, output, reference.output)


def chosen_prompts() -> list[Prompt]:
    """A few, and one that takes several blocks of any size."""
    return [*prompts()[:5], sum(prompts()[:16], ())[:150]]


AROUND = (
    Circumstances(),
    Circumstances(budget=7, block_size=32),
    Circumstances(preempt="recompute", depth=1, block_size=32),
    Circumstances(preempt="swap", caching=True),
)


@pytest.mark.skipif(fast_product() != "dynamic", reason="the output matrix is kept dense on this machine")
def test_quantised_arithmetic_gives_the_same_bits_in_any_batch() -> None:
    product = fast_product()
    assert product is not None
    decoder = build_decoder(checkpoint(), 512, QuantizedStorage(product))
    _same_bits_in_any_batch(lambda around: record(decoder, chosen_prompts(), around, num_new=6))


def test_native_arithmetic_gives_the_same_bits_in_any_batch() -> None:
    model = build_model(checkpoint(), 512)
    _same_bits_in_any_batch(lambda around: record_native(model, chosen_prompts(), around, num_new=6))


def _same_bits_in_any_batch(run_in: Callable[[Circumstances], Record]) -> None:
    alone = run_in(Circumstances(alone=True, budget=512))
    for around in AROUND:
        run = run_in(around)
        assert not differences(run, alone), around
        assert bool(run.preempted) == bool(around.preempt)


def test_native_arithmetic_is_near_the_real_one() -> None:
    text = sum(prompts()[:20], ())[:200]
    model, decoder = build_model(checkpoint(), 512), build_decoder(checkpoint(), 512)
    around = Circumstances(budget=512)
    _are_near(
        record(decoder, [text], around, num_new=1), record_native(model, [text], around, num_new=1), text
    )


@pytest.mark.skipif(fast_product() is None, reason="this machine has no fast 4-bit product")
def test_quantised_arithmetic_is_near_the_real_one() -> None:
    product = fast_product()
    assert product is not None
    text = sum(prompts()[:20], ())[:200]
    decoders = build_decoder(checkpoint(), 512), build_decoder(checkpoint(), 512, QuantizedStorage(product))
    runs = [record(decoder, [text], Circumstances(budget=512), num_new=1) for decoder in decoders]
    _are_near(runs[0], runs[1], text)


def _are_near(exact: Record, run: Record, text: Prompt) -> None:
    """Logits of a text from both: the same direction, and mostly the same likeliest token."""
    logits = []
    for each in (exact, run):
        rows = [np.frombuffer(each.bits[text[:count]], np.float32) for count in range(1, len(text) + 1)]
        logits.append(torch.from_numpy(np.stack(rows)))
    assert torch.nn.functional.cosine_similarity(logits[0], logits[1]).median() > 0.99
    likeliest = [each.argmax(dim=-1) for each in logits]
    assert float((likeliest[0] == likeliest[1]).float().mean()) > 0.8
