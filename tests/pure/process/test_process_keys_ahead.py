"""Prefix keys of long prompts are made beside steps, and what comes behind such a prompt waits for it."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.request import BlockKey
from paceline.engine.prefix_keys import KEYED_AT_ONCE, PrefixKeyHooks
from paceline.kv.prefix import KeyMaker
from paceline.process.keys_ahead import LONG_PROMPT, KeysAhead
from tests.pure.engine.engine_helpers import Bench, engine_config

KEY = BlockKey(b"key", b"payload")


def parts_after(gate: threading.Event) -> Iterator[list[BlockKey]]:
    yield [KEY]
    gate.wait(30)
    yield [KEY]


def test_what_comes_behind_a_long_prompt_waits_for_it_in_order() -> None:
    gate, ahead = threading.Event(), KeysAhead[str, str]()
    seen: list[object] = []

    def add(message: str, keys: list[BlockKey]) -> None:
        seen.append((message, len(keys)))

    def apply(message: str) -> None:
        if message == "long again":
            ahead.start(message, parts_after(gate))
        else:
            seen.append(message)

    ahead.start("long", parts_after(gate))
    for message in ("abort", "long again", "short"):
        ahead.put(message)
    ahead.take(add, apply)
    assert not seen and ahead  # nothing is handed on while the keys are made
    gate.set()
    ahead.take(add, apply, wait=True)
    assert seen == [("long", 2), "abort", ("long again", 2), "short"] and not ahead
    ahead.close()


@pytest.mark.parametrize("length", [1, 15, 16, KEYED_AT_ONCE, KEYED_AT_ONCE + 17, LONG_PROMPT + 1])
def test_keys_made_in_parts_are_those_made_at_once(length: int) -> None:
    maker = KeyMaker(16, b"key of the process")
    engine = Bench(engine_config(), hooks=PrefixKeyHooks(maker)).engine
    tokens = np.arange(length, dtype=np.int32)
    whole = maker.extend([], tokens, maker.root("a tenant", 0, 3))
    made = [key for part in engine.prompt_keys(tokens, "a tenant", 3) for key in part]
    assert made == whole
