"""Random traffic on the native kernels of tiny models, for a chosen number of steps.

    python -m tests.native.random_steps --steps 200000            every address is looked up
    python -m tests.native.random_steps --steps 4000 --yields     threads let others go first at random

Requests come, share prefixes, branch, are preempted, swapped and aborted, in every mode of batching, in most seeds with
adapters, which come and go. What is computed
depends on the seed alone: a digest of all logits is the same for every number of threads and with every yield.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.adapter import NO_ADAPTER
from paceline.core.clock import ManualClock
from paceline.core.request import RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.factory import build_engine
from paceline.models.files.adapter_files import Adapter
from paceline.models.spec import ExpertsSpec, ModelSpec, RopeSpec
from paceline.runner.cpu import CPURunner
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.code import Code
from paceline.runner.native.layout import PARTS
from paceline.runner.native.model import NativeModel, build_model, objection
from paceline.runner.native.step import NativeStep
from paceline.runner.sampling.sampler import Settled, Wanted
from tests.bits import Between, Changing
from tests.kernels import checked_code
from tests.native.adapters import make_adapter
from tests.quantized_helpers import QuantizedSource

VOCAB = 64
LONGEST = 96
STEPS_PER_SEED = 200  # twenty seeds have every model with every number of threads
THREADS = (1, 2, 3, 8)
STEP_S = 0.003
NUM_ADAPTERS = 8


def tiny(*, window: int | None = None, experts: bool = False, inner: int = 64) -> ModelSpec:
    """Two layers, as small as the kernels allow."""
    spec = ModelSpec(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=inner,
        num_layers=2 if window else 1,
        num_heads=3 if experts else 2,
        num_kv_heads=1,
        head_dim=32,
        max_positions=LONGEST + 8,
        windows=(None, window) if window else (None,),
        ropes=(RopeSpec(rotary_dim=32),),
        layer_ropes=(0, 0) if window else (0,),
        tied_embeddings=experts,
        eos_token_ids=(2,),
    )
    if not experts:
        return spec
    chosen = ExpertsSpec(num_experts=3, per_token=2, intermediate_size=32, normalize=True, layers=(0,))
    return replace(spec, experts=chosen, qk_norm=True, qkv_bias=True)


MODELS = {
    "four bits": (tiny(), "Q4_1"),
    "a window": (tiny(window=20), "Q4_0"),
    "experts": (tiny(experts=True), "Q8_0"),
    "float32": (tiny(), "F32"),
    "experts in float32": (tiny(experts=True, window=9), "F32"),
}


@cache
def model(kind: str) -> NativeModel:
    spec, dtype = MODELS[kind]
    source = QuantizedSource(spec, dtype, mixed=True)
    assert not objection(source, 16)
    return build_model(source, spec.max_positions)


@cache
def an_adapter(kind: str, number: int) -> Adapter:
    parts = (PARTS, ("q", "v"), ("k", "o", "down"))[number % 3]
    dtype = ("float32", "bfloat16", "float16")[number % 3]
    return make_adapter(MODELS[kind][0], (1, 4, 7, 16)[number % 4], parts, dtype, seed=number)


class Digest(Between):
    """Stands between the runner and the kernels: a digest of every token's logits, step by step."""

    def __init__(self, step: NativeStep) -> None:
        super().__init__(step)
        self._step = step
        self._hash = hashlib.sha256()
        self.steps = self.rows = self.settled = 0

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._keep(batch, self._step.forward(rows, batch, due))

    def forward_and_draw(
        self, rows: DeviceRows, batch: FlatBatch, due: NDArray[np.int64], wanted: Wanted
    ) -> tuple[NDArray[np.bool_], Settled]:
        good, settled = self._step.forward_and_draw(rows, batch, due, wanted)
        self.settled += int(settled.is_settled.sum())
        self._hash.update(np.where(settled.is_settled, settled.tokens, -1).tobytes())
        return self._keep(batch, good), settled

    def _keep(self, batch: FlatBatch, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        self._hash.update(good.tobytes())
        self._hash.update(self._step.logits(np.arange(len(batch.tokens))).tobytes())
        self.steps += 1
        self.rows += len(batch.rows)
        return good

    @property
    def value(self) -> str:
        return self._hash.hexdigest()


def draw_config(rng: random.Random, spec: ModelSpec) -> EngineConfig:
    """A small engine, often short of blocks."""
    block_size = rng.choice((16, 16, 32, 64))
    seqs = rng.choice((1, 3, 9, 12))
    longest = -(-LONGEST // block_size)
    blocks = 2 + longest + int(seqs * longest * rng.choice((0.2, 0.5, 0.9)))
    return EngineConfig(
        kv=KVConfig(
            block_size=block_size,
            num_blocks=blocks,
            num_host_blocks=rng.choice((0, blocks)),
            enable_prefix_caching=rng.random() < 0.8,
            groups=tuple(GroupSpec(window=window) for window in spec.group_windows),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.choice((12, 24, 70, 200)),
            max_model_len=LONGEST,
            mode=rng.choices(("continuous", "static", "dynamic"), (0.7, 0.15, 0.15))[0],
            batch_size=rng.choice((2, 4, 8)),
            batch_timeout_s=0.02,
            static_flush_s=0.1,
            max_preemptions=4,
            max_queue=16,
        ),
        depth=rng.choice((0, 1, 2)),
        check_every=0,
    )


class Traffic:
    """Clients of one engine, from one seed."""

    def __init__(self, seed: int, engine: Engine, clock: ManualClock, *, has_adapters: bool) -> None:
        self._has_adapters = has_adapters
        self._rng = random.Random(seed + 1)
        self._engine = engine
        self._clock = clock
        self._prefixes = [[self._rng.randrange(3, VOCAB) for _ in range(LONGEST)] for _ in range(3)]

    def turn(self) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            self._add()
        if self._has_adapters and rng.random() < 0.1:
            self._change_adapters()
        for act in (self._abort, self._fork, self._preempt):
            if rng.random() < 0.05:
                act()

    def _add(self) -> None:
        rng = self._rng
        length = rng.randint(1, rng.choice((6, 30, 80)))
        shared = rng.randint(0, length)
        prompt = rng.choice(self._prefixes)[:shared]
        prompt = prompt + [rng.randrange(3, VOCAB) for _ in range(length - shared)]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, min(40, LONGEST - length)),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.5)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            top_k=rng.choice((0, 0, 5)),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 1.0)),
            seed=rng.randrange(1 << 30),
            n=rng.choice((1, 1, 2)),
        )
        known = [info.number for info in self._engine.adapters.infos()]
        try:
            self._engine.add(prompt, sampling, adapter=rng.choice([NO_ADAPTER, *known]))
        except PacelineError:
            return  # the queue is full, or it can never fit

    def _change_adapters(self) -> None:
        """One comes, and one of more than two goes; the name says which it is."""
        adapters = self._engine.adapters
        adapters.load("", Path(str(self._rng.randrange(NUM_ADAPTERS))))
        if len(known := adapters.infos()) > 2:
            self._engine.unload_adapter(self._rng.choice(known).number)

    def _pick(self) -> RequestId | None:
        running = [
            request.id
            for request in self._engine.scheduler.state.requests.values()
            if request.state is RequestState.RUNNING
        ]
        return self._rng.choice(running) if running else None

    def _abort(self) -> None:
        request = self._pick()
        if request is not None:
            self._engine.abort(request)

    def _fork(self) -> None:
        request = self._pick()
        if request is not None and len(self._engine.scheduler.tokens_of(request)) < LONGEST:
            try:
                self._engine.fork(request, 1)
            except PacelineError:
                return

    def _preempt(self) -> None:
        request = self._pick()
        if request is not None:
            self._engine.scheduler.preempt(request, swap=self._rng.random() < 0.5)

    def step(self) -> None:
        engine = self._engine
        _ = engine.step_overlapped() if engine.depth else engine.step()
        if engine.last_error is not None:
            raise engine.last_error
        self._clock.advance(STEP_S)


