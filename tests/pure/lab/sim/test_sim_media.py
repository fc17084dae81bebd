"""Pictures in the simulator: what encoding takes, whole pictures beside pieces, and runs that replay byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.audit.runlog import BEGAN, RunLogWriter, read_run_log, run_header
from paceline.costs.cost_model import StepShape
from paceline.costs.fit import FittedCost
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import Roofline, encoder_work
from paceline.errors import InputError
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.workload import Images
from tests.pure.costs.test_costs_fit import linear_samples
from tests.pure.scheduler.test_scheduler_forecast import forecasts

QWEN = Machine.of(model_shape("qwen2.5-vl-7b"), device_spec("h200"))


def config(workload: Workload, *, check: bool = False, **options: object) -> SimConfig:
    return SimConfig(machine=QWEN, engine=engine_config(QWEN, workload, options), check=check)


def one(text: int, *pictures: int, output: int = 4, contents: tuple[int, ...] = ()) -> Workload:
    """A request with pictures of so many tokens, before its text."""
    lengths = np.array([text + sum(pictures)], np.int32)
    workload = Workload.of_one_tenant("one", np.zeros(1), lengths, np.array([output], np.int32))
    images = Images(
        first=np.array([0, len(pictures)]),
        tokens=np.array(pictures, np.int32),
        content=np.array(contents or range(len(pictures))),
    )
    return replace(workload, images=images)


def busy_s(record: RunRecord) -> float:
    return float((record.step_end_s - record.step_start_s).sum())


def test_every_position_of_a_picture_takes_its_time() -> None:
    sees, reads = one(20, 1280), replace(one(20, 1280), images=None)
    roofline = Roofline(QWEN.model, QWEN.device)
    line = StepShape(encode_positions=2 * 32 * 5120, encode_products=32 * 5120 * 5120)
    alone_s = roofline.step_seconds(line) - QWEN.device.fixed_step_s
    times = {how: busy_s(simulate(config(sees, encode=how), sees)) for how in ("whole", "pieces")}
    plain_s = busy_s(simulate(config(reads, step_target_ms=16.0, step_stretch=1.0), reads))
    assert times["whole"] == pytest.approx(plain_s + alone_s, rel=0.05)
    assert times["pieces"] == pytest.approx(plain_s + alone_s, rel=0.1)
    two, twice = one(20, 1280, 1280), one(20, 1280, 1280, contents=(7, 7))
    two_s, twice_s = (busy_s(simulate(config(each, encode="whole"), each)) for each in (two, twice))
    assert two_s - twice_s == pytest.approx(alone_s, rel=0.1), "one that is there twice is encoded once"


def test_forecasts_know_what_pictures_take() -> None:
    """Those of the request itself, and those before it; without them half of these are wrong by a quarter and more."""
    for rate, most in ((2.0, 0.12), (9.5, 0.25)):
        workload = load_workload("mm-image", num_requests=120, rate=rate, seed=3)
        with forecasts() as said:
            record = simulate(config(workload), workload)
        seen = record.first_token_s - record.arrival_s
        told = [
            (forecast.first_token_s, seen[at]) for at, forecast in enumerate(said) if forecast is not None
        ]
        assert np.median([abs(one - other) / max(other, 0.02) for one, other in told]) < most


def test_pieces_keep_the_time_between_tokens_of_others() -> None:
    workload = load_workload("mm-image", num_requests=80, rate=9.5, seed=2)
    found = {how: simulate(config(workload, encode=how), workload) for how in ("whole", "pieces")}
    assert {int(each.outcome.max()) for each in found.values()} == {0}
    p99 = {how: float(np.quantile(each.itl_s, 0.99)) for how, each in found.items()}
    assert p99["whole"] > 1.7 * p99["pieces"]
    longest = {how: float((each.step_end_s - each.step_start_s).max()) for how, each in found.items()}
    # A step exceeds its target by one layer of a group at most.
    assert longest["pieces"] < 0.022 < longest["whole"]


def test_a_run_with_pictures_replays_byte_for_byte(tmp_path: Path) -> None:
    workload = load_workload("mm-image", num_requests=25, rate=9.5)
    repeated = replace(workload.images, content=workload.images.content % 9) if workload.images else None
    workload = replace(workload, images=repeated)
    set_up = config(workload, check=True)
    path = tmp_path / "run.jsonl"
    recorder = RunLogWriter(path, run_header(set_up.engine, **{BEGAN: 0.0}))
    simulate(set_up, workload, recorder=recorder)
    log = read_run_log(path)
    assert '"encodes"' in path.read_text() and b"picture" not in path.read_bytes().split(b"\n")[0]
    report = replay(log, output=tmp_path / "again.jsonl")
    assert report.difference is None
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_a_model_without_an_encoder_takes_no_pictures() -> None:
    workload = load_workload("mm-image", num_requests=3)
    text_only = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    with pytest.raises(InputError, match="llama-3.1-8b takes text only; try smolvlm-256m, qwen2.5-vl-7b"):
        engine_config(text_only, workload, {})
    fitted = FittedCost.fit(linear_samples())
    with pytest.raises(InputError, match="says nothing of pictures"):
        engine_config(replace(QWEN, cost=fitted), workload, {})


@pytest.mark.parametrize(
    ("name", "millions", "encoder_millions"),
    [
        ("qwen2.5-vl-7b", 8292, 676.6),
        ("qwen3-vl-8b", 8767, 576.4),
        ("smolvlm-256m", 256.5, 93.0),
        ("bert-base", 109.5, 0),
        ("minilm", 22.7, 0),
        ("qwen3-embedding-0.6b", 595.8, 0),
    ],
)
def test_models_have_the_parameters_of_their_cards(
    name: str, millions: float, encoder_millions: float
) -> None:
    model = model_shape(name)
    assert model.num_parameters / 1e6 == pytest.approx(millions, rel=0.02)
    if model.encoder is not None:
        assert model.encoder.num_parameters / 1e6 == pytest.approx(encoder_millions, rel=0.01)


def test_what_an_encoder_costs_in_tokens_is_what_it_takes() -> None:
    encoder = QWEN.model.encoder
    assert encoder is not None
    work = encoder_work(QWEN.cost, encoder, on_gpu=True, whole=False)
    units = 4096
    line = StepShape(encode_positions=2 * 32 * units, encode_products=32 * units * units)
    seconds = QWEN.cost.step_seconds(line) - QWEN.device.fixed_step_s
    tokens = work.tokens(0, 2 * 32 * units, units, units)
    more = StepShape(prefill_tokens=4096, logit_rows=1), StepShape(prefill_tokens=2048, logit_rows=1)
    token_s = (QWEN.cost.step_seconds(more[0]) - QWEN.cost.step_seconds(more[1])) / 2048
    assert tokens * token_s == pytest.approx(seconds, rel=0.01)
    assert work.least == "layer"
    assert encoder_work(QWEN.cost, encoder, on_gpu=False, whole=False).least == "position"


def test_placed_tokens_are_read_and_written() -> None:
    model = model_shape("llama-3.1-8b")
    cost = Roofline(model, device_spec("h200"))
    seconds = cost.parts(StepShape(placed_tokens=8000)).place_s
    assert 2 * 8000 * model.kv_bytes_per_token / device_spec("h200").read_bandwidth < seconds < 0.7e-3
