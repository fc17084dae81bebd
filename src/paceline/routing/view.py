"""What a front knows of its engines: the last figures each has sent, and what it has sent there since.

A choice counts from the moment it is made, not from the next report: of two requests that come together the second
sees the first. Engines have numbers, columns have a place for each.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.routing.prefix_map import PrefixMap

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

NOBODY = -1  # in place of an engine's number


class EngineState(IntEnum):
    ABSENT = 0  # the number is free
    STARTING = 1
    READY = 2
    DRAINING = 3  # what it has ends or moves; nothing new comes
    LOST = 4


class Role(IntEnum):
    ANY = 0
    PREFILL = 1
    DECODE = 2  # is handed requests that have begun


class Gauges(NamedTuple):
    """What an engine says of itself. Speeds come from its own forecast, so that unlike devices compare in seconds."""

    waiting_tokens: int = 0  # of prompts that are not computed yet
    running_tokens: int = 0  # that rows hold in the KV cache
    rows: int = 0
    free_blocks: int = 0  # free or evictable
    prefill_per_s: float = 1.0  # prompt tokens, beside the rows it has
    decode_s: float = 0.0  # a step of the rows it has
    row_s: float = 0.0  # what one row more adds to that


class Ask(NamedTuple):
    """A request, as far as choosing an engine goes."""

    now_s: float
    num_prompt: int
    max_tokens: int = 1
    keys: tuple[bytes, ...] = ()  # of the prompt's full blocks, the first block first
    tenant: str = ""
    session: bytes = b""  # requests that belong together; empty: those that begin alike
    only: str | None = None  # an engine with this fingerprint
    without: frozenset[int] = frozenset()  # engines that have just refused it
    has_begun: bool = False  # its tokens are known: engines that only read prompts are no use


class Choice(NamedTuple):
    """An engine and why. `against` is what would have been chosen without it."""

    engine: int
    rule: str
    cached_tokens: int = 0  # of the prompt, that it holds
    cost_s: float = 0.0
    against: int = NOBODY
    against_cost_s: float = 0.0


class Sent(NamedTuple):
    """What a choice adds to an engine's figures until it reports them itself."""

    waiting_tokens: int
    running_tokens: int
    blocks: int