@dataclass(frozen=True, slots=True)
class Run:
    """What a seed computed."""

    digest: str
    steps: int
    rows: int
    settled: int  # tokens that the kernels drew


def run_seed(code: Code, seed: int, steps: int, threads: tuple[int, ...] = (1,), yields: int = 0) -> Run:
    """Traffic until the kernels have computed `steps` steps."""
    rng = random.Random(seed)
    kind = list(MODELS)[seed % len(MODELS)]
    config = draw_config(rng, MODELS[kind][0])
    step = NativeStep(model(kind), config, code, max(threads), Changing(threads))
    if step.checks is not None:
        step.checks.yields = yields
    digest, clock = Digest(step), ManualClock()
    try:
        engine = build_engine(
            config,
            CPURunner(config, digest),
            clock=clock,
            make_adapters=lambda scheduler: Adapters(
                scheduler, step.adapters, lambda path: an_adapter(kind, int(path.name))
            ),
        )
        traffic = Traffic(seed, engine, clock, has_adapters=bool(seed % 3))
        while digest.steps < steps:
            traffic.turn()
            traffic.step()
    finally:
        step.close()
    return Run(digest.value, digest.steps, digest.rows, digest.settled)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.random_steps")
    parser.add_argument("--steps", type=int, default=2000, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--yields", action="store_true", help="also compare with runs of one thread")
    arguments = parser.parse_args()
    code, started_s = checked_code(), time.perf_counter()
    done = rows = 0
    seed = arguments.seed
    while done < arguments.steps:
        threads = (THREADS[seed % len(THREADS)],) if arguments.yields else (1 + seed % 2,)
        run = run_seed(code, seed, STEPS_PER_SEED, threads, yields=seed + 1 if arguments.yields else 0)
        if arguments.yields and run.digest != run_seed(code, seed, STEPS_PER_SEED).digest:
            print(f"seed {seed}: {threads[0]} threads that yield compute other numbers than one thread")
            return 1
        done, rows, seed = done + run.steps, rows + run.rows, seed + 1
    print(
        f"{done:,} steps of {rows / done:.1f} rows, {seed - arguments.seed} seeds, "
        f"{time.perf_counter() - started_s:.0f} s: nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
