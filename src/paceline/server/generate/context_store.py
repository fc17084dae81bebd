"""Contexts: texts with a name that a key keeps here, and what stands for them in a conversation.

A part `{"type": "context", "context": "ctx_..."}` becomes the text, before anything else reads the body. Texts live in
this process, so that an engine in the place of another computes them again when they are asked for; what is pinned is
the engine's business. A context of another key is answered like one that never was.
Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.parameters import Pin
from paceline.core.stretch import ModulePart
from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.errors import ContextsFull, UnknownContext
from paceline.text.placed_texts import mark_of

PART = "context"
PREFIX = "ctx_"
MOST_OF_KEY, MOST = 1_000, 10_000  # contexts
MOST_BYTES_OF_KEY, MOST_BYTES = 64 * 2**20, 256 * 2**20  # of their texts
# Fields of a body that hold messages, items or parts, and how deep parts may lie in them.
FIELDS = ("messages", "input", "system")
DEEPEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One text."""

    id: str
    tenant: str
    name: str
    text: str
    model: str
    role: str  # of the message that it is thought to begin
    num_tokens: int  # of the text alone
    created_s: float  # of the clock on the wall
    ttl_s: int
    until_s: float  # monotonic
    # What was computed and pinned: the beginning of a conversation, up to the end of the text, or the text alone where
    # it is to be placed. Empty: nothing.
    prompt: tuple[int, ...] = ()
    is_placed: bool = False
    num_blocks: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode(errors="replace"))

    def pin(self, ids: list[int], now_s: float) -> Pin | None:
        """The pin of a prompt that begins with it; None: it is not pinned, or the prompt begins otherwise."""
        end, left_s = len(self.prompt), int(self.until_s - now_s)
        if self.is_placed or not end or left_s < 1 or tuple(ids[:end]) != self.prompt:
            return None
        return Pin(ttl_s=left_s, name=self.id, num_tokens=end)


class InsertedText(NamedTuple):
    """A text that is put behind what an answer has."""

    text: str
    context: Context | None = None  # that it is of


def new_id() -> str:
    return PREFIX + secrets.token_hex(12)


