"""Finds stop strings in a text that arrives in pieces, without ever showing a part of one.

Only a suffix that could still become a stop string is held back; everything before it is certain. The first stop
to end wins, the longest of those ending there; the text is cut where it begins. Works on characters, in one pass
(all stop strings are followed at once); knows nothing of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What one piece brought: text to show, and the stop string that ended it, if any."""

    emit: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopMatcher:
    """Watches one text. After a stop string was found, nothing more is emitted."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._root = _automaton(stops)
        self._state = self._root
        self._include_stop = include_stop
        self._held = ""  # could become a stop string
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Take the next piece in. With `may_stop=False` a stop string that ends in this piece is let through."""
        if self._stopped:
            return StopResult(emit="")
        state = self._state
        for index, character in enumerate(text):
            state = self._advance(state, character)
            if state.stop and may_stop:
                return self._finish(text[: index + 1], state.stop)
        self._state = state
        return StopResult(emit=self._release(text, keep=state.partial))

    def flush(self) -> str:
        """What was held back; the text is over."""
        text, self._held = self._held, ""
        self._state = self._root
        return "" if self._stopped else text

    def _advance(self, state: _State, character: str) -> _State:
        while state is not self._root and character not in state.next:
            state = state.fallback or self._root
        return state.next.get(character, self._root)

    def _release(self, text: str, *, keep: int) -> str:
        """Everything but the last `keep` characters, which are held back."""
        known = self._held + text
        certain = len(known) - keep
        self._held = known[certain:]
        return known[:certain]

    def _finish(self, text: str, stop: str) -> StopResult:
        self._stopped = True
        emit = self._held + text
        self._held = ""
        return StopResult(emit=emit if self._include_stop else emit[: len(emit) - len(stop)], stop=stop)


@dataclass(slots=True, eq=False)
class _State:
    """A prefix of some stop string that the text ends with; no longer prefix fits."""

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None  # the longest shorter prefix the text ends with too
    stop: str = ""  # the longest stop string that ends here
    partial: int = 0  # characters at the end of the text that may still grow into a stop string


def _automaton(stops: Sequence[str]) -> _State:
    """All stop strings as one automaton (Aho and Corasick)."""
    root = _State()
    for stop in stops:
        assert stop, "an empty stop string is refused by SamplingParams"
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(depth=state.depth + 1))
        state.stop = stop
    waiting = deque([root])
    while waiting:  # breadth first: a fallback is shorter, so it is complete already
        state = waiting.popleft()
        for character, child in state.next.items():
            child.fallback = _fallback(state.fallback, character, root)
            child.stop = child.stop or child.fallback.stop
            child.partial = child.depth if child.next else child.fallback.partial
            waiting.append(child)
    return root


def _fallback(state: _State | None, character: str, root: _State) -> _State:
    while state is not None and character not in state.next:
        state = state.fallback
    return root if state is None else state.next[character]
