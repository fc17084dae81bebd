"""Drafts of heads and of smaller models change when tokens come, never which."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline import LLM
from paceline.config.engine import EngineConfig
from paceline.config.sized import Capacity
from paceline.core.plan import StepPlan
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.models.decoder import Decoder
from paceline.models.draft_head import DraftModel, DraftNet, EagleHead, build_head
from paceline.models.files.head_folder import HeadFiles, head_tensors, new_head, write_head
from paceline.models.files.open import open_checkpoint
from paceline.models.load import build_decoder
from paceline.models.spec import ModelSpec, RopeSpec
from paceline.runner.device_rows import DeviceRows, Drafts
from paceline.runner.drafts import NgramDrafter
from paceline.runner.model_drafts import MOST_FAILURES, ModelDrafter
from paceline.runner.torch_step import TorchStep
from tests.bits import Circumstances, Record, record
from tests.cases import diagonal
from tests.model_folder import write_model, write_weights
from tests.native.test_native_drafts import CIRCUMSTANCES, SAMPLINGS, answer
from tests.native.test_native_engine import ALONE, MAX_LEN, NUM_NEW, prompts
from tests.quantized_helpers import QuantizedSource, tiny_spec

Index = NDArray[np.int64]
GUESSERS = ("eagle", "medusa", "draft_model", "itself")


@cache
def target(window: int | None = None) -> Decoder:
    return build_decoder(QuantizedSource(tiny_spec(window=window), "F32"), MAX_LEN + 1)


def random_head(kind: str, model: ModelSpec, *, draft_vocab: int = 64) -> HeadFiles:
    spec = new_head(kind, model, draft_vocab, num_heads=3)
    rng = np.random.default_rng(7)
    tensors = {
        name: (rng.standard_normal(shape) * 0.2).astype(np.float32) + ("norm" in name)
        for name, shape in head_tensors(spec)
    }
    to_target = np.sort(rng.permutation(model.vocab_size)[:draft_vocab])
    return HeadFiles(spec=spec, tensors=tensors, to_target=to_target)


def net_for(kind: str, decoder: Decoder) -> DraftNet:
    """A random head, another random model, or the model itself."""
    if kind == "itself":
        return DraftModel(decoder)
    if kind == "draft_model":
        small = replace(
            tiny_spec(tied=True),
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            head_dim=16,
            windows=(None, 8),
            ropes=(RopeSpec(rotary_dim=16),),
            layer_ropes=(0, 0),
        )
        return DraftModel(build_decoder(QuantizedSource(small, "F32", 3), MAX_LEN + 1))
    return build_head(random_head(kind, decoder.spec), decoder.parts.embedding, MAX_LEN + 1)


class Silent(NgramDrafter):
    """The model is asked for every row."""

    def promises(self, at: Index) -> list[float]:
        return [0.0] * len(at)

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        return None


def drafter_of(config: EngineConfig, step: TorchStep, net: DraftNet) -> ModelDrafter:
    return ModelDrafter(step, net, Capacity.of(config).num_rows, Silent(beside_model=True))


def run(decoder: Decoder, around: Circumstances, net: DraftNet | None = None) -> Record:
    steps: list[TorchStep] = []

    def make_step(config: EngineConfig) -> TorchStep:
        steps.append(TorchStep(decoder, config.kv, net=net))
        return steps[-1]

    make_drafter: Callable[[EngineConfig], ModelDrafter] | None = None
    if net is not None:
        make_drafter = lambda config: drafter_of(config, steps[-1], net)  # noqa: E731
    return record(
        make_step,
        decoder.spec,
        prompts(),
        around,
        num_new=NUM_NEW,
        num_blocks=120,
        make_drafter=make_drafter,
    )


@cache
def alone(window: int | None) -> Record:
    return run(target(window), ALONE)


# The groups of layers are the same for all kinds.
@pytest.mark.parametrize(
    ("guesser", "around"),
    diagonal(
        [*((kind, None) for kind in GUESSERS), ("eagle", 24)],
        [each for each in CIRCUMSTANCES if not each.threads],
    ),
    ids=str,
)
def test_tokens_are_those_without_drafts(guesser: tuple[str, int | None], around: Circumstances) -> None:
    kind, window = guesser
    decoder = target(window)
    found = run(decoder, around, net_for(kind, decoder))
    assert found.outputs == alone(window).outputs
    assert found.accepted + found.rejected > 10
    assert bool(found.preempted) == bool(around.preempt) and bool(found.forked) == around.fork
    # Its keys move with the blocks, whatever happens to the row; what was computed for a row that has left is dropped.
    if kind == "itself" and not (around.preempt and around.depth):
        assert not found.rejected


@pytest.mark.parametrize(("kind", "depth"), diagonal(GUESSERS, [0, 2]))
def test_every_parameter_gives_the_same_tokens(kind: str, depth: int) -> None:
    samplings = [
        replace(each, max_tokens=40, seed=number, ignore_eos=each.structured_outputs is None)
        for number, each in enumerate(SAMPLINGS)
    ]
    rng = random.Random(2)
    texts = [tuple(rng.randrange(3, 140) for _ in range(rng.randint(1, 30))) for _ in samplings]
    decoder = target()
    config = Circumstances().config(decoder.spec, MAX_LEN, 400)
    net = net_for(kind, decoder)
    expected, _ = answer(TorchStep(decoder, config.kv), texts, samplings, None)
    step = TorchStep(decoder, config.kv, net=net)
    found, counters = answer(step, texts, samplings, drafter_of(config, step, net), depth=depth)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.reason for each in found] == [each.reason for each in expected]
    assert {each.reason for each in expected} == {FinishReason.LENGTH, FinishReason.STOP}
    assert counters.draft_tokens > 100
    if kind == "itself":  # the noise of the row is the noise of its drafts; rules are not known to them
        assert counters.accepted_tokens > 0.5 * counters.draft_tokens


def test_drafts_of_an_eagle_head_are_those_of_dense_attention() -> None:
    """States and keys of a row, kept by slot over chunks and drafts, against the whole text at once."""
    decoder = target()
    files = random_head("eagle", decoder.spec)
    net = build_head(files, decoder.parts.embedding, MAX_LEN + 1)
    assert isinstance(net, EagleHead)
    config = Circumstances(drafts=3, budget=20).config(decoder.spec, MAX_LEN, 100)
    step = TorchStep(decoder, config.kv, net=net)
    drafter = drafter_of(config, step, net)
    asked: dict[int, torch.Tensor] = {}  # logits of the first guess, by the number of the row's tokens
    lengths: list[int] = []
    propose, drawn = drafter.propose, drafter._drawn

    def listen(rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        lengths.append(int(rows.num_tokens[0]))
        return propose(rows, plan, at)

    def note(logits: torch.Tensor, at: Index, positions: Index) -> tuple[Index, Index] | None:
        if int(positions[0]) == lengths[-1]:
            asked[lengths[-1]] = logits[0].clone()
        return drawn(logits, at, positions)

    drafter.propose, drafter._drawn = listen, note  # type: ignore[method-assign]
    rng = random.Random(5)
    text = tuple(rng.randrange(3, 140) for _ in range(70))
    sampling = replace(SAMPLINGS[0], max_tokens=30, ignore_eos=True)
    (found,), _ = answer(step, [text], [sampling], drafter, width=3, budget=30)
    whole = torch.tensor([*text, *found.tokens])
    assert len(asked) > 20
    for length, logits in asked.items():
        assert torch.allclose(_dense_logits(decoder, net, whole[:length]), logits, atol=1e-4), length


@torch.inference_mode()
def _dense_logits(decoder: Decoder, net: EagleHead, tokens: torch.Tensor) -> torch.Tensor:
    def attention(scale: float) -> Callable[..., torch.Tensor]:
        def attend(layer: int, *heads: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1)[None] for part in heads)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return mixed[0].transpose(0, 1).flatten(1)

        return attend

    positions = torch.arange(len(tokens))
    tapped = dict.fromkeys(net.taps, torch.zeros(0))
    hidden = decoder.forward(tokens, positions, positions + 1, attention(decoder.spec.softmax_scale), tapped)
    behind = net.states([tapped[tap] for tap in net.taps], hidden)
    before = torch.cat((torch.zeros_like(behind[:1]), behind[:-1]))
    logits, _ = net.guess(0, tokens, before, positions, positions + 1, attention(net.softmax_scale))  # type: ignore[arg-type]
    return logits[-1]


class NoNumbers(EagleHead):
    """Gives numbers that are none."""

    def guess(self, *given: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = super().guess(*given, **named)  # type: ignore[arg-type]
        return logits * torch.nan, states


def test_a_head_without_numbers_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    decoder = target()
    files = random_head("eagle", decoder.spec)
    weights = {name: torch.from_numpy(values) for name, values in files.tensors.items()}
    net = NoNumbers(files.spec, weights, decoder.parts.embedding, files.to_target, MAX_LEN + 1)
    around = Circumstances(drafts=3, budget=400)
    with caplog.at_level(logging.WARNING, "paceline"):
        found = run(decoder, around, net)
    assert found.outputs == alone(None).outputs and not found.accepted + found.rejected
    said = [line for line in caplog.messages if "switched off" in line]
    assert said == [
        f"the eagle that makes drafts gave no numbers in {MOST_FAILURES} steps and is switched off; "
        "answers do not change"
    ]


@pytest.mark.parametrize(("kind", "method"), diagonal(["eagle", "medusa", "draft_model"], ["auto", "named"]))
def test_a_model_is_served_with_drafts_of_another(tmp_path: Path, kind: str, method: str) -> None:
    """A model guesses its own tokens best."""
    folder = write_weights(write_model(tmp_path / "model"))
    guesser = folder
    if kind != "draft_model":
        spec = open_checkpoint(folder).spec
        guesser = tmp_path / "head"
        write_head(guesser, random_head(kind, spec, draft_vocab=50), spec, {})
    given = {"model": str(guesser), "num_speculative_tokens": 5}
    drafts = json.dumps(given if method == "auto" else {**given, "method": kind})
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    options = {"num_blocks": 64, "enable_prefix_caching": False, "cpu_backend": "auto"}
    answers = []
    for config in ("off", drafts):
        with LLM(str(folder), speculative_config=config, **options) as llm:
            answers.append([one.outputs[0].token_ids for one in llm.generate(["a", "b c"], sampling)])
            loaded, counters = llm.loaded, llm._front.engine.scheduler.state.counters
    assert answers[0] == answers[1]
    name = "draft model" if kind == "draft_model" else f"{kind} head"
    assert loaded.notices[-1].endswith(f"not by the native CPU kernels: these compute no {name}")
    if kind == "draft_model":
        assert counters.accepted_tokens > 50
    # Keys of two layers of the model, and of one or two more.
    layers = {"eagle": 3, "medusa": 2, "draft_model": 4}[kind]
    assert loaded.hardware.kv_bytes == 64 * layers * 2 * 16 * 2 * 16 * 4


def test_the_size_of_the_cache_counts_the_layers_of_a_draft_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    sizes = []
    for config in ("off", json.dumps({"model": str(folder)})):
        with LLM(
            str(folder), load_format="dummy", speculative_config=config, kv_cache_memory_bytes=2**20
        ) as llm:
            sizes.append(llm.loaded.config.kv.num_blocks)
    assert sizes == [128, 64]
