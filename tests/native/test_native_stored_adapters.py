"""Prefixes of adapters on a disk and in a store that servers share: over a restart each finds its own and no other's,
and one that is loaded again in place nothing of what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, LoRARequest, SamplingParams
from paceline.runner.stores.store_level import StoreLevel
from tests.adapter_folders import adapter_arrays, write_adapter
from tests.kernels import host_code
from tests.model_folder import write_model, write_weights
from tests.native import disk_victim
from tests.native.disk_victim import options, prompts
from tests.shared_store import Client, fake_server

PROMPT = {"prompt_token_ids": prompts()[0]}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
FOUND = 384
Answer = tuple[list[tuple[int, float]], int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host_code()
    return write_weights(write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512))


@pytest.fixture(params=["disk", "store"])
def below(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of engines that keep prefixes in one place."""
    monkeypatch.setattr(StoreLevel, "with_rates", disk_victim.cheap_disk)
    if request.param == "disk":
        return {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_size": 1 << 26}
    server = fake_server()
    monkeypatch.setattr("paceline.runner.stores.redis_store.connect", lambda url: Client(server))
    return {"kv_store": "redis://store", "kv_store_key": str(tmp_path / "key")}


class Adapters:
    """Folders of one model's adapters."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self._folder = model, folder
        with self.engine({"enable_prefix_caching": False}) as llm:
            self._spec = llm.loaded.checkpoint.spec

    def write(self, name: str, seed: int, **config: Any) -> LoRARequest:
        arrays = adapter_arrays(self._spec, seed=seed, size=0.1)
        return LoRARequest(name, 1 + seed, str(write_adapter(self._folder / name, arrays, **config)))

    def engine(self, below: dict[str, Any]) -> LLM:
        return LLM(str(self.model), enable_lora=True, max_lora_rank=4, **below, **options())


def answer(llm: LLM, adapter: LoRARequest | None) -> Answer:
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=adapter)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, each[token].logprob) for token, each in pairs], output.num_cached_tokens


def test_each_adapter_finds_its_own_prefix_after_a_restart(
    model: Path, tmp_path: Path, below: dict[str, Any]
) -> None:
    made = Adapters(model, tmp_path)
    every = [None, made.write("a", 1), made.write("b", 2)]
    with made.engine({"enable_prefix_caching": False}) as llm:
        computed = [answer(llm, each)[0] for each in every]
    assert len({json.dumps(each) for each in computed}) == 3
    with made.engine(below) as llm:
        assert [answer(llm, each) for each in every] == [(each, 0) for each in computed]
    with made.engine(below) as llm:  # in another order, so that they have other numbers
        assert [answer(llm, each) for each in every[::-1]] == [(each, FOUND) for each in computed[::-1]]


@pytest.mark.parametrize("change", [{"seed": 7}, {"lora_alpha": 16}])
def test_an_adapter_loaded_again_in_place_finds_nothing_of_the_old(
    model: Path, tmp_path: Path, below: dict[str, Any], change: dict[str, Any]
) -> None:
    made = Adapters(model, tmp_path)
    old = made.write("a", 1)
    with made.engine(below) as llm:
        before = answer(llm, old)
        made.write("a", **{"seed": 1, **change})
        after = answer(llm, LoRARequest("a", old.lora_int_id, old.lora_path, load_inplace=True))
    assert after[1] == 0 and after[0] != before[0]
    with made.engine(below) as llm:
        assert answer(llm, old) == (after[0], FOUND)
    made.write("a", 1)
    with made.engine(below) as llm:  # what it was at first is another identity, which is still there
        assert answer(llm, old) == (before[0], FOUND)
