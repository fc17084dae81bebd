"""Flags that commands show alike, whether they load a model or simulate one.

Owns nothing but their spelling and what is said where nothing is given; the options are declared in `config`.
Imports nothing heavy.
"""

from __future__ import annotations

from paceline.cli.options import Flag, Panel
from paceline.config import EngineConfig, KVConfig

# How batches are formed, and how much of a step one prompt may take.
FORMING = (
    Flag(name="batch_size"),
    Flag(name="batch_timeout_s", also=("--batch-timeout",)),
    Flag(name="static_flush_s"),
    Flag(name="static_order"),
    Flag(name="long_prefill_share"),
)
# Between latency and throughput; one of them at most.
DIAL = (
    Flag(name="dial", default="off"),
    Flag(name="target_itl_p99_ms", default="none"),
    Flag(name="target_ttft_p99_ms", default="none"),
)
# Who goes first.
POLICY = (
    Flag(name="scheduling_policy"),
    Flag(name="ageing_s"),
    Flag(name="prompt_handicap_ms"),
    Flag(name="output_handicap_ms"),
    Flag(name="first_token_s", default="any time before the deadline"),
    Flag(name="tenant_weights"),
    Flag(name="output_token_cost"),
    Flag(name="flood_tokens"),
)
BUDGET = (
    Flag(name="max_num_batched_tokens", default="measured at start"),
    Flag(name="max_num_prompt_tokens", default="measured on a CPU"),
)
KV_BLOCKS = Panel(
    title="Engine",
    config=KVConfig,
    optional=True,
    flags=(
        Flag(name="block_size"),
        Flag(name="num_blocks", default="what fits into --kv-cache-memory-bytes"),
        Flag(name="enable_prefix_caching"),
    ),
)


def depth_panel(title: str) -> Panel:
    """`--depth`, in whichever group of the help page."""
    return Panel(title=title, config=EngineConfig, optional=True, flags=(Flag(name="depth"),))
