"""Pictures in prompts: against transformers, and the same however they are cut, shared and interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.config.encoder import EncoderWork
from paceline.core.events import Finished
from paceline.core.plan import Encodes
from paceline.core.stretch import MediaInput
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest
from paceline.runner import sizing
from paceline.runner.pictures import Pictures
from paceline.runner.sizing import encoder_work
from tests.cases import diagonal
from tests.torch.llm_helpers import is_at_rest
from tests.torch.vision.tiny_models import (
    KINDS,
    Prompt,
    picture,
    prompt,
    reference_logits,
    reference_tokens,
    save_model,
)

NUM_TOKENS = 40
MOST_DIFFERENCE = 1e-5
# Tokens of a step, tokens of a block, positions of a line for a token.
CUTS = [
    (7, 4, 0.5),
    (7, 16, 1e6),
    (64, 4, 9.0),
    (64, 16, 0.5),
    (512, 4, 1e6),
    (512, 16, 9.0),
]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "num_blocks": 96,
    "max_num_batched_tokens": 64,
    "check_every": 1,
    "cpu_backend": "torch",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    return folder, save_model(request.param, folder)


@pytest.fixture
def line_prices(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many positions of a line cost as much as a token: the size of pieces follows."""

    def set_price(positions: float) -> None:
        def work(*args: Any) -> EncoderWork:
            return replace(encoder_work(*args), token_positions=positions, product_share=0.0, keys_share=1.0)

        monkeypatch.setattr(sizing, "encoder_work", work)

    return set_price


