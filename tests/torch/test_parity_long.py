"""Sequences longer than a piece of attention's sums, and prompt log-probabilities, against transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.factory import build_engine
from paceline.models.decoder import Decoder
from paceline.models.files.open import open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.attention import PIECE
from paceline.runner.cpu import CPURunner
from paceline.runner.native.model import NativeModel, build_model
from tests.bits import Circumstances
from tests.native.runs import record_native
from tests.torch.bits import record
from tests.torch.parity import BACKENDS, TOLERANCE, Reference, greedy_reference, subject
from tests.torch.tiny_models import save

NUM_NEW = 8
LENGTHS = (PIECE - NUM_NEW // 2, PIECE - 1, PIECE, PIECE + 1, PIECE + 40, 2 * PIECE - 3, 2 * PIECE + 30)


@cache
def long_subject(name: str, folder: str) -> tuple[Decoder, NativeModel, tuple[Reference, ...]]:
    model = save(name, Path(folder))
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 160) for _ in range(length)] for length in LENGTHS]
    references = tuple(greedy_reference(model, prompt, NUM_NEW, eos=()) for prompt in prompts)
    checkpoint, longest = open_checkpoint(folder), max(LENGTHS) + NUM_NEW + 1
    return build_decoder(checkpoint, longest), build_model(checkpoint, longest), references


@pytest.mark.parametrize(
    "around",
    [
        Circumstances(budget=100),
        Circumstances(budget=600, block_size=32, depth=1, caching=True),
        Circumstances(alone=True, budget=300, block_size=8, preempt="swap"),
        Circumstances(budget=600, preempt="recompute"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_long_sequences(
    name: str, backend: str, around: Circumstances, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / name
    folder.mkdir(exist_ok=True)
    decoder, native, references = long_subject(name, str(folder))
    prompts = [reference.prompt for reference in references]
    if backend == "torch":
        run = record(decoder, prompts, around, num_new=NUM_NEW)
    else:
        around = replace(around, block_size=max(around.block_size, 16))
        run = record_native(native, prompts, around, num_new=NUM_NEW)
    assert run.outputs == [reference.output for reference in references]
    for reference in references:
        read = reference.sequence[:-1]
        known = [count for count in range(1, len(read) + 1) if read[:count] in run.bits]
        logits = np.stack([np.frombuffer(run.bits[read[:count]], np.float32) for count in known])
        assert len(known) == len(read)
        assert float(np.abs(logits - reference.logits.numpy()).max()) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("preempting", [False, True])
def test_prompt_logprobs(budget: int, preempting: bool, backend: str) -> None:
    """One for every token of the prompt but the first, whatever the chunks; none of them from a cache."""
    model = subject("gemma3")
    config = EngineConfig(
        kv=KVConfig(
            block_size=16,
            num_blocks=100,
            num_host_blocks=50,
            groups=tuple(GroupSpec(window=window) for window in model.decoder.spec.group_windows),
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_model_len=80, max_num_seqs=32),
        depth=1,
    )
    engine = build_engine(config, CPURunner(config, model.make_step(backend, config)))
    sampling = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    plain = SamplingParams(max_tokens=3, temperature=0.0)
    asked: dict[RequestId, Reference | None] = {}
    for reference in model.references[:6]:
        asked[engine.add(reference.prompt, plain)[0]] = None
        asked[engine.add(reference.prompt, sampling)[0]] = reference
    found: dict[RequestId, dict[int, float]] = {request: {} for request in asked}
    while engine.has_requests:
        events = engine.step_overlapped()
        assert engine.last_error is None
        for event in events.logprobs:
            said = found[event.request].setdefault(event.logprobs.position, event.logprobs.logprob)
            assert said == pytest.approx(event.logprobs.logprob, abs=1e-5), "said twice, and otherwise"
        for batch in events.tokens if preempting else ():
            for request in set(batch.requests.tolist()) & engine.scheduler.state.requests.keys():
                engine.scheduler.preempt(request, swap=bool(request % 2))
    for request, wanted in asked.items():
        if wanted is None:
            assert not found[request]
            continue
        prompt = torch.tensor(wanted.prompt)
        expected = wanted.logits.log_softmax(dim=-1)[torch.arange(len(prompt) - 1), prompt[1:]]
        assert sorted(found[request]) == list(range(1, len(prompt)))
        got = torch.tensor([found[request][position] for position in range(1, len(prompt))])
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
