"""The rules by which an engine is chosen.

A router looks at the view of a fleet and at what is asked, and says which engine and why. It changes neither: `route`
counts the choice. `soonest` is the default; the others are what it is compared with.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from paceline.config.user_class import load_class
from paceline.errors import ConfigError
from paceline.routing.view import NOBODY, Ask, Choice, FleetView, Integers

DEFAULT_ROUTER = "soonest"
MOST_EXPECTED = 256  # tokens of an answer that are believed to come, whatever the request allows
# Of the splitmix64 generator.
_GOLDEN, _MIXING, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)
TIE_S = 1e-3  # costs that differ by less are alike


class Router(Protocol):
    """Chooses for one request at a time. There is a candidate whenever it is asked."""

    def choose(self, view: FleetView, ask: Ask) -> Choice: ...


def route(view: FleetView, router: Router, ask: Ask) -> Choice | None:
    """Choose an engine and count the choice; None when no engine may get this request."""
    view.prefixes.pass_time(ask.now_s)
    if not len(view.candidates(ask)):
        return None
    choice = router.choose(view, ask)
    view.enter(ask, choice)
    return choice


class SoonestFirstToken:
    """Where the first token would come soonest, with what that costs the others there.

    Seconds of what is before it, of what is left of its prompt, and of the steps of its answer. The steps that read the
    prompt are long ones for all rows there: each waits as long as that takes, which counts `others` of what this
    request's own wait does.
    """

    def __init__(self, others: float = 0.5) -> None:
        self._others = others

    def choose(self, view: FleetView, ask: Ask) -> Choice:
        numbers = view.candidates(ask)
        at: Integers | slice = slice(None) if len(numbers) == len(view) else numbers  # a slice copies nothing
        cached = view.cached(ask)[at]
        costs = (ask.num_prompt - cached) * (1.0 + self._others * view.rows[at])
        costs += view.waiting_tokens[at]
        costs /= view.prefill_per_s[at]
        costs += min(ask.max_tokens, MOST_EXPECTED) * (view.decode_s[at] + view.row_s[at])
        best = int(costs.argmin())
        cost_s, rule = float(costs[best]), "soonest"
        costs[best] = np.inf
        second = int(costs.argmin())
        second_s = float(costs[second])
        if second_s <= cost_s + TIE_S:
            costs[best], rule = cost_s, "session"
            alike = (costs <= cost_s + TIE_S).nonzero()[0]
            best = int(alike[_steadiest(ask, numbers[alike])])
            cost_s, costs[best] = float(costs[best]), np.inf
            second = int(costs.argmin())
            second_s = float(costs[second])
        found, has_second = int(cached[best]), second_s < np.inf
        return Choice(
            engine=int(numbers[best]),
            rule="prefix" if found else rule,
            cached_tokens=found,
            cost_s=cost_s,
            against=int(numbers[second]) if has_second else NOBODY,
            against_cost_s=second_s if has_second else 0.0,
        )


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._last = NOBODY

    def choose(self, view: FleetView, ask: Ask) -> Choice:
        numbers = view.candidates(ask)
        at = int(numbers.searchsorted(self._last, side="right"))
        self._last = int(numbers[at % len(numbers)])
        return Choice(self._last, "round-robin", int(view.cached(ask)[self._last]))


class LeastLoaded:
    """The engine with the fewest tokens queued and running; the lowest number of several."""

    def choose(self, view: FleetView, ask: Ask) -> Choice:
        numbers = view.candidates(ask)
        chosen = int(numbers[view.load(numbers).argmin()])
        return Choice(chosen, "least-loaded", int(view.cached(ask)[chosen]))


class PrefixAware:
    """The engine that holds most of the prompt, unless it is overloaded.

    Overloaded is one with more than `imbalance` times the least load and `slack_tokens` on top of it; then, and when
    nothing of the prompt is known, the least loaded one is taken.
    """

    def __init__(self, *, imbalance: float = 1.5, slack_tokens: int = 16_384) -> None:
        self._imbalance = imbalance
        self._slack_tokens = slack_tokens

    def choose(self, view: FleetView, ask: Ask) -> Choice:
        numbers = view.candidates(ask)
        loads, cached = view.load(numbers), view.cached(ask)[numbers]
        least, longest = int(loads.argmin()), int(cached.max())
        if longest:
            holding = np.flatnonzero(cached == longest)
            best = int(holding[loads[holding].argmin()])
            if loads[best] <= loads[least] * self._imbalance + self._slack_tokens:
                return Choice(int(numbers[best]), "prefix", longest, against=int(numbers[least]))
        rule = "overloaded" if longest else "least-loaded"
        return Choice(int(numbers[least]), rule, int(cached[least]))


ROUTERS: dict[str, Callable[[], Router]] = {
    "soonest": SoonestFirstToken,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def make_router(name: str) -> Router:
    """One of these, or an operator's own as `module:Class`, which is called without arguments."""
    if ":" not in name:
        if name not in ROUTERS:
            raise ConfigError(f"--router must be one of {', '.join(ROUTERS)} or MODULE:CLASS, not '{name}'")
        return ROUTERS[name]()
    kind = load_class("--router", name, "my_routers:Nearest", ("choose",))
    try:
        router: Router = kind()
    except Exception as error:
        raise ConfigError(
            f"--router {name}: the class cannot be called without arguments ({type(error).__name__}: {error})"
        ) from error
    return router


def _steadiest(ask: Ask, numbers: Integers) -> int:
    """Rendezvous hashing: which of `numbers` a session returns to, whichever others come and go. A session is named, or
    those requests that begin alike."""
    name = ask.session or (ask.keys[0] if ask.keys else b"")
    if not name:
        return 0
    scores = numbers.astype(np.uint64)
    scores += np.uint64(zlib.crc32(name) + 1)
    scores *= _GOLDEN
    scores ^= scores >> _HALF
    scores *= _MIXING
    return int(scores.argmax())
