"""What continuous batching is judged by: rows in use, padding, preemptions, work done, cost.

Families for /metrics from the engine's own totals, read when they are asked for. Shares of a device's peak are there
only where that peak is known; work is estimated from the model's shape, under vLLM's names for it. Labels come from
closed sets. Belongs to the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from paceline.core.counters import LEVELS, STEP_TOKEN_BOUNDS, STRUCTURE_OUTCOMES
from paceline.core.events import Rule
from paceline.costs.cost_model import WorkDone, work_done
from paceline.costs.presets import Peak, published_peak
from paceline.process.client import EngineClient, EngineInfo, EngineStats, EngineUnavailable
from paceline.server.metrics.families import Families, Histogram
from paceline.server.metrics.request_metrics import MET, MISSED, RequestFamilies

# The key figures of continuous batching over the last minute, for readers without a database of metrics.
#
# Differences of the same totals that /metrics shows as counters, noted about once a second; nothing is counted
# here. What cannot be said, because nothing happened or the device is not known, is left out. Belongs to the event
# loop.


WINDOW_S = 60.0
LEAST_S = 0.5  # between two notes


class Totals(NamedTuple):
    """What is known at one moment, since the start of the engine or of the server."""

    time_s: float
    steps: int = 0
    busy_s: float = 0.0
    row_places: int = 0  # rows there are, summed over steps
    occupied_rows: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    preemptions: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    vectors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    met: int = 0
    missed: int = 0


class BatchLimits(NamedTuple):
    """What the figures are shares of; None where it is not known."""

    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    cost_per_hour: float | None = None


class RecentTotals:
    """Keeps a minute of totals."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self.totals = totals
        self._notes: deque[Totals] = deque()

    def note(self, seen: Totals | None = None) -> None:
        """To be called about once a second; `seen` are totals of a moment before now."""
        now = self.totals() if seen is None else seen
        if self._notes and now.steps < self._notes[-1].steps:
            self._notes.clear()  # another engine, which counts from nothing
        if self._notes and now.time_s - self._notes[-1].time_s < LEAST_S:
            return
        self._notes.append(now)
        while len(self._notes) > 2 and now.time_s - self._notes[1].time_s >= WINDOW_S:
            self._notes.popleft()

    def change(self) -> Totals | None:
        """What the last minute added; its `time_s` is how long it was. None before there is a second of it."""
        now = self.totals()
        if not self._notes or now.steps < self._notes[-1].steps:
            return None
        then = self._notes[0]
        if now.time_s - then.time_s < LEAST_S:
            return None
        return Totals._make(new - old for new, old in zip(now, then, strict=True))


def recent_figures(change: Totals | None, limits: BatchLimits) -> Iterator[tuple[str, str, float]]:
    """Name, meaning and value of what can be said of the last minute."""
    if change is None:
        return
    elapsed_s = change.time_s
    yield "busy_share", "Share of the last minute that the engine spent in steps.", change.busy_s / elapsed_s
    text = "Preemptions per second in the last minute."
    yield "preemptions_per_second", text, change.preemptions / elapsed_s
    text = "Requests of the last minute that ended with a vector, by the second."
    yield "vectors_per_second", text, change.vectors / elapsed_s
    if change.row_places:
        text = "Share of rows in use in the steps of the last minute."
        yield "slot_occupancy_mean", text, change.occupied_rows / change.row_places
    if change.computed_tokens:
        text = "Share of the tokens computed in the last minute that was padding."
        yield "padding_share", text, change.padding_tokens / change.computed_tokens
    if change.met + change.missed:
        text = "Share of the requests of the last minute that had their times, of those that have any."
        yield "goodput_share", text, change.met / (change.met + change.missed)
        text = "Requests that had their times, by the second, in the last minute."
        yield "goodput_requests_per_second", text, change.met / elapsed_s
    if limits.peak_flops:
        text = "Share of the device's peak arithmetic that the last minute used."
        yield "compute_share", text, change.flops / elapsed_s / limits.peak_flops
    if limits.peak_bandwidth:
        text = "Share of the device's peak memory bandwidth that the last minute used."
        moved = change.read_bytes + change.written_bytes
        yield "memory_share", text, moved / elapsed_s / limits.peak_bandwidth


