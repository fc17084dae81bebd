"""Several models on one card, with made-up weights, in one piece of memory: three of 8B and one of 0.6B.

- *peaks*: each of the three has its peak while the others have little to do. Time to the first token with KV memory
  that moves in slabs to where it is needed, against a third of it for each.
- *reclaim*: slabs of 1 GiB, with cached prefixes in them, go from one model to another. No driver is called.
- *wake*: from weights in host memory to the first token of a request.
- *turns*: two models step in turns, as the conductor of a server has them, against one after the other. The part of the
  device's time is what the conductor charged the first; the last steps, when one has ended, are left out.

    python -m benchmarks.gpu.models [--kv-gib 24] [--peak 160] [--rows 64] [--tokens 96] [--rounds 5]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import (
    Benchmark,
    Found,
    Given,
    flag,
    in_turns,
    no_garbage_collection,
    row,
    spread,
    table,
)
from paceline import SamplingParams
from paceline.config.model_set import ModelShare
from paceline.core.events import StepEvents
from paceline.core.standing import WEIGHTS_KEPT
from paceline.engine.conductor import Conductor, Seat
from paceline.engine.engine import Engine
from paceline.engine.slab_trade import SlabTrade, broken_slabs
from paceline.factory import LoadedModel, load_model
from paceline.kv.slabs import SlabMarket
from paceline.lab.bench.shapes import write_shape
from paceline.llm.arguments import split_arguments
from paceline.process.engine_main import share_memory, slab_market

bench = Benchmark(__doc__)
LARGE, SMALL = "llama-3.1-8b", "qwen3-0.6b"
GIB = 1 << 30
WEIGHTS_GIB = {LARGE: 15.2, SMALL: 1.5}  # about, with what is left of the last slab
PERIOD_S, BURST_S, TRICKLE_S = 8.0, 1.0, 0.5
PEAK_TOKENS, LIGHT_TOKENS = (512, 512), (64, 32)  # of the prompt and of the answer


def loaded_models(shapes: Sequence[str], kv_gib: float, folder: Path) -> tuple[list[LoadedModel], SlabMarket]:
    entries = []
    for number, shape in enumerate(shapes):
        place = folder / str(number)
        place.mkdir()
        options = write_shape(shape, place) | {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": 2048,
        }
        model, given = split_arguments(None, options)
        entries.append((model, given, ModelShare(name=f"{shape} {number}")))
    memory_bytes = int((kv_gib + sum(WEIGHTS_GIB[shape] for shape in shapes)) * GIB)
    memory = share_memory(entries, memory_bytes)
    models = []
    for (model, given, share), shared in zip(entries, memory, strict=True):
        started_s = time.perf_counter()
        models.append(load_model(model, given, shared=shared))
        row(f"loading {share.name}", f"{time.perf_counter() - started_s:.1f} s")
    market = slab_market(models, [share for _, _, share in entries], memory)
    assert market is not None, "several models on a GPU share their memory"
    return models, market


def step(engine: Engine) -> StepEvents:
    return engine.step_overlapped() if engine.depth else engine.step()


def prompt(draw: random.Random, length: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def empty(trade: SlabTrade) -> None:
    """Take every slab from every model, with what is cached there."""
    for owner, engine in enumerate(trade.engines):
        for slab in trade.market.slabs(owner):
            engine.move_slab(slab, gained=False)
            trade.market.give(slab)


# -- peaks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    due_s: float
    model: int
    num_prompt: int
    num_output: int


def arrivals(num_models: int, peak: int) -> list[Arrival]:
    found = []
    for model in range(num_models):
        begin_s = model * PERIOD_S
        found += [Arrival(begin_s + BURST_S * index / peak, model, *PEAK_TOKENS) for index in range(peak)]
        for index in range(int(num_models * PERIOD_S / TRICKLE_S)):
            found.append(Arrival(index * TRICKLE_S, model, *LIGHT_TOKENS))
    return sorted(found, key=lambda each: each.due_s)


def first_tokens(trade: SlabTrade, models: Sequence[LoadedModel], coming: list[Arrival]) -> list[float]:
    """Seconds to the first token of every request; models step in turns, as in a server."""
    engines = [loaded.engine for loaded in models]
    conductor = Conductor([Seat(config=ModelShare(name=str(place))) for place in range(len(engines))])
    draw, vocabulary = random.Random(1), models[0].checkpoint.spec.vocab_size
    waiting = [(each, prompt(draw, each.num_prompt, vocabulary), greedy(each.num_output)) for each in coming]
    waiting.reverse()
    due: dict[tuple[int, int], float] = {}
    found: list[float] = []
    started_s = time.perf_counter()
    while waiting or any(engine.has_requests for engine in engines):
        now_s = time.perf_counter() - started_s
        while waiting and waiting[-1][0].due_s <= now_s:
            each, tokens, sampling = waiting.pop()
            due[each.model, engines[each.model].add(tokens, sampling)[0]] = each.due_s
        trade.settle()
        chosen = conductor.next([engine.has_requests for engine in engines])
        if chosen is None:
            time.sleep(max(0.0, min(0.002, waiting[-1][0].due_s - now_s)))
            continue
        began_s = time.perf_counter()
        events = step(engines[chosen])
        conductor.charge(chosen, time.perf_counter() - began_s)
        now_s = time.perf_counter() - started_s
        for batch in events.tokens:
            for number in batch.requests.tolist():
                came_s = due.pop((chosen, number), None)
                if came_s is not None:
                    found.append(now_s - came_s)
    for engine in engines:
        engine.drain()
        assert engine.last_error is None, repr(engine.last_error)
    assert len(found) == len(coming), "every request has a first token"
    assert not list(broken_slabs(trade)), list(broken_slabs(trade))
    return found


def peaks(models: Sequence[LoadedModel], market: SlabMarket, peak: int) -> Found:
    """The first models only; the others keep their floors."""
    count = sum(loaded.checkpoint.spec.num_layers == 32 for loaded in models)
    engines = [loaded.engine for loaded in models]
    for_kv = market.num_slabs - 1 - sum(len(owner.home) + owner.floor for owner in market.owners[count:])
    third = (for_kv - sum(len(owner.home) for owner in market.owners[:count])) // count
    fixed = [replace(owner, floor=third, ceiling=third) for owner in market.owners[:count]]
    ways = {
        "a third each": SlabMarket(market.num_slabs, (*fixed, *market.owners[count:]), market.slab_bytes),
        "slabs": SlabMarket(market.num_slabs, market.owners, market.slab_bytes),
    }
    found: Found = {"third_slabs": third, "slab_bytes": market.slab_bytes}
    for name, each in ways.items():
        trade = SlabTrade(each, engines)
        trade.begin()
        took = first_tokens(trade, models, arrivals(count, peak))
        p50, p99 = (float(np.percentile(took, at)) for at in (50, 99))
        preempted = sum(engine.scheduler.state.counters.preempted for engine in engines)
        row(
            f"first token, {name}", f"p50 {p50:.3f} s, p99 {p99:.3f} s, {trade.num_reclaimed} slabs reclaimed"
        )
        found[name] = {
            "p50_s": p50,
            "p99_s": p99,
            "reclaimed": trade.num_reclaimed,
            "preempted_so_far": preempted,
        }
        if name != "slabs":
            empty(trade)
    found["times_lower"] = round(found["a third each"]["p99_s"] / found["slabs"]["p99_s"], 3)
    row("p99 with slabs", f"{found['times_lower']:.2f} times lower")
    found["reclaim"] = reclaim(trade)
    empty(trade)
    return found


def reclaim(trade: SlabTrade) -> Found:
    """Slabs of 1 GiB, in which prefixes are cached, from model to model."""
    count = -(-GIB // trade.market.slab_bytes)
    took_s, cached = [], []
    for owner in (0, 1, 2, 0, 1, 2):
        before = sum(_num_cached(engine) for engine in trade.engines)
        started_s = time.perf_counter()
        moved = trade.reclaim(owner, count)
        took_s.append(time.perf_counter() - started_s)
        cached.append(before - sum(_num_cached(engine) for engine in trade.engines))
        assert moved == count, f"{moved} of {count} slabs could be had"
    row(
        f"1 GiB ({count} slabs) reclaimed",
        f"{1e3 * max(took_s):.2f} ms at most, {max(cached)} cached blocks gone",
    )
    return {"slabs": count, "ms": spread([1e3 * each for each in took_s], 3), "cached_blocks": cached}


def _num_cached(engine: Engine) -> int:
    return sum(len(group.cache) for group in engine.scheduler.state.kv.groups)


# -- wake ----------------------------------------------------------------------------------------------------


def wake(models: Sequence[LoadedModel], trade: SlabTrade, number: int, rounds: int = 4) -> Found:
    """Sleep with weights in host memory, then wake; the first sleep pins that memory and copies them there."""
    loaded, engine = models[number], models[number].engine
    assert loaded.sleeper is not None
    draw, vocabulary = random.Random(2), loaded.checkpoint.spec.vocab_size
    slept_s, woke_s, first_s = [], [], []
    for _ in range(rounds):
        began_s = time.perf_counter()
        engine.sleep()
        loaded.sleeper.let_go(WEIGHTS_KEPT)
        trade.slept(number)
        slept_s.append(time.perf_counter() - began_s)
        asked = prompt(draw, 16, vocabulary)
        began_s = time.perf_counter()
        assert trade.make_room(number), "no copy is under way"
        engine.wake(loaded.sleeper.open())
        woke_s.append(time.perf_counter() - began_s)
        engine.add(asked, greedy(1))
        while not step(engine).tokens:
            pass
        first_s.append(time.perf_counter() - began_s)
        engine.drain()
    name = trade.market.owners[number].name
    row(f"{name}: first sleep, next ones", f"{slept_s[0]:.2f} s, {1e3 * min(slept_s[1:]):.1f} ms")
    row(f"{name}: wake to first token", f"{min(first_s):.3f} s, of which {min(woke_s):.3f} s to be awake")
    return {"sleep_s": slept_s, "wake_s": spread(woke_s, 4), "first_token_s": spread(first_s, 4)}


# -- turns ---------------------------------------------------------------------------------------------------


def fill(loaded: LoadedModel, rows: int, tokens: int, seed: int) -> Engine:
    """Requests that decode together."""
    draw, vocabulary = random.Random(seed), loaded.checkpoint.spec.vocab_size
    for _ in range(rows):
        loaded.engine.add(prompt(draw, 16, vocabulary), greedy(tokens))
    return loaded.engine


def one_after_the_other(models: Sequence[LoadedModel], rows: int, tokens: int) -> float:
    engines = [fill(loaded, rows, tokens, place) for place, loaded in enumerate(models)]
    started_s = time.perf_counter()
    for engine in engines:
        while engine.has_requests:
            step(engine)
        engine.drain()
    return time.perf_counter() - started_s


def taken_in_turns(
    models: Sequence[LoadedModel], trade: SlabTrade, rows: int, tokens: int
) -> tuple[float, float]:
    """Seconds, and the first model's part of the device's time while both had work."""
    engines = [fill(loaded, rows, tokens, place) for place, loaded in enumerate(models)]
    conductor = Conductor([Seat(config=ModelShare(name=str(place))) for place in range(len(engines))])
    started_s, part = time.perf_counter(), 0.0
    while True:
        ready = [engine.has_requests for engine in engines]
        trade.settle()
        chosen = conductor.next(ready)
        if chosen is None:
            break
        began_s = time.perf_counter()
        step(engines[chosen])
        conductor.charge(chosen, time.perf_counter() - began_s)
        if all(ready):
            part = conductor.seats[0].device_s / sum(seat.device_s for seat in conductor.seats)
    for engine in engines:
        engine.drain()
    return time.perf_counter() - started_s, part


def turns(models: Sequence[LoadedModel], trade: SlabTrade, given: Given) -> Found:
    parts: list[float] = []

    def alternating() -> float:
        seconds, part = taken_in_turns(models, trade, given.rows, given.tokens)
        parts.append(part)
        return seconds

    one_after_the_other(models, given.rows, 8)  # warm
    with no_garbage_collection():
        works = {
            "after": lambda: one_after_the_other(models, given.rows, given.tokens),
            "turns": alternating,
        }
        found = in_turns(works, given.rounds)
    ratio = min(found["after"]) / min(found["turns"])
    row("one after the other", f"{min(found['after']):.3f} s")
    row("in turns", f"{min(found['turns']):.3f} s, {ratio:.3f} of the speed")
    row("part of the first", f"{parts[-1]:.3f}")
    after, alternated = (spread(found[name], 4) for name in ("after", "turns"))
    return {"after_s": after, "turns_s": alternated, "ratio": round(ratio, 4), "parts": parts}


@bench.part(
    flag("--kv-gib", 24.0, "KV memory of all models together"),
    flag("--peak", 160, "requests of a peak"),
    flag("--rows", 64, "of each model, in turns"),
    flag("--tokens", 96, "of each row, in turns"),
    flag("--rounds", 5, "of each way, in turns"),
)
def models(given: Given) -> Found:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table("what", "found")
        loaded, market = loaded_models((LARGE, LARGE, LARGE, SMALL), given.kv_gib, folder)
        found: Found = {"peaks": peaks(loaded, market, given.peak)}
        trade = SlabTrade(
            SlabMarket(market.num_slabs, market.owners, market.slab_bytes), [each.engine for each in loaded]
        )
        trade.begin()
        found["turns"] = turns(loaded[:2], trade, given)
        found["wake"] = {
            name: wake(loaded, trade, number) for name, number in (("8B", 0), ("0.6B", len(loaded) - 1))
        }
        assert not list(broken_slabs(trade)), list(broken_slabs(trade))
    return found


if __name__ == "__main__":
    bench.main()
