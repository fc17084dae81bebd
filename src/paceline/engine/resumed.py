"""Requests that another engine had begun: they come with the output that is known, and go on behind it.

Such a request is made as if this engine had preempted it: its prompt stays its prompt, so that penalties, lengths,
positions and seeds count as they did. Nothing that is known is told again, and its place in the order is that of its
arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from paceline.core.request import Request, RequestHooks
from paceline.errors import InvalidRequest

# Of each branch, its known output; None: it has ended.
Outputs = Sequence[Sequence[int] | None]


def take_up(branches: Sequence[Request], outputs: Outputs, hooks: RequestHooks) -> list[Request]:
    """Give branches their output; those that have not ended, the others children of the first. None has been added."""
    if len(outputs) != len(branches):
        raise InvalidRequest(f"outputs are of {len(outputs)} branches, there are {len(branches)}")
    if branches[0].sampling.pooling is not None or branches[0].ends_with_prompt:
        raise InvalidRequest("a request that ends with its prompt has no output to go on from")
    shares_keys = branches[0].sampling.prompt_logprobs is None
    going_on = []
    for branch, known in zip(branches, outputs, strict=True):
        if known is None:
            continue
        if len(known) > branch.sampling.max_tokens:
            raise InvalidRequest(
                f"{len(known)} tokens of output are known, max_tokens is {branch.sampling.max_tokens}"
            )
        if len(known):
            branch.tokens = np.concatenate((branch.tokens, np.array(known, np.int32)))
            branch.keys += hooks.new_keys(branch) if shares_keys else ()
        going_on.append(branch)
    if not going_on:
        raise InvalidRequest("every branch has ended")
    first, *others = going_on
    first.parent, first.branches = None, len(branches) - 1
    for branch in others:
        branch.parent = first.id
    return going_on


def has_stopped(request: Request, ends: Collection[int]) -> bool:
    """Whether the last token that is known has ended the output: the engine was lost before it said so."""
    if not request.has_output:
        return False
    last, wanted = int(request.tokens[-1]), request.sampling
    return last in wanted.stop_token_ids or (last in ends and not wanted.ignore_eos)
