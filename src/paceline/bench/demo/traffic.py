"""The traffic of the demonstration: bursts of requests whose lengths are those of recorded chats, made smaller.

Owns lengths, arrivals and how many requests fill a given time. The same seed gives the same requests, down to the
token ids, so that every mode does the same work. Knows no engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.workload import Workload, load_workload

SOURCE = "azure-conv"
SHORTER_PROMPT, SHORTER_OUTPUT = 32, 8  # what a small model on a CPU answers in the time there is
LONGEST_PROMPT, LONGEST_OUTPUT = 96, 80
BURSTS = "onoff:2,3"  # seconds of requests, seconds of none
LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT


def burst_traffic(num_requests: int, rate: float, seed: int) -> Workload:
    """So many requests in bursts, with a mean of `rate` a second."""
    drawn = load_workload(SOURCE, num_requests=num_requests, seed=seed, rate=rate, arrivals=BURSTS)
    return _smaller(drawn)


def at_once(num_requests: int, seed: int) -> Workload:
    """The like, all there from the start: to see how much a machine can do."""
    return _smaller(load_workload(SOURCE, num_requests=num_requests, seed=seed, arrivals="all-at-once"))


def prompt_tokens(workload: Workload, vocab_size: int, seed: int) -> list[NDArray[np.int32]]:
    """Random ids, so that no request finds anything of another in the prefix cache."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, int(count), dtype=np.int32) for count in workload.prompt_len]


def _smaller(workload: Workload) -> Workload:
    return replace(
        workload,
        name="bursts of chats",
        prompt_len=np.clip(workload.prompt_len // SHORTER_PROMPT, 4, LONGEST_PROMPT).astype(np.int32),
        output_len=np.clip(workload.output_len // SHORTER_OUTPUT, 4, LONGEST_OUTPUT).astype(np.int32),
    )
