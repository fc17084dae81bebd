"""How long steps take in which rows decode, tried out when an engine is built."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

MEASURED_STEPS = 3  # of which the shortest counts


def decode_seconds(
    kv: KVConfig, make_engine: Callable[[EngineConfig], Engine], rows: int, context: int
) -> float:
    """Seconds of a step in which `rows` rows with `context` tokens each decode, on a small separate engine."""
    length, block_size = context + MEASURED_STEPS + 2, 16
    groups = tuple(GroupSpec(window=group.window) for group in kv.groups)
    blocks = rows * (-(-length // block_size)) + 1
    config = EngineConfig(
        kv=KVConfig(num_blocks=blocks, block_size=block_size, enable_prefix_caching=False, groups=groups),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=rows * context, max_model_len=length, watermark=0.0
        ),
        depth=0,
    )
    engine = make_engine(config)
    for _ in range(rows):
        engine.add(
            [1] * context, SamplingParams(max_tokens=MEASURED_STEPS + 1, temperature=0.0, ignore_eos=True)
        )
    engine.step()  # the prompts, all at once
    taken = []
    for _ in range(MEASURED_STEPS):
        started_s = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started_s)
    engine.close()
    return min(taken)
