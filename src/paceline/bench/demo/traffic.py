"""The traffic of the demonstration: bursts of requests whose lengths are those of recorded chats, or smaller.

Owns lengths, arrivals and how many requests fill a given time. The same seed gives the same requests, down to the
token ids, so that every mode does the same work. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.workload import Workload, load_workload

SOURCE = "azure-conv"
ON_S, OFF_S = 2.0, 3.0  # seconds of requests, seconds of none
WHOLE_BURSTS_S = 7.0  # of traffic: in less time there would be only one burst of that length
LEAST_SHARE = 0.001  # of the length of a burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Parts of the recorded lengths, and the longest."""

    prompt_part: int
    output_part: int
    longest_prompt: int
    longest_output: int

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_output

    def of(self, workload: Workload) -> Workload:
        prompts, outputs = workload.prompt_len // self.prompt_part, workload.output_len // self.output_part
        return replace(
            workload,
            name="bursts of chats",
            prompt_len=np.clip(prompts, 4, self.longest_prompt).astype(np.int32),
            output_len=np.clip(outputs, 4, self.longest_output).astype(np.int32),
        )


# What a small model on a CPU answers in the time there is; and whole chats, but for the very longest.
LENGTHS = {
    "cpu": Lengths(prompt_part=32, output_part=8, longest_prompt=96, longest_output=80),
    "cuda": Lengths(prompt_part=1, output_part=1, longest_prompt=2048, longest_output=1024),
}


def burst_traffic(num_requests: int, rate: float, seed: int, lengths: Lengths) -> Workload:
    """So many requests in bursts, with a mean of `rate` a second. Little traffic has short bursts: if all of it came in
    the first one, it would come faster and be over sooner than was asked for."""
    share = min(1.0, max(LEAST_SHARE, num_requests / rate / WHOLE_BURSTS_S))
    arrivals = f"onoff:{ON_S * share:g},{OFF_S * share:g}"
    return lengths.of(
        load_workload(SOURCE, num_requests=num_requests, seed=seed, rate=rate, arrivals=arrivals)
    )


def at_once(num_requests: int, seed: int, lengths: Lengths) -> Workload:
    """The like, all there from the start: to see how much a machine can do."""
    return lengths.of(load_workload(SOURCE, num_requests=num_requests, seed=seed, arrivals="all-at-once"))


def prompt_tokens(workload: Workload, vocab_size: int, seed: int) -> list[NDArray[np.int32]]:
    """Random ids, so that no request finds anything of another in the prefix cache."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, int(count), dtype=np.int32) for count in workload.prompt_len]
