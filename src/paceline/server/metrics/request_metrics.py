"""What /metrics shows: vLLM's names, labels and buckets under a prefix of ours.

Gauges are read from the engine when they are asked for, so that none can be stale; counters and histograms are plain
numbers that requests add to. Labels come from closed sets. Everything belongs to the event loop; nothing locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from paceline.core.dial import DialStatus, DialWord
from paceline.core.service_class import BATCH, CLASSES, DEFAULT_CLASS, SPOT
from paceline.process.client import EngineClient, EngineState, EngineUnavailable
from paceline.server.access.caller import LIMITS, Caller
from paceline.server.generate.request_record import NO_TIMES, RequestRecord, Times
from paceline.server.metrics.families import E2E_BUCKETS, Families, Histogram
from paceline.text.tools.scanner import CALL_OUTCOMES

# Forecasts against what came: first tokens, waiting by class, objectives that were met.
#
# Plain numbers that requests add to, and their families for /metrics. Labels come from closed sets: classes of
# service and whether objectives were met. Belongs to the event loop, like all metrics.


ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
FLOOR_S = 0.2  # a shorter time to the first token is judged as if it were this long


OWN, SERVER = "own", "server"  # the source of the times
MET, MISSED = "met", "missed"


class Goodput:
    """Counts requests that had the times they were to have: those they asked for, or those the operator set for all.

    A request is judged by its own objectives where it has them and by the server's for the rest; spot work and batches,
    which no reader waits for, by their own alone. One that did not end well has missed.
    """

    def __init__(self, server: Times = NO_TIMES) -> None:
        self._server = server
        self.counts = {
            (name, source, result): 0
            for name in CLASSES
            for source in (OWN, SERVER)
            for result in (MET, MISSED)
        }

    def finished(self, record: RequestRecord) -> None:
        own = record.objectives
        name = record.service_class if record.service_class in CLASSES else DEFAULT_CLASS
        times = own
        if name not in (SPOT, BATCH):
            times = Times._make(a if a is not None else b for a, b in zip(own, self._server, strict=True))
        if times != NO_TIMES:
            source = SERVER if own == NO_TIMES else OWN
            self.counts[name, source, MET if is_met(record, times) else MISSED] += 1

    def total(self, result: str) -> int:
        return sum(count for (_, _, found), count in self.counts.items() if found == result)


def is_met(record: RequestRecord, times: Times) -> bool:
    """Whether a request ended well and had its first token, its tokens and its end in time."""
    first_s, end_s = record.first_token_s, record.finished_s
    if record.finish_reason not in ("stop", "length") or first_s is None or end_s is None:
        return False
    gaps = max(1.0, record.num_output / max(1, record.num_branches) - 1.0)
    between_s = (end_s - first_s) / gaps if record.num_output > record.num_branches else 0.0
    seen_s = (end_s - record.received_s, first_s - record.received_s, between_s)
    return all(most is None or seen <= most / 1e3 for most, seen in zip(times, seen_s, strict=True))


class ForecastMetrics:
    """Observes first tokens and endings."""

    def __init__(self, times: Times = NO_TIMES) -> None:
        self.error = Histogram(ERROR_BUCKETS)
        self.predicted_s = self.real_s = 0.0  # sums over first tokens that were predicted
        self.queued = {name: Histogram(E2E_BUCKETS) for name in CLASSES}
        self.goodput = Goodput(times)

    def first_token(self, record: RequestRecord) -> None:
        said_s = record.predicted_ttft_s
        if said_s is None or record.first_token_s is None:
            return
        seen_s = record.first_token_s - record.received_s
        self.error.observe(abs(said_s - seen_s) / max(seen_s, FLOOR_S))
        self.predicted_s += said_s
        self.real_s += seen_s

    def finished(self, record: RequestRecord) -> None:
        name = record.service_class if record.service_class in self.queued else DEFAULT_CLASS
        if record.queue_s is not None:
            self.queued[name].observe(record.queue_s)
        self.goodput.finished(record)


def forecast_families(metrics: ForecastMetrics, make: Families) -> Iterator[Metric]:
    text = "Error of the predicted time to the first token, as a share of the real one or 200 ms."
    yield make.histogram("predicted_ttft_error_ratio", text, metrics.error)
    text = "Sum of predicted times to first tokens that came."
    yield make.counter("predicted_ttft_seconds", text, metrics.predicted_s)
    text = "Sum of the real times of the same first tokens."
    yield make.counter("real_ttft_seconds", text, metrics.real_s)
    text = "From arrival to the first step, by class of service."
    queued = {(name,): histogram for name, histogram in metrics.queued.items()}
    yield make.histogram("queue_time_by_class_seconds", text, queued, "class")
    text = "Requests that were to have certain times, their own or the server's, by whether they had them."
    yield make.counter("goodput_requests", text, metrics.goodput.counts, "class", "slo", "result")


TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class RequestFamilies:
    """Counters and histograms of generations; an observer of them. `times` are those the operator wants kept."""

    def __init__(self, times: Times = NO_TIMES) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.under_way = 0
        self.finished_by_reason = dict.fromkeys(FINISH_REASONS, 0)
        self.tool_calls = dict.fromkeys(CALL_OUTCOMES, 0)
        self.billed_nano = dict.fromkeys(CLASSES, 0)
        self.histograms: dict[str, tuple[str, Histogram]] = {
            name: (text, Histogram(bounds)) for name, text, bounds in _HISTOGRAMS
        }
        self.forecasts = ForecastMetrics(times)
        self._ttft = self.histograms["time_to_first_token_seconds"][1]
        self._itl = self.histograms["inter_token_latency_seconds"][1]

    def started(self, record: RequestRecord) -> None:
        self.under_way += 1

    def first_token(self, record: RequestRecord) -> None:
        if record.first_token_s is not None:
            self.prompt_tokens += record.num_prompt
            self._ttft.observe(record.first_token_s - record.received_s)
            self.forecasts.first_token(record)

    def tokens(self, record: RequestRecord, count: int, time_s: float) -> None:
        self.generation_tokens += count
        last = record.last_token_s
        if last is not None and count > 0:
            self._itl.observe(max(0.0, time_s - last) / count, count)
        record.last_token_s = time_s

    def finished(self, record: RequestRecord) -> None:
        self.under_way -= 1
        if record.first_token_s is None:  # else they count since then
            self.prompt_tokens += record.num_prompt
        self.cached_tokens += record.num_cached
        reason = record.finish_reason if record.finish_reason in FINISH_REASONS else "error"
        self.finished_by_reason[reason] += 1
        for outcome, number in record.tool_calls.items():
            self.tool_calls[outcome] += number
        self.billed_nano[record.charge.quote.service_class] += record.charge.amounts.total
        self.forecasts.finished(record)
        for name, value in _values_of(record):
            if value is not None:
                self.histograms[name][1].observe(value)


def _values_of(record: RequestRecord) -> Iterator[tuple[str, float | None]]:
    """What one finished request adds to the histograms; None where it does not have it."""
    end_s = record.finished_s if record.finished_s is not None else record.received_s
    first_s = record.first_token_s
    decode_s = None if first_s is None else max(0.0, end_s - first_s)
    per_branch = record.num_output / max(1, record.num_branches)
    inference_s = prefill_s = None
    if record.queue_s is not None:
        inference_s = max(0.0, end_s - record.received_s - record.queue_s)
        prefill_s = None if first_s is None else max(0.0, first_s - record.received_s - record.queue_s)
    yield "e2e_request_latency_seconds", max(0.0, end_s - record.received_s)
    yield "request_queue_time_seconds", record.queue_s
    yield "request_inference_time_seconds", inference_s
    yield "request_prefill_time_seconds", prefill_s
    yield "request_decode_time_seconds", decode_s
    if decode_s is not None and per_branch > 1:
        yield "request_time_per_output_token_seconds", decode_s / (per_branch - 1)
    yield "request_prompt_tokens", float(record.num_prompt)
    yield "request_generation_tokens", float(record.num_output)
    yield "request_max_num_generation_tokens", float(record.longest_output)
    yield "request_params_n", float(record.num_branches)
    yield "request_params_max_tokens", float(record.max_tokens)
    yield "request_prefill_kv_computed_tokens", float(max(0, record.num_prompt - record.num_cached))


_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS),
    ("inter_token_latency_seconds", "From one token to the next.", ITL_BUCKETS),
    ("request_time_per_output_token_seconds", "Mean time of a request's tokens but the first.", ITL_BUCKETS),
    ("e2e_request_latency_seconds", "From arrival to the end.", E2E_BUCKETS),
    ("request_queue_time_seconds", "From arrival to the first step.", E2E_BUCKETS),
    ("request_inference_time_seconds", "From the first step to the end.", E2E_BUCKETS),
    ("request_prefill_time_seconds", "From the first step to the first token.", E2E_BUCKETS),
    ("request_decode_time_seconds", "From the first token to the end.", E2E_BUCKETS),
    ("request_prompt_tokens", "Tokens of a request's prompts.", TOKEN_BUCKETS),
    ("request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS),
    ("request_max_num_generation_tokens", "Tokens of the longest answer of a request.", TOKEN_BUCKETS),
    ("request_params_n", "Answers that requests ask for.", N_BUCKETS),
    ("request_params_max_tokens", "Most tokens that requests ask for.", TOKEN_BUCKETS),
    ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", TOKEN_BUCKETS),
)


class HttpMetrics:
    """Requests by route, method and status, and what keys are refused by; all of it from closed sets."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], int] = {}
        self.refused = {(limit, name): 0 for limit in LIMITS for name in CLASSES}
        self.callers: Sequence[Caller] = ()  # every caller with a key

    def count(self, route: str, method: str, status: int) -> None:
        key = (route, method if method in METHODS else "other", str(status))
        self.counts[key] = self.counts.get(key, 0) + 1

    def count_refusal(self, limit: str, service_class: str) -> None:
        """A request was refused by a limit of its key."""
        if (limit, service_class) in self.refused:
            self.refused[limit, service_class] += 1

    def keys_by_class(self) -> dict[str, int]:
        counts = Counter(caller.service_class for caller in self.callers)
        return {name: counts[name] for name in CLASSES}

    def keys_by_limit(self) -> dict[str, int]:
        """How many keys have each limit."""
        return {limit: sum(getattr(caller, limit) is not None for caller in self.callers) for limit in LIMITS}


