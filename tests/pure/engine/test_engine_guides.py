"""Guides in the engine's hands: made before a request runs, moved on with its tokens, dropped with it."""

from __future__ import annotations

import pytest

from paceline.core.request import BlockReason, FinishReason, RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.factory import build_engine
from paceline.scheduler.invariants import InvariantChecker
from tests.fakes import FakeRunner
from tests.guides import FakeGuide
from tests.pure.engine.engine_helpers import engine_config, prompt
from tests.reference_output import reference_output


class Maker:
    """Makes guides when it is told to."""

    objection = ""
    compiled = (0, 0.0)

    def __init__(self) -> None:
        self.is_ready = True
        self.refuses = False

    def take(self, structure: Structure) -> FakeGuide | None:
        number, total_s = self.compiled
        self.compiled = (number + 1, total_s + 0.25)
        if self.refuses:
            raise InvalidRequest("no such grammar")
        return FakeGuide(structure.source) if self.is_ready else None


class GuidedEngine:
    """An engine, what its maker does, and what its requests got."""

    def __init__(self, depth: int = 1) -> None:
        self.maker = Maker()
        config = engine_config(depth=depth)
        self.engine = build_engine(
            config, FakeRunner(config), guide_maker=self.maker, make_checker=InvariantChecker
        )
        self.tokens: dict[RequestId, list[int]] = {}
        self.endings: dict[RequestId, tuple[FinishReason, str]] = {}

    def add(self, source: str, *, n: int = 1, max_tokens: int = 30) -> list[RequestId]:
        structure = Structure(kind="regex", source=source)
        sampling = SamplingParams(max_tokens=max_tokens, seed=3, n=n, structured_outputs=structure)
        return self.engine.add(prompt(5), sampling)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            events = self.engine.step_overlapped()
            for batch in events.tokens:
                for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                    self.tokens.setdefault(RequestId(request), []).append(token)
            for finished in events.finished:
                self.endings[finished.request] = finished.reason, finished.detail

    def run(self) -> None:
        while self.engine.has_requests or not self.engine.is_idle:
            self.step()

    def state(self, request: RequestId) -> RequestState:
        return self.engine.scheduler.state.requests[request].state


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_answer_ends_where_its_structure_does(depth: int) -> None:
    guided = GuidedEngine(depth)
    (request,) = guided.add("5:7")
    guided.run()
    sampling = SamplingParams(max_tokens=30, seed=3, structured_outputs=Structure(kind="regex", source="5:7"))
    assert (guided.tokens[request], "stop") == reference_output(prompt(5), sampling)
    assert guided.endings[request] == (FinishReason.STOP, "") and len(guided.tokens[request]) == 7
    assert not guided.engine.guides


def test_a_request_waits_for_its_structure_and_others_do_not() -> None:
    guided = GuidedEngine()
    guided.maker.is_ready = False
    waiting = guided.add("5:7", n=2)
    free = guided.engine.add(prompt(4, 1), SamplingParams(max_tokens=4, seed=1))[0]
    guided.step(8)
    assert free in guided.endings and guided.engine.guides.is_compiling
    request = guided.engine.scheduler.state.requests[waiting[0]]
    assert request.state is RequestState.BLOCKED
    assert request.blocked is not None and request.blocked.reason is BlockReason.GRAMMAR
    guided.maker.is_ready = True
    guided.run()
    assert [guided.endings[each] for each in waiting] == [(FinishReason.STOP, "")] * 2


def test_a_structure_that_cannot_be_compiled_ends_its_request_alone() -> None:
    guided = GuidedEngine()
    guided.maker.is_ready = False
    (bad,) = guided.add("5:7")
    free = guided.engine.add(prompt(4, 1), SamplingParams(max_tokens=9, seed=1))[0]
    guided.step(2)
    guided.maker.refuses = True
    guided.run()
    assert guided.endings[bad] == (FinishReason.ERROR, "grammar_error") and bad not in guided.tokens
    assert guided.endings[free] == (FinishReason.LENGTH, "")


def test_a_guide_that_breaks_delivers_no_token_more() -> None:
    guided = GuidedEngine()
    (request,) = guided.add("8:20")  # breaks at its fourth token
    guided.run()
    assert guided.endings[request] == (FinishReason.ERROR, "grammar_error")
    assert len(guided.tokens[request]) == 3


def test_every_structure_is_counted_by_its_outcome() -> None:
    guided = GuidedEngine()
    guided.add("5:7", n=2)
    guided.add("5:20", max_tokens=6)
    (left,) = guided.add("5:21")
    guided.add("8:20")  # breaks
    guided.step(4)
    guided.engine.abort(left)
    guided.maker.is_ready = False
    (gone,) = guided.add("5:8")
    guided.engine.abort(gone)
    guided.add("5:9")
    guided.maker.refuses = True
    guided.run()
    counters = guided.engine.scheduler.state.counters
    assert counters.structures == {"complete": 2, "unfinished": 3, "grammar_error": 2}
    assert (counters.compiled, counters.compile_s) == guided.maker.compiled and counters.compiled > 5


def test_branches_of_a_running_request_go_on_from_where_it_is() -> None:
    guided = GuidedEngine()
    (request,) = guided.add("5:12")
    guided.step(6)
    branches = guided.engine.fork(request, 2)
    begun = len(guided.tokens[request])
    guided.run()
    assert 0 < begun < 12
    for branch in branches:
        assert guided.endings[branch] == (FinishReason.STOP, "")
        assert len(guided.tokens[branch]) + begun >= 11  # one may have been on its way


def test_a_preempted_request_keeps_its_guide() -> None:
    guided = GuidedEngine()
    (request,) = guided.add("5:9")
    for _ in range(6):
        guided.step(2)
        if request in guided.engine.scheduler.state.requests:
            guided.engine.scheduler.preempt(request)
    guided.run()
    assert guided.endings[request] == (FinishReason.STOP, "") and len(guided.tokens[request]) == 9


def test_an_engine_without_a_maker_refuses_structures() -> None:
    config = engine_config()
    engine = build_engine(config, FakeRunner(config))
    with pytest.raises(InvalidRequest, match="not available on this engine"):
        engine.add([1], SamplingParams(structured_outputs=Structure.of({"regex": "a"})))
    assert not engine.has_requests
