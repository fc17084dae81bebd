"""An engine that blends: the same tokens whatever was in the cache, whatever runs beside, whatever is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.blend_quality import PassagePrompt
from paceline.core.events import StepEvents
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import ModulePart
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.runner.cpu import CPURunner
from paceline.runner.native.code import Code
from paceline.runner.native.model import NativeModel, build_model
from paceline.runner.native.step import NativeStep
from paceline.scheduler.invariants import InvariantChecker
from tests.quantized_helpers import QuantizedSource, tiny_spec
from tests.torch.test_blending import prompt

ANSWER = 10
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
PROMPTS = [
    prompt(7, -50, 2, -90, -64, 11),
    prompt(3, -130, 5, seed=1),
    prompt(20, -50, -50, 9, seed=2),
    prompt(-70, 4, seed=3),
    prompt(40, seed=4),
]


@pytest.fixture(scope="module")
def model() -> NativeModel:
    return build_model(QuantizedSource(tiny_spec(), "Q4_0"), 512)


def engine(model: NativeModel, code: Code, *, blocks: int = 200, budget: int = 64, rows: int = 8) -> Engine:
    config = EngineConfig(
        kv=KVConfig(block_size=16, num_blocks=blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=400, max_preemptions=8
        ),
    )
    step = NativeStep(model, config, code, 2)
    return build_engine(config, CPURunner(config, step), make_checker=InvariantChecker)


def read(asked: PassagePrompt, *, blends: bool = True) -> tuple[list[int], list[ModulePart]]:
    tokens: list[int] = []
    modules = []
    for part in asked:
        if part.is_placed and blends:
            modules.append(ModulePart(len(tokens), len(part.tokens)))
        tokens += part.tokens
    return tokens, modules


def add(made: Engine, asked: PassagePrompt, *, blends: bool = True, tenant: str = "one") -> RequestId:
    tokens, modules = read(asked, blends=blends)
    return made.add(tokens, GREEDY, modules=modules, tenant=tenant)[0]


def finish(made: Engine) -> dict[int, list[int]]:
    """The tokens of each request."""
    found: dict[int, list[int]] = {}
    while made.has_requests or not made.is_idle:
        events: StepEvents = made.step()
        assert made.last_error is None, repr(made.last_error)
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found.setdefault(number, []).append(token)
    return found


def answers(made: Engine, asked: Sequence[PassagePrompt]) -> list[list[int]]:
    numbers = [add(made, each) for each in asked]
    found = finish(made)
    return [found[number] for number in numbers]


@pytest.fixture(scope="module")
def expected(model: NativeModel, code: Code) -> list[list[int]]:
    """Of each prompt alone, in an engine that has computed nothing before."""
    return [answers(engine(model, code), [each])[0] for each in PROMPTS]


def test_blended_answers_are_not_those_of_plain_prompts(
    model: NativeModel, code: Code, expected: list[list[int]]
) -> None:
    made = engine(model, code)
    number = add(made, PROMPTS[0], blends=False)
    assert finish(made)[number] != expected[0], "or the tests of this file say nothing"


@pytest.mark.parametrize("budget", [17, 64, 2048])
def test_resident_or_not_and_in_any_batch(
    model: NativeModel, code: Code, expected: list[list[int]], budget: int
) -> None:
    made = engine(model, code, budget=budget)
    assert answers(made, PROMPTS) == expected, "all at once, computed on the way"
    assert answers(made, PROMPTS) == expected, "resident, where they still are"
    assert [answers(made, [each])[0] for each in PROMPTS] == expected
    made.scheduler.reset_prefix_cache()
    assert answers(made, PROMPTS[::-1]) == expected[::-1], "evicted"


def test_exact_and_blended_prompts_never_meet(
    model: NativeModel, code: Code, expected: list[list[int]]
) -> None:
    plain = engine(model, code)
    first = add(plain, PROMPTS[0], blends=False)
    exact = finish(plain)[first]
    both = engine(model, code)
    for blends, wanted in ((True, expected[0]), (False, exact), (True, expected[0]), (False, exact)):
        number = add(both, PROMPTS[0], blends=blends)
        assert finish(both)[number] == wanted


def test_after_preemption(model: NativeModel, code: Code, expected: list[list[int]]) -> None:
    made = engine(model, code, blocks=48)
    numbers = [add(made, each) for each in PROMPTS]
    found: dict[int, list[int]] = {}
    rng = np.random.default_rng(0)
    while made.has_requests or not made.is_idle:
        events = made.step()
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found.setdefault(number, []).append(token)
        victim = RequestId(int(rng.choice(numbers)))
        if victim in made.scheduler.state.requests and rng.random() < 0.3:
            made.scheduler.preempt(victim)
    assert [found[number] for number in numbers] == expected
    assert made.scheduler.state.counters.preempted > 0


def test_tenants_share_no_module(model: NativeModel, code: Code, expected: list[list[int]]) -> None:
    made = engine(model, code)
    computed = []
    for tenant in ("one", "one", "two"):
        before = made.scheduler.state.counters.computed_tokens
        number = add(made, PROMPTS[1], tenant=tenant)
        assert finish(made)[number] == expected[1]
        computed.append(made.scheduler.state.counters.computed_tokens - before)
    assert computed[1] < computed[0] - 100, "the second finds it"
    assert computed[2] == computed[0], "another tenant computes it again"


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("begins_blended", [False, True])
def test_injected_into_a_running_request_it_is_the_same_prompt(
    model: NativeModel, code: Code, begins_blended: bool, disturbed: bool
) -> None:
    """Texts that are put behind what a request has generated are placed as in a prompt that has all of it; beside
    others, and when the request is preempted and its cache is gone."""
    made = engine(model, code, blocks=120)
    begun, before = read(PROMPTS[3] if begins_blended else PROMPTS[4])
    inserted, parts = read(PROMPTS[0])
    held = replace(GREEDY, max_tokens=5, on_stop="hold", hold_s=60.0)
    (number,) = made.add(begun, held, modules=before, tenant="one")
    made.step()
    beside = add(made, PROMPTS[1])
    while made.scheduler.state.requests[number].held is None:
        made.step()
    tokens = made.scheduler.tokens_of(number).tolist()
    made.extend(number, inserted, max_tokens=ANSWER, modules=parts)
    requests = made.scheduler.state.requests
    while requests[number].held is None:
        made.step()
        if (
            disturbed
            and made.scheduler.preempt(number)
            and requests[number].num_tokens < len(tokens) + len(inserted) + 4
        ):
            made.scheduler.reset_prefix_cache()
    assert made.last_error is None
    found = made.scheduler.tokens_of(number).tolist()[len(tokens) + len(inserted) :]
    made.prune(number)
    finish(made)
    assert beside not in requests
    alone, plain = engine(model, code), engine(model, code)
    behind = [part._replace(start=part.start + len(tokens)) for part in parts]
    (same,) = alone.add(tokens + inserted, GREEDY, modules=[*before, *behind], tenant="one")
    (exact,) = plain.add(tokens + inserted, GREEDY, modules=before, tenant="one")
    assert found == finish(alone)[same]
    assert found != finish(plain)[exact], "or this test says nothing"
