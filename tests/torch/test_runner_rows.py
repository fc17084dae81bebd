"""The rows that enter each linear layer are exactly the tokens of the plan: nothing is padded, nothing left out."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.plan import StepPlan, StepResult
from paceline.models.decoder import Decoder
from paceline.models.layers import DenseLinear, Experts, Linear
from paceline.runner.cpu import CPUPending, CPURunner
from tests.torch.parity import Play, Scenario, subject

CASES = [
    Scenario(architecture="llama"),
    Scenario(architecture="llama", chunk="budget 7", disturbance="swap"),
    Scenario(architecture="llama-tied", depth=2, disturbance="aborts"),
    Scenario(architecture="gemma3", chunk="share 1", disturbance="recompute", depth=1),
    Scenario(architecture="qwen3", disturbance="fork", block_size=8),
    Scenario(architecture="llama", mode="static", caching=False),
    Scenario(architecture="phi3", mode="dynamic", depth=1),
    Scenario(architecture="mixtral", disturbance="n=4"),
    Scenario(architecture="qwen3_moe", chunk="budget 7", depth=1),
]


class RowCounter:
    """Stands around the linear layers and checks each step as it is computed."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decoder = decoder
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self.steps = 0
        self._plans: dict[int, StepPlan] = {}
        call, submit, finish = DenseLinear.__call__, CPURunner.submit, CPURunner.finish_until

        def counted(linear: DenseLinear, x: Tensor) -> Tensor:
            self._rows[id(linear)].append(x.shape[0])
            return call(linear, x)

        def noted(runner: CPURunner, plan: StepPlan) -> CPUPending:
            self._plans[plan.seq] = plan
            return submit(runner, plan)

        def checked(runner: CPURunner, seq: int) -> StepResult:
            """Plans are waited for in order, and computed then: one at a time."""
            self._rows.clear()
            result = finish(runner, seq)
            self._check(self._plans.pop(seq), result)
            return result

        monkeypatch.setattr(DenseLinear, "__call__", counted)
        monkeypatch.setattr(CPURunner, "submit", noted)
        monkeypatch.setattr(CPURunner, "finish_until", checked)

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        tokens = plan.work.decode_rows + plan.work.prefill_tokens
        self.steps += tokens > 0
        for layer in self._decoder.parts.layers:
            part = layer.feed_forward
            linears = [layer.attention.qkv, layer.attention.output]
            linears += [part.router] if isinstance(part, Experts) else [part.gate_up, part.down]
            for linear in linears:
                assert self._of(linear) == ([tokens] if tokens else [])
            if isinstance(part, Experts):
                assert sum(sum(self._of(expert.down)) for expert in part.experts) == tokens * part._per_token
        sampled = int(result.count.sum())
        assert self._of(self._decoder.parts.head) == ([sampled] if sampled else [])
        assert sampled <= plan.work.logit_rows

    def _of(self, linear: Linear) -> list[int]:
        return self._rows[id(linear)]


def plain_play(scenario: Scenario) -> Play:
    """A scenario in which no logits are computed but those of rows that get a token."""
    return Play(scenario, subject(scenario.architecture), compares_logits=False)


@pytest.mark.parametrize("scenario", CASES, ids=str)
def test_linear_layers_see_the_tokens_of_the_plan(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = plain_play(scenario)
    counter = RowCounter(subject(scenario.architecture).decoder, monkeypatch)
    outcome = play.run()
    assert not outcome.wrong
    assert counter.steps > 20


def test_padding_is_computed_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a padded batch the step is the rectangle: more rows than there are tokens to read."""
    play = plain_play(Scenario(architecture="llama", mode="static", caching=False))
    seen: list[tuple[int, int]] = []
    forward = Decoder.forward

    def noted(decoder: Decoder, tokens: Tensor, *given: Any) -> Tensor:
        hidden = forward(decoder, tokens, *given)
        seen.append((len(tokens), int(torch.isfinite(hidden).all(dim=-1).sum())))
        return hidden

    monkeypatch.setattr(Decoder, "forward", noted)
    outcome = play.run()
    real = sum(len(sequence.tokens) - 1 for sequence in outcome.sequences)
    real += sum(len(prompt) for prompt in _prompts())
    assert sum(count for count, _ in seen) > 1.1 * real
    assert all(count == finite for count, finite in seen)


def _prompts() -> list[tuple[int, ...]]:
    model = subject("llama")
    return [*(reference.prompt for reference in model.references), *model.neighbours]
