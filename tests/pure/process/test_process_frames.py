"""Messages between the processes: what goes in comes out, and what is no message of ours is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.config.engine import ModelConfig
from paceline.core.adapter import AdapterInfo
from paceline.core.counters import Counters
from paceline.core.dial import DialKind, DialSetting
from paceline.core.events import Decision, DecisionKind, LogprobEvent, Rule
from paceline.core.plan import RowLogprobs
from paceline.core.request import Change, Cost, RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.process import frames
from paceline.process.client import EngineStats, Explanation, PolicyChange
from tests.fake_engine import engine_info, finished, forecast

SAMPLING = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    n=3,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias={3: -100.0, 9: 2.5},
    allowed_token_ids=(1, 2, 3),
    bad_words=((5, 6), (7,)),
    prediction=(5, 6, 7),
    seed=-5,
    stop_token_ids=(8,),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=0,
)
INFO = engine_info(notices=("a sentence",))
LOGPROBS = RowLogprobs(
    row=2,
    position=2,
    token=3,
    logprob=-float("inf"),
    rank=1,
    top_tokens=(3, 4),
    top_logprobs=(-0.5, -1.0),
)
TO_ENGINE = [
    frames.Configure(
        ModelConfig(model="somewhere", seed=3), {"num_blocks": 8, "watermark": 0.5}, 0.5, 0.25, 1 << 20
    ),
    frames.Configure(ModelConfig(), {}, 0.5, 0.25, 1 << 20, fleet_key=bytes(range(32))),
    frames.Add(
        first=1,
        tokens=b"\x01\0\0\0",
        sampling=frames.Sampling.of(SAMPLING),
        tenant="tenant",
        priority=-2,
        age_s=12.5,
        left_s=None,
    ),
    frames.Steer(
        1, DialSetting(kind=DialKind.POSITION, value=0.5), PolicyChange(name="", options={"a": 1.5})
    ),
    frames.ChangeBranches(2, (1, 2), Change(priority=3, until_s=float("inf"))),
    frames.Abort((1, 2, 3)),
    frames.FinishAt(4, 17),
    frames.Explain(3, 4),
    frames.LoadAdapter(5, 2, "poet", "/adapters/poet", "ab12"),
    frames.UnloadAdapter(2),
    frames.EndPin("alice", "ctx_1"),
    frames.Ping(),
    frames.Stop(),
]
FROM_ENGINE = [
    frames.StillLoading(),
    frames.StillLoading("loading weights", 3, 30),
    frames.Ready(INFO),
    frames.LoadFailure("no such file", 2),
    frames.Failed("three failures"),
    frames.Log(30, "two\nlines"),
    frames.Update(1.5),
    frames.Update(
        1.5,
        bytes(8),
        bytes(4),
        [LogprobEvent(request=RequestId(1), logprobs=LOGPROBS)],
        [finished(1, num_output=4, cost=Cost(block_us=7, rejected_predictions=3))],
        [frames.Rejected(9, "queue_full", "no place", None)],
        EngineStats(running=3, busy_s=0.5, counters=Counters(preempted=2, preempted_by={"blocks:swap": 2})),
        [(5, None), (6, forecast(0.5, 1.5))],
    ),
    frames.PrefixNews(bytes(16), b"\x01" * 8, b"of a store"),
    frames.AdapterLoaded(
        5, 2, AdapterInfo(name="poet", folder="/adapters/poet", number=2, identity="ab12", rank=8), None
    ),
    frames.Explained(3, Explanation([Decision(DecisionKind.ADMIT, RequestId(4), Rule.FITS, step=3)], True)),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_what_goes_to_the_engine_comes_out_as_it_went_in(message: frames.ToEngine) -> None:
    assert frames.decode_to_engine(frames.encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_what_comes_from_the_engine_comes_out_as_it_went_in(message: frames.FromEngine) -> None:
    assert frames.decode_from_engine(frames.encode(message)) == message


def test_sampling_keeps_every_field_the_engine_reads() -> None:
    assert frames.Sampling.of(SAMPLING).params() == SAMPLING


def test_every_field_of_sampling_travels_or_belongs_to_text() -> None:
    text = {
        "stop",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
    }
    assert set(frames.Sampling.__struct_fields__) == set(SamplingParams.__slots__) - text


def test_sampling_that_is_out_of_range_is_refused_by_its_own_rules() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        frames.Sampling(max_tokens=1, temperature=9.0).params()


def add(**changes: Any) -> list[Any]:
    plain = {
        "first": 1,
        "tokens": b"\0\0\0\0",
        "sampling": {"max_tokens": 1},
        "tenant": "a",
        "priority": 0,
        "age_s": 0.0,
        "left_s": None,
    }
    return ["add", *{**plain, **changes}.values()]


@pytest.mark.parametrize(
    "message",
    [
        ["no such type", 1],
        ["news", 1.0],  # of the other direction
        {"type": "ping"},
        "ping",
        None,
        ["abort", [0]],
        ["abort", ["1"]],
        ["finish_at", 1, -1],
        ["finish_at", 1],
        add(first=-1),
        add(first=1.5),
        add(tokens="text"),
        add(sampling={"max_tokens": "1"}),
        add(sampling={"max_tokens": 1, "unknown": 2}),
        add(sampling={"max_tokens": 1, "bad_words": ["text"]}),
        add(tenant=None),
        add(priority=2**31),
        add(asks=False, service_class="gold"),
        add(left_s="soon"),
    ],
)
def test_what_is_no_message_to_the_engine_is_refused(message: object) -> None:
    with pytest.raises(frames.BadFrame):
        frames.decode_to_engine(msgspec.msgpack.encode(message))


def test_the_example_of_the_bad_ones_is_good() -> None:
    assert isinstance(frames.decode_to_engine(msgspec.msgpack.encode(add())), frames.Add)


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_message_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(frames.BadFrame):
        frames.decode_to_engine(frames.encode(TO_ENGINE[1])[:cut])