def recent_costs(change: Totals | None, limits: BatchLimits) -> dict[str, float]:
    """What a million tokens cost at the pace of the last minute, by which tokens are counted."""
    if change is None or limits.cost_per_hour is None:
        return {}
    cost = limits.cost_per_hour * change.time_s / 3600.0
    counts = {"output": change.output_tokens, "all": change.output_tokens + change.prompt_tokens}
    return {name: cost / count * 1e6 for name, count in counts.items() if count}


Fact = tuple[str, str, float]  # name, meaning, value
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's words, by level of sleep
PREEMPTIONS = tuple(rule.value for rule in Rule if ":" in rule.value)  # reason:kind


class BatchingMetrics:
    """Reads one engine."""

    def __init__(
        self, client: EngineClient, requests: RequestFamilies, *, cost_per_hour: float | None = None
    ) -> None:
        self._client = client
        self._requests = requests
        self._cost_per_hour = cost_per_hour
        self.recent = RecentTotals(self._totals)

    def families(self, make: Families) -> Iterator[Metric]:
        info, stats = self._info, self._client.stats
        for fact in self._gauges(info, stats):
            yield make.gauge(*fact)
        for fact in self._counters(info, stats):
            yield make.counter(*fact)
        if stats.cpu.threads:
            yield make.gauge("cpu_threads", "Threads that compute steps now.", stats.cpu.threads)
        if stats.cpu.phase_s:
            text = "Time of the threads in CPU steps; the shares of phases are those of one step in 7."
            yield make.counter_by("phase", "cpu_phase_seconds", text, stats.cpu.phase_s)
            text = "Time in the calls that compute CPU steps: the rest of engine_busy_seconds is planning."
            yield make.counter("cpu_call_seconds", text, stats.cpu.call_s)
        text = (
            "1 for the state the model is in; weights_offloaded: sleep of level 1, discard_all: of level 2."
        )
        states: dict[tuple[str, ...], float] = {
            (state,): float(stats.sleep_level == level) for level, state in enumerate(SLEEP_STATES)
        }
        yield make.gauge_by("engine_sleep_state", text, states, "sleep_state")
        text = "The same as num_preemptions, by what became of their KV and for what."
        by_rule = {
            tuple(reversed(rule.split(":", 1))): stats.counters.preempted_by.get(rule, 0)
            for rule in PREEMPTIONS
        }
        yield make.counter("preemptions", text, by_rule, "kind", "reason")
        text = "Requests with a structure that have ended, by outcome; unfinished: by length or otherwise."
        ended = {name: stats.counters.structures.get(name, 0) for name in STRUCTURE_OUTCOMES}
        yield make.counter_by("outcome", "structured_requests", text, ended)
        yield from level_families(stats, info, make)
        yield from media_families(stats, make)
        steps = Histogram([float(bound) for bound in STEP_TOKEN_BOUNDS])
        steps.counts = list(stats.counters.steps_by_tokens)
        steps.total = stats.counters.computed_tokens
        yield make.histogram("iteration_tokens_total", "Tokens of steps.", steps)
        costs = recent_costs(self.recent.change(), self._limits(info))
        if costs:
            text = "What a million tokens cost at the pace of the last minute, by which tokens are counted."
            by_tokens = {(tokens,): cost for tokens, cost in costs.items()}
            yield make.gauge("cost_per_million_tokens", text, by_tokens, "tokens")

    @property
    def _info(self) -> EngineInfo | None:
        try:
            return self._client.info
        except EngineUnavailable:
            return None

    def _gauges(self, info: EngineInfo | None, stats: EngineStats) -> Iterator[Fact]:
        rows = 0 if info is None else info.max_num_seqs
        yield "engine_max_rows", "Requests that can be in the batch at once.", rows
        text = "Share of rows in use now, 0 to 1."
        yield "slot_occupancy", text, stats.running / rows if rows else 0.0
        if stats.fairness_gap is not None:
            text = "Most that waiting tenants are apart in what they were served for their weight, in tokens."
            yield "fairness_gap_tokens", text, stats.fairness_gap
        if stats.next_place_s is not None:
            text = "Time until a running request is thought to end."
            yield "next_place_seconds", text, stats.next_place_s
        peak = _peak(info)
        if peak is not None:
            yield "device_peak_flops", "FLOP/s the device's data sheet names, dense bf16.", peak.flops
            text = "Memory bandwidth the device's data sheet names."
            yield "device_peak_bytes_per_second", text, peak.bandwidth
        if self._cost_per_hour is not None:
            yield "cost_per_hour", "What an hour of this server costs.", self._cost_per_hour
        yield from recent_figures(self.recent.change(), self._limits(info))

    def _counters(self, info: EngineInfo | None, stats: EngineStats) -> Iterator[Fact]:
        text = "Tokens computed in steps, padding included."
        yield "engine_computed_tokens", text, stats.counters.computed_tokens
        text = "Tokens computed in steps that were only padding."
        yield "engine_padding_tokens", text, stats.counters.padding_tokens
        text = (
            "Rows in use, summed over steps: with engine_steps and engine_max_rows, the mean slot occupancy."
        )
        yield "engine_occupied_rows", text, stats.counters.occupied_rows
        yield "pooled_requests", "Requests that ended with a vector.", stats.counters.vectors
        yield (
            "pooled_tokens",
            "Prompt tokens of requests that ended with a vector.",
            stats.counters.pooled_tokens,
        )
        done = _work(info, stats)
        if done is None:
            return
        yield "estimated_flops_per_gpu", "Arithmetic of all steps, estimated.", done.flops
        if done.read_bytes is not None:
            text = "Memory read by all steps, estimated."
            yield "estimated_read_bytes_per_gpu", text, done.read_bytes
        text = "Keys and values written by all steps, estimated."
        yield "estimated_write_bytes_per_gpu", text, done.written_bytes

    def _limits(self, info: EngineInfo | None) -> BatchLimits:
        peak = _peak(info)
        if peak is None:
            return BatchLimits(cost_per_hour=self._cost_per_hour)
        knows_bytes = info is not None and info.work is not None and info.work.step_bytes is not None
        return BatchLimits(peak.flops, peak.bandwidth if knows_bytes else None, self._cost_per_hour)

    def _totals(self) -> Totals:
        info, stats, requests = self._info, self._client.stats, self._requests
        done = _work(info, stats)
        goodput = requests.forecasts.goodput
        return Totals(
            time_s=time.monotonic(),
            steps=stats.steps,
            busy_s=stats.busy_s,
            row_places=stats.steps * (0 if info is None else info.max_num_seqs),
            occupied_rows=stats.counters.occupied_rows,
            computed_tokens=stats.counters.computed_tokens,
            padding_tokens=stats.counters.padding_tokens,
            preemptions=stats.counters.preempted,
            vectors=stats.counters.vectors,
            flops=0.0 if done is None else done.flops,
            read_bytes=0.0 if done is None else done.read_bytes or 0.0,
            written_bytes=0.0 if done is None else done.written_bytes,
            prompt_tokens=requests.prompt_tokens,
            output_tokens=requests.generation_tokens,
            met=goodput.total(MET),
            missed=goodput.total(MISSED),
        )


