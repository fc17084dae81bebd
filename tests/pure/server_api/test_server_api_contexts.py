"""Contexts that are made side by side, or by clients that leave: limits hold, and no pin is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed
from paceline.process.client import BranchUpdate
from paceline.server.api import context_routes
from paceline.server.call import Answer
from paceline.server.errors import ContextsFull, ContextTooLong
from paceline.server.generate import context_store as module
from tests.pure.server_api.api_helpers import DEFAULT_CALLER, Api

PATH = "/v1/contexts"
TEXT = "the lamp is lit " * 8  # of some blocks


def test_contexts_that_are_made_at_once_keep_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_KEY", 1)
    monkeypatch.setattr(context_routes, "INLINE_CHARS", 0)  # texts are read beside the event loop
    made = Api()

    async def run() -> list[object]:
        asked = [made.open(PATH, {"text": TEXT, "pin": False}) for _ in range(3)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    found = asyncio.run(run())
    assert [type(each) for each in found] == [Answer, ContextsFull, ContextsFull]
    assert len(made.service.contexts) == 1
    made.service.contexts.delete(made.service.contexts.of(DEFAULT_CALLER)[0])
    made.ask(PATH, {"text": TEXT, "pin": False})  # what was refused holds no place


@pytest.mark.parametrize("text", ["x" * 100_000, "the lamp is lit " * 100])
@pytest.mark.parametrize("pin", [False, True])
def test_a_text_that_fits_no_conversation_is_no_context(text: str, pin: bool) -> None:
    """Known by its characters, or by its tokens."""
    made = Api()
    with pytest.raises(ContextTooLong) as found:
        made.ask(PATH, {"text": text, "pin": pin})
    assert found.value.param == "text"
    assert not made.client.submitted and not len(made.service.contexts) and made.is_at_rest


class _Pinning(Api):
    """An engine that says nothing of a context, or fails at it; what is unpinned is noted."""

    def __init__(self, *steps: list[BranchUpdate] | Exception) -> None:
        def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
            return list(steps)

        super().__init__(script)
        self.unpinned: list[tuple[str, str]] = []
        self.client.unpin = lambda tenant, name: self.unpinned.append((tenant, name))  # type: ignore[method-assign]

    @property
    def pins(self) -> list[tuple[str, str]]:
        """Those that requests have come for."""
        sent = [(each["tenant"], each["sampling"].pin) for each in self.client.submitted]
        return [(tenant, pin.name) for tenant, pin in sent]


def test_a_client_that_leaves_leaves_no_pin() -> None:
    made = _Pinning()

    async def run() -> None:
        asked = asyncio.create_task(made.open(PATH, {"text": TEXT}))
        while not (made.client.submitted or asked.done()):
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(run())
    assert len(made.pins) == 1 and made.unpinned == made.pins
    assert made.is_at_rest and not len(made.service.contexts)


def test_a_context_that_fails_leaves_no_pin() -> None:
    made = _Pinning(EngineFailed("gone"))
    with pytest.raises(EngineFailed):
        made.ask(PATH, {"text": TEXT})
    assert len(made.pins) == 1 and made.unpinned == made.pins
    assert made.is_at_rest and not len(made.service.contexts)
