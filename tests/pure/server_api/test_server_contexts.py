"""What is kept of contexts, for whom and how long, and what stands for them in a body."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.parameters import Pin
from paceline.core.stretch import ModulePart
from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.errors import ContextsFull, UnknownContext
from paceline.server.generate import context_store as module
from paceline.server.generate.context_store import Context, Contexts

ALICE, BOB = Caller(tenant="alice"), Caller(tenant="bob")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(name: str, text: str = "text", tenant: str = "alice", ttl_s: int = 60, **fields: Any) -> Context:
    return Context(
        id=name,
        tenant=tenant,
        name="",
        text=text,
        model="tiny",
        role="user",
        num_tokens=1,
        created_s=0.0,
        ttl_s=ttl_s,
        until_s=float(ttl_s),
        **fields,
    )


def store(*contexts: Context) -> Contexts:
    kept = Contexts(Clock())
    for each in contexts:
        kept.add(each)
    return kept


def part(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "context", "context": name, **more}


def test_parts_become_texts_wherever_they_may_stand() -> None:
    kept = store(made("a", "one"), made("b", "two"))
    marked = part("a", cache_control={"type": "ephemeral"})
    result = {"type": "tool_result", "tool_use_id": "x", "content": [part("b")]}
    body = {
        "system": [part("b")],
        "messages": [{"role": "user", "content": [marked, {"type": "text", "text": "?"}, result]}],
        "other": [part("never")],
    }
    before = str(body)
    resolved, used = kept.resolve(body, ALICE)
    assert resolved["system"] == [{"type": "text", "text": "two"}]
    first, _, last = resolved["messages"][0]["content"]
    assert first == {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    assert last["content"] == [{"type": "text", "text": "two"}]
    assert sorted(context.id for context in used) == ["a", "b", "b"]
    assert resolved["other"] is body["other"] and str(body) == before, "the client's own body stays"


def test_a_body_without_contexts_is_the_same_object() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, "no message"],
        "input": "x",
    }
    assert store().resolve(body, ALICE) == (body, ()) and store().resolve(body, ALICE)[0] is body


@pytest.mark.parametrize("caller, name", [(BOB, "a"), (ALICE, "b"), (ALICE, "")])
def test_only_what_a_key_has_is_found(caller: Caller, name: str) -> None:
    with pytest.raises(UnknownContext):
        store(made("a")).resolve({"messages": [{"role": "user", "content": [part(name)]}]}, caller)


@pytest.mark.parametrize("named", [None, 5, ["a"], {}])
def test_a_part_names_its_context_by_a_text(named: object) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].context must be the id") as refused:
        store(made("a")).resolve({"messages": [{"role": "user", "content": [part(named)]}]}, ALICE)
    assert refused.value.param == "messages"


def test_a_context_is_gone_when_its_time_is_over() -> None:
    clock = Clock()
    kept = Contexts(clock)
    kept.add(made("a", ttl_s=60))
    kept.add(made("b", ttl_s=30))
    clock.now_s = 29.9
    assert [each.id for each in kept.of(ALICE)] == ["a", "b"]
    clock.now_s = 30.0
    assert [each.id for each in kept.of(ALICE)] == ["a"] and kept.num_bytes == 4
    clock.now_s = 60.0
    assert not len(kept) and not kept.num_bytes


@pytest.mark.parametrize(
    "limit, value, words",
    [
        ("MOST_OF_KEY", 1, "1 contexts of this key are kept and 1 come; the limit is 1"),
        ("MOST", 2, "2 contexts are kept and 1 come; the limit is 2"),
        ("MOST_BYTES_OF_KEY", 8, "4 bytes of contexts of this key are kept and 5 come; the limit is 8"),
        ("MOST_BYTES", 12, "8 bytes of contexts are kept and 5 come; the limit is 12"),
    ],
)
def test_limits_are_kept_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, words: str
) -> None:
    monkeypatch.setattr(module, limit, value)
    kept = store(made("a"), made("b", tenant="bob"))
    with pytest.raises(ContextsFull, match=words):
        kept.check_room("alice", 5)
    monkeypatch.setattr(module, limit, value + 1)
    kept.check_room("alice", 5)


def test_only_a_prompt_that_begins_with_it_pins_it_again() -> None:
    context = made("a", prompt=(1, 2, 3))
    assert context.pin([1, 2, 3, 4], 20.5) == Pin(ttl_s=39, name="a", num_tokens=3)
    assert context.pin([1, 2, 4], 0.0) is None and context.pin([1, 2], 0.0) is None
    assert context.pin([1, 2, 3], 59.5) is None, "less than a second is left"
    assert made("b").pin([1, 2, 3], 0.0) is None


def test_what_places_a_context_brings_its_pin_along() -> None:
    kept = store(
        made("a", ttl_s=99, prompt=(1, 2, 3), is_placed=True),
        made("b", prompt=(4, 5)),
        made("c", is_placed=True),
        made("d", prompt=(7,), is_placed=True),
    )
    kept.now_s = lambda: 59.5
    used, ids = kept.of(ALICE), [9, 1, 2, 3, 4, 5, 7, 1, 2]
    parts = [ModulePart(1, 3), ModulePart(4, 2), ModulePart(6, 1), ModulePart(7, 2)]
    pins = [each.pin for each in kept.pin_modules(used, used[0].model, ids, parts)]
    assert pins == [Pin(ttl_s=39, name="a"), None, None, None], "d has less than a second left"
    assert kept.pin_modules(used, "another", ids, parts) == tuple(parts)
    kept.delete(used[0])
    assert kept.pin_modules(used, used[0].model, ids, parts) == tuple(parts)


@pytest.mark.parametrize("parts", [["x"], [{"type": "text"}], [{"type": "image"}], [5]])
def test_what_is_put_into_an_answer_is_text(parts: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        store().inserted(parts, ALICE)
    assert refused.value.param == "content"
