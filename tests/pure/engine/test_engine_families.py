"""The branches that a request begins with have its prompt in common, and all that follows from it."""

from __future__ import annotations

from paceline.core.stretch import ModulePart
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def test_a_module_of_a_prompt_with_many_answers_is_hashed_once() -> None:
    bench = Bench(engine_config())
    keys_of, asked = bench.engine.modules.keys_of, []
    assert keys_of is not None
    bench.engine.modules.keys_of = lambda request, tokens: (
        asked.append(request.id) or keys_of(request, tokens)
    )
    ids = bench.add_all(prompt(64), n=4, temperature=1.0, modules=[ModulePart(4, 48)])
    assert asked == ids[:1]
    first, *others = (bench.request(each) for each in ids)
    assert first.modules and first.stretches
    for branch in others:
        assert (branch.modules, branch.stretches) == (first.modules, first.stretches)
    bench.run()
