"""Totals of a scheduler since its start, for metrics and reports.

Sums only: a step adds a few whole numbers, whatever its batch. What the sums come to in shares, FLOPs and bytes is
worked out where they are shown.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.events import Rule
from paceline.core.plan import StepPlan

# Upper ends of the buckets that steps are counted in by their tokens.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

LEVELS = ("device", "host", "disk")  # where a prefix may lie

# What became of the structure of a request: `unfinished` ended otherwise, such as by its length.
COMPLETE, UNFINISHED = "complete", "unfinished"
STRUCTURE_OUTCOMES = (COMPLETE, UNFINISHED, Rule.GRAMMAR_ERROR.value, Rule.GRAMMAR_TOO_COMPLEX.value)


@dataclass(frozen=True, slots=True)
class CPUWork:
    """What the threads of steps on a CPU have done since the start; empty on a GPU."""

    threads: int = 0  # that computed the last step
    # Seconds of all threads by phase, estimated from the steps that were timed.
    phase_s: dict[str, float] = field(default_factory=dict)
    call_s: float = 0.0  # seconds in the calls that compute steps

    def plus(self, other: CPUWork) -> CPUWork:
        """With what others have done in the same steps."""
        names = {**self.phase_s, **other.phase_s}
        phases = {name: self.phase_s.get(name, 0.0) + other.phase_s.get(name, 0.0) for name in names}
        return CPUWork(self.threads, phases, self.call_s + other.call_s)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Adapters of an engine at one moment, by their numbers."""

    running: tuple[int, ...] = ()  # that rows have
    waiting: tuple[int, ...] = ()  # that requests without a row have
    resident: int = 0  # in memory
    most: int = 0  # that may be; 0: all there are
    read: int = 0  # times that one was read again
    evicted: int = 0


class LevelUse(NamedTuple):
    """How a level below the device is used, in blocks of all layer groups."""

    name: str  # host or disk
    held: int  # by swapped requests and copies under way
    cached: int  # hold a prefix, copies of which may be under way
    places: int
    # Since the start: prompt tokens hit here, blocks copied to it and back, copies that failed.
    hits: int
    stored: int
    loaded: int
    failed: int
    is_off: bool  # it failed too often


class SlabUse(NamedTuple):
    """Slabs of the memory that models share, where they do: those of one model, and all there are."""

    kv: int = 0
    weights: int = 0
    adapters: int = 0
    all: int = 0


class PinUse(NamedTuple):
    """Pins at one moment, and the blocks that they have and may have."""

    pins: int = 0
    blocks: int = 0
    most: int = 0
    most_of_key: int = 0


class MediaUse(NamedTuple):
    """Pages of vectors of pictures at one moment."""

    held: int = 0  # that rows and the group under way have
    cached: int = 0  # of pictures that no row has
    pages: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    added: int = 0
    finished: int = 0
    rejected: int = 0
    preempted: int = 0
    preempted_by: dict[str, int] = field(default_factory=dict)  # by the rule of the decision
    swapped: int = 0
    forked: int = 0
    extended: int = 0  # times that tokens were put into a request
    vectors: int = 0  # requests that ended with one
    pooled_tokens: int = 0  # of their prompts
    media_queries: int = 0  # pictures that rows came to
    media_hits: int = 0  # of these, with vectors that were there
    encoded: int = 0  # pictures
    encoded_units: int = 0
    # Of placed texts: tokens whose KV was copied to their place, and those that were computed again.
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    encode_positions: int = 0  # of encoders' lines, in all steps submitted
    encode_as_tokens: float = 0.0  # tokens of prompts that take as long as these
    encode_waits: int = 0  # times that a row waited for vectors
    encode_wait_s: float = 0.0
    pinned: int = 0  # times that a prompt was
    pins_lost: int = 0  # before their time
    held: int = 0  # times that one was kept at its end
    holding: int = 0  # that are kept now
    late_results: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0  # of requests admitted for the first time
    cached_tokens: int = 0  # of these, found in blocks that were there already
    found_tokens: list[int] = field(default_factory=lambda: [0] * len(LEVELS))  # the cached ones, by level
    # Copies between two levels, by the lower one and the direction: host_out, host_in, disk_out, disk_in.
    copied_blocks: dict[str, int] = field(default_factory=dict)
    copy_s: dict[str, float] = field(default_factory=dict)  # from their plan to the word that they are done
    failed_copies: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)  # what became of prefixes below, by rule
    load_saved_s: float = 0.0  # what computing would have taken, less the loads
    evicted_blocks: int = 0  # blocks whose cached prefix was evicted
    computed_tokens: int = 0  # in all steps submitted, padding included
    padding_tokens: int = 0  # of these
    occupied_rows: int = 0  # rows in use, summed over steps
    decode_context: int = 0  # as of `StepWork`, summed over steps
    context_products: int = 0  # of decoding rows and of prompts
    logit_rows: int = 0
    drafts: int = 0  # rows of steps that had guessed tokens verified
    draft_tokens: int = 0  # guessed tokens verified
    accepted_tokens: int = 0  # of these, right and delivered
    masks: int = 0  # of tokens that may come next, made for rows with a guide
    mask_s: float = 0.0
    mask_wait_s: float = 0.0  # that draws waited for them
    forced_tokens: int = 0  # of the accepted drafts, those that a guide was certain of
    compiled: int = 0  # structures
    compile_s: float = 0.0
    structures: dict[str, int] = field(default_factory=dict)  # requests with one that have ended, by outcome
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))

    def found(self, num_tokens: int, host: int, disk: int) -> None:
        """Tokens of a prompt were found, these of them on the levels below the device."""
        found = self.found_tokens
        found[0] += num_tokens - host - disk
        found[1] += host
        found[2] += disk

    def copied(self, level: int, *, incoming: bool, num_blocks: int, seconds: float, failed: bool) -> None:
        """A copy between `level` and the one below is over."""
        name = f"{LEVELS[level + 1]}_{'in' if incoming else 'out'}"
        if failed:
            self.failed_copies[name] = self.failed_copies.get(name, 0) + 1
        else:
            self.copied_blocks[name] = self.copied_blocks.get(name, 0) + num_blocks
            self.copy_s[name] = self.copy_s.get(name, 0.0) + seconds

    def judged(self, rule: Rule) -> None:
        """A prefix below was loaded, waited for, or computed."""
        self.loads[rule.value] = self.loads.get(rule.value, 0) + 1

    def planned(self, plan: StepPlan, occupied_rows: int) -> None:
        """A step was planned."""
        work = plan.work
        tokens = work.decode_rows + work.prefill_tokens
        self.computed_tokens += tokens
        self.padding_tokens += plan.pad_tokens + plan.padding_rows
        self.occupied_rows += occupied_rows
        self.decode_context += work.decode_context
        self.context_products += work.decode_context + work.prefill_context_products
        self.logit_rows += work.logit_rows
        self.encode_positions += work.encode_positions
        self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
