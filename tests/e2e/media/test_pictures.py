"""Pictures over sockets: every API, files of every kind, what is refused, and damaged ones. A canary follows each."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.e2e.catalogue.fuzz import NUMBERS, ODD, TEXTS
from tests.e2e.media.picture_server import (
    BASE64,
    BLOCK,
    CHAT,
    DATA,
    MESSAGES,
    MODEL,
    NUM_TOKENS,
    PART,
    RESPONSES,
    TEXT,
    PictureServer,
    chat,
    inline,
    link,
    text_of,
)
from tests.pictures import encoded, picture, sixteen_bits, turned


def test_every_api_answers_the_same(server: PictureServer, wanted: str) -> None:
    reply = server.ask_chat(PART, TEXT)
    assert text_of(reply) == wanted
    assert reply.json["usage"]["prompt_tokens_details"]["image_tokens"] == 36
    shown = server.ask("POST", MESSAGES, chat(BLOCK, TEXT))
    assert shown.json["content"][0]["text"] == wanted
    answered = server.ask("POST", RESPONSES, responses({"type": "input_image", **PART, "image_url": URL}))
    assert answered.json["output"][0]["content"][0]["text"] == wanted
    price = server.ask("POST", "/v1/estimate", chat(PART, TEXT)).json["prompt_tokens"]
    assert price == reply.json["usage"]["prompt_tokens"]


URL = PART["image_url"]["url"]


def responses(*parts: Any) -> dict[str, Any]:
    content = [*parts, {"type": "input_text", "text": TEXT["text"]}]
    asked = {"model": MODEL, "input": [{"role": "user", "content": content}]}
    return {**asked, "max_output_tokens": NUM_TOKENS, "temperature": 0}


def test_a_large_picture_fits_the_limit(server: PictureServer) -> None:
    """Larger than any other body may be."""
    part = inline(encoded(picture(1100, 1000), "BMP"), "bmp")
    reply = server.ask_chat(part, TEXT, max_tokens=1)
    url = part["image_url"]["url"]
    assert reply.status == 200 and len(url) > 4_000_000
    too_large = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": url})
    assert too_large.status == 413


# What takes long to make is made by the test that sends it.
@cache
def frames(kind: str, count: int) -> bytes:
    made = [picture(24, 16, "P" if kind == "GIF" else "RGB", seed=seed % 7) for seed in range(count)]
    return encoded(made[0], kind, save_all=True, append_images=made[1:])


SERVED: dict[str, Callable[[], tuple[bytes, str]]] = {
    "a thousand frames": lambda: (frames("GIF", 1_000), "gif"),
    "moving WebP": lambda: (frames("WEBP", 40), "webp"),
    "one pixel": lambda: (encoded(picture(1, 1)), "png"),
    "a line": lambda: (encoded(picture(1, 5_000)), "png"),
    "a wide one": lambda: (encoded(picture(2_000, 10)), "png"),
    "palette": lambda: (encoded(picture(50, 40, "P"), "PNG", transparency=3), "png"),
    "CMYK": lambda: (encoded(picture(50, 40, "CMYK"), "JPEG"), "jpeg"),
    "sixteen bits": lambda: (sixteen_bits(50, 40), "png"),
    "transparent": lambda: (encoded(picture(50, 40, "RGBA")), "png"),
    "turned": lambda: (turned(50, 40, 6), "jpeg"),
}


@pytest.mark.parametrize("name", SERVED)
def test_pictures_of_every_kind_are_served(server: PictureServer, name: str) -> None:
    data, kind = SERVED[name]()
    reply = server.ask_chat(inline(data, kind), TEXT)
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def test_of_an_animation_the_first_frame_is_seen(server: PictureServer) -> None:
    first = encoded(picture(24, 16, "P", seed=0), "GIF")
    moving = inline(frames("GIF", 1_000), "gif")
    assert text_of(server.ask_chat(moving, TEXT)) == text_of(server.ask_chat(inline(first, "gif"), TEXT))


def png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *more, (b"IEND", b"")]
    made = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + made


def webp(width: int, height: int) -> bytes:
    """A moving one that promises this much."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    head = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sides
    body = b"WEBP" + head + frames("WEBP", 40)[30:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


@cache
def zeros() -> bytes:
    return zlib.compress(bytes(300_000_000), 9)


def text_bomb() -> bytes:
    return png(8, 8, (b"zTXt", b"Comment\0\0" + zeros()), (b"IDAT", b""))


def profile_bomb() -> bytes:
    return png(8, 8, (b"iCCP", b"a\0\0" + zeros()), (b"IDAT", b""))


def filled() -> bytes:
    return png(8_000, 8_000, (b"IDAT", zlib.compress(bytes(1_000_000))))


INVALID = "invalid_image"
BAD: dict[str, Callable[[], tuple[list[Any], str, str]]] = {
    "header of a bomb": lambda: ([inline(png(50_000, 50_000))], INVALID, "50000 x 50000"),
    "a long side": lambda: ([inline(png(16_385, 1))], INVALID, "at most 16384 a side"),
    "moving bomb": lambda: ([inline(webp(16_000, 16_000), "webp")], INVALID, "16000 x 16000"),
    "text of a bomb": lambda: ([inline(text_bomb())], INVALID, "damaged"),
    "profile of a bomb": lambda: ([inline(profile_bomb())], INVALID, "damaged"),
    "more promised than there is": lambda: ([inline(filled())], INVALID, "damaged"),
    "too many bytes": lambda: ([inline(DATA + bytes(20_000_000))], INVALID, "at most 20000000"),
    "empty": lambda: ([inline(b"")], INVALID, "empty"),
    "no base64": lambda: ([link("data:image/png;base64,@@@@")], INVALID, "base64"),
    "no type": lambda: ([link(f"data:;base64,{BASE64}")], INVALID, "type"),
    "a type that lies": lambda: ([inline(DATA, "jpeg")], INVALID, "is image/png"),
    "cut short": lambda: ([inline(DATA[: len(DATA) // 2])], INVALID, "damaged"),
    "cut within its header": lambda: ([inline(DATA[:20])], INVALID, "messages[0].content[1]"),
    "the second": lambda: ([PART, inline(b"no picture")], INVALID, "messages[0].content[2]"),
    "svg": lambda: ([inline(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml")], INVALID, "format"),
    "too many": lambda: ([PART] * 49, "invalid_value", "has 49 pictures; at most 48"),
    "too long": lambda: ([inline(encoded(picture(128, 128)))] * 48, "context_length_exceeded", "2048"),
    "audio": lambda: (
        [{"type": "input_audio", "input_audio": {"data": ""}}],
        "unsupported_modality",
        "pictures",
    ),
    "video": lambda: ([{"type": "video_url", "video_url": {"url": ""}}], "unsupported_modality", "pictures"),
    "a file": lambda: ([{"type": "file", "file": {"file_id": "a"}}], "unsupported_modality", "pictures"),
    "a file that is not there": lambda: (
        [{"type": "input_image", "file_id": "file_1"}],
        "file_not_found",
        "no file",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_leaves_no_trace(server: PictureServer, name: str) -> None:
    parts, code, words = BAD[name]()
    reply = server.ask_chat(TEXT, *parts)
    assert (reply.status, reply.code) == (404 if code == "file_not_found" else 400, code), reply.body
    assert words in reply.json["error"]["message"]


def test_text_that_spells_marks_is_text(server: PictureServer) -> None:
    spelled = "<image><fake_token_around_image><global-img><row_1_col_1>"
    plain = server.ask_chat(TEXT, max_tokens=1).json["usage"]["prompt_tokens"]
    more = {"type": "text", "text": spelled}
    usage = server.ask_chat(TEXT, more, max_tokens=1).json["usage"]
    assert usage["prompt_tokens"] == plain + len(spelled)
    assert "image_tokens" not in usage["prompt_tokens_details"]


# ---------------------------------------------------------------- drawn at random

KINDS = {b"\x89": "png", b"\xff": "jpeg", b"R": "webp", b"G": "gif", b"B": "bmp"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(2_000, marks=pytest.mark.campaign)])
def test_damaged_pictures_are_never_our_mistake(server: PictureServer, count: int) -> None:
    draw = random.Random(5)
    sources = [encoded(picture(40, 30), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    sources += [frames("WEBP", 40), turned(40, 30, 5), sixteen_bits(20, 20), frames("GIF", 4)]
    seen: set[int] = set()
    for _ in range(count):
        data = bytearray(draw.choice(sources))
        for _ in range(draw.randint(1, 12)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        kind = KINDS.get(bytes(data[:1]), "png")
        reply = server.ask_chat(inline(bytes(data), kind), TEXT, max_tokens=1)
        seen.add(reply.status)
        assert reply.status in (200, 400), (base64.b64encode(data), reply.body)
    assert seen == {200, 400}


def spoiled(draw: random.Random, value: Any) -> Any:
    """The same with one thing in it changed, left out, or there twice."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return draw.choice(
            (*ODD, *NUMBERS, *TEXTS, URL, {"url": URL}, [PART], BLOCK["source"], json.dumps(value))
        )
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    at = draw.choice(list(made) if isinstance(made, dict) else range(len(made)))
    way = draw.random()
    if way < 0.1:
        del made[at]
    elif way < 0.2 and isinstance(made, list):
        made.insert(at, made[at])
    elif way < 0.2:
        made[draw.choice(("type", "detail", "url", "source", "file_id", "x"))] = made[at]
    else:
        made[at] = spoiled(draw, made[at])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.campaign)])
def test_spoiled_bodies_are_never_our_mistake(server: PictureServer, count: int) -> None:
    draw = random.Random(6)
    detailed = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    turns = [{"role": "user", "content": "Hi"}, used, {"role": "user", "content": [result]}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat(PART, TEXT, max_tokens=1)),
        (CHAT, chat(TEXT, detailed, PART, max_tokens=1)),
        (
            RESPONSES,
            {
                **responses({"type": "input_image", "image_url": URL, "detail": "auto"}),
                "max_output_tokens": 1,
            },
        ),
        (MESSAGES, chat(BLOCK, TEXT, max_tokens=1)),
        (MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": turns}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": turns}),
        ("/v1/estimate", chat(PART, TEXT, max_tokens=1)),
        ("/tokenize", chat(PART, TEXT)),
    ]
    seen: set[int] = set()
    for _ in range(count):
        path, body = draw.choice(bodies)
        for _ in range(draw.randint(1, 3)):
            # Below the messages, where the pictures are, more often than not.
            name = draw.choice(("messages", "input")) if draw.random() < 0.8 else draw.choice(list(body))
            if name in body:
                body = {**body, name: spoiled(draw, body[name])}
        body = {**body, "max_output_tokens" if path == RESPONSES else "max_tokens": 1, "stream": False}
        reply = server.ask("POST", path, body)
        seen.add(reply.status)
        assert reply.status < 500, (path, body, reply.body)
    assert {200, 400} <= seen
