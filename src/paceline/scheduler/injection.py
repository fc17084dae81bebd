"""What is put behind the tokens of a live request, from outside: tokens of its output, some of them placed.

The request has left its row, and meets what was put in on its way back, like a prompt. Decisions:
docs/decisions/0041-trees.md, docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.core.events import DecisionKind, Rule, TokenEvents
from paceline.core.plan import I32
from paceline.core.request import PlacedStretches, Request
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step import pinning


def inject(
    state: SchedulerState, request: Request, tokens: I32, max_tokens: int, placed: PlacedStretches
) -> None:
    """Give a request these tokens, and room for `max_tokens` behind them."""
    count = len(tokens)
    first = request.num_tokens - request.num_prompt
    total = first + count + max_tokens
    least = request.sampling.min_tokens
    request.sampling = replace(
        request.sampling,
        max_tokens=total,
        min_tokens=min(total, least + count if first < least else least),
    )
    request.tokens = np.concatenate([request.tokens, tokens])
    request.modules += pinning.count_from_arrival(state, request, placed.modules)
    request.stretches += placed.stretches
    request.cost = request.cost._replace(injected=request.cost.injected + count)
    if request.tree is not None:
        request.tree.members[request.id] = request.most_generated
    if first or request.sampling.prompt_logprobs is None:  # else every token of its prompt is computed
        state.learn_keys(request)
    state.accounting.admitted(state.tenant_index(request.tenant), count)
    state.counters.extended += 1
    state.decide(DecisionKind.EXTEND, request, Rule.INJECTED, count)
    if not count:  # it only goes on
        return
    state.events.tokens.append(
        TokenEvents(
            seq=state.kv.submitted,
            time_s=state.now_s,
            requests=np.full(count, request.id, np.int64),
            tokens=tokens,
            index=np.arange(first, first + count),
            is_injected=True,
        )
    )
