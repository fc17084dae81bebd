"""Sizes that follow from the model and the machine: KV blocks, longest sequence, and the token budget of a step.

The budget keeps a step of a CPU short, so that streams flow, aborts act and health answers: it comes from a
step-time model measured when the engine starts, and follows the steps from there (`scheduler/step_sizes.py`).
Whatever the user gave stays as given.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.encoder import EncoderWork
from paceline.config.engine import EngineConfig, LearnedSteps, ModelConfig, StepCosts
from paceline.errors import ConfigError
from paceline.models.spec import FurtherLayer, ModelSpec, model_work

GIB = 1 << 30
LONGEST_BLOCK = 1024  # that a config allows
MAX_STEP_S = 0.25
MARGIN = 0.45  # attention is not in the measurement, and the other process of a server uses the same cores
# MARGIN of a step without decoding rows: no stream waits for it, and larger steps compute a prompt sooner.
ALONE = 1.0
DEFAULT_ROWS = 128
# A batch of 32 decodes in one step even where that takes longer than a step should: in two it would take longer still.
SMALLEST_BUDGET, LARGEST_BUDGET = 32, 2048
SMALLEST_STEP = 16  # tokens of the shortest step that a pace may choose, or that is learnt
LEARNED_BUDGET = 512  # that sizes may grow to while serving, where the start did not find larger ones
DECODING_ROWS, CONTEXTS = 4, (16, 112)  # measured for a pace: rows that decode together, and what they read
FINENESS = 4  # tokens between two sizes that a pace may choose


def block_bytes(
    spec: ModelSpec, block_size: int, further: Sequence[FurtherLayer] = (), kv_dtype: str = "float32"
) -> int:
    """Bytes of one block: its tokens' keys and values in every layer, and in those of a model that guesses."""
    if spec.encoder is not None:
        return 0
    shapes = [(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
    shapes += [(layer.num_kv_heads, layer.head_dim) for layer in further]
    # Bytes of a head of a token; int8 has a scale beside them.
    size = sum(heads * (dim + 4 if kv_dtype == "int8" else 4 * dim) for heads, dim in shapes)
    return 2 * block_size * size


def choose_sizes(
    model: ModelConfig,
    spec: ModelSpec,
    given: Mapping[str, Any],
    measure: Callable[[], tuple[float, float]],
    further: Sequence[FurtherLayer] = (),
) -> dict[str, Any]:
    """`given` completed: every size the engine's config needs. `measure`: what a step takes at least, and a token.
    `further`: see `block_bytes`."""
    if spec.encoder is not None:
        return encoder_sizes(spec, given, lambda: step_budget(*measure(), margin=ALONE))
    sizes = dict(given)
    block_size = sizes.setdefault("block_size", 16)
    per_block = block_bytes(spec, block_size, further, model.cpu_kv_dtype)
    if "num_blocks" not in sizes:
        memory = model.kv_cache_memory_bytes or int(default_memory() * model.kv_memory_part)
        sizes["num_blocks"] = max(2, memory // per_block)
    capacity = (sizes["num_blocks"] - 1) * block_size
    if "max_model_len" not in sizes:
        sizes["max_model_len"] = max(2, min(spec.max_positions, capacity))
    longest = sizes["max_model_len"]
    if longest > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {longest} is longer than the model's {spec.max_positions} positions"
        )
    if longest > capacity:
        raise ConfigError(
            f"the KV cache holds {capacity} tokens, less than --max-model-len {longest}: it needs "
            f"--kv-cache-memory-bytes {(longest // block_size + 2) * per_block}, or a shorter length"
        )
    sizes.setdefault("max_num_seqs", DEFAULT_ROWS)
    if "max_num_batched_tokens" not in sizes:
        measured = measure()
        sizes["max_num_batched_tokens"] = step_budget(*measured)
        sizes.setdefault("max_num_prompt_tokens", step_budget(*measured, margin=ALONE))
        sizes["learned_steps"] = _learned_steps(measured, spec, sizes, "max_num_prompt_tokens" in given)
    sizes.setdefault("depth", 0)  # host and device are the same cores: planning ahead would gain nothing
    if any(rope.kind == "dynamic" for rope in spec.ropes) and longest > min(
        rope.trained_positions for rope in spec.ropes if rope.kind == "dynamic"
    ):
        # Keys of one text then differ with the length of the prompt they stand in: no block can be shared.
        sizes["enable_prefix_caching"] = False
    return sizes


def encoder_sizes(
    spec: ModelSpec,
    given: Mapping[str, Any],
    budget: Callable[[], int],
    *,
    rows: int = DEFAULT_ROWS,
    depth: int = 0,
) -> dict[str, Any]:
    """An encoder keeps nothing: blocks are only counted, so there are as many as its rows can want. A step has room for
    the longest text. `budget`: tokens of a step; `rows` and `depth` as on its device."""
    sizes = dict(given)
    longest = sizes.setdefault("max_model_len", spec.max_positions)
    if longest > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {longest} is longer than the model's {spec.max_positions} positions"
        )
    rows = sizes.setdefault("max_num_seqs", rows)
    size = sizes["block_size"] = min(longest, LONGEST_BLOCK)
    sizes["num_blocks"] = 1 + rows * -(-longest // size)
    if "max_num_batched_tokens" not in sizes:
        sizes["max_num_batched_tokens"] = max(budget(), longest)
    sizes.setdefault("depth", depth)
    return {**sizes, "enable_prefix_caching": False, "num_host_blocks": 0}


def step_budget(fixed_s: float, per_token_s: float, margin: float = MARGIN) -> int:
    """Tokens of a step that takes `fixed_s` and `per_token_s` for each, and should stay under MAX_STEP_S."""
    tokens = int((MAX_STEP_S * margin - fixed_s) / max(per_token_s, 1e-9))
    return min(max(tokens // 8 * 8, SMALLEST_BUDGET), LARGEST_BUDGET)


def _learned_steps(
    measured: tuple[float, float], spec: ModelSpec, sizes: Mapping[str, Any], is_bound: bool
) -> LearnedSteps:
    """How sizes follow measured steps; `is_bound`: the size of steps without decoding rows was given."""
    alone = sizes["max_num_prompt_tokens"]
    work = model_work(spec, weight_bytes=0, kv_token_bytes=0.0)
    most = min(max(LEARNED_BUDGET, 2 * alone), LARGEST_BUDGET)
    return LearnedSteps(
        fixed_s=measured[0],
        token_s=measured[1],
        beside_s=MAX_STEP_S * MARGIN,
        alone_s=MAX_STEP_S * ALONE,
        least=SMALLEST_STEP,
        most=min(most, alone) if is_bound and alone else most,
        most_alone=max(alone, sizes["max_num_batched_tokens"]) if is_bound else most,
        product_s=measured[1] * PAIR_COST * work.product_flops / work.token_flops,
    )


PAGE = 64  # vectors of pictures in a page
CACHED_VECTORS, CACHED_BYTES = 8192, GIB  # vectors at least; bytes, where a prompt could have more
PAIR_COST = 2.0  # a pair of attention takes as long as so many of its operations would in a product


def encoder_work(
    vision: ModelSpec,
    position_s: tuple[float, float],
    token_s: float,
    cached: int | None,
    config: EngineConfig,
) -> EncoderWork:
    """What encoding takes, beside a decoder that takes `token_s` for a token. `position_s`: see
    `pictures.position_seconds`. `cached`: vectors in memory."""
    assert vision.encoder is not None and vision.encoder.patches is not None
    units, local = vision.encoder.patches.side**2, vision.encoder.local
    inner = vision.intermediate_size * (1.5 if vision.encoder.is_gated else 1.0)
    share = PAIR_COST / (vision.hidden_size + inner)
    seen = 0 if local and local[0] else units  # in the layer that was timed; windows are counted as nothing
    alone_s = max(position_s[1], 1e-9) / (1 + share * seen)  # of a position that attends to nothing
    if local:  # in most layers a patch sees few others
        share *= 1 - sum(local) / len(local)
    most = CACHED_BYTES // (4 * vision.encoder.patches.values)
    vectors = cached or max(CACHED_VECTORS, min(config.scheduler.max_model_len, most))
    return EncoderWork(
        layers=vision.num_layers,
        num_pages=-(-vectors // PAGE),
        page_vectors=PAGE,
        max_units=units,
        token_positions=max(token_s / alone_s, 1e-3),
        product_share=share,
        keys_share=position_s[0] / alone_s,
        least="line" if config.scheduler.encode == "whole" else "position",
    )


def line_costs(
    fixed_s: float, per_token_s: float, most: int, decoding: Callable[[int, int], float]
) -> StepCosts:
    """What steps of up to `most` tokens take, for a pace; `decoding` times rows by their number and context."""
    sizes = (*range(SMALLEST_STEP, most, FINENESS), most)
    few, many = (decoding(DECODING_ROWS, context) for context in CONTEXTS)
    context_s = max(0.0, (many - few) / (DECODING_ROWS * (CONTEXTS[1] - CONTEXTS[0])))
    row_s = (few - fixed_s) / DECODING_ROWS - per_token_s - context_s * CONTEXTS[0]
    seconds = tuple(fixed_s + per_token_s * size for size in sizes)
    return StepCosts(sizes=sizes, seconds=seconds, context_s=context_s, row_s=max(0.0, row_s))


def default_memory() -> int:
    """Two GiB, or a quarter of the memory that is free if that is less; PACELINE_CPU_KVCACHE_SPACE says otherwise."""
    given = os.environ.get("PACELINE_CPU_KVCACHE_SPACE")
    if given:
        try:
            return int(float(given) * GIB)
        except ValueError as error:
            raise ConfigError(f"PACELINE_CPU_KVCACHE_SPACE is {given!r}: give a number of GiB") from error
    return min(2 * GIB, free_memory() // 4)


def free_memory() -> int:
    """Bytes that could be used without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2


# What preemption costs on this machine, measured when the engine starts: a token, a block, a step.
#
# Copies are timed between blocks and host places that are not in use yet. Where there are no host places nothing can
# be swapped, and nothing is copied. Owns the measuring; what is made of the numbers is the scheduler's business.


MOST_BLOCKS = 256  # copied at a time
TIMES = 3


def block_seconds(config: EngineConfig, copy: Callable[[int], None]) -> float:
    """Seconds to copy one block to the host or back; infinity without a swap pool. `copy` copies that many blocks
    out and back and returns when that is done."""
    count = min(config.kv.num_host_blocks, config.kv.num_blocks - 1, MOST_BLOCKS)
    if count < 1:
        return math.inf
    copy(count)  # the first touches memory that was never used
    taken = []
    for _ in range(TIMES):
        started_s = time.perf_counter()
        copy(count)
        taken.append(time.perf_counter() - started_s)
    return min(taken) / (2 * count)