def engine_gauges(client: EngineClient) -> Iterator[tuple[str, str, float]]:
    """Name, meaning and value of what the engine says of itself right now."""
    stats = client.stats
    yield "num_requests_running", "Requests in the batch.", stats.running
    yield "num_requests_waiting", "Requests that wait for a row.", stats.waiting
    text = "Branches that have come to their end and are kept, to be forked or extended."
    yield "num_requests_held", text, stats.counters.holding
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    yield "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage
    yield "engine_up", "1 when the engine takes requests.", float(client.state is EngineState.READY)
    yield "engine_heartbeat_age_seconds", "Time since the engine's last heartbeat.", client.heartbeat_age_s
    yield (
        "spec_decode_width",
        "Most drafts of a request in a step; 0: they are not worth their time.",
        stats.draft_width,
    )
    yield "spec_decode_gain", "Speed of the last steps over that without drafts.", stats.draft_gain
    yield from dial_gauges(stats.dial)
    yield "model_wake_seconds", "What waking the model took last.", stats.last_wake_s


def dial_gauges(dial: DialStatus) -> Iterator[tuple[str, str, float]]:
    """Where the dial stands; a target or a p99 that there is not is 0."""
    target_s = dial.setting.target_s or 0.0
    yield "dial_on", "1 when the dial is set.", float(dial.word is not DialWord.OFF)
    yield "dial_position", "Place of the dial: 0 is least latency, 1 most throughput.", dial.position
    yield "dial_target_seconds", "The p99 the dial holds, of tokens or of first tokens.", target_s
    yield "dial_itl_p99_seconds", "The p99 between tokens that the dial sees.", (dial.itl_p99_ms or 0.0) / 1e3
    yield "dial_ttft_p99_seconds", "The p99 of first tokens that it sees.", (dial.ttft_p99_ms or 0.0) / 1e3
    yield (
        "dial_unreachable",
        "1 while the dial's target cannot be held.",
        float(dial.word is DialWord.UNREACHABLE),
    )
    yield (
        "dial_step_target_seconds",
        "Length the dial gives steps with prompts.",
        (dial.step_target_ms or 0.0) / 1e3,
    )
    yield "dial_max_step_tokens", "Most tokens of a step under the dial.", dial.max_step_tokens
    yield "dial_max_rows", "Most rows at a time under the dial.", dial.max_rows
    yield "dial_moves", "Moves of the dial since it was set.", dial.moves