def _peak(info: EngineInfo | None) -> Peak | None:
    """Of a device whose data sheet is known, for a model whose work is."""
    return None if info is None or info.work is None else published_peak(info.device)


def _work(info: EngineInfo | None, stats: EngineStats) -> WorkDone | None:
    if info is None or info.work is None:
        return None
    drafts = stats.counters.draft_tokens  # not among the others: a plan does not know how many there will be
    return work_done(
        info.work,
        steps=stats.steps,
        tokens=stats.counters.computed_tokens + drafts,
        products=stats.counters.context_products,
        decode_context=stats.counters.decode_context,
        logit_rows=stats.counters.logit_rows + drafts,
    )


def media_families(stats: EngineStats, make: Families) -> Iterator[Metric]:
    """What becomes of pictures: vectors that were there, encoding in steps, pages, waiting for vectors."""
    counters = stats.counters
    text = "Pictures that requests came to, and whose vectors were in memory or had to be computed."
    yield make.counter("mm_cache_queries", text, counters.media_queries)
    text = "Pictures that requests came to, and whose vectors were in memory."
    yield make.counter("mm_cache_hits", text, counters.media_hits)
    yield make.counter("encoded_pictures", "Pictures that were encoded.", counters.encoded)
    yield make.counter("encoded_units", "Patches of pictures that were encoded.", counters.encoded_units)
    text = "Positions of the lines of encoders, computed in steps: two for each layer and patch."
    yield make.counter("encode_positions", text, counters.encode_positions)
    share = 0.0
    if counters.encode_as_tokens:
        share = counters.encode_as_tokens / (counters.encode_as_tokens + counters.computed_tokens)
    text = "Share of all steps that encoding pictures took, at the price that rows pay for it."
    yield make.gauge("encode_step_share", text, share)
    yield make.counter("encode_waits", "Times that a prompt waited for vectors.", counters.encode_waits)
    yield make.counter("encode_wait_seconds", "Time that prompts waited for vectors.", counters.encode_wait_s)
    text = "Tokens of contexts whose KV was copied to their place in prompts."
    yield make.counter("reused_tokens", text, counters.reused_tokens)
    text = "Tokens at the beginnings of placed contexts, computed again where they stand."
    yield make.counter("reused_tokens_recomputed", text, counters.recomputed_tokens)
    text = "Pages of vectors of pictures: held by requests, kept for later ones, and all there are."
    pages: dict[tuple[str, ...], float] = {(state,): n for state, n in stats.media._asdict().items()}
    yield make.gauge_by("encoding_pages", text, pages, "state")


