"""Runs of an engine that keep the bits of every logit, to compare runs that should not differ at all.

Whatever computes the steps of the CPU runner can be put in; nothing here needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.core.adapter import NO_ADAPTER
from paceline.core.parameters import KVKeep
from paceline.core.plan import DraftTally, StepPlan
from paceline.core.request import RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.files.adapter_files import Adapter
from paceline.models.spec import ModelSpec
from paceline.runner.cpu import CPURunner, StepCompute
from paceline.runner.device_rows import DeviceRows, Drafts, FlatBatch
from paceline.runner.drafts import Counts, Drafter
from paceline.runner.machine_load import FreeCores, MachineLoad

Prompt = tuple[int, ...]
Index = NDArray[np.int64]
MakeStep = Callable[[EngineConfig], StepCompute]


class Adapted(tuple[int, ...]):
    """A prompt that is answered with an adapter."""

    adapter: Adapter

    @classmethod
    def of(cls, prompt: Prompt, adapter: Adapter) -> Adapted:
        made = cls(prompt)
        made.adapter = adapter
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a run does that must not matter."""

    alone: bool = False
    budget: int = 64
    block_size: int = 16
    depth: int = 0
    preempt: str = ""  # "recompute" or "swap", after every token
    fork: bool = False  # requests get branches, which must go on as they do
    mode: str = "continuous"
    caching: bool = False
    threads: tuple[int, ...] = ()  # of one step after the other, over and over
    # These two matter: what each token sees, and how it is kept.
    kv_keep: KVKeep | None = None
    kv_dtype: str = "float32"
    drafts: int = 0  # of each row in a step at most; some are right, some are not

    def config(self, spec: ModelSpec, max_len: int, num_blocks_of_16: int) -> EngineConfig:
        scale = 16 / self.block_size
        return EngineConfig(
            kv=KVConfig(
                block_size=self.block_size,
                num_blocks=int(num_blocks_of_16 * scale),
                num_host_blocks=int(num_blocks_of_16 * scale),
                enable_prefix_caching=self.caching,
                groups=tuple(GroupSpec(window=window) for window in spec.group_windows),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=self.budget,
                max_model_len=max_len,
                max_preemptions=0,
                mode=self.mode,
                batch_size=min(8, self.budget),
                batch_timeout_s=0.0,
                static_flush_s=0.0,
                drafts=DraftConfig(width=self.drafts) if self.drafts else None,
            ),
            depth=self.depth,
            check_every=0,
        )


class Between:
    """Stands between a runner and what computes its steps; they draw no tokens and see no pictures."""

    pictures = None

    def __init__(self, compute: StepCompute) -> None:
        self.spec, self.kv = compute.spec, compute.kv
        self.work = compute.work
        self._compute = compute

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        return self._compute.forward(rows, batch, due)

    def logits(self, tokens: Index) -> NDArray[np.float32]:
        return self._compute.logits(tokens)


class Bits(Between):
    """Keeps the logits of every token that is computed, under everything that came before the token."""

    def __init__(self, compute: StepCompute) -> None:
        super().__init__(compute)
        self.bits: dict[Prompt, bytes] = {}
        self.changed = 0  # tokens computed again with other bits
        self.identity_of: Callable[[int], str] = lambda number: ""  # of adapters

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        good = self._compute.forward(rows, batch, due)
        numbers = self._compute.logits(np.arange(len(batch.tokens)))
        end = 0
        for index, row in enumerate(batch.rows.tolist()):
            start, end = end, end + int(batch.count[index])
            if batch.masked[index]:
                continue
            tokens = rows.tokens[row].tolist()
            adapter = [-int(self.identity_of(int(rows.adapter[row])), 16)] if rows.adapter[row] else []
            # Those that are not finite end their row; which other tokens of that row they reach may differ.
            for offset in np.flatnonzero(good[start:end]).tolist():
                key = tuple(adapter + tokens[: int(batch.start[index]) + offset + 1])
                bits = numbers[start + offset].tobytes()
                self.changed += self.bits.setdefault(key, bits) != bits
        return good


