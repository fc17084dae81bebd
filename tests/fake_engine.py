"""Values that an engine sends, and an engine that answers nothing, for tests, benchmarks and tools.

Change what a test speaks of, and leave the rest: `engine_info(max_num_seqs=8)`, `finished(1, "length")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.adapter import AdapterInfo
from paceline.core.dial import DialSetting
from paceline.core.events import Finished, Forecast
from paceline.core.request import BranchState, Change, ChangeOutcome, FinishReason, RequestId, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import PLAIN, ModulePart, PromptParts
from paceline.errors import SleepRefused, UnknownAdapter
from paceline.process.client import (
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStream,
    EngineUnavailable,
    Explanation,
    OnUpdates,
    PolicyChange,
    Steering,
)

_INFO = EngineInfo(
    vocab_size=100,
    max_model_len=64,
    block_size=16,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_num_prompt_tokens=0,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    weight_bytes=1,
    kv_bytes=1,
    load_s=0.1,
)


def engine_info(**changes: Any) -> EngineInfo:
    return replace(_INFO, **changes)


def finished(branch: int = 1, reason: str = "stop", num_output: int = 1, **changes: Any) -> Finished:
    ending = Finished(
        request=RequestId(branch),
        reason=FinishReason(reason),
        detail="",
        time_s=2.0,
        num_prompt=1,
        num_output=num_output,
        num_cached=0,
        preemptions=0,
        queue_s=0.25,
    )
    return ending._replace(**changes)


def forecast(first_token_s: float, finish_s: float, **changes: Any) -> Forecast:
    """Of a request that has just arrived."""
    made = Forecast(
        first_token_s=first_token_s,
        finish_s=finish_s,
        ahead=0,
        waited_s=0.0,
        soonest_first_s=first_token_s,
        soonest_finish_s=finish_s,
        alone_first_s=first_token_s,
        alone_finish_s=finish_s,
        between_s=0.01,
        num_cached=0,
        num_output=16.0,
    )
    return replace(made, **changes)


class IdleStream:
    """A stream without updates; a base for those that have some."""

    first = 1
    forecast: Forecast | None = None
    failovers = 0

    def divert(self, on_updates: OnUpdates) -> None:
        """Updates are always taken by the reader."""

    def finish_at(self, branch: int, num_output: int) -> None:
        raise AssertionError("no stop string is in the text")

    def close(self) -> None:
        pass


class IdleClient:
    """An engine that is ready and answers nothing; a base for those that answer what a test needs."""

    state = EngineState.READY
    stats = EngineStats()
    heartbeat_age_s = 0.1
    waits_for_engine = False
    info = _INFO
    adapters: Mapping[str, AdapterInfo] = {}

    async def load_adapter(self, name: str, folder: str) -> AdapterInfo:
        raise EngineUnavailable("this engine loads nothing")

    def unload_adapter(self, name: str) -> None:
        raise UnknownAdapter("this engine has no adapters")

    def unpin(self, tenant: str, name: str) -> None:
        pass

    async def rest(self, level: int, *, aborts: bool = False) -> Standing:
        raise SleepRefused("this engine never sleeps")

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        timeout_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = 0,
        parts: PromptParts = PLAIN,
    ) -> EngineStream:
        raise NotImplementedError

    async def forecast(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = 0,
        parts: PromptParts = PLAIN,
    ) -> Forecast | None:
        raise NotImplementedError

    def fork(self, number: int, count: int, **how: Any) -> EngineStream:
        raise NotImplementedError

    async def extend(
        self,
        number: int,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        raise EngineUnavailable("this engine extends nothing")

    async def prune(self, numbers: Sequence[int]) -> list[ChangeOutcome]:
        raise EngineUnavailable("this engine prunes nothing")

    async def tree(self, number: int) -> list[BranchState]:
        raise EngineUnavailable("this engine has no trees")

    async def explain(self, number: int) -> Explanation:
        raise EngineUnavailable("this engine explains nothing")

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        raise EngineUnavailable("this engine changes nothing")

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        raise EngineUnavailable("this engine cannot be steered")

    async def snapshot(self) -> bytes:
        raise EngineUnavailable("this engine cannot be watched", code="shutting_down")

    def resume_all(self) -> None:
        pass