def engine_counters(client: EngineClient) -> Iterator[tuple[str, str, float]]:
    stats = client.stats
    yield "num_preemptions", "Preemptions of running requests.", stats.counters.preempted
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits
    yield "kv_blocks_evicted", "KV blocks whose cached prefix was evicted.", stats.counters.evicted_blocks
    yield "spec_decode_num_drafts", "Times a request had drafts verified in a step.", stats.counters.drafts
    yield "spec_decode_num_draft_tokens", "Drafts verified.", stats.counters.draft_tokens
    yield (
        "spec_decode_num_accepted_tokens",
        "Drafts that were right and delivered.",
        stats.counters.accepted_tokens,
    )
    yield "structured_masks", "Masks made of the tokens that may come next.", stats.counters.masks
    yield "structured_mask_seconds", "Time of making them.", stats.counters.mask_s
    yield (
        "structured_mask_wait_seconds",
        "Time that the draws of steps waited for them; on a CPU all of it.",
        stats.counters.mask_wait_s,
    )
    yield (
        "structured_forced_tokens",
        "Tokens delivered as drafts that a structure forced.",
        stats.counters.forced_tokens,
    )
    yield "structured_compiles", "Structures compiled.", stats.counters.compiled
    yield (
        "structured_compile_seconds",
        "Time of compiling them; the first includes preparing the vocabulary.",
        stats.counters.compile_s,
    )
    yield "model_sleeps", "Times the model was put to sleep.", stats.sleeps
    yield "model_wakes", "Times the model was woken.", stats.wakes
    yield "engine_steps", "Steps made.", stats.steps
    yield (
        "engine_busy_seconds",
        "Time inside steps: of several models, the device's time each had.",
        stats.busy_s,
    )
    yield "engine_cpu_seconds", "Processor time of the engine's process.", stats.cpu_s
    yield "watch_cpu_seconds", "Of these, spent on showing it to the live page.", stats.watch_cpu_s
    yield "engine_failed_steps", "Steps that failed.", stats.counters.failed_steps
    yield "engine_frames_rejected", "Messages between the processes that were wrong.", stats.rejected_frames
    yield "invariant_violations", "Invariants found broken.", stats.violations


def cache_labels(client: EngineClient) -> dict[str, str] | None:
    """The labels of cache_config_info, once a model is loaded."""
    try:
        info = client.info
    except EngineUnavailable:
        return None
    return {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "max_model_len": str(info.max_model_len),
        "dtype": info.dtype,
        "cache_dtype": info.kv_dtype,
    }
