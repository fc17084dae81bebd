"""Drafts of the GPU's runner through Triton's interpreter: tokens are those of a CPU that makes none.

A tiny model in float32 whose greedy text repeats itself; rows come and go, some have rules, penalties, guides or
logprobs, and the host plans ahead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.structure import Structure
from tests.guides import ScriptedGuide, ScriptedMaker, structure
from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.core.counters import Counters
from paceline.core.plan import DraftTally, Runner
from paceline.core.request import Cost
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.guides import Guides
from paceline.factory import build_engine
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu.drafts import device_drafts
from paceline.runner.torch_step import TorchStep
from paceline.scheduler.draft_budget import DraftBudget
from paceline.scheduler.invariants import InvariantChecker
from tests.torch.test_gpu_runner_interpreted import CONFIG, QuickRunner, SameWeights

LENGTHS = (5, 70, 12)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48)
PLAIN = (
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, seed=3),
)


class SureGuide(ScriptedGuide):
    """Is certain of tokens that are only possible: as a text that can be spelt in several ways."""

    def forced(self) -> list[int]:
        found: list[int] = []
        guide = self.copy()
        while len(found) < 5 and not guide.is_over:
            found.append(guide.only if guide.only is not None else 30 + (guide._salt + guide.count) % 3)
            guide.count += 1
        return found

    def copy(self) -> SureGuide:
        return SureGuide(self._source, self._vocab_size, self.count)


class SureMaker(ScriptedMaker):
    def take(self, structure: Structure) -> ScriptedGuide | None:
        return SureGuide(structure.source, self._vocab_size)


def make_engine(checkpoint: Checkpoint, drafts: DraftConfig | None, *, depth: int) -> Engine:
    """`drafts` on the GPU's runner, None: the CPU without any."""
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48, max_model_len=256, drafts=drafts)
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=24, groups=(GroupSpec(),)), scheduler=scheduler, depth=depth
    )
    ends, device = checkpoint.spec.eos_token_ids, torch.device("cpu")
    runner: Runner
    if drafts is not None:
        parts = build_decoder(checkpoint, 2, SameWeights(device, torch.float32)).parts
        runner = QuickRunner(config, checkpoint.spec, parts, ends, device=device)
    else:
        runner = CPURunner(config, TorchStep(build_decoder(checkpoint, 512), config.kv), ends)
    maker = ScriptedMaker(checkpoint.spec.vocab_size)
    return build_engine(config, runner, guide_maker=maker, make_checker=InvariantChecker)


def finish(
    engine: Engine,
    requests: Sequence[tuple[list[int], SamplingParams]],
    costs: dict[int, Cost] | None = None,
) -> list[list[int]]:
    """Tokens by request; `costs` gets what each took."""
    found: dict[int, list[int]] = {}
    for prompt, params in requests:
        found |= {number: [] for number in engine.add(prompt, params)}
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped()
        if costs is not None:
            costs |= {ending.request: ending.cost for ending in events.finished}
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    return list(found.values())


def generate(
    folder: Path, params: tuple[SamplingParams, ...], drafts: DraftConfig | None, *, depth: int = 1
) -> tuple[list[list[int]], Counters]:
    engine = make_engine(open_checkpoint(folder, load_format="dummy"), drafts, depth=depth)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 512, length).tolist() for length in LENGTHS]
    found = finish(engine, list(zip(prompts, params, strict=False)))
    return found, engine.scheduler.state.counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generate(folder, PLAIN, None, depth=0)[0]


def test_ngrams_change_no_token(folder: Path, expected: list[list[int]]) -> None:
    """With sizes of steps that all take the same, room is made for what may be right."""
    config = DraftConfig(method="ngram", width=3, sizes=SIZES, seconds=(0.01,) * len(SIZES))
    found, counters = generate(folder, PLAIN, config)
    assert found == expected
    assert counters.accepted_tokens >= 5, "no draft was right, or this test says nothing"


def test_texts_that_repeat_nothing_get_steps_without_room(folder: Path) -> None:
    """No draft is ever made, so none is compared: that too is known of a step."""
    config = DraftConfig(method="ngram", width=3, sizes=SIZES, seconds=(0.01,) * len(SIZES))
    engine = make_engine(open_checkpoint(folder, load_format="dummy"), config, depth=1)
    noise = SamplingParams(max_tokens=12, temperature=2.0, seed=1, ignore_eos=True)
    finish(engine, [(list(range(100, 105)), noise)])
    drafts = engine.scheduler.state.drafts
    assert drafts is not None and drafts.chosen == 0
    assert engine.scheduler.state.counters.draft_tokens == 0, "a draft was made, so this test says nothing"


def test_drafts_that_do_not_pay_are_only_compared(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_drafts, "PROBE_EVERY", 3)
    learnt: list[DraftTally] = []
    monkeypatch.setattr(DraftBudget, "learn_drafts", lambda self, tally: learnt.append(tally))
    config = DraftConfig(method="ngram", width=3, sizes=SIZES, seconds=tuple(map(float, SIZES)))
    found, counters = generate(folder, PLAIN[:1], config)
    assert found == expected[:1]
    assert counters.draft_tokens == 0
    steps = len(found[0]) - 1
    compared = sum(int(tally.compared.sum()) for tally in learnt)
    assert steps // 3 - 1 <= compared <= steps // 3
    assert sum(int(tally.equal.sum()) for tally in learnt) > 0


