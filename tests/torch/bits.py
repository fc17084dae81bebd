"""Runs of an engine that keep the bits of every logit, to compare runs that should not differ at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.decoder import Decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.flat_batch import FlatBatch
from paceline.runner.machine_load import FreeCores, MachineLoad
from paceline.runner.workers import Workers

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a run does that must not matter."""

    alone: bool = False
    budget: int = 64
    block_size: int = 16
    depth: int = 0
    preempt: str = ""  # "recompute" or "swap", after every token
    mode: str = "continuous"
    caching: bool = False
    threads: tuple[int, ...] = ()  # of one step after the other, over and over

    def config(self, decoder: Decoder, max_len: int, num_blocks_of_16: int) -> EngineConfig:
        scale = 16 / self.block_size
        return EngineConfig(
            kv=KVConfig(
                block_size=self.block_size,
                num_blocks=int(num_blocks_of_16 * scale),
                num_host_blocks=int(num_blocks_of_16 * scale),
                enable_prefix_caching=self.caching,
                groups=tuple(GroupSpec(window=window) for window in decoder.spec.group_windows),
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
            ),
            depth=self.depth,
            check_every=0,
        )


class BitsRunner(CPURunner):
    """Keeps the logits of every token it computes, under everything that came before the token."""

    def __init__(self, config: EngineConfig, decoder: Decoder, workers: Workers | None = None) -> None:
        super().__init__(config, decoder, workers=workers)
        self.bits: dict[tuple[int, ...], bytes] = {}
        self.changed = 0  # tokens computed again with other bits

    def _forward(self, batch: FlatBatch) -> Tensor:
        hidden = super()._forward(batch)
        numbers = hidden.numpy()
        end = 0
        for index, row in enumerate(batch.rows.tolist()):
            start, end = end, end + int(batch.count[index])
            if batch.masked[index]:
                continue
            tokens = self._rows.tokens[row].tolist()
            for offset in range(end - start):
                key = tuple(tokens[: int(batch.start[index]) + offset + 1])
                bits = numbers[start + offset].tobytes()
                self.changed += self.bits.setdefault(key, bits) != bits
        return hidden


@dataclass(slots=True)
class Record:
    """Outputs in the order of the prompts, and the bits of every hidden state by what came before it."""

    outputs: list[tuple[int, ...]]
    bits: dict[tuple[int, ...], bytes] = field(repr=False)
    changed: int
    preempted: int = 0


def record(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    around: Circumstances,
    *,
    num_new: int,
    num_blocks: int = 200,
) -> Record:
    """Run the prompts. Hidden states stand for logits: the head is a function of one of them at a time."""
    longest = max(len(prompt) for prompt in prompts) + num_new
    config = around.config(decoder, longest, num_blocks)
    before = torch.get_num_threads()
    if around.threads:
        torch.set_num_threads(max(around.threads))
    workers = Workers(_Changing(around.threads)) if around.threads else None
    torch.set_num_threads(before)
    runner = BitsRunner(config, decoder, workers)
    engine = build_engine(config, runner)
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    listener = _Listener(engine, around)
    for group in [[prompt] for prompt in prompts] if around.alone else [list(prompts)]:
        for prompt in group:
            (request,) = engine.add(prompt, sampling)
            listener.heard[request] = []
        while engine.has_requests:
            listener.step()
    outputs = [tuple(tokens) for tokens in listener.heard.values()]
    return Record(outputs, runner.bits, runner.changed, listener.preempted)


class _Changing(FreeCores):
    """Cores that others take and leave with every step."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__(MachineLoad(), max(counts))
        self._counts = cycle(counts)

    def look(self, tokens: int = 1) -> int:
        return next(self._counts)


class _Listener:
    """Steps an engine, keeps what each request says, and preempts who has just spoken where that is asked for."""

    def __init__(self, engine: Engine, around: Circumstances) -> None:
        self._engine = engine
        self._around = around
        self._rng = random.Random(0)
        self.heard: dict[int, list[int]] = {}
        self.preempted = 0

    def step(self) -> None:
        engine = self._engine
        events = engine.step_overlapped() if self._around.depth else engine.step()
        if engine.last_error is not None:
            raise engine.last_error
        for batch in events.tokens:
            for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                self.heard[request].append(token)
                self._preempt(RequestId(request))

    def _preempt(self, request: RequestId) -> None:
        scheduler, kind = self._engine.scheduler, self._around.preempt
        if kind and request in scheduler.state.requests and self._rng.random() < 0.7:
            self.preempted += scheduler.preempt(request, swap=kind == "swap")


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
            f"{len(wrong)} of {len(common)} states differ, the first after {len(key)} tokens by {gap:.1e}"
        )
    if one.changed or other.changed:
        found.append(f"{one.changed} and {other.changed} states changed when they were computed again")
    return found
