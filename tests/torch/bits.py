"""Runs on torch that keep the bits of every logit (see `tests.bits`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.decoder import Decoder
from paceline.runner.torch_step import TorchStep
from paceline.runner.workers import Workers
from tests.bits import Changing, Circumstances, Prompt, Record
from tests.bits import record as record_bits


def record(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    around: Circumstances,
    *,
    num_new: int,
    num_blocks: int = 200,
) -> Record:
    """Run the prompts, greedily."""
    before = torch.get_num_threads()
    if around.threads:
        torch.set_num_threads(max(around.threads))
    workers = Workers(Changing(around.threads)) if around.threads else None
    torch.set_num_threads(before)
    return record_bits(
        lambda config: TorchStep(decoder, config.kv, workers, kv_dtype=around.kv_dtype),
        decoder.spec,
        prompts,
        around,
        num_new=num_new,
        num_blocks=num_blocks,
    )