@pytest.mark.parametrize("acceptance", [1.0, 0.5])
def test_answers_known_before_come_in_fewer_steps(
    folder: Path, expected: list[list[int]], acceptance: float
) -> None:
    told = tuple(
        replace(params, prediction=tuple(answer)) for params, answer in zip(PLAIN, expected, strict=True)
    )
    config = DraftConfig(method="oracle", width=7, acceptance=acceptance)
    found, counters = generate(folder, told, config, depth=2 if acceptance < 1.0 else 1)
    assert found == expected
    assert counters.accepted_tokens >= 5
    assert (counters.draft_tokens == counters.accepted_tokens) == (acceptance == 1.0)


def test_what_a_request_is_expected_to_say_is_drafted_from(folder: Path, expected: list[list[int]]) -> None:
    """A text with words put in: the row is found again behind them. The other row has none, and nothing to repeat."""
    answer = expected[1]
    told = replace(PLAIN[1], prediction=(*answer[:3], 3, 3, 3, *answer[3:]))
    plain = replace(PLAIN[1], seed=8)
    checkpoint = open_checkpoint(folder, load_format="dummy")
    prompt = np.random.default_rng(0).integers(0, 512, sum(LENGTHS)).tolist()[5:75]
    other = list(range(100, 130))
    engine = make_engine(checkpoint, DraftConfig(method="ngram", width=3), depth=1)
    costs: dict[int, Cost] = {}
    found = finish(engine, [(prompt, told), (other, plain)], costs)
    alone = make_engine(checkpoint, None, depth=0)
    assert found == [answer, *finish(alone, [(other, plain)])]
    first, second = (costs[request] for request in sorted(costs))
    assert first.accepted_predictions >= 5 and first.rejected_predictions > 0
    assert (second.accepted_predictions, second.rejected_predictions) == (0, 0)


def test_texts_that_ended_are_drafted_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row has said nothing twice, only another row's text can be right: the same request, one later. There is
    room for drafts all the time, also after the first text, which had none."""
    monkeypatch.setattr(DraftBudget, "learn_drafts", lambda self, tally: None)
    one = SamplingParams(max_tokens=10, temperature=0.8, seed=5, ignore_eos=True)
    checkpoint = open_checkpoint(folder, load_format="dummy")
    found, right = [], []
    for method in ("history", "ngram"):
        engine = make_engine(checkpoint, DraftConfig(method=method, width=4), depth=1)
        for _ in range(2):
            (tokens,) = finish(engine, [(list(range(20, 32)), one)])
            found.append(tokens)
        right.append(engine.scheduler.state.counters.accepted_tokens)
    assert found == [found[0]] * 4
    assert right[0] >= 4 and right[1] == 0


def test_rows_of_every_kind_share_steps_with_drafts(folder: Path) -> None:
    """Truncation, bias, bans and min_tokens are drafted for; penalties are not; logprobs put drafts off."""
    params = (
        SamplingParams(max_tokens=9, temperature=0.7, seed=4, top_p=0.9, min_tokens=5, logit_bias={5: 12.0}),
        SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=0.5, presence_penalty=0.2),
        SamplingParams(max_tokens=6, temperature=1.2, seed=9, top_k=5, logprobs=1),
    )
    expected = generate(folder, params, None, depth=0)[0]
    found, counters = generate(folder, params, DraftConfig(method="ngram", width=4))
    assert found == expected and counters.accepted_tokens >= 1


@pytest.mark.parametrize("method, width", [("ngram", 4), ("history", 1)])
def test_what_a_guide_forces_is_drafted_beside_other_rows(folder: Path, method: str, width: int) -> None:
    """One structure ends before its length, one at a token that is forced; a row with penalties has no drafts."""
    params = (
        SamplingParams(max_tokens=14, temperature=0.9, seed=2, structured_outputs=structure(4, 13)),
        replace(PLAIN[0], max_tokens=10),
        SamplingParams(max_tokens=9, seed=3, structured_outputs=structure(7, 30), frequency_penalty=0.4),
    )
    expected = generate(folder, params, None, depth=0)[0]
    assert [len(tokens) for tokens in expected] == [13, 10, 9]
    found, counters = generate(folder, params, DraftConfig(method=method, width=width))
    assert found == expected
    # Two tokens of five are certain: the second of them is drafted behind the first.
    assert counters.forced_tokens >= 2 and counters.accepted_tokens > counters.forced_tokens


def test_a_guide_that_was_too_sure_changes_no_token(folder: Path) -> None:
    """Drafts of a guide that are not drawn, branches of one request, and a row that has none."""
    guided = SamplingParams(max_tokens=12, temperature=0.9, seed=6, structured_outputs=structure(5, 40), n=2)
    requests = [([7, 8, 9], guided), (list(range(40, 60)), replace(PLAIN[0], max_tokens=8))]
    checkpoint, found = open_checkpoint(folder, load_format="dummy"), []
    for drafts, maker in ((None, ScriptedMaker), (DraftConfig(method="ngram", width=3), SureMaker)):
        engine = make_engine(checkpoint, drafts, depth=1)
        engine.guides = Guides(engine.scheduler, maker(512))
        found.append(finish(engine, requests))
    counters = engine.scheduler.state.counters
    assert found[0] == found[1] and len(found[0]) == 3
    assert 0 < counters.accepted_tokens < counters.draft_tokens and counters.forced_tokens > 0