class FleetView:
    """Columns by engine number. One front owns one view."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.prefixes = PrefixMap()
        self.fingerprint: list[str] = []
        self.state: Integers = np.zeros(0, np.int64)
        self.role: Integers = np.zeros(0, np.int64)
        self.waiting_tokens: Integers = np.zeros(0, np.int64)
        self.running_tokens: Integers = np.zeros(0, np.int64)
        self.rows: Integers = np.zeros(0, np.int64)
        self.free_blocks: Integers = np.zeros(0, np.int64)
        self.prefill_per_s: Floats = np.zeros(0)
        self.decode_s: Floats = np.zeros(0)
        self.row_s: Floats = np.zeros(0)
        self.num_sent: list[int] = []  # choices since the engine was attached
        self._on_way: list[deque[Sent]] = []  # those of them that no report has counted
        self._open: Integers | None = None  # engines that take new requests; None: to be found again

    def __len__(self) -> int:
        """Numbers there have been; some may be absent."""
        return len(self.state)

    # -- engines come and go ---------------------------------------------------------------------------------

    def attach(
        self,
        *,
        fingerprint: str = "",
        role: Role = Role.ANY,
        state: EngineState = EngineState.READY,
        gauges: Gauges | None = None,
    ) -> int:
        """Give an engine a number: the lowest that is free."""
        free = np.flatnonzero(self.state == EngineState.ABSENT)
        number = int(free[0]) if len(free) else self._grow()
        self.fingerprint[number] = fingerprint
        self.role[number] = role
        self.num_sent[number] = 0
        self._on_way[number] = deque()
        self.report(number, Gauges() if gauges is None else gauges, known=0)
        self.set_state(number, state)
        return number

    def detach(self, number: int) -> None:
        """The engine is gone, with all it held. Its number may be another's next."""
        self.prefixes.forget(number)
        self._on_way[number].clear()
        self.set_state(number, EngineState.ABSENT)

    def set_state(self, number: int, state: EngineState) -> None:
        self.state[number] = state
        self._open = None
        if state is EngineState.LOST:
            self.prefixes.forget(number)

    def _grow(self) -> int:
        for name in ("state", "role", "waiting_tokens", "running_tokens", "rows", "free_blocks"):
            setattr(self, name, np.append(getattr(self, name), 0))
        for name in ("prefill_per_s", "decode_s", "row_s"):
            setattr(self, name, np.append(getattr(self, name), 0.0))
        self.fingerprint.append("")
        self.num_sent.append(0)
        self._on_way.append(deque())
        return len(self.state) - 1

    # -- load ------------------------------------------------------------------------------------------------

    def report(self, number: int, gauges: Gauges, *, known: int) -> None:
        """An engine's figures, taken when it had received `known` of the choices this front has sent it."""
        on_way = self._on_way[number]
        for _ in range(len(on_way) - (self.num_sent[number] - known)):
            on_way.popleft()
        self.waiting_tokens[number] = gauges.waiting_tokens
        self.running_tokens[number] = gauges.running_tokens
        self.rows[number] = gauges.rows
        self.free_blocks[number] = gauges.free_blocks
        self.prefill_per_s[number] = max(gauges.prefill_per_s, 1e-6)
        self.decode_s[number] = gauges.decode_s
        self.row_s[number] = gauges.row_s
        for sent in on_way:
            self._count(number, sent)

    def enter(self, ask: Ask, choice: Choice) -> None:
        """Count a choice, and expect its prompt's blocks there."""
        number, size = choice.engine, self.block_tokens
        uncached = ask.num_prompt - choice.cached_tokens
        sent = Sent(uncached, choice.cached_tokens, -(-uncached // size))
        self.num_sent[number] += 1
        self._on_way[number].append(sent)
        self._count(number, sent)
        self.prefixes.expect(number, ask.keys, ask.now_s, start=choice.cached_tokens // size)

    def enter_move(self, number: int, tokens: int) -> None:
        """A running request with so many tokens is on its way to this engine. It counts as one that was sent."""
        sent = Sent(0, tokens, -(-tokens // self.block_tokens))
        self.num_sent[number] += 1
        self._on_way[number].append(sent)
        self._count(number, sent)

    def withdraw(self, choice: Choice) -> None:
        """The last choice of this engine was not sent after all. One that the engine refuses is not withdrawn: its next
        report knows."""
        sent = self._on_way[choice.engine].pop()
        self.num_sent[choice.engine] -= 1
        self._count(choice.engine, sent, sign=-1)

    def _count(self, number: int, sent: Sent, sign: int = 1) -> None:
        self.waiting_tokens[number] += sign * sent.waiting_tokens
        self.running_tokens[number] += sign * sent.running_tokens
        self.rows[number] += sign
        self.free_blocks[number] -= sign * sent.blocks
        self.decode_s[number] += sign * self.row_s[number]

    # -- what a router looks at ------------------------------------------------------------------------------

    def candidates(self, ask: Ask) -> Integers:
        """Numbers of the engines that may get this request, in order."""
        if ask.has_begun:
            takes = (self.state == EngineState.READY) & (self.role != Role.PREFILL)
            found: Integers = np.flatnonzero(takes)
        else:
            if self._open is None:
                self._open = np.flatnonzero((self.state == EngineState.READY) & (self.role != Role.DECODE))
            found = self._open
        if ask.only is None and not ask.without:
            return found
        is_same = (
            (ask.only is None or self.fingerprint[number] == ask.only) and number not in ask.without
            for number in found.tolist()
        )
        return found[np.fromiter(is_same, np.bool_, len(found))]

    def load(self, numbers: Integers) -> Integers:
        """Tokens queued and running."""
        found: Integers = self.waiting_tokens[numbers] + self.running_tokens[numbers]
        return found

    def cached(self, ask: Ask) -> Integers:
        """By engine number: tokens at the beginning of the prompt that need not be computed there.

        The last token always is: its logits are what comes next.
        """
        tokens = self.prefixes.blocks_held(ask.keys, len(self.state))
        tokens *= self.block_tokens
        if len(ask.keys) * self.block_tokens >= ask.num_prompt:
            np.minimum(tokens, max(0, ask.num_prompt - 1), out=tokens)
        return tokens