@dataclass(slots=True)
class Record:
    """Outputs in the order of the prompts, and the bits of every token's logits by what came before them."""

    outputs: list[tuple[int, ...]]
    bits: dict[Prompt, bytes] = field(repr=False)
    changed: int
    preempted: int = 0
    forked: int = 0
    hits: int = 0  # tokens that were not computed, because a cache had them
    accepted: int = 0  # drafts that were right
    rejected: int = 0  # and those that were not


def record(
    make_step: MakeStep,
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    around: Circumstances,
    *,
    num_new: int,
    num_blocks: int = 200,
    answers: Sequence[Prompt] = (),
    make_drafter: Callable[[EngineConfig], Drafter] | None = None,
) -> Record:
    """Run the prompts, greedily; `answers` are prompts with what follows them, for drafts, unless `make_drafter` makes
    these. A prompt may be `Adapted`."""
    config = around.config(spec, max(len(prompt) for prompt in prompts) + num_new, num_blocks)
    compute = make_step(config)
    bits = Bits(compute)
    drafter: Drafter | None = Oracle(answers) if around.drafts else None
    if make_drafter is not None:
        drafter = make_drafter(config)
    adapters = {each.adapter.identity: each.adapter for each in prompts if isinstance(each, Adapted)}
    engine = build_engine(
        config,
        CPURunner(config, bits, drafter=drafter),
        make_adapters=lambda scheduler: Adapters(
            scheduler, getattr(compute, "adapters", None), lambda path: adapters[path.name]
        ),
    )
    bits.identity_of = engine.adapters.identity_of
    numbers = {identity: engine.adapters.load("", Path(identity)).number for identity in adapters}
    always_draft(engine)
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, kv_keep=around.kv_keep)
    listener = _Listener(engine, around, num_new)
    for group in [[prompt] for prompt in prompts] if around.alone else [list(prompts)]:
        for prompt in group:
            adapter = numbers[prompt.adapter.identity] if isinstance(prompt, Adapted) else NO_ADAPTER
            (request,) = engine.add(prompt, sampling, adapter=adapter)
            listener.tokens_of[request] = []
        while engine.has_requests:
            listener.step()
    listener.check_branches()
    outputs = [tuple(tokens) for tokens in listener.tokens_of.values()]
    forked = len(listener.branches)
    counters = engine.scheduler.state.counters
    return Record(
        outputs,
        bits.bits,
        bits.changed,
        preempted=listener.preempted,
        forked=forked,
        hits=listener.hits,
        accepted=counters.accepted_tokens,
        rejected=counters.draft_tokens - counters.accepted_tokens,
    )


def always_draft(engine: Engine) -> None:
    """Drafts are verified whether they are worth their time or not: nothing is learnt of it."""
    if engine.scheduler.state.drafts is not None:
        engine.scheduler.state.drafts.learn = lambda work, result, room=0: None  # type: ignore[method-assign]


class Oracle:
    """Drafts from texts that are known: as long as may be or shorter, right or, now and then, wrong."""

    def __init__(self, texts: Sequence[Prompt], wrong: float = 0.3) -> None:
        self._texts = [list(text) for text in texts]
        self._wrong = wrong
        self._rng = random.Random(0)

    def join(self, rows: DeviceRows, row: int, prediction: Sequence[int] = ()) -> None: ...

    def leave(self, rows: DeviceRows, row: int) -> None: ...

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> Drafts | None:
        if not plan.draft_width:
            return None
        rng, left = self._rng, plan.draft_tokens
        tokens: Index = np.zeros((len(at), plan.draft_width), np.int64)
        count: Index = np.zeros(len(at), np.int64)
        for number, row in enumerate(at.tolist()):
            length = int(rows.num_tokens[row])
            known = rows.tokens[row, :length].tolist()
            text = next((text for text in self._texts if text[:length] == known), known)
            most = min(plan.draft_width, int(rows.limit[row]) - length - 1, left)
            if rows.ended[row] or most < 1 or rng.random() < 0.1:
                continue
            drafts = (text[length:] + [1] * most)[: rng.choice((most, rng.randint(1, most)))]
            tokens[number, : len(drafts)] = [
                rng.randrange(2, 100) if rng.random() < self._wrong else each for each in drafts
            ]
            count[number] = len(drafts)
            left -= len(drafts)
        return Drafts(tokens, count)

    def observe(self, rows: DeviceRows, at: Index, count: Counts, verified: Index | None) -> None: ...

    def take_tally(self) -> DraftTally | None:
        return None


