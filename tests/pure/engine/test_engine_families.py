"""The branches that a request begins with have its prompt in common, and all that follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.parameters import Pin
from paceline.core.request import BlockKey, Request
from paceline.core.stretch import ModulePart
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def test_a_module_of_a_prompt_with_many_answers_is_hashed_once() -> None:
    bench = Bench(engine_config())
    keys_of, asked = bench.engine.modules.keys_of, list[int]()
    assert keys_of is not None

    def counted(request: Request, tokens: NDArray[np.int32]) -> list[BlockKey]:
        asked.append(request.id)
        return keys_of(request, tokens)

    bench.engine.modules.keys_of = counted
    ids = bench.add_all(prompt(64), n=4, temperature=1.0, modules=[ModulePart(4, 48)])
    assert asked == ids[:1]
    first, *others = (bench.request(each) for each in ids)
    assert first.modules and first.stretches
    for branch in others:
        assert (branch.modules, branch.stretches) == (first.modules, first.stretches)
    bench.run()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5}])
def test_a_branch_does_not_pin_what_its_parent_pins(changes: dict[str, float]) -> None:
    bench = Bench(engine_config())
    parent = bench.add(prompt(32), max_tokens=8, pin=Pin(ttl_s=60, name="ctx"))
    bench.step()
    bench.step()
    (branch,) = bench.fork(parent, changes=changes)
    assert bench.request(branch).sampling.pin is None
    assert bench.request(parent).sampling.pin is not None
