"""Runs on the native kernels that keep the bits of every logit (see `tests.bits`)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

from paceline.config.engine import EngineConfig
from paceline.runner.cpu import StepCompute
from paceline.runner.native.code import Code
from paceline.runner.native.model import NativeModel
from paceline.runner.native.step import NativeStep
from tests.bits import Changing, Circumstances, Prompt, Record, record
from tests.kernels import host_code


def step_threads() -> int:
    """Threads of the steps that are still held: those let go of end first, whichever test had them."""
    gc.collect()
    return sum(thread.name.startswith("step-") for thread in threading.enumerate())


def record_native(
    model: NativeModel,
    prompts: Sequence[Prompt],
    around: Circumstances,
    *,
    num_new: int,
    num_blocks: int = 200,
    change: Callable[[NativeStep], StepCompute] | None = None,
    code: Code | None = None,
    answers: Sequence[Prompt] = (),
) -> Record:
    """Run the prompts, greedily; `change` stands between the kernels and the runner, `code` are other kernels, drafts
    come from `answers`; see `record`."""
    steps: list[NativeStep] = []

    def make_step(config: EngineConfig) -> StepCompute:
        threads = around.threads or (1,)
        made = code or host_code()
        steps.append(
            NativeStep(model, config, made, max(threads), Changing(threads), kv_dtype=around.kv_dtype)
        )
        return steps[-1] if change is None else change(steps[-1])

    try:
        return record(
            make_step,
            model.spec,
            prompts,
            around,
            num_new=num_new,
            num_blocks=num_blocks,
            answers=answers,
        )
    finally:
        for step in steps:
            step.close()