class Changing(FreeCores):
    """Cores that others take and leave with every step; threads sleep at the meetings of every second one."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__(MachineLoad(), max(counts))
        self._counts = cycle(counts)

    def refresh(self, tokens: int = 1) -> int:
        self.count = 0 if self.count else self.most
        return next(self._counts)


class _Listener:
    """Steps an engine, keeps the tokens of each request, and preempts or forks one that has just got a token."""

    def __init__(self, engine: Engine, around: Circumstances, num_new: int) -> None:
        self._engine = engine
        self._around = around
        self._num_new = num_new
        self._rng = random.Random(0)
        self.tokens_of: dict[RequestId, list[int]] = {}
        # Of which request, and all its tokens.
        self.branches: dict[RequestId, tuple[RequestId, list[int]]] = {}
        self.preempted = 0
        self.hits = 0

    def step(self) -> None:
        engine = self._engine
        events = engine.step_overlapped() if self._around.depth else engine.step()
        if engine.last_error is not None:
            raise engine.last_error
        for batch in events.tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                request = RequestId(number)
                known = self.tokens_of.get(request)
                (self.branches[request][1] if known is None else known).append(token)
            for request in map(RequestId, dict.fromkeys(batch.requests.tolist())):
                self._preempt(request)
                if self._around.fork and request in self.tokens_of:
                    self._fork(request)
        own = [finished for finished in events.finished if finished.request in self.tokens_of]
        self.hits += sum(finished.num_cached for finished in own)  # a branch begins with what it shares

    def check_branches(self) -> None:
        for parent, tokens in self.branches.values():
            assert tokens == self.tokens_of[parent], "a branch went another way"

    def _preempt(self, request: RequestId) -> None:
        scheduler, kind = self._engine.scheduler, self._around.preempt
        if kind and request in scheduler.state.requests and self._rng.random() < 0.7:
            self.preempted += scheduler.preempt(request, swap=kind == "swap")

    def _fork(self, request: RequestId) -> None:
        found, tokens = self._engine.scheduler.state.requests.get(request), self.tokens_of[request]
        if found is None or found.state is not RequestState.RUNNING or len(tokens) == self._num_new:
            return
        if self._rng.random() < 0.15:
            for branch in self._engine.fork(request, 2):
                self.branches[branch] = request, list(tokens)


def differences(one: Record, other: Record) -> list[str]:
    """What is not the same, bit for bit, in sentences; empty when all is."""
    found = [
        f"output {index}: {ours} and {theirs}"
        for index, (ours, theirs) in enumerate(zip(one.outputs, other.outputs, strict=True))
        if ours != theirs
    ]
    common = one.bits.keys() & other.bits.keys()
    wrong = [key for key in common if one.bits[key] != other.bits[key]]
    if wrong:
        key = min(wrong, key=len)
        gap = np.abs(
            np.frombuffer(one.bits[key], np.float32) - np.frombuffer(other.bits[key], np.float32)
        ).max()
        found.append(
            f"logits of {len(wrong)} of {len(common)} tokens differ, the first after {len(key)} tokens by {gap:.1e}"
        )
    if one.changed or other.changed:
        found.append(
            f"logits of {one.changed} and {other.changed} tokens changed when they were computed again"
        )
    return found
