"""What must be true after a soak. Looks at collected facts only, so that facts can be made up to prove it notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.soak.server import DISK_BYTES, Held, ProcessState

MEBIBYTE = 1024  # in KiB
MOST_DISK_BYTES = DISK_BYTES + 65_536  # the index and the key beside the places
# What the traffic has to make happen: copies to and from the disk, adapters read again, models put to sleep.
MOVES = ("kv_copy_bytes_total", "adapters_read_total", "model_sleeps_total", "model_wakes_total")
SPARE = 2  # files, threads and tasks that may be there beside those of the beginning
SPARE_OBJECTS, SPARE_KIB = 2000, 512  # what caches may take that were not full at the beginning
MEMORY_FROM = 0.25  # of the run; before that caches fill up
# What clients that left may have been counted as: answered just then, refused, or gone.
STATUSES_OF_LEAVERS = {"200", "429", "499"}
AT_REST = {  # gauges of an idle server, and counters that must not move
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0,
    "generations_under_way": 0,
    "admission_places_taken": 0,
    "admission_tokens_waiting": 0,
    "kv_level_blocks_held": 0,
    "adapters_in_use": 0,
    "models_asleep": 1,  # the one that sleeps when it is idle
    "engine_up": 2,  # models
    "engine_failed_steps_total": 0,
    "engine_frames_rejected_total": 0,
    "invariant_violations_total": 0,
    "log_lines_dropped_total": 0,
}
Series = Sequence[tuple[float, int]]  # seconds, KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much memory may grow. A short run is judged by its total, a long one by its slope too."""

    growth_mib: float
    slope_mib_per_min: float | None = None


