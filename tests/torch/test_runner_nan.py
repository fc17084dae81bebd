"""A row whose numbers are not finite fails alone: neighbours, cached beginnings and reused blocks stay clean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.events import Finished
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.decoder import Decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.torch_step import TorchStep
from tests.torch.parity import MAX_LEN, NUM_NEW, Reference, subject

GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SHORT = SamplingParams(max_tokens=4, temperature=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Poisoned:
    """A model in which one token, that no other request reads or writes, is not a number."""

    decoder: Decoder
    token: int
    references: tuple[Reference, ...]


def poisoned(architecture: str) -> Poisoned:
    clean = subject(architecture)
    used = {token for reference in clean.references for token in reference.sequence}
    poison = next(token for token in range(3, 160) if token not in used)
    embed = clean.decoder.parts.embedding

    def embedding(x: Tensor) -> Tensor:
        return torch.where((x == poison)[:, None], torch.nan, embed(x))

    parts = replace(clean.decoder.parts, embedding=embedding)
    return Poisoned(Decoder(clean.decoder.spec, parts, MAX_LEN + 1), poison, clean.references)


class Bench:
    """An engine over a poisoned model. After every step all of its memory is looked at."""

    def __init__(
        self,
        model: Poisoned,
        *,
        budget: int = 64,
        depth: int = 0,
        num_blocks: int = 200,
        mode: str = "continuous",
    ) -> None:
        windows = model.decoder.spec.group_windows
        config = EngineConfig(
            kv=KVConfig(
                block_size=8,
                num_blocks=num_blocks,
                num_host_blocks=64,
                groups=tuple(GroupSpec(window=window) for window in windows),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=budget,
                max_model_len=MAX_LEN,
                mode=mode,
                batch_size=min(budget, 8),
                watermark=0.0,
            ),
            depth=depth,
        )
        self.compute = TorchStep(model.decoder, config.kv)
        self.clock = ManualClock()
        self.engine: Engine = build_engine(config, CPURunner(config, self.compute), clock=self.clock)
        self.tokens: dict[RequestId, list[int]] = {}
        self.finished: dict[RequestId, Finished] = {}

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> RequestId:
        (request,) = self.engine.add(list(prompt), sampling)
        self.tokens[request] = []
        return request

    def step(self) -> None:
        self.clock.advance(1.0)
        events = self.engine.step_overlapped() if self.engine.depth else self.engine.step()
        assert self.engine.last_error is None
        for batch in events.tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                self.tokens[RequestId(request)].append(token)
        self.finished |= {event.request: event for event in events.finished}
        self._check_memory()

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.has_requests:
                return
            self.step()
        raise AssertionError("the run does not end")

    def _check_memory(self) -> None:
        for pools in self.compute.kv.layers:
            for pool in (pools.keys, pools.values):
                assert torch.isfinite(pool).all()
                assert not pool[:, 0].any(), "the null block holds something"

    def failed(self, request: RequestId) -> bool:
        event = self.finished[request]
        return event.reason.value == "error" and event.detail == "numerical_error"


def outputs(bench: Bench, requests: Sequence[RequestId]) -> list[tuple[int, ...]]:
    return [tuple(bench.tokens[request]) for request in requests]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mixtral"])
def test_a_poisoned_prompt_fails_alone(architecture: str, budget: int, depth: int) -> None:
    model = poisoned(architecture)
    bench = Bench(model, budget=budget, depth=depth)
    chosen = model.references[:6]
    neighbours = [bench.add(reference.prompt) for reference in chosen[:3]]
    bad = bench.add([*chosen[0].prompt[:20], *range(10, 25), model.token, *range(3, 9)])
    neighbours += [bench.add(reference.prompt) for reference in chosen[3:]]
    bench.run()
    assert bench.failed(bad)
    assert bench.tokens[bad] == []
    assert outputs(bench, neighbours) == [reference.output for reference in chosen]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_poison_in_the_middle_of_an_output(architecture: str, depth: int) -> None:
    """The token itself is a number; what follows from it is not."""
    model = poisoned(architecture)
    bench = Bench(model, depth=depth)
    chosen = model.references[:4]
    neighbours = [bench.add(reference.prompt) for reference in chosen]
    forced = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, allowed_token_ids=(model.token,))
    bad = bench.add(chosen[0].prompt, forced)
    bench.run()
    assert bench.failed(bad)
    assert bench.tokens[bad] == [model.token]
    assert outputs(bench, neighbours) == [reference.output for reference in chosen]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("budget", [5, 64])
def test_its_beginning_serves_no_other_request(budget: int, depth: int) -> None:
    """A request with the same clean beginning, during and after, gets what it gets without the poisoned one."""
    model = poisoned("llama")
    reference = max(model.references, key=lambda reference: len(reference.prompt))
    bench = Bench(model, budget=budget, depth=depth)
    bad = bench.add([*reference.prompt, model.token, 5], SHORT)
    for _ in range(3):
        bench.step()
    during = bench.add(reference.prompt)
    bench.run()
    assert bench.failed(bad)
    after = bench.add(reference.prompt)
    again = bench.add([*reference.prompt, model.token], SHORT)
    bench.run()
    assert bench.failed(again)
    assert outputs(bench, [during, after]) == [reference.output] * 2


def test_a_poisoned_block_is_never_a_hit() -> None:
    model = poisoned("llama")
    bench = Bench(model)
    prompt = [*range(10, 25), model.token, *range(30, 54)]
    first = bench.add(prompt)
    bench.run()
    keys = {key for group in bench.engine.scheduler.state.kv.groups for key in group.cache.entries()}
    second = bench.add(prompt)
    bench.run()
    assert bench.failed(first) and bench.failed(second)
    assert bench.finished[second].num_cached == 0
    assert not keys


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_blocks_are_clean_for_their_next_owner(architecture: str) -> None:
    """A pool so small that every block of the poisoned request is handed on at once."""
    model = poisoned(architecture)
    bench = Bench(model, budget=9, num_blocks=2 + -(-MAX_LEN // 8))
    for reference in model.references[:6]:
        bad = bench.add([*range(40, 70), model.token, *range(70, 80)])
        good = bench.add(reference.prompt)
        bench.run()
        assert bench.failed(bad)
        assert tuple(bench.tokens[good]) == reference.output


def test_a_swapped_out_neighbour_comes_back_clean() -> None:
    model = poisoned("llama")
    bench = Bench(model, budget=16)
    reference = max(model.references, key=lambda reference: len(reference.prompt))
    good = bench.add(reference.prompt)
    for _ in range(6):
        bench.step()
    assert bench.engine.scheduler.preempt(good, swap=True)
    bad = bench.add([*range(3, 33), model.token])
    bench.run()
    assert bench.failed(bad)
    assert tuple(bench.tokens[good]) == reference.output


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_in_a_padded_batch_too(mode: str) -> None:
    model = poisoned("llama")
    bench = Bench(model, mode=mode)
    neighbours = [bench.add(reference.prompt) for reference in model.references[:7]]
    bad = bench.add([*range(3, 33), model.token])
    bench.run()
    assert bench.failed(bad)
    assert outputs(bench, neighbours) == [reference.output for reference in model.references[:7]]
