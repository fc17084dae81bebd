"""Requests are the same whenever they are made, as long as they were asked to be, and share what they should."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.errors import InputError
from paceline.lab.bench.load.prompt_source import (
    WORDS,
    BodyForm,
    LoadRequest,
    PicturedSource,
    RandomSource,
    TextSource,
    TraceSource,
    is_trace,
    parse_size,
    png,
    read_prompts,
)
from paceline.lab.workload.workload import Workload


def words_of(request: LoadRequest) -> list[str]:
    assert isinstance(request.prompt, str)
    return request.prompt.split()


def workload(**more: object) -> Workload:
    columns = {
        "name": "made",
        "arrival_s": np.array([0.0, 1.0, 2.0]),
        "prompt_len": np.array([5, 6, 7], dtype=np.int32),
        "output_len": np.array([1, 2, 3], dtype=np.int32),
        "tenant": np.array([0, 1, 0], dtype=np.int32),
        "tenants": ("alice", "bob"),
        "prefix_ids": None,
        "prefix_block": 0,
    }
    return Workload(**{**columns, **more})  # type: ignore[arg-type]


def test_there_are_no_words_twice() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200


def test_random_requests_depend_on_seed_and_number_alone() -> None:
    source = RandomSource(seed=3, input_len=20, output_len=9)
    assert source.make(5) == RandomSource(seed=3, input_len=20, output_len=9).make(5)
    assert source.make(5) != source.make(6)
    assert source.make(5) != RandomSource(seed=4, input_len=20, output_len=9).make(5)
    assert len(words_of(source.make(5))) == 20 and source.make(5).num_output == 9


def test_spread_lengths_lie_around_the_mean() -> None:
    source = RandomSource(input_len=100, output_len=40, spread=0.5)
    made = [source.make(index) for index in range(400)]
    lengths = [len(words_of(request)) for request in made]
    assert min(lengths) >= 50 and max(lengths) <= 150 and abs(np.mean(lengths) - 100) < 6
    assert {request.num_output for request in made} <= set(range(20, 61))


def test_a_share_of_the_prompt_is_common_and_warm_up_has_none_of_it() -> None:
    source = RandomSource(input_len=100, prefix_share=0.6, num_prefixes=2)
    first, second, third = (words_of(source.make(index)) for index in range(3))
    assert first[:60] == third[:60] and first[60:] != third[60:]
    assert first[:60] != second[:60]
    assert words_of(source.make(-2))[:10] != first[:10]


def test_a_trace_gives_lengths_tenants_and_objectives() -> None:
    objectives = np.array([[0, 0, 0], [5000, 0, 40], [0, 0, 0]], dtype=np.int32)
    source = TraceSource(workload(objectives=objectives), seed=0)
    second = source.make(1)
    assert (len(words_of(second)), second.num_output, second.tenant) == (6, 2, "bob")
    assert second.fields == {"deadline_ms": 5000, "itl_slo_ms": 40}
    again = source.make(4)  # behind the end it begins again, with other words
    assert len(words_of(again)) == 6 and again.prompt != second.prompt


def test_blocks_of_a_trace_have_the_same_words_wherever_they_are() -> None:
    ids = ((1, 2), (1, 3), (9, 2))
    source = TraceSource(workload(prefix_ids=ids, prefix_block=4), seed=0)
    first, second, third = (words_of(source.make(index)) for index in range(3))
    assert first[:4] == second[:4] and first[4:] != second[4:5]
    assert third[:4] != first[:4] and third[4:5] == first[4:5]
    assert [len(first), len(second), len(third)] == [5, 6, 7]


def test_bodies_have_the_form_of_their_api() -> None:
    request = LoadRequest(prompt="hello", num_output=4, fields={"ttft_slo_ms": 9})
    chat = json.loads(BodyForm(api="chat", model="m", ignore_eos=True).encode(request))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert (chat["max_tokens"], chat["ignore_eos"], chat["ttft_slo_ms"]) == (4, True, 9)
    assert chat["stream"] is True and chat["stream_options"] == {"include_usage": True}
    form = BodyForm(api="completions", model="m", ignore_eos=False, temperature=0.0, more={"stream": False})
    plain = json.loads(form.encode(LoadRequest(prompt=[{"role": "user", "content": "a"}, {"content": "b"}])))
    assert plain["prompt"] == "a\nb" and plain["temperature"] == 0.0 and plain["stream"] is False
    assert "ignore_eos" not in plain and "max_tokens" not in plain


FILES = {
    "plain.txt": "first\n\n second \n",
    "lines.jsonl": '{"prompt": "first", "max_tokens": 3, "tenant": "a"}\n'
    '{"messages": [{"role": "user", "content": "second"}]}\n',
    "questions.jsonl": '{"question": "first", "answer": "x"}\n{"turns": ["second", "third"]}\n'
    '{"turns": [{"content": "fourth"}]}\n',
    "batch.jsonl": '{"custom_id": "1", "body": {"prompt": "first"}}\n{"body": {"prompt": "second"}}\n',
    "share.json": json.dumps(
        [
            {"conversations": [{"from": "human", "value": "first"}, {"from": "gpt", "value": "x" * 40}]},
            {"conversations": [{"from": "human", "value": "left out"}]},
            {"conversations": [{"from": "human", "value": "second"}, {"from": "gpt", "value": ""}]},
        ]
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_prompts_are_read_from_any_form(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert not is_trace(path)
    first, second, *_ = read_prompts(path)
    assert first.prompt == "first"
    assert second.prompt in ("second", [{"role": "user", "content": "second"}])
    assert first.num_output == {"lines.jsonl": 3, "share.json": 10}.get(name)


@pytest.mark.parametrize(
    "content",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "arrival_s,client,prompt_len,output_len\n",
        '{"timestamp": 0, "input_length": 3, "output_length": 1}\n',
    ],
)
def test_traces_are_told_by_their_first_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    assert is_trace(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no prompts; it may hold plain text"),
        ('{"prompt": 3}', ':1: needs "prompt"'),
        ('{"prompt": "a"}\n{"prompt": ', ":2: is not valid JSON"),
        ('{"prompt": "a", "max_tokens": 0}', '"max_tokens" is 0'),
        ('[{"nothing": 1}]', "entry 1 has no conversations"),
        ("[1, ", "is not valid JSON"),
    ],
)
def test_mistakes_in_files_name_the_place(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(content)
    with pytest.raises(InputError, match="prompts") as caught:
        read_prompts(path)
    assert says in str(caught.value)


# -- pictures ------------------------------------------------------------------------------------------------------


def pictured(*, count: int = 3, reuse: float = 0.0) -> PicturedSource:
    return PicturedSource(RandomSource(), count=count, size=(70, 33), reuse=reuse, seed=1)


def test_made_pictures_are_png_files_of_their_size() -> None:
    content = png(70, 33, seed="one")
    opened = Image.open(io.BytesIO(content))
    opened.load()
    assert (opened.format, opened.size, opened.mode) == ("PNG", (70, 33), "RGB")
    assert len({opened.getpixel((x, y)) for x in range(0, 70, 16) for y in range(0, 33, 16)}) == 15
    assert content == png(70, 33, seed="one") != png(70, 33, seed="two")


def test_pictures_stand_before_the_text_of_a_chat() -> None:
    source = pictured()
    request = source.make(5)
    body = json.loads(BodyForm(api="chat", model="m", ignore_eos=True).encode(request))
    *pictures, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": RandomSource().make(5).prompt}
    assert [each["type"] for each in pictures] == ["image_url"] * 3
    for each in pictures:
        kind, _, content = each["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(content))).size == (
            70,
            33,
        )
    assert request == source.make(5) and source.name == "random 256x128, 3 pictures of 70x33"


def test_a_share_of_pictures_is_sent_again() -> None:
    sent = [image for index in range(200) for image in pictured(reuse=0.5).make(index).images]
    assert len(sent) == 600 and len(set(sent)) / 600 == pytest.approx(0.5, abs=0.05)
    assert len({image for index in range(50) for image in pictured(reuse=0.0).make(index).images}) == 150
    assert len({image for index in range(50) for image in pictured(reuse=1.0).make(index).images}) == 8


@pytest.mark.parametrize("text", ["512", "x512", "0x512", "512x99999", "5.5x4", "512x512x3", ""])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--image-size"):
        parse_size(text)
    assert parse_size("640x480") == (640, 480)


def test_conversations_take_no_made_pictures() -> None:
    chats = TextSource("chats", [LoadRequest(prompt=[{"role": "user", "content": "hello"}])])
    with pytest.raises(InputError, match="prompts of text"):
        PicturedSource(chats, count=1, size=(8, 8), reuse=0.0, seed=0).make(0)
