"""A tiny model behind `LLM` and `AsyncLLM`, and what tests ask of its engine."""

from __future__ import annotations

from typing import Any

from paceline.engine.engine import Engine

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "num_blocks": 96,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "check_every": 1,
}


def is_at_rest(engine: Engine) -> bool:
    """No request, no step under way, and every block free."""
    groups = engine.scheduler.state.kv.groups
    free = all(group.pool.num_free == group.pool.usable for group in groups)
    return engine.is_idle and not engine.has_requests and free
