"""Rows of a device: what they keep of their owners, and when that goes."""

from __future__ import annotations

from dataclasses import replace

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.plan import StepPlan, i32, whole_rows
from paceline.core.sampling import SamplingParams
from paceline.runner.device_rows import DeviceRows

CONFIG = EngineConfig(
    kv=KVConfig(num_blocks=64), scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=200), depth=0
)


def test_steps_of_text_ask_no_row_once_those_with_pictures_have_left() -> None:
    rows = DeviceRows(CONFIG)
    joins = whole_rows([0, 2], [[1] * 8] * 2, [20, 20], SamplingParams())
    rows.apply(StepPlan(seq=1, joins=replace(joins, media=(((2, 6, 1),), ()))))
    assert rows.media == {0: ((2, 6, 1),)}
    rows.apply(StepPlan(seq=2, leaves=i32([2])))
    assert rows.media == {0: ((2, 6, 1),)}
    rows.apply(StepPlan(seq=3, leaves=i32([0])))
    assert not rows.media


def test_a_row_that_another_takes_at_once_has_the_new_ones_pictures() -> None:
    rows = DeviceRows(CONFIG)
    joins = whole_rows([1], [[1] * 8], [20], SamplingParams())
    rows.apply(StepPlan(seq=1, joins=replace(joins, media=(((2, 6, 1),),))))
    rows.apply(StepPlan(seq=2, leaves=i32([1]), joins=replace(joins, media=(((3, 7, 2),),))))
    assert rows.media == {1: ((3, 7, 2),)}
