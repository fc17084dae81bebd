"""Prefixes in host memory, on the card: what a hit saves, what it does for throughput, what copies cost other rows.

A shape with made-up weights, prompts of random tokens; one engine, in which the level is turned off for comparison.
*first token*: of a prompt that is computed, found on the device, and loaded from host memory, in turns.
*in turn*: more prompts than the device holds, again and again in the same order, all sent at once; prompt tokens a
second with the level and without, in turns.
*decode step*: of rows with short contexts, alone, beside copies in each direction that never end, and beside memory
that is being pinned.

    python -m benchmarks.gpu.levels [--shape llama-3.1-8b] [--tokens 8192] [--pool 12] [--over 3]
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, no_garbage_collection, row, table
from paceline import LLM, SamplingParams
from paceline.core.plan import NO_SWAPS, Swaps
from paceline.lab.bench.shapes import SHAPES, write_shape
from paceline.runner.gpu.kernels import BLOCK_SIZE

bench = Benchmark(__doc__)
GIB = 1 << 30
DECODING = 64  # rows of the decode step
STEPS = 100  # of them, timed in one go
BESIDE, UNDER_WAY = 128, 3  # blocks of one plan's copies beside the decode step, and plans


class Card:
    """One engine with a host level, driven step by step."""

    def __init__(self, llm: LLM, seed: int = 1) -> None:
        self.engine = llm.loaded.engine
        self.state = self.engine.scheduler.state
        self.runner: Any = self.engine._runner
        self._reset = llm.reset_prefix_cache
        self._draw = random.Random(seed)
        self._vocabulary = llm.loaded.checkpoint.spec.vocab_size

    def prompts(self, number: int, length: int) -> list[list[int]]:
        return [[self._draw.randrange(self._vocabulary) for _ in range(length)] for _ in range(number)]

    def first_token_s(self, prompt: list[int]) -> float:
        """Until the first of two tokens: an only one would end the request in the same step."""
        started_s = time.perf_counter()
        self.engine.add(prompt, sampling(2))
        first_s = 0.0
        while self.engine.has_requests or not self.engine.is_idle:
            events = self._step()
            if not first_s and events.tokens:
                first_s = time.perf_counter() - started_s
        return first_s

    def all_s(self, prompts: list[list[int]], tokens: int) -> float:
        """All prompts, sent at once."""
        started_s = time.perf_counter()
        for prompt in prompts:
            self.engine.add(prompt, sampling(tokens))
        while self.engine.has_requests or not self.engine.is_idle:
            self._step()
        return time.perf_counter() - started_s

    def decode_ms(self, beside: Callable[[], None] = lambda: None) -> list[float]:
        """Milliseconds of steps in which all rows decode; `beside` is called before each of them."""
        for prompt in self.prompts(DECODING, 16):
            self.engine.add(prompt, sampling(STEPS + 4))
        ends_s = []
        with no_garbage_collection():
            while self.engine.has_requests or not self.engine.is_idle:
                beside()
                events = self._step()
                if sum(len(batch.tokens) for batch in events.tokens) == DECODING:
                    ends_s.append(time.perf_counter())
        assert len(ends_s) > STEPS // 2, f"{len(ends_s)} steps had all rows"
        taken_ms: list[float] = (1e3 * np.diff(ends_s[2:])).tolist()
        return taken_ms

    def forget(self) -> None:
        self._reset()

    @contextmanager
    def without_level(self) -> Iterator[None]:
        """Nothing goes down, nothing is looked for there."""
        tiers, loading = self.state.tiers, self.engine.scheduler.composer.admission.loading
        tiers.is_on = loading.is_on = False
        try:
            yield
        finally:
            tiers.is_on = loading.is_on = True

    def wait_until_pinned(self) -> float:
        """Gigabytes a second at which the rest was pinned."""
        places = self.runner.host_places
        before, started_s = places.num_pinned, time.perf_counter()
        size = sum(group[0].nbytes for group in places.tensors)
        while places.num_pinned < len(places.tensors[0]):
            time.sleep(0.02)
            assert time.perf_counter() - started_s < 120, f"{places.num_pinned} places were pinned"
        taken_s = time.perf_counter() - started_s
        return float((places.num_pinned - before) * size) / taken_s / 1e9

    def _step(self) -> Any:
        events = self.engine.step_overlapped()
        assert self.engine.last_error is None, repr(self.engine.last_error)
        return events


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@contextmanager
def loaded(given: Given) -> Iterator[tuple[Card, float]]:
    """The engine, with the seconds its start took."""
    blocks = given.pool * (given.tokens // BLOCK_SIZE + 1) + 1
    shape = SHAPES[given.shape]
    entries = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    host = (given.over + 1) * blocks * entries * 4 * BLOCK_SIZE / GIB
    with tempfile.TemporaryDirectory() as folder:
        options = {"num_blocks": blocks, "kv_offloading_size": host, "max_num_seqs": DECODING}
        options |= {"max_model_len": given.tokens + 256, "speculative_config": "off", "check_every": 0}
        started_s = time.perf_counter()
        llm = LLM(**write_shape(given.shape, Path(folder)) | options)
        yield Card(llm), time.perf_counter() - started_s
        llm.shutdown()


def first_tokens(card: Card, given: Given, found: Found) -> None:
    (first,) = card.prompts(1, given.tokens)
    times: dict[str, list[float]] = {"computed": [], "on the device": [], "from the host": []}
    with card.without_level():
        card.first_token_s(first)  # what is loaded when it is used first
    levels = card.state.counters.found_tokens
    for _ in range(given.rounds):
        # New ones: the device keeps those longest that were asked for before.
        near, far, *flood = card.prompts(given.pool + 4, given.tokens)
        card.forget()
        times["computed"].append(card.first_token_s(far))
        card.first_token_s(near)
        times["on the device"].append(card.first_token_s(near))
        card.all_s(flood, 1)
        before = levels[1]
        times["from the host"].append(card.first_token_s(far))
        loaded = levels[1] - before
        assert loaded > 0.9 * given.tokens, f"{loaded} of {given.tokens} tokens came from the host"
    medians = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    for name, taken_ms in medians.items():
        row(f"first token, {name}", "ms", taken_ms, "")
    found["first token, ms"] = medians
    found["times sooner from the host"] = medians["computed"] / medians["from the host"]
    row("first token, computed / from the host", "times", found["times sooner from the host"], "5")


def in_turn(card: Card, given: Given, found: Found) -> None:
    prompts = card.prompts(given.pool * given.over, given.tokens)
    rates: dict[str, list[float]] = {"with the level": [], "without": []}
    total, out_of = 0, 0
    for _ in range(max(2, given.rounds - 2)):
        card.forget()
        with card.without_level():
            rates["without"].append(len(prompts) * given.tokens / card.all_s(prompts, 1))
        card.forget()
        for _ in range(2):  # fills the level
            card.all_s(prompts, 1)
        before = card.state.counters.cached_tokens
        rates["with the level"].append(len(prompts) * given.tokens / card.all_s(prompts, 1))
        total += card.state.counters.cached_tokens - before
        out_of += len(prompts) * given.tokens
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, rate in medians.items():
        row(f"{len(prompts)} prompts in turn, {name}", "tokens/s", rate, "")
    found["in turn, tokens/s"] = medians
    found["found"] = total / out_of
    found["times the rate"] = medians["with the level"] / medians["without"]
    row("in turn, share of prompt tokens found", "", found["found"], "")
    row("in turn, with / without", "times", found["times the rate"], "4")


def decode_steps(card: Card, given: Given, found: Found, pinning: list[float]) -> None:
    swap_pool = card.runner._swap_pool

    def keep_busy(copies: Swaps, *, out: bool, back: bool) -> Callable[[], None]:
        """One plan's copies behind the other's."""

        def copy() -> None:
            asked = [
                copies if wanted and lane.num_open < UNDER_WAY else NO_SWAPS
                for wanted, lane in ((out, swap_pool._out), (back, swap_pool._back))
            ]
            asked_blocks.append(sum(len(each.block) for each in asked))
            swap_pool.swap(*asked)

        return copy

    asked_blocks: list[int] = []  # in each step
    card.forget()
    pool = card.state.kv.groups[0].pool
    blocks = pool.allocate(min(BESIDE, pool.usable // 2))  # that no row uses
    zeros = np.zeros(len(blocks), np.int32)
    places = np.arange(len(blocks), dtype=np.int32)
    copies = Swaps(ticket=zeros, group=zeros, block=blocks.astype(np.int32), place=places)
    alone: list[float] = []
    beside: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with card.without_level():
        for _ in range(given.rounds):
            alone += card.decode_ms()
            for name, ways in {"out": (True, False), "in": (False, True), "both ways": (True, True)}.items():
                busy = keep_busy(copies, out=ways[0], back=ways[1])
                asked_blocks.clear()
                started_s = time.perf_counter()
                beside.setdefault(name, []).extend(card.decode_ms(busy))
                card.runner._queue.drain()
                copied = sum(asked_blocks) * sum(group[0].nbytes for group in card.runner.host_places.tensors)
                rates.setdefault(name, []).append(copied / (time.perf_counter() - started_s) / 1e9)
                swap_pool.forget()
    pool.release(blocks)
    median = statistics.median(alone)
    row(f"decode step of {DECODING} rows, alone", "ms", median, "")
    found["decode step alone, ms"] = median
    for name, taken in beside.items():
        found[f"decode step beside copies {name}"] = statistics.median(taken) / median
        row(f"decode step beside copies {name}", "times", found[f"decode step beside copies {name}"], "1.12")
        found[f"copies {name} beside decode steps, GB/s"] = statistics.median(rates[name])
        row(f"copies {name} beside decode steps", "GB/s", statistics.median(rates[name]), "")
    if pinning:
        found["decode step beside pinning, p50"] = statistics.median(pinning) / median
        found["decode step beside pinning, p99"] = float(np.percentile(pinning, 99)) / median
        row("decode step while memory is pinned, p50", "times", found["decode step beside pinning, p50"], "")
        row("decode step while memory is pinned, p99", "times", found["decode step beside pinning, p99"], "")


@bench.part(
    flag("--shape", "llama-3.1-8b", choices=tuple(SHAPES)),
    flag("--tokens", 8192, "of each prompt"),
    flag("--pool", 12, "prompts that the device holds"),
    flag("--over", 3, "times as many prompts are sent in turn"),
    flag("--rounds", 4, "runs of each kind"),
)
def levels(given: Given) -> Found:
    """A host hit against computing, prompts in turn with and without the level, a decode step beside copies."""
    found: Found = {"shape": given.shape, "tokens": given.tokens}
    table("what", "unit", "found", "asked")
    with loaded(given) as (card, start_s):
        places = card.runner.host_places
        row("start", "s", start_s, "")
        row("host memory, blocks", "", len(places.tensors[0]), "")
        pinning = card.decode_ms() if places.num_pinned < len(places.tensors[0]) else []
        if places.num_pinned == len(places.tensors[0]):
            pinning = []  # it was done before
        else:
            found["pinned, GB/s"] = card.wait_until_pinned()
            row("pinned", "GB/s", found["pinned, GB/s"], "")
        costs = card.state.config.preemption_costs
        assert costs is not None
        found["a block, ms"] = 1e3 * costs.block_s
        row("a block, copied", "ms", 1e3 * costs.block_s, "")
        row("a block, computed", "ms", 1e3 * costs.token_s * BLOCK_SIZE, "")
        first_tokens(card, given, found)
        in_turn(card, given, found)
        decode_steps(card, given, found, pinning)
    return found


if __name__ == "__main__":
    bench.main()
