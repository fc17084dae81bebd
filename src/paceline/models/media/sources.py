"""Pictures in messages: where the bytes of each come from, in the words of every API.

OpenAI's `image_url` (chat) and `input_image` (responses), Anthropic's `image`, and, from a caller in the same process,
pictures of Pillow, bytes and paths. A part becomes `{"type": "image", "picture": Picture}`; nothing is decoded, fetched
or opened here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidImage, InvalidRequest, MediaNotAllowed
from paceline.models.media.headers import MAX_BYTES

PARTS = ("image_url", "input_image", "image", "image_pil")
DETAILS = ("auto", "low", "high", "original")
PICTURE = "picture"  # the key of a part that was read
_LINKS = ("http://", "https://")


class Picture:
    """One picture of a conversation. `url` and `file_id` are followed by a server only; then it has `data`."""

    def __init__(self, place: str) -> None:
        self.place = place  # in the messages, for errors
        self.data: bytes | None = None
        self.text = ""  # the same in base64
        self.declared: str | None = None  # the type it says it is of
        self.image: Any = None  # of Pillow
        self.path: Path | None = None
        self.url = ""
        self.file_id = ""
        self.low = False  # little detail is wanted

    @property
    def num_bytes(self) -> int:
        """About as many as its file has, where it came with the request."""
        return len(self.data or b"") + len(self.text) * 3 // 4

    def read(self) -> bytes:
        """The file. Raises InvalidImage, without the place, where it is too large or no base64."""
        if self.data is not None:
            return self.data
        if self.url or self.file_id:
            message = f"{self.place}: links and files are read by a server; give the picture's bytes"
            raise MediaNotAllowed(message, param="messages")
        if self.path is not None:
            try:
                if self.path.stat().st_size > MAX_BYTES:
                    raise InvalidImage(f"the picture has more than {MAX_BYTES} bytes")
                return self.path.read_bytes()
            except OSError as error:
                message = f"the picture {self.path} cannot be read: {error.strerror or error}"
                raise InvalidImage(message) from None
        if self.num_bytes > MAX_BYTES + 3:
            message = f"the picture has {self.num_bytes} bytes; at most {MAX_BYTES} are accepted"
            raise InvalidImage(message)
        try:
            return base64.b64decode(self.text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidImage("the picture is not valid base64") from None


def take_pictures(
    messages: Sequence[Any], *, most: int, is_local: bool = False, param: str = "messages"
) -> tuple[Sequence[Any], list[Picture]]:
    """The conversation with its pictures read, and the pictures in their order; more than `most` are refused."""
    found: list[Picture] = []
    taken: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            place = f"{param}[{index}].content"
            parts = [_taken(part, f"{place}[{at}]", found, is_local) for at, part in enumerate(content)]
            message = {**message, "content": parts}
        taken.append(message)
    if len(found) > most:
        message = (
            f"the request has {len(found)} pictures; at most {most} are accepted (--limit-mm-per-prompt)"
        )
        raise InvalidRequest(message, param=param)
    return taken, found


def has_pictures(messages: Sequence[Any]) -> bool:
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(
        isinstance(part, Mapping) and part.get("type") in PARTS
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def _taken(part: Any, place: str, found: list[Picture], is_local: bool) -> Any:
    if is_local and not isinstance(part, str | Mapping):
        part = {"type": "image", "image": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in PARTS:
        return part
    assert isinstance(part, Mapping)
    picture = part.get(PICTURE)
    if not isinstance(picture, Picture):
        picture = Picture(place)
        if not (is_local and _is_local_part(picture, part)):
            _read_part(picture, part)
    found.append(picture)
    return {"type": "image", PICTURE: picture}


def _is_local_part(picture: Picture, part: Mapping[str, Any]) -> bool:
    """Pictures that a program has at hand."""
    given = part.get("image", part.get("image_pil"))
    if isinstance(given, bytes | bytearray):
        picture.data = bytes(given)
    elif isinstance(given, str | Path):
        picture.path = Path(given)
    elif hasattr(given, "convert") and hasattr(given, "size"):
        picture.image = given
    elif given is not None:
        message = f"{picture.place}.image is a picture of Pillow, bytes or a path, not {type(given).__name__}"
        raise InvalidRequest(message, param="messages")
    return given is not None


def _read_part(picture: Picture, part: Mapping[str, Any]) -> None:
    place, detail = picture.place, part.get("detail")
    source, link = part.get("source"), part.get("image_url")
    if isinstance(link, Mapping):
        detail = link.get("detail", detail)
        link = link.get("url")
    if detail is not None and detail not in DETAILS:
        raise _wrong(f"{place}: detail must be one of {', '.join(DETAILS)}, not {detail!r:.40}")
    picture.low = detail == "low"
    if part["type"] == "image" and isinstance(source, Mapping):
        _read_source(picture, source)
    elif isinstance(link, str):
        _read_link(picture, link)
    elif part["type"] == "input_image" and isinstance(part.get("file_id"), str):
        picture.file_id = part["file_id"]
    else:
        must = {
            "image_url": "an image_url with a url",
            "input_image": "an image_url or a file_id, which are texts",
        }.get(part["type"], "a source of type base64, url or file")
        raise _wrong(f"{place} must have {must}")


def _read_source(picture: Picture, source: Mapping[str, Any]) -> None:
    place, kind = picture.place, source.get("type")
    if kind == "base64":
        declared, data = source.get("media_type"), source.get("data")
        if not isinstance(declared, str) or not isinstance(data, str):
            raise _wrong(f"{place}.source must have media_type and data, which are texts")
        picture.declared, picture.text = declared, data
    elif kind == "url" and isinstance(source.get("url"), str):
        _read_link(picture, source["url"])
    elif kind == "file" and isinstance(source.get("file_id"), str):
        picture.file_id = source["file_id"]
    else:
        raise _wrong(f"{place}.source must be of type base64, url or file, with its data, url or file_id")


def _read_link(picture: Picture, link: str) -> None:
    if link[:5].lower() == "data:":
        head, comma, picture.text = link[5:].partition(",")
        declared, _, rest = head.partition(";")
        if not comma or "base64" not in rest.lower().split(";") or not declared:
            message = "must be data:image/TYPE;base64,... with the type of the picture"
            raise InvalidImage(f"{picture.place}: the url {message}", param="messages")
        picture.declared = declared
    elif link.lower().startswith(_LINKS):
        picture.url = link
    else:
        message = f"{picture.place}: the url must begin with data:, https:// or http://"
        raise MediaNotAllowed(message, param="messages")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
