"""Drafts change when tokens come, never which: tokens, logits and logprobs with drafts are those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import LLM
from paceline.core.counters import Counters, CPUWork
from paceline.core.plan import DRAFT_KINDS, DraftTally, StepPlan
from paceline.core.request import FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.factory import build_engine
from paceline.models.spec import ModelSpec
from paceline.runner.cpu import CPURunner, StepCompute
from paceline.runner.device_rows import DeviceRows, Drafts, FlatBatch
from paceline.runner.drafts import Drafter
from paceline.runner.native.step import NativeStep
from paceline.scheduler.draft_budget import TALLIES, StepSeconds
from tests.bits import Circumstances, Oracle, Prompt, always_draft, differences
from tests.cases import first
from tests.guides import ScriptedMaker, structure
from tests.kernels import host_code
from tests.model_folder import write_model
from tests.native.runs import record_native
from tests.native.test_native_engine import MAX_LEN, NUM_NEW, alone, model, prompts
from tests.quantized_helpers import tiny_spec

CIRCUMSTANCES = [
    Circumstances(drafts=3, budget=400),
    Circumstances(drafts=7, budget=200, depth=1),
    Circumstances(drafts=15, block_size=32, depth=3),
    Circumstances(drafts=1, budget=60),
    Circumstances(drafts=7, alone=True, caching=True, block_size=32),
    Circumstances(drafts=7, caching=True, preempt="recompute", depth=1),
    Circumstances(drafts=7, preempt="swap", block_size=64),
    Circumstances(drafts=3, fork=True, budget=200),
    Circumstances(drafts=7, fork=True, caching=True, preempt="swap", block_size=32, depth=2),
    Circumstances(drafts=7, budget=200, threads=(2, 1, 3)),
]


@pytest.mark.parametrize("kind", ["plain", "experts"])
@pytest.mark.parametrize("around", CIRCUMSTANCES, ids=str)
def test_the_same_bits_with_drafts(kind: str, around: Circumstances) -> None:
    answers = [(*prompt, *output) for prompt, output in zip(prompts(), alone(kind).outputs, strict=True)]
    run = record_native(
        model(kind), prompts(), around, num_new=NUM_NEW, num_blocks=120, answers=[*answers, *answers]
    )
    assert not differences(run, alone(kind))
    assert run.accepted > 5 and run.rejected > 5
    assert bool(run.preempted) == bool(around.preempt)
    assert bool(run.forked) == around.fork


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, int, float, tuple[int, ...]]] = field(default_factory=list)
    reason: FinishReason | None = None
    drafted: list[int] = field(default_factory=list, compare=False)  # positions of tokens that came as drafts


def answer(
    compute: StepCompute,
    texts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    drafter: Drafter | None,
    *,
    width: int = 7,
    depth: int = 0,
    budget: int = 400,
    prepare: Callable[[Engine], None] = always_draft,
) -> tuple[list[Answer], Counters]:
    """What requests get, each with its own parameters, all at once."""
    around = Circumstances(drafts=width if drafter is not None else 0, depth=depth, budget=budget)
    config = around.config(compute.spec, MAX_LEN, 400)
    maker = ScriptedMaker(compute.spec.vocab_size)
    engine = build_engine(config, CPURunner(config, compute, drafter=drafter), guide_maker=maker)
    prepare(engine)
    answers: dict[RequestId, Answer] = {}
    for text, sampling in zip(texts, samplings, strict=True):
        answers.update((request, Answer()) for request in engine.add(text, sampling))
    while engine.has_requests:
        events = engine.step_overlapped() if depth else engine.step()
        assert engine.last_error is None, engine.last_error
        for entry in events.logprobs:
            said = entry.logprobs
            answers[entry.request].logprobs.append((said.position, said.token, said.logprob, said.top_tokens))
            if said.is_drafted:
                answers[entry.request].drafted.append(said.position)
        for batch in events.tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                answers[RequestId(request)].tokens.append(token)
        for finished in events.finished:
            answers[finished.request].reason = finished.reason
    return list(answers.values()), engine.scheduler.state.counters


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1.5, min_p=0.1, top_k=20),
    SamplingParams(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=3),
    SamplingParams(temperature=0.8, logprobs=0, n=3),
    SamplingParams(temperature=1.0, logit_bias={5: 4.0, 9: -100.0}, min_tokens=6, stop_token_ids=(5,)),
    SamplingParams(temperature=1.0, logit_bias={7: 6.0}, stop_token_ids=(7,)),
    SamplingParams(temperature=0.8, allowed_token_ids=(3, 4, 5, 6)),
    SamplingParams(temperature=0.9, structured_outputs=structure(4, 33)),
    SamplingParams(temperature=0.0, structured_outputs=structure(5, 40), logprobs=2),
    SamplingParams(
        temperature=1.2, structured_outputs=structure(6, 30), n=2, presence_penalty=0.5, top_p=0.9
    ),
]


@pytest.mark.parametrize("depth", [0, 2])
def test_every_parameter_gives_the_same_tokens(depth: int) -> None:
    samplings = [
        replace(each, max_tokens=40, seed=number, ignore_eos=each.structured_outputs is None)
        for number, each in enumerate(SAMPLINGS)
    ]
    rng = random.Random(2)
    texts = [tuple(rng.randrange(3, 140) for _ in range(rng.randint(1, 30))) for _ in samplings]
    config = Circumstances().config(model("plain").spec, MAX_LEN, 400)
    step = NativeStep(model("plain"), config, host_code(), 1)
    try:
        expected, _ = answer(step, texts, samplings, None)
        begun = [text for text, each in zip(texts, samplings, strict=True) for _ in range(each.n)]
        known = [(*text, *one.tokens) for text, one in zip(begun, expected, strict=True)]
        found, counters = answer(step, texts, samplings, Oracle(known), depth=depth)
    finally:
        step.close()
    assert found == expected
    assert counters.accepted_tokens > 100 and counters.draft_tokens > counters.accepted_tokens + 50
    assert {each.reason for each in expected} == {FinishReason.LENGTH, FinishReason.STOP}


def test_tokens_that_came_as_drafts_are_known() -> None:
    config = Circumstances().config(model("plain").spec, MAX_LEN, 400)
    step = NativeStep(model("plain"), config, host_code(), 1)
    samplings = [SamplingParams(max_tokens=30, seed=seed, logprobs=0, prompt_logprobs=0) for seed in range(4)]
    texts = [(5, 6, 7 + number) for number in range(4)]
    try:
        expected, plain = answer(step, texts, samplings, None)
        known = [(*text, *one.tokens) for text, one in zip(texts, expected, strict=True)]
        found, counters = answer(step, texts, samplings, Oracle(known))
    finally:
        step.close()
    assert not any(each.drafted for each in expected) and not plain.accepted_tokens
    assert sum(len(each.drafted) for each in found) == counters.accepted_tokens > 50
    for text, each in zip(texts, found, strict=True):
        # The first token is drawn behind the prompt, the last of each step behind its drafts.
        assert each.drafted == sorted(set(each.drafted)) and each.drafted[0] > len(text)
        assert each.drafted[-1] < len(text) + len(each.tokens)


class NoGuesses(Oracle):
    """What a guide forces is all that is drafted."""

    def propose(self, rows: DeviceRows, plan: StepPlan, at: NDArray[np.int64]) -> Drafts | None:
        return None


def test_masks_and_forced_tokens_are_counted() -> None:
    config = Circumstances().config(model("plain").spec, MAX_LEN, 400)
    step = NativeStep(model("plain"), config, host_code(), 1)
    sampling = SamplingParams(max_tokens=40, seed=1, temperature=0.9)
    guided = replace(sampling, structured_outputs=structure(4, 33))
    texts = [(5, 6, 7), (8, 9)]
    try:
        plain = answer(step, texts, [sampling, guided], None)[1]
        forced = answer(step, texts, [sampling, guided], NoGuesses([]))[1]
        free = answer(step, texts, [sampling, sampling], NoGuesses([]))[1]
    finally:
        step.close()
    assert (plain.masks, plain.forced_tokens) == (33, 0) and plain.mask_wait_s == plain.mask_s > 0
    assert forced.forced_tokens == forced.accepted_tokens > 5
    assert forced.masks == 33 - forced.accepted_tokens + forced.draft_tokens and forced.mask_s > 0
    assert (free.masks, free.mask_s, free.forced_tokens) == (0, 0.0, 0)


def doubt_guesses(engine: Engine) -> None:
    """Guesses have always been wrong, and steps take what the start found."""
    budget = engine.scheduler.state.drafts
    assert budget is not None
    wrong = DraftTally(np.full(DRAFT_KINDS, 1000, np.int32), np.zeros(DRAFT_KINDS, np.int32))
    for _ in range(TALLIES):
        budget.learn_drafts(wrong)
    budget._seconds = StepSeconds(6e-3, 2e-3)
    budget._seconds.learn = lambda tokens, seconds: None  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [0, 1])
def test_certain_tokens_have_room_where_no_guess_is_worth_its_time(depth: int) -> None:
    config = Circumstances().config(model("plain").spec, MAX_LEN, 400)
    step = NativeStep(model("plain"), config, host_code(), 1)
    sampling = SamplingParams(max_tokens=40, temperature=0.9)
    ruled = [replace(sampling, seed=seed, structured_outputs=structure(seed, 33)) for seed in range(4)]
    free = [replace(sampling, seed=seed, ignore_eos=True) for seed in range(4)]
    texts = [(5, 6, 7 + number) for number in range(4)]
    try:
        expected, _ = answer(step, texts, ruled, None)
        found, guided = answer(step, texts, ruled, NoGuesses([]), depth=depth, prepare=doubt_guesses)
        alike = [(*text, *one.tokens) for text, one in zip(texts, expected, strict=True)]
        _, plain = answer(step, texts, free, Oracle(alike), prepare=doubt_guesses)
    finally:
        step.close()
    assert found == expected
    # Two of five tokens are certain, of four answers of 33; those of the first steps come before it is known.
    assert guided.forced_tokens > 4 * 8
    assert plain.draft_tokens == 0


class FixedLogits:
    """A model that finds every next token as likely as any other has found it."""

    pictures = None

    def __init__(self, logits: NDArray[np.float32], compute: StepCompute) -> None:
        self.spec: ModelSpec = replace(compute.spec, vocab_size=len(logits))
        self.kv = compute.kv
        self._logits = logits

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.ones(len(batch.tokens), np.bool_)

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.tile(self._logits, (len(tokens), 1))

    def work(self) -> CPUWork:
        return CPUWork()


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", first(1, [60, 572]))
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_drafted_draws_follow_the_softmax(top_p: float, num_rows: int) -> None:
    """Chi-square of 21,000 or 200,000 draws from 16 tokens; drafts are always the likeliest token."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 1.2, 16).astype(np.float32)
    config = Circumstances().config(tiny_spec(), MAX_LEN, 400)
    step = NativeStep(model("plain"), config, host_code(), 1)
    fixed = FixedLogits(logits, step)
    best = int(logits.argmax())
    samplings = [
        SamplingParams(temperature=1.0, top_p=top_p, max_tokens=350, seed=seed, ignore_eos=True)
        for seed in range(num_rows)
    ]
    try:
        found, counters = answer(
            fixed, [(1,)] * len(samplings), samplings, Oracle([(best,) * MAX_LEN], wrong=0.0), width=3
        )
    finally:
        step.close()
    drawn = np.bincount([token for each in found for token in each.tokens], minlength=16)
    assert drawn.sum() == num_rows * 350 and counters.draft_tokens > 1000
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights)
    share = np.cumsum(weights[order]) / weights.sum()
    kept = order[: int(np.searchsorted(share, top_p)) + 1] if top_p < 1 else order
    assert not drawn[np.setdiff1d(order, kept)].any()
    expected = weights[kept] / weights[kept].sum() * drawn.sum()
    chi_square = float(((drawn[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    # Wilson and Hilferty: beyond 3.09 standard deviations with a chance of 0.001.
    normal = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert normal < 3.09, f"chi-square {chi_square:.1f} of {freedom}"


def test_drafts_are_of_no_use_to_padded_batches() -> None:
    around = Circumstances(mode="static", drafts=3)
    run = record_native(model("plain"), prompts(), around, num_new=NUM_NEW, num_blocks=120)
    assert not differences(run, alone("plain")) and not run.accepted + run.rejected


def test_a_model_is_asked_with_drafts(tmp_path: Path) -> None:
    """Random weights soon repeat themselves, which n-grams find; the text is the same."""
    folder = write_model(tmp_path)
    sampling = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    texts = []
    for method in ("off", '{"method": "ngram", "num_speculative_tokens": 5}'):
        with LLM(str(folder), load_format="dummy", num_blocks=64, speculative_config=method) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(["a", "b c"], sampling)])
            counters = llm._front.engine.scheduler.state.counters
            assert bool(counters.accepted_tokens) == (method != "off")
    assert texts[0] == texts[1]


def test_what_was_answered_before_is_drafted_for_the_same_tenant(tmp_path: Path) -> None:
    """The second of two equal requests is nearly all drafts; the text is the same."""
    folder = write_model(tmp_path)
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    steps = []
    with LLM(
        str(folder),
        load_format="dummy",
        num_blocks=64,
        speculative_config="history",
        enable_prefix_caching=False,
    ) as llm:
        always_draft(llm._front.engine)
        answers = []
        for _ in range(4):
            before = llm._front.engine.num_submitted
            answers.append(llm.generate("once upon a time", sampling)[0].outputs[0].token_ids)
            steps.append(llm._front.engine.num_submitted - before)
            if len(steps) == 3:
                llm.reset_prefix_cache()
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert steps[2] < 0.4 * steps[0], steps
    assert steps[3] == steps[0]  # the texts before are forgotten


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_a_prediction_brings_tokens_sooner_and_no_others(tmp_path: Path, method: str) -> None:
    """One that is right, one with words put in, for two branches, of which one says something else."""
    folder = write_model(tmp_path)
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True, n=2)
    given = {"load_format": "dummy", "num_blocks": 64, "enable_prefix_caching": False}
    outputs, steps = [], []
    with LLM(str(folder), speculative_config=method, **given) as llm:
        engine = llm._front.engine
        prediction: tuple[int, ...] = ()
        always_draft(engine)
        for number in (1, 2, 2, 1):
            before = engine.num_submitted
            outputs += llm.generate("once upon a time", replace(sampling, n=number, prediction=prediction))
            steps.append(engine.num_submitted - before)
            said = outputs[0].outputs[0].token_ids
            prediction = tuple(said) if len(outputs) != 2 else (*said[:30], *[5] * 20, *said[30:])
    assert all(output.outputs[0].token_ids == said for output in outputs)
    assert outputs[1].outputs[1].token_ids == outputs[2].outputs[1].token_ids != said
    accepted = [output.accepted_prediction_tokens for output in outputs]
    rejected = [output.rejected_prediction_tokens for output in outputs]
    if method == "off":
        assert accepted == rejected == [0, 0, 0, 0] and min(steps) >= 60
        return
    assert (accepted[0], rejected[0], rejected[3]) == (0, 0, 0)
    assert min(accepted[1:]) > 20 and rejected[2] > 0
    assert steps[3] == 60 - accepted[3] < 40, steps


def test_drafts_and_padded_batches_exclude_each_other(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(ConfigError, match="--speculative-config needs --mode continuous"):
        LLM(str(folder), load_format="dummy", num_blocks=64, speculative_config="auto", mode="static")