@dataclass(slots=True, kw_only=True)
class ClientCounts:
    """Every request that was sent, by what became of it."""

    answered: Counter[str] = field(default_factory=Counter)  # by status, those that reached a route
    good: int = 0  # generations answered with 200
    refused: int = 0  # answered before there was a route
    left: int = 0  # left, having sent everything and closed in order
    perhaps_unseen: int = 0  # left with a reset or half a request: the server may not know
    dripped: int = 0  # slow headers that were answered with 408
    undecided: int = 0  # slow headers that perhaps were, when the run was over


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Everything a run left behind."""

    clients: ClientCounts
    problems: list[str]  # what clients complained about
    complaints: list[str]  # warnings and errors in the server's log
    by_status: Counter[str]  # requests the server counted, without probes
    ended: Counter[str]  # generations the server counted, by reason
    num_logged: int
    refused: int
    timed_out: int
    stalled: int
    preemptions: int
    moved: Mapping[str, float]  # counters of what must have happened
    disk_bytes: int
    at_rest: Mapping[str, float]
    memory: Mapping[str, Series]
    before: Mapping[str, ProcessState] = field(default_factory=dict)
    after: Mapping[str, ProcessState] = field(default_factory=dict)
    tasks_before: int = 0
    tasks_after: int = 0
    held_before: Mapping[str, Held] = field(default_factory=dict)
    held_after: Mapping[str, Held] = field(default_factory=dict)
    num_between: int = 0  # requests between those two
    is_same_engine: bool = True
    exit_code: int = 0


def judge(evidence: Evidence, limits: Limits) -> list[str]:
    """What is wrong, a line each; nothing when all is well."""
    return [
        *(f"a client saw: {problem}" for problem in evidence.problems),
        *(f"the log says: {complaint}" for complaint in evidence.complaints),
        *_conserved(evidence),
        *_at_rest(evidence),
        *_given_back(evidence),
        *_let_go(evidence),
        *_flat(evidence, limits),
    ]


def _conserved(evidence: Evidence) -> Iterator[str]:
    """Every request the clients sent is one the server counted, and the other way round."""
    clients = evidence.clients
    more = evidence.by_status.copy()
    more.subtract(clients.answered)
    for status, count in sorted(more.items()):
        if count < 0:
            yield f"{-count} more answers with {status} arrived than the server counted"
        if count > 0 and status not in STATUSES_OF_LEAVERS:
            yield f"the server counted {count} more answers with {status} than arrived"
    extra = sum(more.values())
    most = clients.left + clients.perhaps_unseen
    if not clients.left <= extra <= most:
        yield f"{clients.left} to {most} requests were left by their clients; the server knows of {extra}"
    if evidence.num_logged != sum(evidence.by_status.values()):
        yield f"{evidence.num_logged} requests in the log, {sum(evidence.by_status.values())} in the metrics"
    well = evidence.ended["stop"] + evidence.ended["length"]
    if not clients.good <= well <= clients.good + extra:
        yield f"{clients.good} generations arrived, {extra} were left; the server ended {well} well"
    if evidence.ended["error"]:
        yield f"{evidence.ended['error']} generations ended with an error"
    if evidence.ended["abort"] > extra:
        yield f"{evidence.ended['abort']} generations were aborted, but only {extra} clients left"
    refused = clients.refused + clients.dripped
    if not refused <= evidence.refused <= refused + clients.undecided:
        yield f"{refused} clients were refused; the server counted {evidence.refused}"
    if evidence.timed_out < clients.dripped:
        yield f"{clients.dripped} slow requests ended, the server counted {evidence.timed_out}"


def _at_rest(evidence: Evidence) -> Iterator[str]:
    for name, wanted in AT_REST.items():
        found = evidence.at_rest[name]
        if found != wanted:
            yield f"{name} is {found:g} at rest, not {wanted}"
    if not evidence.preemptions:
        yield "no request was preempted: the pool was too large for this traffic"
    for name, count in evidence.moved.items():
        if not count:
            yield f"{name} is 0: this traffic does not show what it should"
    if evidence.disk_bytes > MOST_DISK_BYTES:
        yield f"the folder on disk has {evidence.disk_bytes} bytes"
    if not evidence.stalled:
        yield "no stalled reader was cut off"
    if not evidence.clients.dripped:
        yield "no slow request was cut off"
    if not evidence.is_same_engine:
        yield "the engine was restarted"
    if evidence.exit_code:
        yield f"the server ended with code {evidence.exit_code}"


def _given_back(evidence: Evidence) -> Iterator[str]:
    for name, before in evidence.before.items():
        after = evidence.after[name]
        if after.files > before.files + SPARE:
            yield f"{name} has {after.files} files open, {before.files} at the beginning"
        if after.threads > before.threads + SPARE:
            yield f"{name} has {after.threads} threads, {before.threads} at the beginning"
    if evidence.tasks_after > evidence.tasks_before + SPARE:
        yield f"{evidence.tasks_after} tasks, {evidence.tasks_before} at the beginning"


def _let_go(evidence: Evidence) -> Iterator[str]:
    """A leak of one object or half a kilobyte per request is more than caches take.

    Of the engine only objects are counted: torch keeps what it prepared for shapes it has seen, up to some thousand.
    """
    for name, before in evidence.held_before.items():
        after = evidence.held_after[name]
        objects, kib = after.objects - before.objects, after.malloc_kib - before.malloc_kib
        if objects > SPARE_OBJECTS + evidence.num_between:
            yield f"{name} holds {objects} more objects after {evidence.num_between} requests"
        if name != "engine" and kib > SPARE_KIB + evidence.num_between / 2:
            yield f"{name} holds {kib} KiB more after {evidence.num_between} requests"


def _flat(evidence: Evidence, limits: Limits) -> Iterator[str]:
    for name, series in evidence.memory.items():
        growth = growth_mib(series)
        if growth > limits.growth_mib:
            yield f"{name} grew by {growth:.1f} MiB; {limits.growth_mib:g} are allowed"
        slope = slope_mib_per_min(series)
        if limits.slope_mib_per_min is not None and slope > limits.slope_mib_per_min:
            yield f"{name} grows by {slope:.2f} MiB a minute; {limits.slope_mib_per_min:g} are allowed"


def growth_mib(series: Series) -> float:
    """From the first quarter on: the median of the last tenth less that of a tenth then."""
    sizes = [size for _, size in series]
    tenth = max(1, len(sizes) // 10)
    first = int(len(sizes) * MEMORY_FROM)
    return float(np.median(sizes[-tenth:]) - np.median(sizes[first : first + tenth])) / MEBIBYTE


def slope_mib_per_min(series: Series) -> float:
    """Of a line through the last half."""
    half = np.array(series[len(series) // 2 :], dtype=float)
    if len(half) < 2:
        return 0.0
    return float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) * 60 / MEBIBYTE