LOADS = (Rule.LOADS, Rule.COMPUTES, Rule.LOADING, Rule.MAKING_ROOM, Rule.LOAD_FAILED)
WAYS = tuple(f"{level}_{way}" for level in LEVELS[1:] for way in ("out", "in"))


def level_families(stats: EngineStats, info: EngineInfo | None, make: Families) -> Iterator[Metric]:
    """What is found on the levels of the KV cache, and copied between them."""
    counters = stats.counters
    if stats.below:
        text = "Blocks of host memory and a disk; held: by swapped requests and copies under way."
        used: dict[tuple[str, ...], float] = {
            (level.name, state): getattr(level, state)
            for level in stats.below
            for state in ("held", "cached", "places")
        }
        yield make.gauge_by("kv_level_blocks", text, used, "level", "state")
        text = "1; 0 when a level is off because it failed too often."
        up: dict[tuple[str, ...], float] = {(level.name,): float(not level.is_off) for level in stats.below}
        yield make.gauge_by("kv_level_up", text, up, "level")
    if stats.slabs.all:
        text = "Slabs of the memory that models share: of this model's KV, weights and adapters, and all there are."
        slabs: dict[tuple[str, ...], float] = {(use,): n for use, n in stats.slabs._asdict().items()}
        yield make.gauge_by("memory_slabs", text, slabs, "use")
    pins = stats.pins
    text = "KV blocks that pins hold, that one key may pin, and that all may pin."
    pinned: dict[tuple[str, ...], float] = {
        ("held",): pins.blocks,
        ("most_of_key",): pins.most_of_key,
        ("most",): pins.most,
    }
    yield make.gauge_by("kv_pinned_blocks", text, pinned, "state")
    yield make.gauge("kv_pins", "Beginnings of prompts that are pinned in the cache.", pins.pins)
    yield make.counter("kv_pinned", "Times that a prompt or a context was pinned.", counters.pinned)
    yield make.counter("kv_pins_lost", "Pins that were lost before their time.", counters.pins_lost)
    device, host, disk = counters.found_tokens
    text = "Prompt tokens of admitted requests, by where they came from; local_cache_hit: the device."
    sources = {"local_compute": counters.prompt_tokens - counters.cached_tokens, "local_cache_hit": device}
    yield make.counter_by("source", "prompt_tokens_by_source", text, {**sources, "host": host, "disk": disk})
    block_bytes = 0 if info is None else info.kv_bytes // info.num_blocks
    copied = {way: block_bytes * counters.copied_blocks.get(way, 0) for way in WAYS}
    text = "KV copied between the device and host memory, and between host memory and a disk."
    yield make.counter_by("way", "kv_copy_bytes", text, copied)
    text = "Time of these copies, from the plan of a step to the word that they are done."
    yield make.counter_by(
        "way", "kv_copy_seconds", text, {way: counters.copy_s.get(way, 0.0) for way in WAYS}
    )
    text = "Copies that failed; what they held is computed again."
    failed = {way: counters.failed_copies.get(way, 0) for way in WAYS}
    yield make.counter_by("way", "kv_copy_failures", text, failed)
    text = "What became of prefixes that host memory or a disk had for a request, by the rule."
    loads = {rule.value: counters.loads.get(rule.value, 0) for rule in LOADS}
    yield make.counter_by("result", "kv_loads", text, loads)
    text = "Time that loaded prefixes would have taken to compute, less that of their copies."
    yield make.counter("kv_load_saved_seconds", text, counters.load_saved_s)