class Contexts:
    """Those of one model."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._by_id: dict[str, Context] = {}
        self._sizes: dict[str, int] = {}  # in bytes, by id
        self._coming: list[tuple[str, int]] = []  # tenants and bytes of those that are being made
        self._next_s = 0.0  # when the first of them ends

    def __len__(self) -> int:
        self._expire()
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @contextmanager
    def room_for(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Within the block one more has a place: those that are made at once keep to the limits together. Raises
        ContextsFull."""
        self.check_room(tenant, num_bytes)
        place = (tenant, num_bytes)
        self._coming.append(place)
        try:
            yield
        finally:
            self._coming.remove(place)

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises ContextsFull where one more does not fit."""
        self._expire()
        sizes = [(known.tenant, self._sizes[known.id]) for known in self._by_id.values()] + self._coming
        own = [size for owner, size in sizes if owner == tenant]
        for what, has, more, most in (
            ("contexts of this key", len(own), 1, MOST_OF_KEY),
            ("contexts", len(sizes), 1, MOST),
            ("bytes of contexts of this key", sum(own), num_bytes, MOST_BYTES_OF_KEY),
            ("bytes of contexts", sum(size for _, size in sizes), num_bytes, MOST_BYTES),
        ):
            if has + more > most:
                raise ContextsFull(f"{has} {what} are kept and {more} come; the limit is {most}: delete some")

    def add(self, context: Context) -> None:
        self._by_id[context.id] = context
        self._sizes[context.id] = context.num_bytes
        self._next_s = min(self._next_s or context.until_s, context.until_s)

    def find(self, context_id: object, caller: Caller) -> Context:
        """A context of this caller. Raises UnknownContext."""
        self._expire()
        found = self._by_id.get(context_id) if isinstance(context_id, str) else None
        if found is None or found.tenant != caller.tenant:
            raise UnknownContext(
                "this key has no such context; it may have expired, GET /v1/contexts lists what there is"
            )
        return found

    def of(self, caller: Caller) -> list[Context]:
        self._expire()
        return [known for known in self._by_id.values() if known.tenant == caller.tenant]

    def delete(self, context: Context) -> None:
        if self._by_id.pop(context.id, None) is not None:
            del self._sizes[context.id]

    def pin(self, used: Sequence[Context], model: str, ids: list[int]) -> Pin | None:
        """Of the context that a prompt begins with: what is lost of it is pinned again by whatever uses it."""
        now_s = self.now_s()
        known = [each for each in used if each.model == model and each.id in self._by_id]
        return next((pin for each in known if (pin := each.pin(ids, now_s)) is not None), None)

    def pin_modules(
        self, used: Sequence[Context], model: str, ids: Sequence[int], modules: Sequence[ModulePart]
    ) -> tuple[ModulePart, ...]:
        """The same of contexts that are placed: what is lost of one is pinned again by what places it."""
        now_s = self.now_s()
        pins = {
            each.prompt: Pin(ttl_s=left_s, name=each.id)
            for each in used
            if each.is_placed and each.prompt and each.model == model and each.id in self._by_id
            if (left_s := int(each.until_s - now_s)) >= 1
        }
        if not pins:
            return tuple(modules)
        return tuple(
            [
                part._replace(pin=pins.get(tuple(ids[part.start : part.start + part.num_tokens])))
                for part in modules
            ]
        )

    def resolve(
        self, body: Mapping[str, Any], caller: Caller, secret: str = ""
    ) -> tuple[Mapping[str, Any], tuple[Context, ...]]:
        """A body with texts in the place of its contexts, and which these were. `secret`: of marks that stand there
        instead, because the texts are to be placed."""
        found: list[Context] = []
        changed = {}
        for name in FIELDS:
            value = body.get(name)
            if isinstance(value, list):
                resolved = self._resolved(value, caller, secret, name, found)
                if resolved is not value:
                    changed[name] = resolved
        return ({**body, **changed}, tuple(found)) if changed else (body, ())

    def inserted(self, parts: Sequence[Any], caller: Caller) -> list[InsertedText]:
        """Parts that are put behind what an answer has, as texts."""
        texts = []
        for index, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == PART:
                found: list[Context] = []
                self._as_text(part, caller, "", f"content[{index}]", found)
                texts.append(InsertedText(found[0].text, found[0]))
            elif kind == "text" and isinstance(part.get("text"), str):
                texts.append(InsertedText(part["text"]))
            else:
                raise InvalidRequest("content takes parts of the types text and context", param="content")
        return texts

    def _resolved(
        self, parts: list[Any], caller: Caller, secret: str, place: str, found: list[Context], depth: int = 0
    ) -> list[Any]:
        """The same list where nothing in it changes."""
        made: list[Any] | None = None
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                continue
            now: Any = part
            if part.get("type") == PART:
                now = self._as_text(part, caller, secret, f"{place}[{index}]", found)
            elif isinstance(part.get("content"), list) and depth < DEEPEST:
                inner = self._resolved(
                    part["content"], caller, secret, f"{place}[{index}].content", found, depth + 1
                )
                now = part if inner is part["content"] else {**part, "content": inner}
            if now is not part:
                made = list(parts) if made is None else made
                made[index] = now
        return parts if made is None else made

    def _as_text(
        self, part: dict[str, Any], caller: Caller, secret: str, place: str, found: list[Context]
    ) -> dict[str, Any]:
        known, param = part.get(PART), place.partition("[")[0]
        if not isinstance(known, str):
            raise InvalidRequest(f"{place}.{PART} must be the id of a context", param=param)
        try:
            context = self.find(known, caller)
        except UnknownContext as error:
            error.param = param
            raise
        shown = mark_of(secret, len(found)) if secret else context.text
        found.append(context)
        rest = {name: value for name, value in part.items() if name not in ("type", PART)}
        return {**rest, "type": "text", "text": shown}

    def _expire(self) -> None:
        now_s = self.now_s()
        if not self._by_id or now_s < self._next_s:
            return
        for context in [each for each in self._by_id.values() if each.until_s <= now_s]:
            self.delete(context)
        self._next_s = min((each.until_s for each in self._by_id.values()), default=0.0)
