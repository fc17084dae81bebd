"""A workload sent as it is: prompts of random token ids of exactly its lengths, at its times, by its tenants.

For comparing what a server does with what the simulator says of the same requests. Prompts share nothing, so
that no cache makes them shorter than the workload has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from paceline.lab.bench.load.figures import run_record
from paceline.lab.bench.load.generator import LoadGenerator, LoadPlan, LoadRun
from paceline.lab.bench.load.pool import Pool, Target
from paceline.lab.bench.load.prompt_source import COMPLETIONS, BodyForm, LoadRequest
from paceline.lab.report.run_record import RunRecord
from paceline.lab.workload.workload import Workload

NUM_IDS = 90  # token ids that prompts are drawn from: every model has them, and no two prompts begin alike


class TokenSource:
    """Prompts of token ids, by a workload's lengths."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self.name = workload.name
        self._workload = workload
        self._seed = seed

    def make(self, index: int) -> LoadRequest:
        work = self._workload
        ids = np.random.default_rng([self._seed, index]).integers(0, NUM_IDS, int(work.prompt_len[index]))
        return LoadRequest(
            prompt="",
            num_output=int(work.output_len[index]),
            tenant=work.tenants[int(work.tenant[index])],
            fields={"prompt": ids.tolist()},
        )


def send_workload(
    target: Target,
    model: str,
    workload: Workload,
    *,
    seed: int,
    label: str,
    keys: Mapping[str, str] | None = None,
) -> RunRecord:
    """Send completions at the workload's times. What a client cannot see, admission, is taken to be the first token."""
    run = asyncio.run(_send(target, model, workload, seed, keys or {}))
    seen = run_record(run, label=label)
    return replace(
        seen, admitted_s=seen.first_token_s, tenant=workload.tenant, prompt_len=workload.prompt_len
    )


async def _send(
    target: Target, model: str, workload: Workload, seed: int, keys: Mapping[str, str]
) -> LoadRun:
    form = BodyForm(api=COMPLETIONS, model=model, ignore_eos=True, temperature=0.0)
    plan = LoadPlan(due_s=workload.arrival_s.tolist(), keys=keys)
    pool = Pool(target)
    try:
        return await LoadGenerator(pool, TokenSource(workload, seed=seed), form, plan).run()
    finally:
        pool.close()