def answers(llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """All at once."""
    engine = llm.loaded.engine
    found: dict[int, list[int]] = {}
    for each in prompts:
        for number in engine.add(each.tokens, sampling, media=each.parts):
            found[number] = []
    run(engine, found)
    engine.media.let_go()
    assert is_at_rest(engine) and not engine.media.is_holding
    return list(found.values())


def count_pictures(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """What is encoded from now on, group by group."""
    pictures = pictures_of(llm)
    groups: list[list[bytes]] = []
    begin = pictures._encoder.begin

    def counted(items: Sequence[MediaInput]) -> Any:
        groups.append([item.content for item in items])
        return begin(items)

    monkeypatch.setattr(pictures._encoder, "begin", counted)
    return groups


def pictures_of(llm: LLM) -> Pictures:
    found: Pictures = llm.loaded.engine._runner.compute.pictures  # type: ignore[attr-defined]
    return found


def run(engine: Engine, found: dict[int, list[int]]) -> list[Finished]:
    """Until all requests have ended; tokens by request."""
    ended: list[Finished] = []
    while engine.has_requests or not engine.is_idle:
        events = engine.step()
        for told in events.tokens:
            for request, token in zip(told.requests.tolist(), told.tokens.tolist(), strict=True):
                found[request].append(token)
        ended += events.finished
    return ended


def prompts(name: str) -> list[Prompt]:
    one, two, three = (picture(name, seed) for seed in range(3))
    return [
        prompt(name, 5, one, 9),
        prompt(name, one, 3, two, 1, three, 20, seed=1),
        prompt(name, 30, seed=2),
        prompt(name, 17, two, 1, two, 2, seed=3),
    ]


@pytest.fixture(scope="module")
def wanted(saved: tuple[Path, Any]) -> list[list[int]]:
    return [reference_tokens(saved[1], each, NUM_TOKENS) for each in prompts(saved[0].name)]


def test_logits_are_those_of_transformers(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    with LLM(
        str(folder), **{**OPTIONS, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    ) as llm:
        assert llm.loaded.config.scheduler.encoder is not None
        for each in prompts(folder.name):
            answers(llm, [each], replace(GREEDY, max_tokens=1))
            compute = llm.loaded.engine._runner.compute  # type: ignore[attr-defined]
            count = len(compute.seen()[1])  # tokens of the last step, pictures among them
            found = compute.logits(np.arange(count))
            assert np.abs(found - reference_logits(model, each)[-count:].numpy()).max() < 2e-5


@pytest.mark.parametrize("saved, cut", diagonal(list(KINDS), CUTS), indirect=["saved"])
def test_answers_are_those_of_transformers_however_prompts_and_pictures_are_cut(
    saved: tuple[Path, Any],
    wanted: list[list[int]],
    line_prices: Callable[[float], None],
    cut: tuple[int, int, float],
) -> None:
    budget, block_size, positions = cut
    line_prices(positions)
    options = {**OPTIONS, "max_num_batched_tokens": budget, "block_size": block_size, "num_blocks": 128}
    with LLM(str(saved[0]), **options) as llm:
        made = prompts(saved[0].name)
        assert answers(llm, made) == wanted
        assert answers(llm, made[::-1])[::-1] == wanted  # prefixes, and pictures that are there


def test_a_prefix_may_end_inside_a_picture_or_behind_it(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one picture: another one between has its vectors forgotten, and the rest of it is needed."""
    folder, model = saved
    one, two = picture(folder.name, 0), picture(folder.name, 3)  # of one shape
    first = prompt(folder.name, 3, one, 30)
    again = [Prompt(first.tokens[:-count] + [9] * count, first.parts, first.pictures) for count in (30, 4)]
    other = prompt(folder.name, 3, two, 6)
    changed = first._replace(parts=other.parts, pictures=other.pictures)
    with LLM(str(folder), **{**OPTIONS, "block_size": 4, "encoder_cache_tokens": 64}) as llm:
        groups = count_pictures(llm, monkeypatch)
        for each in (first, other, again[0], again[1], changed, first):
            engine = llm.loaded.engine
            found: dict[int, list[int]] = {engine.add(each.tokens, GREEDY, media=each.parts)[0]: []}
            (ended,) = run(engine, found)
            assert list(found.values()) == [reference_tokens(model, each, NUM_TOKENS)]
            behind = 3 + one.given.outputs
            if each is again[0]:
                assert 3 < ended.num_cached < behind
            elif each is again[1]:
                assert ended.num_cached > behind
            elif each is changed:  # as far as the prompt of that picture
                assert behind < ended.num_cached <= len(other.tokens)

    kinds = [one.given.content, two.given.content, one.given.content]
    assert groups == [[kind] for kind in kinds]  # what stands before the end of a prefix is not encoded again


def test_answers_survive_preemption(
    saved: tuple[Path, Any], wanted: list[list[int]], line_prices: Callable[[float], None]
) -> None:
    # Measured beside other work, pictures may cost so much that requests run one after the other.
    line_prices(9.0)
    made = prompts(saved[0].name)
    longest = max(len(each.tokens) for each in made) + NUM_TOKENS
    options = {**OPTIONS, "block_size": 4, "num_blocks": longest // 4 + 8, "max_model_len": longest + 8}
    with LLM(str(saved[0]), **options) as llm:
        engine = llm.loaded.engine
        found: dict[int, list[int]] = {}
        for each in made:
            found[engine.add(each.tokens, GREEDY, media=each.parts)[0]] = []
        ended = run(engine, found)
        assert list(found.values()) == wanted
        assert sum(each.preemptions for each in ended) > 0


def test_branches_answer_as_their_parent_does(saved: tuple[Path, Any], wanted: list[list[int]]) -> None:
    made = prompts(saved[0].name)[1]
    with LLM(str(saved[0]), **OPTIONS) as llm:
        engine = llm.loaded.engine
        parent = engine.add(made.tokens, GREEDY, media=made.parts)[0]
        found: dict[int, list[int]] = {parent: []}
        while len(found[parent]) < 5:
            for told in engine.step().tokens:
                found[parent] += told.tokens.tolist()
        branches = [engine.fork(parent, 1, at=at)[0] for at in (0, 3)]
        found |= {branch: [] for branch in branches}
        run(engine, found)
        assert found[parent] == wanted[1]
        assert [found[branch] for branch in branches] == [wanted[1], wanted[1][3:]]
        assert answers(llm, [made], replace(GREEDY, n=2)) == [wanted[1]] * 2


def test_a_step_that_fails_in_the_middle_of_a_picture_is_made_good(
    saved: tuple[Path, Any],
    wanted: list[list[int]],
    line_prices: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line_prices(0.5)
    with LLM(str(saved[0]), **OPTIONS) as llm:
        groups = count_pictures(llm, monkeypatch)
        pictures, calls = pictures_of(llm), []
        compute = pictures.compute

        def failing(part: Encodes) -> Any:
            calls.append(part.first)
            if len(calls) == 4:
                pictures._line.x.fill_(float("nan"))
                raise RuntimeError("the device is lost")
            return compute(part)

        monkeypatch.setattr(pictures, "compute", failing)
        assert answers(llm, prompts(saved[0].name)) == wanted
        assert groups.count(groups[0]) == 2 and calls.count(0) == len(groups)


@pytest.mark.parametrize("often", [False, True])
def test_a_line_that_fails_is_begun_again_and_then_fails_its_own_requests(
    saved: tuple[Path, Any],
    wanted: list[list[int]],
    line_prices: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    often: bool,
) -> None:
    """Memory runs out while one picture is encoded, once or whenever that is tried."""
    line_prices(0.5)
    made = prompts(saved[0].name)
    with LLM(str(saved[0]), **OPTIONS) as llm:
        encoder, engine = pictures_of(llm)._encoder, llm.loaded.engine
        begin, advance = encoder.begin, encoder.advance
        lines, failed = list[Any](), list[int]()

        def beginning(items: Sequence[MediaInput]) -> Any:
            line = begin(items)
            if any(item.content.endswith(b" 0") for item in items):
                lines.append(line)
            return line

        def failing(line: Any, first: int, count: int) -> None:
            if any(line is each for each in lines) and first + count > 20 and (often or not failed):
                failed.append(first)
                raise MemoryError
            advance(line, first, count)

        monkeypatch.setattr(encoder, "begin", beginning)
        monkeypatch.setattr(encoder, "advance", failing)
        numbers = [engine.add(each.tokens, GREEDY, media=each.parts)[0] for each in made]
        found: dict[int, list[int]] = {number: [] for number in numbers}
        told = {each.request: each.detail for each in run(engine, found)}
        details = ["numerical_error", "numerical_error", "", ""] if often else [""] * 4
        assert [told[number] for number in numbers] == details
        told_right = [found[number] for number in numbers]
        assert told_right[2 * often :] == wanted[2 * often :]
        assert failed and engine.scheduler.state.counters.failed_steps == 0


def test_numbers_that_are_not_usable_end_the_requests_that_need_them(
    saved: tuple[Path, Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prompts(saved[0].name)
    with LLM(str(saved[0]), **OPTIONS) as llm:
        encoder, engine = pictures_of(llm)._encoder, llm.loaded.engine
        vectors = encoder.vectors

        def damaged(line: Any, items: Sequence[MediaInput]) -> Sequence[Any]:
            found = vectors(line, items)
            for item, values in zip(items, found, strict=True):
                if item.content.endswith(b" 0"):
                    values[-1, -1] = np.nan
            return found

        with monkeypatch.context() as patch:
            patch.setattr(encoder, "vectors", damaged)
            numbers = [engine.add(each.tokens, GREEDY, media=each.parts)[0] for each in made]
            found: dict[int, list[int]] = {number: [] for number in numbers}
            told = {each.request: each.detail for each in run(engine, found)}
        assert [told[number] for number in numbers] == ["numerical_error", "numerical_error", "", ""]
        assert [found[number] for number in numbers[2:]] == wanted[2:]
        assert answers(llm, made) == wanted


def test_vectors_do_not_depend_on_the_group_or_on_pieces(saved: tuple[Path, Any]) -> None:
    with LLM(str(saved[0]), **OPTIONS) as llm:
        encoder = pictures_of(llm)._encoder
        layers = llm.loaded.config.scheduler.encoder.layers  # type: ignore[union-attr]
        items = [picture(saved[0].name, seed).given for seed in range(3)]

        def encoded(together: list[MediaInput], size: int) -> Sequence[Any]:
            line, total = encoder.begin(together), 2 * layers * sum(item.units for item in together)
            for first in range(0, total, size):
                encoder.advance(line, first, min(size, total - first))
            return encoder.vectors(line, together)

        whole = np.concatenate(encoded(items, 10**6))
        alone = [encoded([item], 10**6)[0] for item in items]
        backwards = encoded(items[::-1], 10**6)[::-1]
        found = [alone, backwards, *(encoded(items, size) for size in (1, 37, 100))]
        assert max(np.abs(np.concatenate(each) - whole).max() for each in found) < MOST_DIFFERENCE


def test_a_picture_may_be_encoded_whole(
    saved: tuple[Path, Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(saved[0]), encode="whole", **OPTIONS) as llm:
        parts: list[tuple[int, int]] = []
        pictures = pictures_of(llm)
        compute = pictures.compute

        def counted(part: Encodes) -> Any:
            parts.append((part.first, part.count))
            return compute(part)

        monkeypatch.setattr(pictures, "compute", counted)
        assert answers(llm, prompts(saved[0].name)) == wanted
        assert parts and not any(first for first, _ in parts)


def test_made_up_weights_are_served(saved: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    with LLM(str(tmp_path), load_format="dummy", **OPTIONS) as llm:
        assert [len(each) for each in answers(llm, prompts(saved[0].name))] == [NUM_TOKENS] * 4


def test_items_that_do_not_stand_in_their_prompt_are_refused(saved: tuple[Path, Any]) -> None:
    made = prompts(saved[0].name)[0]
    with LLM(str(saved[0]), **OPTIONS, encoder_cache_tokens=1, max_model_len=60) as llm:
        assert llm.loaded.config.scheduler.encoder.num_pages == 1  # type: ignore[union-attr]
        too_large = made.parts[0]._replace(given=replace(made.parts[0].given, outputs=70))
        with pytest.raises(InvalidRequest, match="do not stand in the prompt"):
            llm.loaded.engine.add(made.tokens, GREEDY, media=[too_large])
