"""Pictures over every API: the same prompt and the same items, priced before they are decoded, refused with a place."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config.engine import ModelConfig
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import MediaPart
from paceline.errors import InvalidImage, InvalidRequest, MediaNotAllowed, NeverFits, UnsupportedModality
from paceline.llm.prompts import ChatPrompts, PreparedRequest, PromptReader, prepared_chat
from paceline.models.media.headers import Header, read_header
from paceline.models.media.pictures import open_pictures
from paceline.server.batches.batch_records import StoredFile, UnknownFile
from paceline.server.errors import TooBusy
from paceline.server.generate import media_work
from paceline.text.tokenizer import Tokenizer
from tests.fake_engine import forecast
from tests.pictures import encoded, picture
from tests.pure.server_api.api_helpers import Api, says
from tests.vision_folder import write_tile_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DATA = encoded(picture(64, 32))
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{BASE64}"
TEXT = {"type": "text", "text": "What is it?"}
PART = {"type": "image_url", "image_url": {"url": URL}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
NUM_IMAGE = 36  # 8 tiles of 32 pixels and the whole, 4 vectors each


def api(limit: int = 20, **options: Any) -> Api:
    with TemporaryDirectory() as folder:
        path = write_tile_model(Path(folder))
        pictures = open_pictures(path, ModelConfig(limit_mm_per_prompt=f'{{"image": {limit}}}', **options))
        return Api(says("a dog"), text=Tokenizer.from_folder(path), pictures=pictures)


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **fields}


def test_every_api_sends_the_same_items_to_the_engine() -> None:
    asked = {
        CHAT: chat(PART, TEXT),
        RESPONSES: {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL},
                        {"type": "input_text", "text": TEXT["text"]},
                    ],
                }
            ],
            "max_output_tokens": 4,
        },
        MESSAGES: chat(BLOCK, TEXT),
    }
    found = {}
    for route, body in asked.items():
        made = api()
        answer = made.ask(route, body)
        (given,) = made.client.submitted
        assert made.is_at_rest
        found[route] = (given["tokens"], [(start, item.content) for start, item in given["media"]])
        usage = answer["usage"]
        if route == CHAT:
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": NUM_IMAGE}
            assert usage["prompt_tokens"] == len(given["tokens"])
        if route == RESPONSES:
            assert usage["input_tokens_details"]["image_tokens"] == NUM_IMAGE
    assert len({repr(each) for each in found.values()}) == 1
    assert len(found[CHAT][1]) == 9


def test_a_result_of_a_tool_may_have_a_picture() -> None:
    made = api()
    body = {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT, BLOCK]}],
            },
        ],
    }
    made.ask(MESSAGES, body)
    (given,) = made.client.submitted
    assert len(given["media"]) == 9


def test_little_detail_is_one_tile() -> None:
    made = api()
    made.ask(CHAT, chat({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}))
    (given,) = made.client.submitted
    assert [item.outputs for _, item in given["media"]] == [4]


def shape(part: MediaPart) -> tuple[object, ...]:
    start, item = part
    return start, item.content, item.units, item.outputs, item.grid


def test_the_price_is_known_before_a_pixel_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("decoded")

    made = api()
    made.ask(CHAT, chat(PART, TEXT))
    expected = len(made.client.submitted[0]["tokens"])
    monkeypatch.setattr("paceline.models.media.pictures.decode", fail)
    made.client.forecast_result = forecast(0.1, 0.2)
    told = made.ask("/v1/estimate", chat(PART, TEXT))
    assert (told["prompt_tokens"], told["image_tokens"]) == (expected, NUM_IMAGE)
    # The engine is asked with the same items, without pixels.
    asked, sent = (
        list(map(shape, given[0]["media"])) for given in (made.client.asked, made.client.submitted)
    )
    assert asked == sent and not any(item.pixels.size for _, item in made.client.asked[0]["media"])
    assert made.ask("/v1/messages/count_tokens", chat(BLOCK, TEXT) | {"max_tokens": 4}) == {
        "input_tokens": expected
    }
    assert made.ask("/tokenize", {"messages": chat(PART, TEXT)["messages"]})["count"] == expected
    many = chat(*[PART] * 20, TEXT)
    with pytest.raises(InvalidRequest, match="maximum context length is"):
        made.ask(CHAT, many)
    assert made.is_at_rest


def test_headers_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def read(data: bytes) -> Header:
        threads.append(current_thread().name)
        return read_header(data)

    monkeypatch.setattr("paceline.models.media.pictures.read_header", read)
    made = api()
    for route, part in (
        (CHAT, PART),
        ("/v1/estimate", PART),
        ("/v1/messages/count_tokens", BLOCK),
        ("/tokenize", PART),
    ):
        made.ask(
            route, {"messages": chat(part, TEXT)["messages"]} | ({"max_tokens": 4} if route == CHAT else {})
        )
    assert len(threads) == 4 and all(name.startswith("paceline-text") for name in threads)


def _with_files(made: Api, folder: Path) -> None:
    """Every tenant has one file, `file_1`."""
    path = folder / "picture"
    path.write_bytes(DATA)
    file = StoredFile(
        id="file_1",
        tenant="",
        filename="a.png",
        purpose="vision",
        bytes=len(DATA),
        created_at=0,
        expires_at=None,
    )

    async def find(tenant: str, file_id: str) -> tuple[StoredFile, Path]:
        return file, path

    made.service.media_sources.find_file = find


def test_files_of_pictures_at_hand_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = api()
    _with_files(made, tmp_path)
    held = []

    def decoded(request: PreparedRequest, tenant: str) -> PreparedRequest:
        held.append(made.service.media_sources.num_bytes)
        return made.service._chat.decoded(request, tenant)

    monkeypatch.setattr(made.service._pixels, "_chat", SimpleNamespace(decoded=decoded))
    monkeypatch.setattr(media_work, "MOST_BYTES", 2 * len(DATA))
    made.ask(CHAT, chat(_file_part(), _file_part(), TEXT))
    assert held == [2 * len(DATA)] and made.is_at_rest
    for route in (CHAT, "/v1/estimate"):
        with pytest.raises(TooBusy, match="bytes of pictures"):
            made.ask(route, chat(*[_file_part()] * 3, TEXT))
        assert made.is_at_rest


def test_a_file_that_is_deleted_while_it_is_asked_for(tmp_path: Path) -> None:
    made = api()
    _with_files(made, tmp_path)
    (tmp_path / "picture").unlink()
    with pytest.raises(UnknownFile):
        made.ask(CHAT, chat(_file_part(), TEXT))
    assert made.is_at_rest


def _file_part() -> dict[str, Any]:
    return {"type": "input_image", "file_id": "file_1"}


def _source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": fields}


@pytest.mark.parametrize(
    "route, part, error, words",
    [
        (
            CHAT,
            {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
            InvalidImage,
            "no known format",
        ),
        (CHAT, {"type": "image_url", "image_url": URL[:-200]}, InvalidImage, "damaged|base64"),
        (
            CHAT,
            {"type": "image_url", "image_url": URL.replace("png", "gif", 1)},
            InvalidImage,
            "is image/png",
        ),
        (MESSAGES, _source(type="base64", media_type="image/gif", data=BASE64), InvalidImage, "is image/png"),
        (CHAT, {"type": "image_url", "image_url": "https://a.example/b.png"}, MediaNotAllowed, "fetches no"),
        (MESSAGES, _source(type="url", url="http://127.0.0.1/"), MediaNotAllowed, "fetches no links"),
        (MESSAGES, _source(type="file", file_id="file_1"), UnsupportedModality, "keeps no files"),
        (CHAT, {"type": "input_audio", "input_audio": {}}, UnsupportedModality, "takes text and pictures"),
        (CHAT, {"type": "file", "file": {}}, UnsupportedModality, "takes text and pictures"),
        (MESSAGES, {"type": "document", "source": {}}, UnsupportedModality, "takes text and pictures"),
    ],
)
def test_pictures_that_are_refused(route: str, part: Any, error: type[Exception], words: str) -> None:
    made = api()
    with pytest.raises(error, match=words) as found:
        made.ask(route, chat(TEXT, part))
    assert "messages[0].content" in str(found.value)
    assert made.is_at_rest and not made.client.submitted
    made.ask(CHAT, chat(TEXT))
    assert made.is_at_rest and len(made.client.submitted) == 1


def test_too_many_pictures() -> None:
    made = api(limit=2)
    with pytest.raises(InvalidRequest, match="has 3 pictures; at most 2 are accepted"):
        made.ask(CHAT, chat(PART, PART, PART))
    assert made.is_at_rest


def test_without_the_extra_pictures_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.media.pictures.can_decode", lambda: False)
    with pytest.raises(UnsupportedModality, match=r"pip install 'paceline\[vision\]'"):
        api().ask(CHAT, chat(PART))


def test_models_of_text_say_so() -> None:
    made = Api()
    for route, part in ((CHAT, PART), (MESSAGES, BLOCK)):
        with pytest.raises(UnsupportedModality, match="reads text only"):
            made.ask(route, chat(part))


def test_an_item_beyond_the_room_for_vectors_is_refused_with_both_numbers() -> None:
    made = api()
    made.client._info = replace(made.client._info, picture_vectors=3)
    with pytest.raises(NeverFits, match=r"content\[0\]: the picture has 4 tokens, .* vectors of 3"):
        made.ask(CHAT, chat(PART))
    assert made.is_at_rest


def test_too_many_that_wait_for_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_work, "MOST_WAITING", 0)
    made = api()
    with pytest.raises(TooBusy, match="too many pictures"):
        made.ask(CHAT, chat(PART))
    made.ask(CHAT, chat(TEXT))  # others are served
    assert made.is_at_rest


def test_what_the_engine_has_is_not_kept_here() -> None:
    made = api()
    with TemporaryDirectory() as folder:
        path = write_tile_model(Path(folder))
        chats = ChatPrompts(Tokenizer.from_folder(path), pictures=made.service.model.pictures)
    rendered = chats.render(chat(PART)["messages"])
    reader = PromptReader(made.service.tokenizer, vocab_size=1000, max_model_len=1000)
    prepared = chats.decoded(prepared_chat(reader, rendered, SamplingParams()), "a")
    lean = prepared.lean()
    assert lean.num_image == prepared.num_image == NUM_IMAGE
    assert prepared.media and not lean.media and not lean.pictures[0].opened.data
