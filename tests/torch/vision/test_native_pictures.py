"""Pictures in prompts that the native kernels compute: as transformers answers, with the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.core.request import Change, ChangeOutcome, RequestId
from paceline.engine.changes import apply_change
from paceline.models.encoder import Encoder
from paceline.runner.native.checks import VARIABLE
from paceline.runner.native.picture_encoder import NativePictureEncoder
from paceline.runner.native.step import BadPlan
from paceline.runner.pictures import NO_VECTOR
from tests.torch.vision.test_pictures import (
    GREEDY,
    NUM_TOKENS,
    OPTIONS,
    answers,
    pictures_of,
    prompts,
    run,
)
from tests.torch.vision.tiny_models import (
    KINDS,
    picture,
    prompt,
    reference_logits,
    reference_tokens,
    save_model,
)

NATIVE = {**OPTIONS, "cpu_backend": "native"}


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "qwen3_vl"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("native") / request.param
    return folder, save_model(request.param, folder)


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_answers_are_those_of_transformers(saved: tuple[Path, Any], budget: int) -> None:
    made = prompts(saved[0].name)
    wanted = [reference_tokens(saved[1], each, NUM_TOKENS) for each in made]
    with LLM(str(saved[0]), **{**NATIVE, "max_num_batched_tokens": budget}) as llm:
        assert llm.loaded.hardware.runner["name"] == "native"
        assert isinstance(pictures_of(llm)._encoder, NativePictureEncoder) and not llm.loaded.notices
        assert answers(llm, made) == wanted
        assert answers(llm, made[::-1])[::-1] == wanted


def test_logits_are_those_of_transformers(saved: tuple[Path, Any]) -> None:
    with LLM(str(saved[0]), **{**NATIVE, "enable_prefix_caching": False}) as llm:
        compute = llm.loaded.engine._runner.compute  # type: ignore[attr-defined]
        for each in prompts(saved[0].name):
            answers(llm, [each], replace(GREEDY, max_tokens=1))
            count = compute._count
            found = compute.logits(np.arange(count))
            assert np.abs(found - reference_logits(saved[1], each)[-count:].numpy()).max() < 2e-5


def test_answers_survive_preemption_and_are_those_of_branches(saved: tuple[Path, Any]) -> None:
    made = prompts(saved[0].name)
    wanted = [reference_tokens(saved[1], each, NUM_TOKENS) for each in made]
    with LLM(str(saved[0]), **NATIVE) as llm:
        engine = llm.loaded.engine
        found: dict[int, list[int]] = {
            engine.add(each.tokens, GREEDY, media=each.parts)[0]: [] for each in made
        }
        while max(map(len, found.values())) < 20:
            for told in engine.step().tokens:
                for request, token in zip(told.requests.tolist(), told.tokens.tolist(), strict=True):
                    found[request].append(token)
        for paused in (True, False):
            for number in found:
                assert apply_change(engine, RequestId(number), Change(paused=paused)) is ChangeOutcome.CHANGED
        run(engine, found)
        assert list(found.values()) == wanted
        parent = engine.add(made[1].tokens, GREEDY, media=made[1].parts)[0]
        found = {parent: []}
        while len(found[parent]) < 5:
            for told in engine.step().tokens:
                found[parent] += told.tokens.tolist()
        branch = engine.fork(parent, 1, at=3)[0]
        found[branch] = []
        run(engine, found)
        assert found == {parent: wanted[1], branch: wanted[1][3:]}


def test_nothing_but_its_own_memory_is_touched(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    made = prompts(saved[0].name)
    with LLM(str(saved[0]), **NATIVE) as llm:
        assert llm.loaded.engine._runner.compute.checks is not None  # type: ignore[attr-defined]
        found = answers(llm, made, replace(GREEDY, max_tokens=3))
    assert found == [reference_tokens(saved[1], each, 3) for each in made]


def test_a_vector_that_does_not_exist_is_not_read(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(saved[0]), **NATIVE) as llm:
        compute, pictures = llm.loaded.engine._runner.compute, pictures_of(llm)  # type: ignore[attr-defined]
        monkeypatch.setattr(
            pictures, "slots", lambda rows, batch: np.array([NO_VECTOR, len(pictures.vectors)])
        )
        with pytest.raises(BadPlan, match="a plan names vector"):
            compute._seen(None, None)


def test_vectors_have_the_same_bits_in_any_steps_and_beside_any_others(saved: tuple[Path, Any]) -> None:
    name = saved[0].name
    items = [picture(name, seed, KINDS[name].grids[0]) for seed in range(3)]
    made = [prompt(name, 5, item, 9) for item in items]
    outputs, found = items[0].given.outputs, []
    for budget, chosen, encode in ((7, made, "pieces"), (512, made[::-1], "pieces"), (64, made, "whole")):
        options = {**NATIVE, "max_num_batched_tokens": budget, "encode": encode}
        with LLM(str(saved[0]), **options) as llm:
            answers(llm, chosen, replace(GREEDY, max_tokens=1))
            pictures = pictures_of(llm)
            slots = [pictures._slots(number, np.arange(outputs)) for number in sorted(pictures._pages)]
            found.append(sorted(pictures.vectors[each].tobytes() for each in slots))
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


def test_what_the_kernels_do_not_cover_is_told_and_left_to_torch(tmp_path: Path) -> None:
    save_model("idefics3", tmp_path, hidden_size=40, num_attention_heads=2)
    for backend in ("auto", "native"):
        with LLM(str(tmp_path), **{**NATIVE, "cpu_backend": backend}) as llm:
            (notice,) = llm.loaded.notices
            assert notice == (
                "pictures are encoded by torch: of their encoder, its hidden size of 40 is not a multiple of 16"
            )
            assert isinstance(pictures_of(llm)._encoder, Encoder)
