"""Messages between the processes: what goes in comes out, and what is no message of ours is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.config.engine import ModelConfig
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.process import frames
from paceline.process.client import EngineInfo, EngineStats

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
    seed=-5,
    stop_token_ids=(8,),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=0,
)
INFO = EngineInfo(
    vocab_size=100,
    max_model_len=64,
    block_size=16,
    num_blocks=9,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_num_prompt_tokens=0,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    weight_bytes=1,
    kv_bytes=2,
    load_s=0.5,
    notices=("a sentence",),
)
TO_ENGINE = [
    frames.Configure(
        ModelConfig(model="somewhere", seed=3), {"num_blocks": 8, "watermark": 0.5}, 0.5, 0.25, 1 << 20
    ),
    frames.Add(1, b"\x01\0\0\0", frames.Sampling.of(SAMPLING), "tenant", -2, 12.5, None),
    frames.Abort((1, 2, 3)),
    frames.FinishAt(4, 17),
    frames.Explain(3, 4),
    frames.Ping(),
    frames.Stop(),
]
FROM_ENGINE = [
    frames.Loading(),
    frames.Loading("loading weights", 3, 30),
    frames.Ready(INFO),
    frames.LoadFailed("no such file", 2),
    frames.Failed("three failures"),
    frames.Log(30, "two\nlines"),
    frames.News(1.5),
    frames.News(
        1.5,
        bytes(8),
        bytes(4),
        [frames.BranchLogprobs(1, 2, 3, -float("inf"), 1, (3, 4), (-0.5, -1.0))],
        [frames.BranchEnding(1, "stop", "", 2.0, 3, 4, 5, 6, 0.25)],
        [frames.Refusal(9, "queue_full", "no place", None)],
        EngineStats(running=3, busy_s=0.5),
    ),
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
        "submitted_s": 0.0,
        "timeout_s": None,
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
        add(timeout_s="soon"),
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
