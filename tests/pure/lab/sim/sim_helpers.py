"""Small workloads, machines and configurations for the simulator's tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.sim.settings import Machine, SimConfig
from paceline.lab.workload.workload import Workload


@dataclass(frozen=True)
class Seconds:
    """Every step takes as long."""

    per_step: float

    def step_seconds(self, shape: StepShape) -> float:
        return self.per_step


@dataclass(frozen=True)
class PerToken:
    """A fixed part and so much per token: enough to tell steps apart."""

    fixed: float = 0.01
    per_token: float = 0.0001

    def step_seconds(self, shape: StepShape) -> float:
        return self.fixed + self.per_token * shape.tokens


def machine(cost: CostModel | None = None) -> Machine:
    return Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), cost)


def make_workload(
    arrival_s: list[float],
    *,
    prompt: int | list[int] = 20,
    output: int | list[int] = 5,
    tenant: list[int] | None = None,
    prefix_ids: Sequence[tuple[int, ...]] | None = None,
    prefix_block: int = 16,
) -> Workload:
    count = len(arrival_s)
    return Workload(
        name="hand-made",
        arrival_s=np.array(arrival_s, np.float64),
        prompt_len=np.full(count, prompt, np.int32)
        if isinstance(prompt, int)
        else np.array(prompt, np.int32),
        output_len=np.full(count, output, np.int32)
        if isinstance(output, int)
        else np.array(output, np.int32),
        tenant=np.zeros(count, np.int32) if tenant is None else np.array(tenant, np.int32),
        tenants=tuple(f"tenant{i}" for i in range(1 + max(tenant or [0]))),
        prefix_ids=None if prefix_ids is None else tuple(prefix_ids),
        prefix_block=0 if prefix_ids is None else prefix_block,
    )


def random_workload(count: int, seed: int, *, rate: float = 50.0, tenants: int = 1) -> Workload:
    random = np.random.default_rng(seed)
    return make_workload(
        np.cumsum(random.exponential(1.0 / rate, count)).tolist(),
        prompt=random.integers(1, 90, count).tolist(),
        output=random.integers(1, 40, count).tolist(),
        tenant=random.integers(0, tenants, count).tolist(),
    )


def small_engine(
    *,
    mode: str = "continuous",
    depth: int = 1,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    preemption: str = "recompute",
    max_model_len: int = 256,
    policy: str = "fcfs",
) -> EngineConfig:
    return EngineConfig(
        kv=KVConfig(block_size=8, num_blocks=num_blocks, num_host_blocks=num_host_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            mode=mode,
            batch_size=4,
            batch_timeout_s=0.2,
            static_flush_s=0.5,
            preemption=preemption,
            scheduling_policy=policy,
        ),
        depth=depth,
    )


def sim_config(engine: EngineConfig | None = None, cost: CostModel | None = None, **more: Any) -> SimConfig:
    values: dict[str, Any] = {"host_step_s": 0.0, **more}
    return SimConfig(
        machine=machine(cost if cost is not None else PerToken()),
        engine=engine if engine is not None else small_engine(),
        **values,
    )
