"""Pictures for a GPU through Triton's interpreter: what steps read is what a CPU's pages hold, and answers are those of
transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.config.encoder import EncoderWork
from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.plan import EncodeJoin, Encodes
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import MediaInput
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.decoder import Parts
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder
from paceline.runner.gpu.build import DeviceStorage
from paceline.runner.gpu.device_pictures import DevicePictures
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.token_inputs import NO_VECTOR, allocate_picture_pages, token_inputs
from paceline.runner.gpu.picture_encoder import DevicePictureEncoder
from paceline.runner.gpu.runner import GPURunner
from tests.torch.test_gpu_runner_interpreted import UnwarmedRunner
from tests.torch.vision.tiny_models import Prompt, picture, prompt, reference_tokens, save_model

CPU = torch.device("cpu")
WIDTH, TOKENS, PAGE = 6, 64, 4
WORK = EncoderWork(layers=2, num_pages=8, page_vectors=PAGE, max_units=64, token_positions=1.0)


class Numbered:
    """Vectors tell their item and their place in it."""

    def begin(self, items: Sequence[MediaInput]) -> Any:
        return len(items)

    def advance(self, line: Any, first: int, count: int) -> None: ...

    def vectors(self, line: Any, items: Sequence[MediaInput]) -> list[NDArray[np.float32]]:
        return [vectors_of(item) for item in items]


def vectors_of(item: MediaInput) -> NDArray[np.float32]:
    place = np.arange(item.outputs, dtype=np.float32)[:, None]
    return (item.units + place / 100 + np.zeros((1, WIDTH))).astype(np.float32)


def item(units: int, outputs: int) -> MediaInput:
    pixels = np.zeros((1, 1, 1, 3), np.uint8)
    return MediaInput(content=b"", units=units, outputs=outputs, pixels=pixels, grid=(1, 1, units))


def pictures() -> DevicePictures:
    """Items 11 and 12, of 6 and of 3 vectors, in pages that are not in order."""
    pages = allocate_picture_pages(8 * PAGE, WIDTH, TOKENS, dtype=torch.float32, device="cpu")
    made = DevicePictures(Numbered(), WORK, pages, DeviceQueue(CPU))
    made.hold(11, item(20, 6))
    made.hold(12, item(30, 3))
    joins = (
        EncodeJoin(media=11, units=20, outputs=6, pages=(5, 2)),
        EncodeJoin(media=12, units=30, outputs=3, pages=(7,)),
    )
    for part in (Encodes(joins=joins, first=0, count=100), Encodes(first=100, count=100)):
        bad = made.encode(part)
        assert bad is not None and not len(bad())
    return made


def batch(decode: Sequence[int], *spans: tuple[int, int, int]) -> DeviceBatch:
    """Spans: row, place of the first token, number."""
    columns = np.array(spans, np.int64).reshape(-1, 3)
    return DeviceBatch(
        decode=np.array(decode, np.int64),
        spans=columns[:, 0],
        start=columns[:, 1],
        count=columns[:, 2],
        finishing=np.zeros(0, np.int64),
        generation=np.zeros(len(decode) + len(spans), np.int32),
        num_pad=0,
    )


MEDIA = {3: ((4, 10, 11), (12, 15, 12)), 5: ((0, 3, 12),)}
NOTHING_DROPPED = np.zeros(8, np.int64)


def rows(media: Any, dropped: NDArray[np.int64]) -> HostRows:
    return cast(HostRows, SimpleNamespace(media=media, dropped=dropped))


def seen(made: DevicePictures, count: int) -> list[float]:
    """What the first layer reads of a step of `count` tokens, in whose place text reads -1."""
    table = torch.full((1, WIDTH), -1.0)
    out = torch.empty(count, WIDTH)
    token_inputs(out, table, torch.zeros(count, dtype=torch.int32), pages=made.pages)
    return [round(value, 2) for value in out[:, 0].tolist()]


def test_tokens_of_spans_read_the_vectors_of_their_places() -> None:
    made = pictures()
    made.put_tokens(rows(MEDIA, NOTHING_DROPPED), batch([1, 2], (3, 2, 5), (5, 1, 4)))
    row_3 = [-1.0, -1.0, 20.0, 20.01, 20.02]  # two of text, then the beginning of its first picture
    row_5 = [30.01, 30.02, -1.0, -1.0]
    assert seen(made, 11) == [-1.0, -1.0, *row_3, *row_5]


def test_a_span_may_have_two_pictures_and_begin_inside_one() -> None:
    made = pictures()
    made.put_tokens(rows(MEDIA, NOTHING_DROPPED), batch([], (3, 8, 8)))
    assert seen(made, 8) == [20.04, 20.05, -1.0, -1.0, 30.0, 30.01, 30.02, -1.0]


def test_places_count_what_a_row_has_dropped() -> None:
    made, dropped = pictures(), NOTHING_DROPPED.copy()
    dropped[3] = 4
    made.put_tokens(rows(MEDIA, dropped), batch([], (3, 8, 3)))
    assert seen(made, 3) == [30.0, 30.01, 30.02]


def test_a_step_without_pictures_finds_no_slot_of_the_one_before() -> None:
    made = pictures()
    made.put_tokens(rows(MEDIA, NOTHING_DROPPED), batch([], (3, 4, 6)))
    made.put_tokens(rows({}, NOTHING_DROPPED), batch([1, 2], (4, 0, 30)))
    assert bool((made.pages.slots == NO_VECTOR).all())


def test_pages_of_another_item_are_not_read_as_the_first_any_more() -> None:
    made = pictures()
    made.hold(13, item(40, 4))
    join = EncodeJoin(media=13, units=40, outputs=4, pages=(5,))
    made.encode(Encodes(joins=(join,), first=0, count=160))
    made.put_tokens(rows({6: ((0, 4, 13),)}, NOTHING_DROPPED), batch([], (6, 0, 4)))
    assert seen(made, 4) == [40.0, 40.01, 40.02, 40.03]
    with pytest.raises(KeyError):  # the scheduler never lets a row get here
        made.put_tokens(rows(MEDIA, NOTHING_DROPPED), batch([], (3, 4, 6)))


# -- whole models ------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)


class SeenRunner(UnwarmedRunner):
    """With the encoder of the pictures of `source`."""

    source: Checkpoint

    def __init__(self, config: EngineConfig, spec: Any, parts: Parts, *more: Any, **options: Any) -> None:
        eyes = DevicePictureEncoder(self.source, queue=DeviceQueue(CPU), dtype=torch.float32)
        super().__init__(config, spec, parts, *more, eyes=eyes, **options)


def engine_of(folder: Path, *, positions: float, num_blocks: int = 24, budget: int = 48) -> Engine:
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    assert spec.vision is not None
    work = EncoderWork(
        layers=spec.vision.num_layers, num_pages=8, page_vectors=16, max_units=160, token_positions=positions
    )
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=num_blocks, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=256, encoder=work
        ),
        depth=1,
        check_every=1,
    )
    parts = build_decoder(checkpoint, 2, DeviceStorage(CPU, torch.float32)).parts
    kind = type("Runner", (SeenRunner,), {"source": checkpoint})
    runner: GPURunner = kind(config, spec, parts, spec.eos_token_ids, device=CPU)
    return build_engine(config, runner)


def answers(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for each in prompts:
        for number in engine.add(each.tokens, GREEDY, media=each.parts):
            found[number] = []
    while engine.has_requests or not engine.is_idle:
        events = engine.step_overlapped()
        assert engine.last_error is None, repr(engine.last_error)
        for told in events.tokens:
            for request, token in zip(told.requests.tolist(), told.tokens.tolist(), strict=True):
                found[request].append(token)
        assert all(finished.reason is FinishReason.LENGTH for finished in events.finished)
    return list(found.values())


# A minute each; tests/gpu has all families.
@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    return folder, save_model(request.param, folder)


def test_answers_are_those_of_transformers(saved: tuple[Path, Any]) -> None:
    """In pieces of lines and of prompts, beside text; one prompt ends with a picture, and one comes again."""
    name = saved[0].name
    one, two = picture(name, 0), picture(name, 1)
    prompts = [
        prompt(name, 5, one, 9),
        prompt(name, one, 3, two, seed=1),
        prompt(name, 20, seed=2),
    ]
    wanted = [reference_tokens(saved[1], each, GREEDY.max_tokens or 0) for each in prompts]
    engine = engine_of(saved[0], positions=40.0)
    assert answers(engine, prompts) == wanted
    assert answers(engine, prompts[:1]) == wanted[:1]  # its beginning is cached


@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_a_preempted_row_sees_its_pictures_again(saved: tuple[Path, Any]) -> None:
    name = saved[0].name
    prompts = [prompt(name, 5, picture(name, number), 40 + number, seed=number) for number in range(2)]
    wanted = [reference_tokens(saved[1], each, GREEDY.max_tokens or 0) for each in prompts]
    assert answers(engine_of(saved[0], positions=50.0, num_blocks=4), prompts) == wanted


def test_numbers_that_are_not_usable_end_the_requests_of_their_picture_alone(tmp_path: Path) -> None:
    folder = tmp_path / "smolvlm"
    save_model("smolvlm", folder)
    engine = engine_of(folder, positions=1e6)
    eyes = cast(Any, engine)._runner._pictures._encoder
    vectors = eyes.vectors
    eyes.vectors = lambda line, items: [each * float("nan") for each in vectors(line, items)]
    (bad,) = engine.add(
        prompt("smolvlm", 3, picture("smolvlm", 0)).tokens,
        GREEDY,
        media=prompt("smolvlm", 3, picture("smolvlm", 0)).parts,
    )
    (good,) = engine.add([5, 6, 7], GREEDY)
    ended: dict[int, FinishReason] = {}
    while len(ended) < 2:
        ended |= {finished.request: finished.reason for finished in engine.step_overlapped().finished}
    assert ended == {bad: FinishReason.ERROR, good: FinishReason.LENGTH}
